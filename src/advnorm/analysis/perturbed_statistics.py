"""Perturbations of batch-norm statistics, and accuracy by their radius (paper B, sec. 4.4 and 4.5, fig. 1 and 2)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from advnorm._core.errors import ConfigError, Description, Problem, raise_problems
from advnorm._core.precision import float32_as
from advnorm._core.seeding import ImageNoise
from advnorm._core.settings import SEEDS, Setting, convert_fields
from advnorm._core.wrappers import device_of, unwrap_model
from advnorm.analysis.banks import routed_copy
from advnorm.analysis.base import BranchView, Finding, TableData, format_percent, register_analysis, view_conditions
from advnorm.analysis.images import even_slices, track
from advnorm.analysis.plots import Figure, Panel, each_value, line_figure, wrap_names
from advnorm.analysis.settings import (
    BatchSize,
    Seed,
    as_tuple,
    empty_problems,
    model_problems,
    require_any,
    setting_problems,
)
from advnorm.attacks import predicting
from advnorm.attacks.inputs import validate_batch, validating_first_logits
from advnorm.attacks.losses import cross_entropy
from advnorm.norms import Perturbation, RoutedNorm, routed_modules, zero_perturbation
from advnorm.norms import statistics as statistics_scope
from advnorm.norms.plan import SHARED

RADII = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
Which = Literal["both", "mean", "std"]
Groups = Annotated[Sequence[int], Setting("Numbers of groups of a batch with their own statistics.", "[1, inf)")]
Radii = Annotated[Sequence[float], Setting("Sizes of the perturbation as shares of the statistics.", "[0, 1)")]


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
    seed: Annotated[int, Setting("Seed of random directions.", SEEDS)] = 0

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
            zero = zero_perturbation(model, requires_grad=False)
            return Perturbation({name: self._random_direction(name, banks) for name, banks in zero.items()})
        if x is None or y is None:
            raise ConfigError("empty", "kind='gradient' needs a batch of {field} and labels", field="images")
        largest_label = validate_batch(x, y)
        delta = zero_perturbation(model)
        with predicting(model, route=self.route, statistics=self.statistics) as predict:
            with statistics_scope(model, perturbation=delta, groups=1):
                loss = cross_entropy(validating_first_logits(predict, largest_label)(x.detach()), y).sum()
            gradients = torch.autograd.grad(loss, delta.tensors, allow_unused=True)
        return delta.sign_step(gradients, 1.0)

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

    def accuracy(
        self, model: nn.Module, data: Iterable[tuple[Tensor, Tensor]], perturbation: Perturbation | None = None
    ) -> float:
        """Accuracy on ``data``, batches of images and labels, under the perturbed statistics."""
        right = []
        perturbed = statistics_scope(model, perturbation=perturbation, groups=self.groups)
        with predicting(model, route=self.route, statistics=self.statistics) as predict, torch.no_grad(), perturbed:
            for x, y in data:
                right.append(validating_first_logits(predict, validate_batch(x, y))(x.detach()).argmax(1) == y)
        require_any(right, "data", "a list of batches; an iterator can be used only once")
        return float(torch.cat(right).sum()) / sum(map(len, right))

    def _random_direction(self, layer: str, zeros: Mapping[str, tuple[Tensor, ...]]) -> dict[str, Any]:
        """The same direction for every bank of a layer, and so for all networks of one architecture (sec. 4.5)."""
        like = next(iter(zeros.values()))[0]
        noise = ImageNoise(self.seed, torch.zeros(1, dtype=torch.long, device=like.device)).fold(self.kind)
        draws = [noise.fold(layer).fold(SHARED).fold(what) for what in ("mean", "std")]
        binary = self.kind == "binary"
        values = [one.signs(like.shape) if binary else 2 * one.uniform(like.shape) - 1 for one in draws]
        return dict.fromkeys(zeros, tuple(value[0].to(like.dtype) for value in values))


@dataclass(frozen=True, kw_only=True)
class AccuracyCurves:
    """Accuracy at each radius by the name of the attack, with the number of images and the batch size."""

    radii: tuple[float, ...]
    accuracy: Mapping[str, tuple[float, ...]]
    images: int
    batch_size: int


def perturbed_accuracy(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    attacks: Mapping[str, StatisticsPerturbation],
    *,
    radii: Radii = RADII,
    batch_size: BatchSize = 256,
) -> AccuracyCurves:
    """Return the accuracy under each attack on the statistics, with each of ``radii`` as its radius.

    A gradient is that of the first batch alone (sec. 4.4), and one direction serves all radii. With batch statistics
    all batches have the same size, which every number of groups divides; the few remaining images are not used. A plain
    model is converted in a copy. A model without batch norms raises.
    """
    problems = setting_problems(perturbed_accuracy, locals())
    problems += empty_problems(attacks, "attacks", "{'uniform': StatisticsPerturbation(radius=0.1, kind='uniform')}")
    for statistics in dict.fromkeys(attack.statistics for attack in attacks.values()):
        problems += model_problems(model, None, statistics)
    raise_problems(problems, "bad perturbed statistics")
    radii = as_tuple(radii)
    model, device = unwrap_model(model), device_of(model)
    if any(isinstance(module, _BatchNorm) for module in model.modules()):
        model = routed_copy(model)
    norms = routed_modules(model).values()
    if not any(isinstance(norm, RoutedNorm) and norm.plan.statistics == "batch" for norm in norms):
        message = f"{type(model).__name__} has no batch norm, and only its statistics can be perturbed (B, eq. 3)"
        raise ConfigError("not_supported", message, field="model")
    if any(attack.statistics != "running" for attack in attacks.values()):
        rows = _equal_batches(len(x), batch_size, [attack.groups for attack in attacks.values()])
    else:
        rows = list(even_slices(len(x), batch_size))
    found: dict[str, tuple[float, ...]] = {}
    with float32_as("ieee", device):
        for name, attack in attacks.items():
            direction = attack.direction(model, x[rows[0]].to(device), y[rows[0]].to(device))
            accuracies = []
            for radius in radii:
                attack = replace(attack, radius=radius)
                data = ((x[part].to(device), y[part].to(device)) for part in rows)
                accuracies.append(attack.accuracy(model, data, attack.scaled(direction)))
            found[name] = tuple(accuracies)
    return AccuracyCurves(radii=radii, accuracy=found, images=rows[-1].stop, batch_size=rows[0].stop)


def _equal_batches(count: int, size: int, groups: Sequence[int]) -> list[slice]:
    """Return the fewest batches of one size, which is a multiple of every number of groups; drop remaining images."""
    unit = math.lcm(*groups)
    even = count // -(-count // size) // unit * unit if count else 0
    if even < 2 * unit:
        message = f"batches must have two images for each group, {{field}} {sorted(set(groups))}"
        got, hint = Description(f"{count} images in batches of {size}"), "use more images or fewer groups"
        raise ConfigError("conflict", message, field="groups", got=got, hint=hint)
    return list(even_slices(count // even * even, even))


@dataclass(frozen=True, kw_only=True, eq=False)
class PerturbedStatistics(Finding):
    """Accuracy by radius: ``accuracy[panel][line]`` has one value for each radius."""

    RECORD = ("analysis", "radii", "accuracy", "attacks", "conditions")

    analysis: str
    title: str
    radii: tuple[float, ...]
    accuracy: Mapping[str, Mapping[str, Sequence[float]]]
    attacks: Mapping[str, Mapping[str, Any]]  # settings of the attacks, without radius and route

    def table(self) -> TableData:
        rows = [
            [panel, name, *map(format_percent, line)]
            for panel, lines in self.accuracy.items()
            for name, line in lines.items()
        ]
        return ["", "", *(f"radius {radius:g}" for radius in self.radii)], rows

    def draw(self) -> Figure:
        titles = wrap_names(self.accuracy, 80 // len(self.accuracy))
        axes, panels = {"ylabel": "accuracy (%)", "ylim": (0, 102)}, []
        for title, shares in zip(titles, self.accuracy.values()):
            lines = {name: dict(zip(self.radii, line)) for name, line in shares.items()}
            panels.append(Panel(title, each_value(lines, lambda share: 100 * share), axes))
        xlabel = "radius ε, as a share of the statistics"
        return line_figure(panels, heading=self.title, xlabel=xlabel, columns=len(panels), sharey=True)


def _measure(
    views: Sequence[BranchView], attacks: Mapping[str, StatisticsPerturbation], radii: Sequence[float], **names: str
) -> PerturbedStatistics:
    """Return the accuracy of every view under every attack through its branch; ``names``: analysis and title."""
    conditions, accuracy = view_conditions(views), {}
    for view in track(views):
        routed = {kind: replace(attack, route=view.route) for kind, attack in attacks.items()}
        found = perturbed_accuracy(*view.data, routed, radii=radii, batch_size=view.target.batch_size)
        # With batch statistics the numbers depend on the batch size and on the images used.
        conditions[view.name] |= {"images_used": found.images, "batch_size": found.batch_size}
        accuracy[view.name] = found.accuracy
    settings = {
        name: {key: value for key, value in vars(attack).items() if key not in ("radius", "route")}
        for name, attack in attacks.items()
    }
    return PerturbedStatistics(radii=tuple(radii), accuracy=accuracy, attacks=settings, conditions=conditions, **names)


@register_analysis(
    "statistics_attack", summary="accuracy under an attack on batch statistics", paper="B fig. 1", takes="branches"
)
def statistics_attack_of_runs(
    views: Sequence[BranchView],
    *,
    radii: Radii = RADII,
    groups: Groups = (1, 2, 8),
    which: Annotated[Which, Setting("The perturbed statistics.")] = "both",
    seed: Seed = 0,
) -> PerturbedStatistics:
    """Compare the sign of a gradient with random perturbations of batch statistics, by radius and groups.

    The gradient is that of the first batch; the accuracy is that of all images.
    """
    if wrong := [view.name for view in views if model_problems(view.target.model, None, "batch_frozen")]:
        message = f"the norms of {wrong[0]} need batch statistics of both domains, but these batches have one domain"
        hint = "perturb the running statistics: perturbed_statistics"
        raise ConfigError("not_supported", message, field="targets", hint=hint)
    common: dict[str, Any] = {"radius": 0.0, "which": which, "seed": seed}
    attacks = {
        "uniform random": StatisticsPerturbation(kind="uniform", **common),
        "binary random": StatisticsPerturbation(kind="binary", **common),
    }
    for count in groups:
        attacks[f"gradient, {count} group{'s' * (count != 1)}"] = StatisticsPerturbation(groups=count, **common)
    title = "Accuracy under an attack on the batch statistics"
    return _measure(views, attacks, radii, analysis="statistics_attack", title=title)


@register_analysis(
    "perturbed_statistics", summary="accuracy under perturbed running statistics", paper="B fig. 2", takes="branches"
)
def perturbed_statistics_of_runs(
    views: Sequence[BranchView], *, radii: Radii = RADII, seed: Seed = 0
) -> PerturbedStatistics:
    """Perturb ``μ ← (1 + εv) μ`` or ``σ ← (1 + εv) σ`` with random signs v, equal for networks of one architecture."""
    common: dict[str, Any] = {"kind": "binary", "scaling": "std", "statistics": "running", "seed": seed}
    attacks = {
        "means": StatisticsPerturbation(radius=0.0, which="mean", **common),
        "standard deviations": StatisticsPerturbation(radius=0.0, which="std", **common),
    }
    title = "Accuracy under randomly perturbed running statistics"
    found = _measure(views, attacks, radii, analysis="perturbed_statistics", title=title)
    by_attack = {
        f"{which} perturbed": {name: lines[which] for name, lines in found.accuracy.items()} for which in attacks
    }
    return replace(found, accuracy=by_attack)
