"""Accuracy under common corruptions, with and without adapted statistics (paper D, fig. 1 and table 7)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from advnorm._core.errors import ConfigError, Problem, raise_problems, unknown_name
from advnorm._core.settings import Setting
from advnorm._core.wrappers import device_of, unwrap_model
from advnorm.analysis.base import Finding, register_analysis
from advnorm.analysis.batches import even_slices, measure_accuracy, track
from advnorm.analysis.plots import Figure, legend_below, new_figure, series_style
from advnorm.analysis.settings import BatchSize, EveryRouteSetting, Seed, as_tuple, model_problems, setting_problems
from advnorm.analysis.targets import branch_views, view_conditions
from advnorm.attacks.base import Progress
from advnorm.attacks.inputs import validate_batch
from advnorm.data import corrupt, list_corruptions
from advnorm.data.cifar10c import CORRUPTIONS, IMAGES_PER_SEVERITY, read_cifar10c
from advnorm.data.corruptions import SEVERITIES, severity_problems
from advnorm.evaluation.target import EvaluationTarget
from advnorm.norms import RoutedNorm, recalibrate, routed_modules
from advnorm.surgery import convert_norm

#: Returns the images under a corruption at a severity.
Corrupter = Callable[[str, int], Tensor]
Corruptions = Annotated[Sequence[str] | None, Setting("Corruptions by name. Default: all that are available.")]
Severities = Annotated[Sequence[int], Setting("Severities from 1 to 5.")]


@dataclass(frozen=True, kw_only=True)
class CorruptionScore:
    """Accuracy of a model by corruption, a number for each severity; ``adapted``: with statistics of those images."""

    RECORD = ("clean", "mean", "adapted_mean", "severities", "accuracy", "adapted")

    clean: float
    severities: tuple[int, ...]
    accuracy: Mapping[str, tuple[float, ...]]
    adapted: Mapping[str, tuple[float, ...]] | None = None

    @property
    def mean(self) -> float:
        """The mean accuracy over corruptions and severities."""
        return _mean(self.accuracy)

    @property
    def adapted_mean(self) -> float | None:
        """The mean accuracy with adapted statistics."""
        return None if self.adapted is None else _mean(self.adapted)


def _mean(accuracy: Mapping[str, tuple[float, ...]]) -> float:
    return fmean(value for values in accuracy.values() for value in values)


def corruption_accuracy(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    corruptions: Corruptions = None,
    severities: Severities = SEVERITIES,
    adapt: bool = False,
    arrays: Path | str | None = None,
    route: str | None = None,
    batch_size: BatchSize = 256,
    seed: Seed = 0,
    rows: Tensor | None = None,
    progress: Progress | None = None,
) -> CorruptionScore:
    """Return the accuracy on images under each corruption and severity, and on the clean ones (D fig. 1).

    The corruptions are computed on the device of the model (``advnorm.data.corrupt``). ``arrays`` is the folder of
    CIFAR-10-C to read them from instead; ``x`` then are CIFAR-10 test images, the first ones or those at ``rows``, and
    frost and the four extra corruptions are available, too. ``adapt``: also with batch statistics re-estimated on the
    corrupted images (D table 7), in a copy of the model. One corruption at one severity is in memory at a time.
    """
    problems = setting_problems(corruption_accuracy, locals()) + model_problems(model, route)
    known = list_corruptions() if arrays is None else CORRUPTIONS
    chosen, severities = _select_corruptions(corruptions, arrays), as_tuple(severities)
    problems += [unknown_name("corruption", name, known) for name in chosen if name not in known]
    problems += [problem for severity in severities for problem in severity_problems(severity)]
    if not chosen or not severities:
        message = "give at least one corruption and one severity"
        problems.append(Problem(code="empty", message=message, field="corruptions"))
    if adapt and not has_batch_statistics(model):
        message = "the model has no batch statistics to adapt"
        problems.append(Problem(code="conflict", message=message, field="adapt", hint="use adapt=False"))
    raise_problems(problems, "bad corruptions")
    severities = tuple(sorted(set(severities)))  # along an axis
    validate_batch(x, y)
    corrupter = _computing(x, seed, device_of(model), batch_size) if arrays is None else _reading(y, arrays, rows)
    other = recalibratable_copy(model) if adapt else None
    how: Any = {"route": route, "batch_size": batch_size}
    plain, adapted = ({name: [] for name in chosen} for _ in range(2))
    for name, severity in track(((name, severity) for name in chosen for severity in severities), progress):
        images = corrupter(name, severity)
        plain[name].append(measure_accuracy(model, images, y, **how))
        if other is not None:
            recalibrate(other, images, **how)
            adapted[name].append(measure_accuracy(other, images, y, **how))
    return CorruptionScore(
        clean=measure_accuracy(model, x, y, **how),
        severities=severities,
        accuracy={name: tuple(values) for name, values in plain.items()},
        adapted={name: tuple(values) for name, values in adapted.items()} if adapt else None,
    )


def _select_corruptions(corruptions: Sequence[str] | str | None, arrays: Any) -> list[str]:
    """Return the given corruptions, else all that can be computed; with arrays also frost, the 15 of the benchmark."""
    if corruptions is None:
        return [*list_corruptions(), *([] if arrays is None else ["frost"])]
    return [corruptions] if isinstance(corruptions, str) else list(corruptions)


def _computing(x: Tensor, seed: int, device: torch.device, batch_size: int) -> Corrupter:
    def corrupted(name: str, severity: int) -> Tensor:
        parts = []
        for rows in even_slices(len(x), batch_size):
            index = torch.arange(rows.start, rows.stop)
            parts.append(corrupt(x[rows].to(device), name, severity, seed=seed, index=index).to(x.device))
        return torch.cat(parts)

    return corrupted


def _reading(y: Tensor, root: Path | str, rows: Tensor | None) -> Corrupter:
    chosen = torch.arange(len(y)) if rows is None else rows

    def corrupted(name: str, severity: int) -> Tensor:
        images, labels = read_cifar10c(root, corruption=name, severity=severity)
        if int(chosen.max()) >= IMAGES_PER_SEVERITY or not torch.equal(labels[chosen], y.cpu()):
            message = "the labels are not those of CIFAR-10-C; its arrays need the test images of CIFAR-10 in order"
            raise ConfigError("conflict", message, field="arrays")
        return images[chosen].float() / 255

    return corrupted


def has_batch_statistics(model: nn.Module) -> bool:
    """Whether a model has batch statistics that can be re-estimated."""
    routed = [norm for norm in routed_modules(model).values() if isinstance(norm, RoutedNorm)]
    plain = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    return bool(plain) or any(norm.plan.statistics == "batch" and not norm.plan.mixture for norm in routed)


def recalibratable_copy(model: nn.Module) -> nn.Module:
    """Return a copy whose statistics can be re-estimated: routed norms replace built-in ones, with the same output."""
    twin = copy.deepcopy(unwrap_model(model))
    if any(isinstance(module, _BatchNorm) for module in twin.modules()):
        convert_norm(twin, "bn")
    return twin


@dataclass(frozen=True, kw_only=True)
class CorruptionAccuracy(Finding):
    """Accuracy of networks under corruptions, as trained and with adapted statistics."""

    RECORD = ("networks", "images", "corruptions", "conditions")

    networks: Mapping[str, CorruptionScore]
    images: int
    seed: int
    arrays: bool

    @property
    def corruptions(self) -> str:
        """The origin of the corrupted images."""
        return "CIFAR-10-C arrays" if self.arrays else f"made from the test images, seed {self.seed}"

    def draw(self) -> Figure:
        from matplotlib.lines import Line2D

        names = list(next(iter(self.networks.values())).accuracy)
        figure, (left, right) = new_figure(1, 2, height=max(2.8, 1.6 + 0.24 * len(names)), width_ratios=(1.5, 1))
        handles = []
        for place, (label, score) in enumerate(self.networks.items()):
            shape = series_style(place)
            self._dots(left, score, shape, (place - (len(self.networks) - 1) / 2) * 0.6 / len(self.networks))
            self._lines(right, score, shape)
            handles.append((label, Line2D([], [], **shape)))
        if any(score.adapted for score in self.networks.values()):
            hollow: dict[str, Any] = {"color": "#555555", "linestyle": ":", "marker": "o", "markerfacecolor": "white"}
            handles.append(("statistics adapted (hollow)", Line2D([], [], **hollow)))
        left.set_yticks(range(len(names)), [name.replace("_", " ") for name in names])
        left.invert_yaxis()
        left.grid(True, axis="x")
        left.tick_params(axis="y", length=0)
        left.set(xlabel="accuracy (%), mean over severities", title="By corruption", xlim=(0, 100))
        right.set(xlabel="severity (0: clean)", ylabel="accuracy (%)", title="By severity", ylim=(0, 100))
        right.set_xticks((0, *next(iter(self.networks.values())).severities))
        legend_below(figure, [handle for _, handle in handles], [label for label, _ in handles])
        return figure

    @staticmethod
    def _dots(axes: Any, score: CorruptionScore, shape: Mapping[str, Any], shift: float) -> None:
        """Draw a filled mark for each corruption and, joined to it, a hollow one for adapted statistics."""
        dot = {**shape, "linestyle": ""}
        rows = [row + shift for row in range(len(score.accuracy))]
        plain = [100 * fmean(values) for values in score.accuracy.values()]
        if score.adapted is not None:
            adapted = [100 * fmean(values) for values in score.adapted.values()]
            axes.hlines(rows, plain, adapted, color=shape["color"], linewidth=0.8)
            axes.plot(adapted, rows, **dot, markerfacecolor="white")
        axes.plot(plain, rows, **dot)

    @staticmethod
    def _lines(axes: Any, score: CorruptionScore, shape: Mapping[str, Any]) -> None:
        def along(accuracy: Mapping[str, tuple[float, ...]]) -> list[float]:
            return [100 * fmean(level) for level in zip(*accuracy.values(), strict=True)]

        axes.plot((0, *score.severities), [100 * score.clean, *along(score.accuracy)], **shape)
        if score.adapted is not None:
            hollow = {**shape, "linestyle": ":", "markerfacecolor": "white"}
            axes.plot(score.severities, along(score.adapted), **hollow)


@register_analysis("corruptions", summary="accuracy under common corruptions", paper="D fig. 1", several=True)
def corruptions_of_runs(
    targets: Sequence[EvaluationTarget],
    *,
    corruptions: Corruptions = None,
    severities: Severities = SEVERITIES,
    adapt: Annotated[bool, Setting("Also adapt the batch statistics to the corrupted images.")] = True,
    arrays: Annotated[str | None, Setting("Folder of CIFAR-10-C. Default: compute the corruptions.")] = None,
    route: EveryRouteSetting = None,
    seed: Seed = 0,
    progress: Progress | None = None,
) -> CorruptionAccuracy:
    """Evaluate networks under corruptions; adapt those that have batch statistics."""
    views = branch_views(targets, route)
    how: Any = {"corruptions": corruptions, "severities": severities, "arrays": arrays, "seed": seed}
    networks = {}
    for name, target, branch in track(views, progress):
        how |= {"adapt": adapt and has_batch_statistics(target.model), "route": branch}
        how |= {"batch_size": target.batch_size, "rows": target.rows}
        networks[name] = corruption_accuracy(target.model, target.images, target.labels, **how)
    return CorruptionAccuracy(
        networks=networks,
        images=len(views[0].target.images),
        seed=seed,
        arrays=arrays is not None,
        conditions={"adapt": adapt, "runs": view_conditions(views)},
    )
