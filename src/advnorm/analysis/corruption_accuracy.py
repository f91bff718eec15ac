"""Accuracy under common corruptions, with and without adapted statistics (paper D, fig. 1 and table 7)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from advnorm._core.errors import ConfigError, Problem, raise_problems, unknown_name
from advnorm._core.settings import Setting
from advnorm._core.wrappers import device_of
from advnorm.analysis.banks import has_batch_statistics, routed_copy
from advnorm.analysis.base import BranchView, Finding, TableData, format_percent, register_analysis, view_conditions
from advnorm.analysis.images import even_slices, measure_accuracy, track
from advnorm.analysis.plots import Figure, legend_below, line_style, new_figure
from advnorm.analysis.settings import BatchSize, Seed, as_tuple, setting_problems
from advnorm.attacks.inputs import validate_batch
from advnorm.data import corrupt, list_corruptions
from advnorm.data.cifar10c import CORRUPTIONS, IMAGES_PER_SEVERITY, read_cifar10c
from advnorm.data.corruptions import EXTRA, NOT_GENERATED, SEVERITIES, severity_problems
from advnorm.evaluation.target import EvaluationTarget
from advnorm.norms import recalibrate

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
) -> CorruptionScore:
    """Return the accuracy on images under each corruption and severity, and on the clean ones (D fig. 1).

    The corruptions are computed on the device of the model (``advnorm.data.corrupt``). ``arrays`` is the folder of
    CIFAR-10-C to read them from instead. Then ``x`` must be CIFAR-10 test images, the first ones or those at ``rows``,
    and frost and spatter are available too. ``adapt``: also with batch statistics re-estimated on the corrupted images
    (D table 7), in a copy of the model. One corruption at one severity is in memory at a time.
    """
    _validate(**locals())
    scorer = _Scorer(model, y, route=route, adapt=adapt, batch_size=batch_size)
    how: Any = {"arrays": arrays, "batch_size": batch_size, "seed": seed, "rows": rows}
    return _scores([scorer], x, _names(corruptions, arrays), severities, **how)[0]


def _validate(
    *,
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    corruptions: Corruptions,
    severities: Severities,
    adapt: bool,
    arrays: Path | str | None,
    route: str | None,
    batch_size: int,
    seed: int,
    rows: Tensor | None,
) -> None:
    """Raise one error with all problems of the settings and of the model."""
    problems = setting_problems(corruption_accuracy, locals())
    known = list_corruptions() if arrays is None else CORRUPTIONS
    for name in _names(corruptions, arrays):
        if arrays is None and name in NOT_GENERATED:
            message, hint = f"{name} is not computed here", "give the folder of CIFAR-10-C as arrays"
            problems.append(Problem("not_supported", message, "corruption", hint=hint))
        elif name not in known:
            problems.append(unknown_name("corruption", name, known))
    problems += [problem for severity in as_tuple(severities) for problem in severity_problems(severity)]
    if adapt and not has_batch_statistics(model):
        message = "the model has no batch statistics to adapt"
        problems.append(Problem(code="conflict", message=message, field="adapt", hint="use adapt=False"))
    raise_problems(problems, "bad corruptions")
    validate_batch(x, y)


def _names(corruptions: Corruptions, arrays: Path | str | None) -> tuple[str, ...]:
    """Return the given corruptions, else the 14 of the benchmark that can be computed; the arrays also have frost."""
    if corruptions is not None:
        return tuple(dict.fromkeys(as_tuple(corruptions)))
    return (*(name for name in list_corruptions() if name not in EXTRA), *(() if arrays is None else ("frost",)))


class _Scorer:
    """Collects the accuracies of a model through one branch, one corruption and severity after another."""

    def __init__(self, model: nn.Module, labels: Tensor, *, route: str | None, adapt: bool, batch_size: int) -> None:
        self.model, self.labels = model, labels
        self.how: dict[str, Any] = {"route": route, "batch_size": batch_size}
        self.twin = routed_copy(model) if adapt else None
        self.accuracy: dict[str, tuple[float, ...]] = {}
        self.adapted: dict[str, tuple[float, ...]] = {}

    def add(self, corruption: str, images: Tensor) -> None:
        """Measure the accuracy on the images under the next severity of a corruption."""
        self._append(self.accuracy, self.model, corruption, images)
        if self.twin is not None:
            recalibrate(self.twin, images, **self.how)
            self._append(self.adapted, self.twin, corruption, images)

    def _append(self, found: dict[str, tuple[float, ...]], model: nn.Module, corruption: str, images: Tensor) -> None:
        found[corruption] = (*found.get(corruption, ()), measure_accuracy(model, images, self.labels, **self.how))

    def score(self, x: Tensor, severities: tuple[int, ...]) -> CorruptionScore:
        return CorruptionScore(
            clean=measure_accuracy(self.model, x, self.labels, **self.how),
            severities=severities,
            accuracy=self.accuracy,
            adapted=None if self.twin is None else self.adapted,
        )


def _scores(
    scorers: Sequence[_Scorer],
    x: Tensor,
    corruptions: Sequence[str],
    severities: Severities,
    *,
    arrays: Path | str | None,
    batch_size: int,
    seed: int,
    rows: Tensor | None,
) -> list[CorruptionScore]:
    """Return the scores of networks on the same images. Each corruption is computed once for all of them."""
    severities = tuple(sorted(set(as_tuple(severities))))  # along an axis
    for name, severity in track(product(corruptions, severities)):
        if arrays is None:
            images = _compute(x, name, severity, seed, device_of(scorers[0].model), batch_size)
        else:
            images = _read(arrays, name, severity, scorers[0].labels, rows)
        for scorer in scorers:
            scorer.add(name, images)
    return [scorer.score(x, severities) for scorer in scorers]


def _compute(x: Tensor, name: str, severity: int, seed: int, device: torch.device, batch_size: int) -> Tensor:
    """Return images under a corruption, computed on the device of the model."""
    parts = []
    for rows in even_slices(len(x), batch_size):
        index = torch.arange(rows.start, rows.stop)
        parts.append(corrupt(x[rows].to(device), name, severity, seed=seed, index=index).to(x.device))
    return torch.cat(parts)


def _read(root: Path | str, name: str, severity: int, y: Tensor, rows: Tensor | None) -> Tensor:
    """Return images under a corruption from the arrays of CIFAR-10-C."""
    images, labels = read_cifar10c(root, corruption=name, severity=severity)
    rows = torch.arange(len(y)) if rows is None else rows
    if int(rows.max()) >= IMAGES_PER_SEVERITY or not torch.equal(labels[rows], y.cpu()):
        message = "the labels are not those of CIFAR-10-C; its arrays need the test images of CIFAR-10 in order"
        raise ConfigError("conflict", message, field="arrays")
    return images[rows].float() / 255


@dataclass(frozen=True, kw_only=True)
class CorruptionAccuracy(Finding):
    """Accuracy of networks under corruptions, as trained and with adapted statistics."""

    RECORD = ("networks", "images", "corruptions", "conditions")

    networks: Mapping[str, CorruptionScore]
    images: int
    corruptions: str  # their origin

    def table(self) -> TableData:
        means = {name: (one.clean, one.mean, one.adapted_mean) for name, one in self.networks.items()}
        rows = [[name, *("–" if one is None else format_percent(one) for one in row)] for name, row in means.items()]
        return ["network", "clean", "corrupted", "corrupted, statistics adapted"], rows

    def draw(self) -> Figure:
        """Draw means over severities and over corruptions; adapted statistics have hollow marks."""
        from matplotlib.lines import Line2D

        first = next(iter(self.networks.values()))
        height = max(2.8, 1.6 + 0.24 * len(first.accuracy))
        figure, (left, right) = new_figure(2, 2, height=height, width_ratios=(1.5, 1))
        hollow: Any = {"linestyle": ":", "markerfacecolor": "white"}
        handles = {}
        for place, (label, score) in enumerate(self.networks.items()):
            style = line_style(place) | {"markersize": 4}
            rows = [row + 0.6 * ((place + 0.5) / len(self.networks) - 0.5) for row in range(len(score.accuracy))]
            plain, level = _percentages(score.accuracy)
            left.plot(plain, rows, **style | {"linestyle": ""})
            (handles[label],) = right.plot((0, *score.severities), [100 * score.clean, *level], **style)
            if score.adapted is not None:
                adapted, level = _percentages(score.adapted)
                left.hlines(rows, plain, adapted, color=style["color"], linewidth=0.8, zorder=1)
                left.plot(adapted, rows, **style | hollow | {"linestyle": ""})
                right.plot(score.severities, level, **style | hollow)
        if any(score.adapted for score in self.networks.values()):
            handles["statistics adapted (hollow)"] = Line2D([], [], color="#555555", marker="o", **hollow)
        left.set_yticks(range(len(first.accuracy)), [name.replace("_", " ") for name in first.accuracy])
        left.invert_yaxis()
        left.grid(True, axis="x")
        left.tick_params(axis="y", length=0)
        left.set(xlabel="accuracy (%), mean over severities", title="By corruption", xlim=(0, 100))
        right.set(xlabel="severity (0: clean)", ylabel="accuracy (%)", title="By severity", ylim=(0, 100))
        right.set_xticks((0, *first.severities))
        legend_below(figure, handles)
        return figure


def _percentages(accuracy: Mapping[str, tuple[float, ...]]) -> tuple[list[float], list[float]]:
    """Return the mean accuracy of each corruption and of each severity in percent."""
    rows = list(accuracy.values())
    by_corruption, by_severity = ([100 * fmean(values) for values in part] for part in (rows, zip(*rows)))
    return by_corruption, by_severity


@register_analysis(
    "corruptions", summary="accuracy when corrupted", paper="D fig. 1", takes="branches", measure=corruption_accuracy
)
def corruptions_of_runs(
    views: Sequence[BranchView],
    *,
    adapt: Annotated[bool, Setting("Also adapt the batch statistics to the corrupted images.")] = True,
    arrays: Annotated[str | None, Setting("Folder of CIFAR-10-C. Default: compute the corruptions.")] = None,
    seed: Seed = 0,
    **chosen: Any,
) -> CorruptionAccuracy:
    """Evaluate networks under corruptions; adapt those that have batch statistics."""
    how: Any = {"corruptions": None, "severities": SEVERITIES, **chosen, "arrays": arrays, "seed": seed}
    scorers: dict[str, _Scorer] = {}
    for view in views:
        model, x, y = view.data
        own: Any = {"adapt": adapt and has_batch_statistics(model), **view.settings}
        _validate(model=model, x=x, y=y, rows=view.target.rows, **own, **how)
        scorers[view.name] = _Scorer(model, y, **own)
    how["corruptions"] = _names(how["corruptions"], arrays)
    scores: dict[str, CorruptionScore] = {}
    for group in track(_groups_by_images(views)):
        target, names = group[0].target, [view.name for view in group]
        of_group = {"batch_size": target.batch_size, "rows": target.rows, **how}
        scores |= zip(names, _scores([scorers[name] for name in names], target.images, **of_group))
    origin = "CIFAR-10-C arrays" if arrays else f"made from the test images, seed {seed}"
    return CorruptionAccuracy(
        networks={view.name: scores[view.name] for view in views},
        images=len(views[0].target.images),
        corruptions=origin,
        conditions={"adapt": adapt, "runs": view_conditions(views)},
    )


def _groups_by_images(views: Sequence[BranchView]) -> list[list[BranchView]]:
    """Return the views in groups of the same images, labels and batches."""
    groups: list[list[BranchView]] = []
    for view in views:
        for group in groups:
            if _same_batches(group[0].target, view.target):
                group.append(view)
                break
        else:
            groups.append([view])
    return groups


def _same_batches(one: EvaluationTarget, other: EvaluationTarget) -> bool:
    def equal(a: Tensor | None, b: Tensor | None) -> bool:
        return a is b or (a is not None and b is not None and torch.equal(a, b))

    tensors = ((one.images, other.images), (one.labels, other.labels), (one.rows, other.rows))
    return one.batch_size == other.batch_size and all(equal(*pair) for pair in tensors)
