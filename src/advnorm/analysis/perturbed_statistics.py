"""Accuracy under perturbed batch-norm statistics, by radius (paper B, sec. 4.4 and 4.5, fig. 1 and 2)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from advnorm._core.errors import ConfigError, Description, raise_problems
from advnorm._core.precision import float32_as
from advnorm._core.settings import Setting
from advnorm._core.wrappers import device_of, unwrap_model
from advnorm.analysis.base import Finding, register_analysis
from advnorm.analysis.batches import even_slices, track
from advnorm.analysis.corruption_accuracy import recalibratable_copy
from advnorm.analysis.plots import Figure, legend_below, new_figure, series_style, wrap_names
from advnorm.analysis.settings import (
    BatchSize,
    EveryRouteSetting,
    Seed,
    as_tuple,
    empty_problems,
    model_problems,
    require_any,
    setting_problems,
)
from advnorm.analysis.statistics_perturbation import StatisticsPerturbation, Which
from advnorm.analysis.targets import branch_views
from advnorm.attacks.base import Progress
from advnorm.evaluation.target import EvaluationTarget
from advnorm.norms import RoutedNorm, routed_modules

RADII = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
Groups = Annotated[Sequence[int], Setting("Numbers of groups of a batch with their own statistics.", "[1, inf)")]
Radii = Annotated[Sequence[float], Setting("Sizes of the perturbation as shares of the statistics.", "[0, 1)")]


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
    radii = as_tuple(radii)
    problems += empty_problems(attacks, "attacks", "{'uniform': StatisticsPerturbation(radius=0.1, kind='uniform')}")
    problems += empty_problems(radii, "radii", str(RADII))
    for statistics in dict.fromkeys(attack.statistics for attack in attacks.values()):
        problems += model_problems(model, None, statistics)
    raise_problems(problems, "bad perturbed statistics")
    model, device = _to_perturbable(model), device_of(model)
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


def _to_perturbable(model: nn.Module) -> nn.Module:
    """Return the model, or a copy with routed norms if it has plain ones."""
    model = unwrap_model(model)
    if any(isinstance(module, _BatchNorm) for module in model.modules()):
        model = recalibratable_copy(model)
    norms = routed_modules(model).values()
    if not any(isinstance(norm, RoutedNorm) and norm.plan.statistics == "batch" for norm in norms):
        message = f"{type(model).__name__} has no batch norm, and only its statistics can be perturbed (B, eq. 3)"
        raise ConfigError("not_supported", message, field="model")
    return model


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

    def draw(self) -> Figure:
        figure, panels = new_figure(1, len(self.accuracy), height=3.4, sharey=True, squeeze=False)
        row = panels[0]
        figure.suptitle(self.title, x=0.01, ha="left", fontsize=10, fontweight="bold")
        names = list(dict.fromkeys(name for lines in self.accuracy.values() for name in lines))
        handles = {}
        titles = wrap_names(self.accuracy, 80 // len(self.accuracy))
        for axes, title, lines in zip(row, titles, self.accuracy.values()):
            for name, values in lines.items():
                (handles[name],) = axes.plot(self.radii, [100 * v for v in values], **series_style(names.index(name)))
            axes.set_title(title, fontweight="normal")
            axes.set_xlabel("radius ε, as a share of the statistics")
        row[0].set_ylabel("accuracy (%)")
        row[0].set_ylim(0, 102)
        legend_below(figure, [handles[name] for name in names], names)
        return figure


def _measure(
    targets: Sequence[EvaluationTarget],
    route: str | None,
    attacks: Mapping[str, StatisticsPerturbation],
    radii: Sequence[float],
    progress: Progress | None,
) -> tuple[dict[str, AccuracyCurves], dict[str, Any]]:
    """Return the curves of every view, each attack through its branch, and what the finding records about them."""
    views, curves = branch_views(targets, route), {}
    for name, target, branch in track(views, progress):
        routed = {kind: replace(attack, route=branch) for kind, attack in attacks.items()}
        data = (target.model, target.images, target.labels)
        curves[name] = perturbed_accuracy(*data, routed, radii=radii, batch_size=target.batch_size)
    settings = {
        name: {key: value for key, value in vars(attack).items() if key not in ("radius", "route")}
        for name, attack in attacks.items()
    }
    # With batch statistics the numbers depend on the batch size and on the images used.
    used = {name: {"images_judged": one.images, "batch_size": one.batch_size} for name, one in curves.items()}
    conditions = {view.name: {**view.conditions, **used[view.name]} for view in views}
    return curves, {"radii": radii, "attacks": settings, "conditions": conditions}


@register_analysis("statistics_attack", summary="accuracy under an attack on batch statistics", paper="B fig. 1")
def statistics_attack_of_run(
    target: EvaluationTarget,
    *,
    radii: Radii = RADII,
    groups: Groups = (1, 2, 8),
    which: Annotated[Which, Setting("The perturbed statistics.")] = "both",
    route: EveryRouteSetting = None,
    seed: Seed = 0,
    progress: Progress | None = None,
) -> PerturbedStatistics:
    """Compare the sign of a gradient with random perturbations of batch statistics, by radius and groups.

    The gradient is that of the first batch; the accuracy is that of all images.
    """
    if model_problems(target.model, None, "batch_frozen"):
        message = f"the norms of {target.name} need batch statistics of both domains, but these batches have one domain"
        hint = "perturb the running statistics: perturbed_statistics"
        raise ConfigError("not_supported", message, field="target", hint=hint)
    require_any(groups, "groups", "1 for the whole batch")
    common: dict[str, Any] = {"radius": 0.0, "which": which, "seed": seed}
    attacks = {
        "uniform random": StatisticsPerturbation(kind="uniform", **common),
        "binary random": StatisticsPerturbation(kind="binary", **common),
    }
    for count in groups:
        attacks[f"gradient, {count} group{'s' * (count != 1)}"] = StatisticsPerturbation(groups=count, **common)
    curves, about = _measure([target], route, attacks, radii, progress)
    return PerturbedStatistics(
        analysis="statistics_attack",
        title="Accuracy under an attack on the batch statistics",
        **about,
        accuracy={name: found.accuracy for name, found in curves.items()},
    )


@register_analysis(
    "perturbed_statistics", summary="accuracy under perturbed running statistics", paper="B fig. 2", several=True
)
def perturbed_statistics_of_runs(
    targets: Sequence[EvaluationTarget],
    *,
    radii: Radii = RADII,
    route: EveryRouteSetting = None,
    seed: Seed = 0,
    progress: Progress | None = None,
) -> PerturbedStatistics:
    """Perturb ``μ ← (1 + εv) μ`` or ``σ ← (1 + εv) σ`` with random signs v, equal for networks of one architecture."""
    common: dict[str, Any] = {"kind": "binary", "scaling": "std", "statistics": "running", "seed": seed}
    attacks = {
        "means": StatisticsPerturbation(radius=0.0, which="mean", **common),
        "standard deviations": StatisticsPerturbation(radius=0.0, which="std", **common),
    }
    curves, about = _measure(targets, route, attacks, radii, progress)
    return PerturbedStatistics(
        analysis="perturbed_statistics",
        title="Accuracy under randomly perturbed running statistics",
        **about,
        accuracy={
            f"{which} perturbed": {name: found.accuracy[which] for name, found in curves.items()} for which in attacks
        },
    )
