"""Defences of the blind part of the gallery, and bounds of a network whose robustness has a certificate.

The specimens name the sources of the defences and of the attacks that broke them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from advnorm.attacks.straight_through import Replace

# -- classifiers that are no networks ----------------------------------------------------------------------------------


class NearestNeighbours(nn.Module):
    """Vote of the nearest training images; ``soft``: of all of them, weighted by distance."""

    images: Tensor
    classes: Tensor

    def __init__(self, images: Tensor, labels: Tensor, neighbours: int = 5) -> None:
        super().__init__()
        self.neighbours, self.soft = neighbours, False
        self.register_buffer("images", images.flatten(1))
        self.register_buffer("classes", F.one_hot(labels).float())

    def forward(self, x: Tensor) -> Tensor:
        distance = torch.cdist(x.flatten(1), self.images)
        if self.soft:
            return ((-8 * distance).softmax(1) @ self.classes).clamp_min(1e-12).log()
        return self.classes[distance.topk(self.neighbours, largest=False).indices].mean(1)


class Forest(nn.Module):
    """The trees of a fitted random forest of scikit-learn; ``soft``: with sigmoids in place of comparisons."""

    feature: Tensor
    threshold: Tensor
    left: Tensor
    right: Tensor
    value: Tensor

    def __init__(self, forest: Any) -> None:
        super().__init__()
        self.soft = False
        trees = [estimator.tree_ for estimator in forest.estimators_]
        self.depth, size = max(tree.max_depth for tree in trees), max(tree.node_count for tree in trees)
        own = torch.arange(size)
        parts: dict[str, list[Tensor]] = {name: [] for name in ("feature", "threshold", "left", "right", "value")}
        for tree in trees:
            shares = torch.zeros(size, tree.value.shape[2])
            shares[: tree.node_count] = torch.from_numpy(tree.value[:, 0]).float()
            parts["value"].append(shares / shares.sum(1, keepdim=True).clamp_min(1e-12))
            parts["feature"].append(_padded(tree.feature, size).clamp_min(0))
            parts["threshold"].append(_padded(tree.threshold, size).float())
            for side, children in (("left", tree.children_left), ("right", tree.children_right)):
                child = _padded(children, size)
                parts[side].append(torch.where(child < 1, own, child))  # a leaf leads to itself
        for name, tensors in parts.items():
            self.register_buffer(name, torch.stack(tensors))

    def forward(self, x: Tensor) -> Tensor:
        above = self.threshold - x.flatten(1)[:, self.feature]  # image, tree, node
        go_left = torch.sigmoid(40 * above) if self.soft else (above >= 0).to(x.dtype)
        reach = torch.zeros_like(above)
        reach[:, :, 0] = 1
        left, right = self.left.expand_as(above), self.right.expand_as(above)
        for _ in range(self.depth):
            reach = (
                torch.zeros_like(reach)
                .scatter_add(2, left, reach * go_left)
                .scatter_add(2, right, reach * (1 - go_left))
            )
        return torch.einsum("btn,tnc->bc", reach, self.value) / len(self.value)


def _padded(values: Any, size: int) -> Tensor:
    return F.pad(torch.from_numpy(values.copy()), (0, size - len(values)))


# -- defences ----------------------------------------------------------------------------------------------------------


def hard_label(z: Tensor) -> Tensor:
    """1 for the predicted class and 0 for the others."""
    return F.one_hot(z.argmax(1), z.shape[1]).to(z)


class DecoyGradient(nn.Module):
    """The answers of one network with the gradients of another one."""

    def __init__(self, model: nn.Module, decoy: nn.Module) -> None:
        super().__init__()
        self.model, self.decoy = model, decoy

    def forward(self, x: Tensor) -> Tensor:
        return Replace.apply(self.model(x), self.decoy(x))  # pyright: ignore[reportReturnType]


class AntiAdversary(nn.Module):
    """Move the image towards the class that the network predicts, then answer (Alfarra et al. 2022)."""

    def __init__(self, model: nn.Module, step: float, steps: int = 2) -> None:
        super().__init__()
        self.model, self.step, self.steps = model, step, steps

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            moved = x.detach().clone()
            predicted = self.model(moved).argmax(1)
            for _ in range(self.steps):
                moved.requires_grad_()
                loss = F.cross_entropy(self.model(moved), predicted, reduction="sum")
                moved = (moved - self.step * torch.autograd.grad(loss, moved)[0].sign()).detach()
        return self.model(x + (moved - x.detach()))


def hash_noise(x: Tensor, height: float) -> Tensor:
    """Add uniform noise that follows from the bits of the image: the same image gets the same noise."""
    bits = x.detach().float().contiguous().view(torch.int32).flatten(1).long()
    place = torch.arange(1, bits.shape[1] + 1, device=x.device)
    key = _mix(bits + place * 0x9E3779B1).sum(1, keepdim=True)
    noise = (_mix(key + place * 0x85EBCA77) % 65536).to(x.dtype) / 32768 - 1
    return x + height * noise.view_as(x)


def _mix(value: Tensor) -> Tensor:
    for _ in range(2):
        value = ((value ^ (value >> 15)) * 0x2C1B3C6D) & 0x7FFFFFFF
    return value


def activation_pruning(x: Tensor, share: float = 0.5) -> Tensor:
    """ReLU whose outputs are drawn by size, with replacement; drawn ones are scaled up (Dhillon et al. 2018)."""
    x = F.relu(x)
    flat = x.flatten(1)
    chances = flat.detach() / flat.detach().sum(1, keepdim=True).clamp_min(1e-12)
    drawn = 1 - (1 - chances) ** round(share * flat.shape[1])
    kept = torch.rand_like(flat) < drawn
    return torch.where(kept, flat / drawn.clamp_min(1e-12), 0.0).view_as(x)


class OutputCode(nn.Module):
    """Probabilities by correlation of output bits with a Hadamard code of each class (Verma & Swami 2019).

    ``saturated=False``: the correlations of the bits before tanh.
    """

    code: Tensor

    def __init__(self, classes: int = 10, bits: int = 16, *, saturated: bool = True) -> None:
        super().__init__()
        self.saturated = saturated
        hadamard = torch.ones(1, 1)
        while len(hadamard) < bits:
            hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
        self.register_buffer("code", hadamard[1 : classes + 1])

    def forward(self, bits: Tensor) -> Tensor:
        if not self.saturated:
            return bits @ self.code.T
        match = F.relu(torch.tanh(bits) @ self.code.T)
        return match / match.sum(1, keepdim=True).clamp_min(1e-12)


class PatchDictionary(nn.Module):
    """Each patch replaced by the nearest patch of a dictionary, as in image quilting (Guo et al. 2018)."""

    patches: Tensor

    def __init__(self, images: Tensor, patches: int, size: int = 2) -> None:
        super().__init__()
        self.size = size
        known = F.unfold(images, size, stride=size).mT.flatten(0, 1)
        chosen = torch.randperm(len(known), generator=torch.Generator().manual_seed(0))[:patches]
        self.register_buffer("patches", known[chosen.to(known.device)])

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(F.unfold(x, self.size, stride=self.size).mT, self.patches).argmin(2)
        return F.fold(self.patches[nearest].mT, x.shape[-2:], self.size, stride=self.size)


class MixupInference(nn.Module):
    """Mean probabilities of mixtures with random training images (Pang et al. 2020)."""

    others: Tensor

    def __init__(self, model: nn.Module, others: Tensor, share: float = 0.6, draws: int = 5) -> None:
        super().__init__()
        self.model, self.share, self.draws = model, share, draws
        self.register_buffer("others", others)

    def forward(self, x: Tensor) -> Tensor:
        outputs: list[Tensor] = []
        for _ in range(self.draws):
            other = self.others[torch.randint(len(self.others), (len(x),), device=x.device)]
            outputs.append(self.model(self.share * x + (1 - self.share) * other).softmax(1))
        return torch.stack(outputs).mean(0).clamp_min(1e-12).log()


# -- networks with a certificate ---------------------------------------------------------------------------------------


def interval_bounds(model: nn.Sequential, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Return bounds on the outputs of flatten, linear and ReLU layers over a box (Gowal et al. 2018)."""
    for layer in model:
        if isinstance(layer, nn.Linear):
            middle, radius = layer((low + high) / 2), F.linear((high - low) / 2, layer.weight.abs())
            low, high = middle - radius, middle + radius
        else:
            low, high = layer(low), layer(high)
    return low, high
