"""The attack on batch-norm statistics, and accuracy under perturbed statistics (paper B, sec. 4.4 and 4.5)."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from advnorm._core.errors import ConfigError, did_you_mean, raise_all
from advnorm._core.seeding import ImageNoise
from advnorm.attacks.base import attacked, check_images, checked
from advnorm.attacks.losses import cross_entropy
from advnorm.norms import Mode, Perturbation, zero_perturbation
from advnorm.norms import statistics as statistics_scope
from advnorm.norms.plan import SHARED

Kind = Literal["gradient", "uniform", "binary"]
Which = Literal["both", "mean", "std"]
Scaling = Literal["invstd", "std"]
Batches = Iterable[tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class StatisticsResult:
    """A perturbation of the statistics and the accuracy of the attacked batch without and with it."""

    perturbation: Perturbation
    clean_accuracy: float
    accuracy: float


@dataclass(frozen=True, kw_only=True)
class StatisticsAttack:
    """``μ ← (1 + δ_μ) μ`` and ``1/σ ← (1 + δ_σ) / σ`` in every batch-fed norm (paper B, eq. 3), |δ| at most ``radius``.

    ``kind``: ``gradient`` is the sign of the gradient over one batch (algorithm 1, line 5; fig. 1), ``uniform`` and
    ``binary`` are random, from the seed and the norm's name, so that models of one architecture share a direction
    (sec. 4.5). ``which``: both statistics, or one of them. ``scaling``: δ_σ multiplies ``invstd`` as in eq. 3, or
    ``std`` as in sec. 4.5, where ``σ ← (1 + ε v) σ``. ``statistics``: the statistics that are perturbed, of the batch
    or the running ones. ``groups``: how many parts of the batch have statistics of their own under evaluation, as in
    APART's second pass; the gradient is that of the whole batch, as in its first.
    """

    radius: float
    kind: Kind = "gradient"
    which: Which = "both"
    scaling: Scaling = "invstd"
    groups: int = 1
    statistics: Mode = "batch_frozen"
    route: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        problems = []
        if isinstance(self.radius, bool) or not isinstance(self.radius, int | float) or not 0 <= self.radius < 1:
            problems.append(f"radius must lie in [0, 1), as a share of the statistics, got {self.radius!r}")
        for name, allowed in (("kind", Kind), ("which", Which), ("scaling", Scaling)):
            value = getattr(self, name)
            if value not in get_args(allowed):
                problems.append(f"unknown {name} {value!r}{did_you_mean(value, get_args(allowed))}")
        if isinstance(self.groups, bool) or not isinstance(self.groups, int) or self.groups < 1:
            problems.append(f"groups must be an integer of at least 1, got {self.groups!r}")
        if self.statistics not in ("batch_frozen", "running"):
            problems.append(f"statistics must be 'batch_frozen' or 'running', got {self.statistics!r}")
        elif self.statistics == "running" and self.groups != 1:
            problems.append("groups belong to batch statistics; use statistics='batch_frozen'")
        raise_all(problems, "bad attack StatisticsAttack")

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> StatisticsResult:
        """Attack with one batch and judge on it; judge other data with :meth:`accuracy`."""
        perturbation = self.perturbation(model, x, y)
        clean, perturbed = (self.accuracy(model, [(x, y)], delta) for delta in (None, perturbation))
        return StatisticsResult(perturbation=perturbation, clean_accuracy=clean, accuracy=perturbed)

    def perturbation(self, model: nn.Module, x: Tensor | None = None, y: Tensor | None = None) -> Perturbation:
        """The perturbation itself; the random kinds need no images."""
        return self.scaled(self.direction(model, x, y))

    def direction(self, model: nn.Module, x: Tensor | None = None, y: Tensor | None = None) -> Perturbation:
        """In which direction, and for ``uniform`` how far: values in [-1, 1]. One direction serves all radii."""
        if self.kind != "gradient":
            return self._random_direction(zero_perturbation(model, requires_grad=False))
        if x is None or y is None:
            raise ConfigError("a gradient needs a batch of images and labels")
        largest_label = check_images(x, y)
        delta = zero_perturbation(model)
        with attacked(model, route=self.route, statistics=self.statistics) as predict:
            with statistics_scope(model, perturbation=delta, groups=1):
                loss = cross_entropy(checked(predict, largest_label)(x.detach()), y).sum()
            gradients = torch.autograd.grad(loss, delta.tensors, allow_unused=True)
        return delta.map(lambda gradient: gradient.detach().sign(), gradients)

    def scaled(self, direction: Perturbation) -> Perturbation:
        """The direction at this attack's radius, for the chosen statistics."""

        def at_radius(delta: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            mean, std = (self.radius * value.detach() for value in delta)
            if self.scaling == "std":  # a gradient points where 1/σ should go, so σ goes the other way
                std = 1 / (1 - std if self.kind == "gradient" else 1 + std) - 1
            return mean * (self.which != "std"), std * (self.which != "mean")

        return Perturbation(
            {name: {bank: at_radius(delta) for bank, delta in banks.items()} for name, banks in direction.items()}
        )

    def accuracy(self, model: nn.Module, data: Batches, perturbation: Perturbation | None = None) -> float:
        """Share of ``data``, batches of images and labels, that is right under the perturbed statistics."""
        right, seen = [], 0
        with attacked(model, route=self.route, statistics=self.statistics) as predict, ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(statistics_scope(model, perturbation=perturbation, groups=self.groups))
            for x, y in data:
                right.append((checked(predict, check_images(x, y))(x.detach()).argmax(1) == y).sum())
                seen += len(x)
        if not seen:
            raise ConfigError("no data to judge on: an iterator that was used up already, or an empty data set")
        return float(torch.stack(right).sum()) / seen

    def _random_direction(self, zero: Perturbation) -> Perturbation:
        """The same for every bank of a layer, so for all networks of one architecture (paper B, sec. 4.5)."""

        def draw(like: Tensor, layer: str, what: str) -> Tensor:
            noise = ImageNoise(self.seed, torch.zeros(1, dtype=torch.long, device=like.device))
            for tag in (self.kind, layer, SHARED, what):
                noise = noise.fold(tag)
            values = noise.signs(like.shape) if self.kind == "binary" else 2 * noise.uniform(like.shape) - 1
            return values[0].to(like.dtype)

        return Perturbation(
            {
                name: {bank: (draw(mean, name, "mean"), draw(std, name, "std")) for bank, (mean, std) in banks.items()}
                for name, banks in zero.items()
            }
        )
