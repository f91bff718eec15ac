"""Perturbations of batch-norm statistics, and accuracy under them (paper B, sec. 4.4 and 4.5)."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from advnorm._core.errors import ConfigError, Problem, raise_problems
from advnorm._core.seeding import ImageNoise
from advnorm._core.settings import Setting, convert_fields
from advnorm.attacks.inputs import validate_batch, validating_first_logits
from advnorm.attacks.losses import cross_entropy
from advnorm.attacks.model_access import predicting
from advnorm.norms import Perturbation, zero_perturbation
from advnorm.norms import statistics as statistics_scope
from advnorm.norms.plan import SHARED

Which = Literal["both", "mean", "std"]
Batches = Iterable[tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class StatisticsPerturbationResult:
    """A perturbation of the statistics, and the accuracy on its batch without and with it."""

    perturbation: Perturbation
    clean_accuracy: float
    accuracy: float


@dataclass(frozen=True, kw_only=True)
class StatisticsPerturbation:
    """``μ ← (1 + δ_μ) μ`` and ``1/σ ← (1 + δ_σ) / σ`` in all batch norms (paper B, eq. 3), |δ| at most ``radius``.

    It changes statistics, not images, so it is not an :class:`~advnorm.attacks.Attack`.

    ``kind``: ``gradient`` is the sign of the gradient over one batch (algorithm 1, line 5; fig. 1). ``uniform`` and
    ``binary`` are random; they depend on the seed and the norm's name, so that models of one architecture share a
    direction (sec. 4.5).
    ``scaling``: δ_σ multiplies ``invstd`` as in eq. 3, or ``std`` as in sec. 4.5: ``σ ← (1 + ε v) σ``.
    ``groups`` apply to the evaluation, as in APART's second pass. The gradient is that of the whole batch, as in its
    first pass.
    """

    radius: Annotated[float, Setting("Largest change, as a share of the statistics.", "[0, 1)")]
    kind: Annotated[Literal["gradient", "uniform", "binary"], Setting("How the direction is chosen.")] = "gradient"
    which: Annotated[Which, Setting("Perturbed statistics.")] = "both"
    scaling: Annotated[Literal["invstd", "std"], Setting("Quantity that the perturbation multiplies.")] = "invstd"
    groups: Annotated[int, Setting("Number of parts of the batch with their own statistics.", "[1, inf)")] = 1
    statistics: Annotated[
        Literal["batch_frozen", "running"], Setting("Statistics of the batch, or the running ones.")
    ] = "batch_frozen"
    route: Annotated[str | None, Setting("Evaluated branch; none: the branch of an enclosing `advnorm.route`.")] = None
    seed: Annotated[int, Setting("Seed of random directions.")] = 0

    def __post_init__(self) -> None:
        problems = convert_fields(self)
        if not problems and self.statistics == "running" and self.groups != 1:
            message, hint = "{field} need batch statistics", "use statistics='batch_frozen'"
            problems.append(Problem(code="conflict", field="groups", message=message, got=self.groups, hint=hint))
        raise_problems(problems, "bad statistics perturbation")

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> StatisticsPerturbationResult:
        """Compute the perturbation on one batch and the accuracy on it; see :meth:`accuracy` for other data."""
        perturbation = self.perturbation(model, x, y)
        clean, perturbed = (self.accuracy(model, [(x, y)], delta) for delta in (None, perturbation))
        return StatisticsPerturbationResult(perturbation=perturbation, clean_accuracy=clean, accuracy=perturbed)

    def perturbation(self, model: nn.Module, x: Tensor | None = None, y: Tensor | None = None) -> Perturbation:
        """Return the perturbation; random kinds need no images."""
        return self.scaled(self.direction(model, x, y))

    def direction(self, model: nn.Module, x: Tensor | None = None, y: Tensor | None = None) -> Perturbation:
        """Return the perturbation for radius 1, with values in [-1, 1]; one direction serves all radii."""
        if self.kind != "gradient":
            return self._random_direction(zero_perturbation(model, requires_grad=False))
        if x is None or y is None:
            raise ConfigError("empty", "kind='gradient' needs a batch of {field} and labels", field="images")
        largest_label = validate_batch(x, y)
        delta = zero_perturbation(model)
        with predicting(model, route=self.route, statistics=self.statistics) as predict:
            with statistics_scope(model, perturbation=delta, groups=1):
                loss = cross_entropy(validating_first_logits(predict, largest_label)(x.detach()), y).sum()
            gradients = torch.autograd.grad(loss, delta.tensors, allow_unused=True)
        return delta.map(lambda gradient: gradient.detach().sign(), gradients)

    def scaled(self, direction: Perturbation) -> Perturbation:
        """Scale a direction to ``radius``, for the chosen statistics."""

        def at_radius(delta: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            mean, std = (self.radius * value.detach() for value in delta)
            if self.scaling == "std":  # the gradient is that of 1/σ, so σ moves the other way
                std = 1 / (1 - std if self.kind == "gradient" else 1 + std) - 1
            return mean * (self.which != "std"), std * (self.which != "mean")

        return Perturbation(
            {name: {bank: at_radius(delta) for bank, delta in banks.items()} for name, banks in direction.items()}
        )

    def accuracy(self, model: nn.Module, data: Batches, perturbation: Perturbation | None = None) -> float:
        """Accuracy on ``data``, batches of images and labels, under the perturbed statistics."""
        right, seen = [], 0
        with predicting(model, route=self.route, statistics=self.statistics) as predict, ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(statistics_scope(model, perturbation=perturbation, groups=self.groups))
            for x, y in data:
                right.append((validating_first_logits(predict, validate_batch(x, y))(x.detach()).argmax(1) == y).sum())
                seen += len(x)
        if not seen:
            raise ConfigError("empty", "{field} is empty: an exhausted iterator or an empty data set", field="data")
        return float(torch.stack(right).sum()) / seen

    def _random_direction(self, zero: Perturbation) -> Perturbation:
        """The same direction for every bank of a layer, and so for all networks of one architecture (sec. 4.5)."""

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
