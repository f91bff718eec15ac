"""Defences that hide gradients: published ones in a few lines each, and simple ones with the same effect.

None of them makes a network robust. Sources: Athalye et al. 2018; Tramèr et al. 2020, "On adaptive attacks to
adversarial example defenses".
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Function(nn.Module):
    """A function of a tensor as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


Change = Callable[[Tensor], Tensor]


def scaled_logits(factor: float) -> Change:
    """Logits times a factor: the answers stay, and cross-entropy underflows."""
    return lambda z: z * factor


def batch_scaled_logits(factor: float) -> Change:
    """Logits divided by their deviation over the batch, times a factor."""
    return lambda z: z * (factor / (z.std() + 1e-6))


def quantized(levels: int) -> Change:
    """Pixels rounded to a grid."""
    return lambda x: (x * levels).round() / levels


class BitDepth(nn.Module):
    """A network behind pixels of a few bits, inside its own forward (Xu et al. 2018)."""

    def __init__(self, model: nn.Module, bits: int) -> None:
        super().__init__()
        self.model, self.steps = model, 2**bits - 1

    def forward(self, x: Tensor) -> Tensor:
        return self.model(torch.floor(x * self.steps + 0.5).to(torch.uint8).float() / self.steps)


class Thermometer(nn.Module):
    """Each pixel as the bits ``x > t`` for growing thresholds (Buckman et al. 2018); ``soft``: as sigmoids."""

    thresholds: Tensor

    def __init__(self, levels: int) -> None:
        super().__init__()
        self.soft = False
        self.register_buffer("thresholds", torch.arange(levels) / levels)

    def forward(self, x: Tensor) -> Tensor:
        x, thresholds = x[:, :, None], self.thresholds.view(-1, 1, 1)
        bits = torch.sigmoid(40 * (x - thresholds)) if self.soft else (x > thresholds)
        return bits.flatten(1, 2).float()


class KWTA(nn.Module):
    """Keep the largest share of each image's activations, set the others to 0 (Xiao et al. 2020).

    ``soft``: weight the activations by a sigmoid of their distance to the smallest that is kept.
    """

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share, self.soft = share, False

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        least = flat.topk(max(1, round(self.share * flat.shape[1])), dim=1).values[:, -1:]
        if self.soft:
            return (flat * torch.sigmoid(10 * (flat - least))).view_as(x)
        return torch.where(flat >= least, flat, 0.0).view_as(x)


class MeanSparse(nn.Module):
    """Values within ``threshold`` deviations of their channel's mean become the mean (Amini et al. 2024).

    ``soft``: weight the deviations by a sigmoid.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Tensor, std: Tensor, threshold: float) -> None:
        super().__init__()
        self.threshold, self.soft = threshold, False
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    def forward(self, x: Tensor) -> Tensor:
        away = x - self.mean
        if self.soft:
            return self.mean + away * torch.sigmoid(10 * (away.abs() / self.std - self.threshold))
        return torch.where(away.abs() <= self.threshold * self.std, self.mean.expand_as(x), x)


def noise(deviation: float) -> Change:
    """Gaussian noise on the pixels, at test time too."""
    return lambda x: x + deviation * torch.randn_like(x)


def random_resize(x: Tensor) -> Tensor:
    """Resize the images of a batch to a random size and pad them at a random place (Xie et al. 2018)."""
    size = x.shape[-1]
    smaller = int(torch.randint(round(0.75 * size), size + 1, ()))
    left, top = (int(torch.randint(0, size - smaller + 1, ())) for _ in range(2))
    x = F.interpolate(x, smaller, mode="bilinear", align_corners=False)
    return F.pad(x, (left, size - smaller - left, top, size - smaller - top))


def half_median_filter(x: Tensor) -> Tensor:
    """A median filter of 3×3 pixels by SciPy, mixed with the image: no gradient passes."""
    from scipy.ndimage import median_filter

    pixels = x.detach().cpu().numpy()
    smooth = median_filter(pixels, size=(1, 1, 3, 3), mode="nearest")
    return torch.from_numpy(0.5 * smooth + 0.5 * pixels).to(x)


def block_transform(x: Tensor, step: float = 0.1) -> Tensor:
    """Cosine coefficients of the image rounded to multiples of ``step``, as JPEG does, by NumPy."""
    from scipy.fft import dctn, idctn

    spectrum: Any = dctn(x.detach().cpu().numpy(), axes=(-2, -1), norm="ortho")
    return torch.from_numpy(idctn((spectrum / step).round() * step, axes=(-2, -1), norm="ortho")).to(x)


class SteepTanh(nn.Module):
    """``tanh(k x)``: for large k it saturates in float32 and has no gradient."""

    def __init__(self, steepness: float) -> None:
        super().__init__()
        self.steepness = steepness

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.steepness * x)


class OffGridBranch(nn.Module):
    """Images whose pixels are off the grid of the data are rounded first; images on the grid are answered directly."""

    def __init__(self, model: nn.Module, levels: int) -> None:
        super().__init__()
        self.model, self.levels = model, levels

    def forward(self, x: Tensor) -> Tensor:
        rounded = (x * self.levels).round() / self.levels
        off = (x - rounded).abs().flatten(1).amax(1) > 1e-6
        return self.model(torch.where(off.view(-1, *(1,) * (x.dim() - 1)), rounded, x))


class Ensemble(nn.Module):
    """The answer of several networks: a function of the networks and the images."""

    def __init__(self, models: Iterable[nn.Module], answer: Callable[[nn.ModuleList, Tensor], Tensor]) -> None:
        super().__init__()
        self.models, self.answer = nn.ModuleList(models), answer

    def forward(self, x: Tensor) -> Tensor:
        return self.answer(self.models, x)


def vote(models: nn.ModuleList, x: Tensor, sharpness: float = 1e4) -> Tensor:
    """The shares of votes of several networks, of which each votes for one class."""
    return torch.stack([(sharpness * model(x)).softmax(1) for model in models]).sum(0)


def soft_vote(models: nn.ModuleList, x: Tensor) -> Tensor:
    return vote(models, x, sharpness=1.0)


def random_member(models: nn.ModuleList, x: Tensor) -> Tensor:
    """One of several networks, chosen at random in each forward."""
    return models[int(torch.randint(len(models), ()))](x)


def mean_logits(models: nn.ModuleList, x: Tensor) -> Tensor:
    """The mean log-probabilities of several networks."""
    return torch.stack([model(x).log_softmax(1) for model in models]).mean(0)


def wave(x: Tensor, height: float = 0.02, periods: float = 100.0) -> Tensor:
    """A fast wave on the pixels: the gradient points anywhere, the image hardly changes."""
    return x + height * torch.sin(2 * torch.pi * periods * x)


def replace_activations(model: nn.Module, make: Callable[[], nn.Module]) -> nn.Module:
    """Return a copy whose activations are replaced."""
    model = copy.deepcopy(model)
    for module in [*model.modules()]:
        for name, child in [*module.named_children()]:
            if isinstance(child, nn.ReLU | nn.GELU | SteepTanh):
                setattr(module, name, make())
    return model


def with_mean_sparse(model: nn.Module, images: Tensor, threshold: float) -> nn.Module:
    """Return a copy with :class:`MeanSparse` behind every batch norm, with the moments of ``images`` there."""
    model = copy.deepcopy(model)
    places = [
        (module, name, child)
        for module in model.modules()
        for name, child in module.named_children()
        if "Norm" in type(child).__name__
    ]
    for module, name, norm in places:  # in the order of the forward: moments behind the ones before
        seen: list[Tensor] = []
        handle = norm.register_forward_hook(lambda _module, _x, out, seen=seen: seen.append(out))
        with torch.no_grad():
            model(images)
        handle.remove()
        axes = [0, *range(2, seen[0].dim())]
        mean, std = seen[0].mean(axes, keepdim=True), seen[0].std(axes, keepdim=True)
        setattr(module, name, nn.Sequential(norm, MeanSparse(mean, std, threshold)))
    return model


def softened(model: nn.Module) -> nn.Module:
    """Return a copy whose hard choices are soft, for an attack with knowledge of the defence."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if hasattr(module, "soft"):
            module.soft = True  # pyright: ignore[reportArgumentType]
    return model
