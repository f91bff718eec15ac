"""Accuracy under perturbed batch-norm statistics, over the radius (paper B, sec. 4.4 and 4.5, fig. 1 and 2)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from advnorm._core.errors import ConfigError, raise_all
from advnorm._core.precision import float32_as
from advnorm._core.wrappers import device_of, unwrapped
from advnorm.analysis.base import Finding, batches, register
from advnorm.analysis.corruption import adapting_copy
from advnorm.analysis.views import (
    View,
    conditions,
    legend,
    look,
    numbers,
    one_domain_problems,
    setting_problems,
    views,
    wrapped,
)
from advnorm.attacks import StatisticsAttack
from advnorm.attacks.base import Progress
from advnorm.attacks.statistics import Which
from advnorm.evaluation.target import EvaluationTarget
from advnorm.norms import RoutedNorm, routed_modules

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RADII = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)


@dataclass(frozen=True, kw_only=True)
class Curves:
    """Accuracy at each radius by the name of the attack, on how many images, in batches of which size."""

    radii: tuple[float, ...]
    accuracy: Mapping[str, tuple[float, ...]]
    images: int
    batch_size: int


def perturbed_accuracy(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    attacks: Mapping[str, StatisticsAttack],
    *,
    radii: float | Sequence[float] = RADII,
    batch_size: int = 256,
) -> Curves:
    """Accuracy under each attack on the statistics, its radius replaced by each of ``radii``.

    A gradient is that of the first batch alone (sec. 4.4), and one direction serves all radii. Where statistics are
    those of batches, these are equally large and can be cut into every number of groups; the few images left over are
    judged by no attack. A plain model is converted in a copy. One without batch norms is refused.
    """
    problems = [] if attacks else ["no attack on statistics given"]
    radii = numbers(radii)
    problems += [f"a radius lies in [0, 1), got {radius!r}" for radius in radii if not 0 <= radius < 1]
    problems += [] if radii else ["no radius given"]
    for attack in attacks.values():
        problems += setting_problems(model, route=None, statistics=attack.statistics, batch_size=batch_size)
        problems += one_domain_problems(model, attack.statistics)
    raise_all(list(dict.fromkeys(problems)), "bad perturbed statistics")
    model, device = _perturbable(model), device_of(model)
    if any(attack.statistics != "running" for attack in attacks.values()):
        rows = _even_batches(len(x), batch_size, [attack.groups for attack in attacks.values()])
    else:
        rows = list(batches(len(x), batch_size))
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
    return Curves(radii=radii, accuracy=found, images=rows[-1].stop, batch_size=rows[0].stop)


def _perturbable(model: nn.Module) -> nn.Module:
    """The model, or a copy with routed norms where it has plain ones."""
    model = unwrapped(model)
    if any(isinstance(module, _BatchNorm) for module in model.modules()):
        model = adapting_copy(model)
    norms = routed_modules(model).values()
    if not any(isinstance(norm, RoutedNorm) and norm.plan.statistics == "batch" for norm in norms):
        raise ConfigError(
            f"{type(model).__name__} has no batch norm; only statistics of batches can be perturbed (paper B, eq. 3)"
        )
    return model


def _even_batches(count: int, size: int, groups: Sequence[int]) -> list[slice]:
    """As few batches of one size as hold ``count`` images but for a few, each a multiple of every number of groups."""
    unit = math.lcm(*groups)
    even = count // -(-count // size) // unit * unit if count else 0
    if even < 2 * unit:
        raise ConfigError(
            f"{count} images in batches of {size} cannot be cut into groups of {sorted(set(groups))} with two images "
            "each; take more images, larger batches or fewer groups"
        )
    return list(batches(count // even * even, even))


@dataclass(frozen=True, kw_only=True, eq=False)
class PerturbedFinding(Finding):
    """Accuracy over the radius: ``panels[title][line]`` is a value per radius."""

    analysis: str
    title: str
    radii: tuple[float, ...]
    panels: Mapping[str, Mapping[str, Sequence[float]]]
    attacks: Mapping[str, StatisticsAttack]  # route and radius play no part
    conditions: Mapping[str, Any] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        return {
            "analysis": self.analysis,
            "radii": list(self.radii),
            "accuracy": {
                panel: {name: list(values) for name, values in lines.items()} for panel, lines in self.panels.items()
            },
            "attacks": {
                name: {key: value for key, value in vars(attack).items() if key not in ("radius", "route")}
                for name, attack in self.attacks.items()
            },
            "conditions": dict(self.conditions),
        }

    def draw(self) -> Figure:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7.0, 3.4))
        figure.suptitle(self.title, x=0.01, ha="left", fontsize=10, fontweight="bold")
        names = list(dict.fromkeys(name for lines in self.panels.values() for name in lines))
        handles = {}
        row = figure.subplots(1, len(self.panels), sharey=True, squeeze=False)[0]
        titles = wrapped(self.panels, 80 // len(self.panels))
        for axes, title, lines in zip(row, titles, self.panels.values()):
            for name, values in lines.items():
                (handles[name],) = axes.plot(self.radii, [100 * v for v in values], **look(names.index(name)))
            axes.set_title(title, fontweight="normal")
            axes.set_xlabel("radius ε, as a share of the statistics")
        row[0].set_ylabel("accuracy (%)")
        row[0].set_ylim(0, 102)
        legend(figure, names, [handles[name] for name in names])
        return figure


def _curves(
    seen: Sequence[View],
    attacks: Mapping[str, StatisticsAttack],
    radii: float | Sequence[float],
    progress: Progress | None,
) -> dict[str, Curves]:
    """The curves of every view, each attack through its branch."""
    found = {}
    for done, view in enumerate(seen):
        if progress is not None:
            progress(done, len(seen))
        subject = view.subject
        found[view.name] = perturbed_accuracy(
            subject.model,
            subject.images,
            subject.labels,
            {name: replace(attack, route=view.route) for name, attack in attacks.items()},
            radii=radii,
            batch_size=subject.batch_size,
        )
    return found


def _conditions(seen: Sequence[View], curves: Mapping[str, Curves]) -> dict[str, Any]:
    """Those of the views; with statistics of batches the numbers depend on their size, and on the images left over."""
    return {
        name: {**told, "images_judged": curves[name].images, "batch_size": curves[name].batch_size}
        for name, told in conditions(seen).items()
    }


@register("statistics_attack", summary="accuracy under an attack on batch statistics", paper="B fig. 1")
def statistics_attack_of_run(
    subject: EvaluationTarget,
    *,
    radii: float | Sequence[float] = RADII,
    groups: int | Sequence[int] = (1, 2, 8),
    which: Which = "both",
    route: str | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> PerturbedFinding:
    """The sign of a gradient against random perturbations, over radii and groups, through one branch or each.

    The gradient is that of the first batch of the images, all of which are judged, with statistics of batches.
    """
    if one_domain_problems(subject.model, "batch_frozen"):
        raise ConfigError(
            f"the norms of {subject.name} take the batch statistics of both domains together, and a batch here is of "
            "one; perturb its running statistics instead: perturbed_statistics"
        )
    common: dict[str, Any] = {"radius": 0.0, "which": which, "seed": seed}
    attacks = {
        "uniform random": StatisticsAttack(kind="uniform", **common),
        "binary random": StatisticsAttack(kind="binary", **common),
    }
    if not numbers(groups):
        raise ConfigError("no number of groups given; 1 is the whole batch")
    for count in numbers(groups):
        attacks[f"gradient, {count} group{'s' * (count != 1)}"] = StatisticsAttack(groups=count, **common)
    seen = views([subject], route)
    curves = _curves(seen, attacks, radii, progress)
    return PerturbedFinding(
        analysis="statistics_attack",
        title="Accuracy under an attack on the batch statistics",
        radii=numbers(radii),
        panels={name: found.accuracy for name, found in curves.items()},
        attacks=attacks,
        conditions=_conditions(seen, curves),
    )


@register("perturbed_statistics", summary="accuracy under perturbed running statistics", paper="B fig. 2", several=True)
def perturbed_statistics_of_runs(
    subjects: Sequence[EvaluationTarget],
    *,
    radii: float | Sequence[float] = RADII,
    route: str | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> PerturbedFinding:
    """``μ ← (1 + εv) μ`` or ``σ ← (1 + εv) σ`` with random signs v, the same for all networks of one architecture."""
    common: dict[str, Any] = {"kind": "binary", "scaling": "std", "statistics": "running", "seed": seed}
    attacks = {
        "means": StatisticsAttack(radius=0.0, which="mean", **common),
        "standard deviations": StatisticsAttack(radius=0.0, which="std", **common),
    }
    seen = views(subjects, route)
    curves = _curves(seen, attacks, radii, progress)
    return PerturbedFinding(
        analysis="perturbed_statistics",
        title="Accuracy under randomly perturbed running statistics",
        radii=numbers(radii),
        panels={
            f"{which} perturbed": {name: found.accuracy[which] for name, found in curves.items()} for which in attacks
        },
        attacks=attacks,
        conditions=_conditions(seen, curves),
    )
