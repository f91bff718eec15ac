"""Independent oracles of the training objectives: the papers' losses on a network that is written out, in float64.

Nothing here uses advnorm's mathematics; the norms are those of ``norm_oracles``, and only names are shared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from advnorm._core.seeding import ImageNoise
from advnorm.attacks import PGD
from advnorm.attacks.base import Attack
from advnorm.attacks.model_access import Predict
from advnorm.norms import make_norm, make_plan
from advnorm.norms.routed_linear import RoutedLinear
from advnorm.threat import ThreatModel
from support.norm_oracles import FORWARDED, Oracle, randomized

CLASSES = 4
SIZE = 6

#: Norms whose domains can be normalized in forwards of their own, and all of them in one concatenated forward.
SEQUENTIAL = ["bn", "dual_bn", "dual_affine_bn", "dual_stats_bn", "gn", "dual_affine_gn"]
CONCATENATED = [*SEQUENTIAL, "cross_bn", "gmm_bn"]


class Tiny(nn.Module):
    """conv, norm, relu, conv, norm, relu, mean, linear; takes float32 images whatever its own precision."""

    def __init__(self, norm: str = "bn", *, dual_head: bool = False, plain: bool = False, **options: Any) -> None:
        super().__init__()

        def layer(channels: int) -> nn.Module:
            return nn.BatchNorm2d(channels) if plain else make_norm(norm, channels, **options)

        self.conv1, self.norm1 = nn.Conv2d(2, 4, 3), layer(4)
        self.conv2, self.norm2 = nn.Conv2d(4, 6, 2), layer(6)
        self.fc = RoutedLinear(6, CLASSES, make_plan("dual_bn")) if dual_head else nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(self.conv1(x.to(self.conv1.weight.dtype))).relu()
        return self.fc(self.norm2(self.conv2(x)).relu().mean((2, 3)))


def tiny(norm: str = "bn", *, seed: int = 0, **options: Any) -> Tiny:
    """A network in float64 and train mode with values that could not hide a mix-up."""
    model = randomized(Tiny(norm, **options).double(), seed)
    with torch.no_grad():  # logits that differ by more than rounding
        for name, value in model.named_parameters():
            if name.startswith(("conv", "fc")) and value.dim() > 1:
                value *= 5
    return model.train()


def images(count: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Float32 images in [0, 1] and their labels."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(count, 2, SIZE, SIZE, generator=generator)
    return x, torch.randint(CLASSES, (count,), generator=generator)


def crafted(x: Tensor) -> Tensor:
    """Other images, which depend on each image alone, for the adversarial domain: sums and products, so exact."""
    return 0.5 * x + 0.25 * x.flip(3) + 0.25


@dataclass(frozen=True, kw_only=True)
class Given(Attack):
    """An attack that ignores the model and returns :func:`crafted` images."""

    threat: ThreatModel = field(default_factory=lambda: ThreatModel(eps=1.0))

    def perturb(self, predict: Predict, x: Tensor, y: Tensor, noise: ImageNoise) -> Tensor:
        return crafted(x)


def pgd(**settings: Any) -> PGD:
    return PGD(**{"threat": ThreatModel(eps=0.1), "steps": 3, **settings})


# -- the network -------------------------------------------------------------------------------------------------------


class Network:
    """The forward of :class:`Tiny` by hand, on float64 copies of its state; differentiable by plain autograd."""

    def __init__(self, model: Tiny, *, other_gradient: bool = True) -> None:
        self.norms: dict[str, Oracle] = {}
        for name in ("norm1", "norm2"):
            norm = routed(getattr(model, name))
            self.norms[name] = Oracle(norm.plan.name, norm, other_gradient=other_gradient)
        self.weights = {
            name: value.detach().double().clone().requires_grad_()
            for name, value in model.named_parameters()
            if not name.startswith("norm")
        }
        self.likelihoods: list[Tensor] = []

    def forward(self, parts: Mapping[str, Tensor], *, mode: str = "batch") -> dict[str, Tensor]:
        """Logits by part of one forward: of one domain's images, or of several concatenated in this order."""
        counts = {domain: len(x) for domain, x in parts.items()}
        x = torch.cat([part.double() for part in parts.values()])
        for conv, norm in (("conv1", "norm1"), ("conv2", "norm2")):
            x = convolution(x, self.weights[f"{conv}.weight"], self.weights[f"{conv}.bias"])
            x = self.norms[norm].forward(x, counts, mode=mode).clamp(min=0)
            likelihood = self.norms[norm].likelihood
            if likelihood is not None:
                self.likelihoods.append(likelihood)
        features = x.sum((2, 3)) / (x.shape[2] * x.shape[3])
        pieces = features.split(list(counts.values()))
        return {domain: self.head(piece, domain) for domain, piece in zip(counts, pieces)}

    def head(self, features: Tensor, domain: str) -> Tensor:
        """A, table 7: with Dual Linear each domain has its own."""
        own = "fc.weight" not in self.weights
        domain = domain.removesuffix(FORWARDED)
        weight, bias = (self.weights[f"fc.{k}_{domain}" if own else f"fc.{k}"] for k in ("weight", "bias"))
        return torch.stack([(features * row).sum(1) for row in weight], 1) + bias

    @property
    def crosses(self) -> bool:
        return any(norm.row.statistics == "other" for norm in self.norms.values())

    @property
    def parameters(self) -> dict[str, Tensor]:
        of_norms = {f"{n}.{k}": v for n, norm in self.norms.items() for k, v in norm.parameters.items()}
        return {**self.weights, **of_norms}

    @property
    def gradients(self) -> dict[str, Tensor]:
        return {k: torch.zeros_like(v) if v.grad is None else v.grad for k, v in self.parameters.items()}

    @property
    def buffers(self) -> dict[str, Tensor]:
        return {f"{n}.{k}": v for n, norm in self.norms.items() for k, v in norm.buffers.items()}

    def descend(self, rate: float) -> None:
        """A step of plain gradient descent."""
        with torch.no_grad():
            for value in self.parameters.values():
                if value.grad is not None:
                    value -= rate * value.grad
                value.grad = None


def routed(norm: Any) -> Any:
    """A built-in batch norm is the single BN of the papers."""
    if not isinstance(norm, nn.BatchNorm2d):
        return norm
    twin = make_norm("bn", norm.num_features).to(norm.weight.dtype)
    twin.load_state_dict(norm.state_dict())
    return twin


def convolution(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``y[n, o, i, j] = b[o] + sum_{c, u, v} w[o, c, u, v] x[n, c, i + u, j + v]``."""
    height, width = (x.shape[2 + k] - weight.shape[2 + k] + 1 for k in range(2))
    total = bias[:, None, None].expand(len(x), -1, height, width)
    for u in range(weight.shape[2]):
        for v in range(weight.shape[3]):
            window = x[:, :, u : u + height, v : v + width]
            total = total + torch.einsum("oc,nchw->nohw", weight[:, :, u, v], window)
    return total


def forwards(
    network: Network, x: Tensor, x_adv: Tensor, *, layout: str = "concatenated", mode: str = "batch"
) -> dict[str, Tensor]:
    """C, sec. 3.1: one concatenated batch, or the clean and then the adversarial one in forwards of their own.

    A, sec. 3: crossed images are normalized by the statistics of forwarded ones of the other domain.
    """
    if network.crosses:
        first = {"clean" + FORWARDED: x, "adv" + FORWARDED: x_adv}
        out = network.forward({**first, "clean": x, "adv": x_adv}, mode=mode)
        return {domain: out[domain] for domain in ("clean", "adv")}
    if layout == "concatenated":
        return network.forward({"clean": x, "adv": x_adv}, mode=mode)
    return {**network.forward({"clean": x}, mode=mode), **network.forward({"adv": x_adv}, mode=mode)}


# -- the losses --------------------------------------------------------------------------------------------------------


def log_probabilities(logits: Tensor) -> Tensor:
    shifted = logits - logits.max(1, keepdim=True).values.detach()
    return shifted - shifted.exp().sum(1, keepdim=True).log()


def cross_entropy(logits: Tensor, y: Tensor, smoothing: float = 0.0) -> Tensor:
    """One value per image: ``-sum_k q_k log p_k`` with ``q = (1 - s) onehot(y) + s / K`` (Szegedy et al. 2016)."""
    target = torch.full_like(logits, smoothing / logits.shape[1])
    target[torch.arange(len(y)), y] += 1 - smoothing
    return -(target * log_probabilities(logits)).sum(1)


def kl(clean: Tensor, adv: Tensor) -> Tensor:
    """C, eq. 2 and 3: ``D_KL(f(x) || f(x_adv))``, one value per image."""
    log_p, log_q = log_probabilities(clean), log_probabilities(adv)
    return (log_p.exp() * (log_p - log_q)).sum(1)


def pairing(clean: Tensor, adv: Tensor) -> Tensor:
    """The squared L2 distance of a pair's logits over the number of classes, one value per image.

    Paper E has no formula; Kannan et al. (2018) write an L2 loss, and their released code takes the mean over images
    and classes, which is what their weight of 0.5 belongs to.
    """
    return ((clean - adv) ** 2).sum(1) / clean.shape[1]


def mixed(clean: Tensor, adv: Tensor, weight: float) -> Tensor:
    """A, eq. 2; C, eq. 1; E, eq. 1: a weighted mean over the images, of which the clean ones may be fewer."""
    total = weight * clean.sum() + (1 - weight) * adv.sum()
    return total / (weight * len(clean) + (1 - weight) * len(adv))
