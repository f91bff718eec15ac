"""Accuracy under common corruptions, and what adapting the statistics to them brings (paper D, fig. 1 and table 7)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from advnorm._core.errors import ConfigError, did_you_mean, raise_all
from advnorm._core.wrappers import device_of, unwrapped
from advnorm.analysis.base import Finding, batches, register
from advnorm.analysis.transfer import predicted, share
from advnorm.analysis.views import conditions, legend, look, numbers, setting_problems, views
from advnorm.attacks.base import Progress, check_images
from advnorm.data import corrupt, list_corruptions
from advnorm.data.cifar10c import CORRUPTIONS, IMAGES_PER_SEVERITY, read_cifar10c
from advnorm.data.corruptions import SEVERITIES
from advnorm.evaluation.target import EvaluationTarget
from advnorm.norms import RoutedNorm, recalibrate, routed_modules
from advnorm.surgery import convert_norm

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Corrupted images for a corruption and a severity.
Corrupted = Callable[[str, int], Tensor]


@dataclass(frozen=True, kw_only=True)
class CorruptionScore:
    """Accuracy of a model by corruption, a number for each severity; ``adapted``: with statistics of those images."""

    clean: float
    severities: tuple[int, ...]
    accuracy: Mapping[str, tuple[float, ...]]
    adapted: Mapping[str, tuple[float, ...]] | None = None

    @property
    def mean(self) -> float:
        """Mean accuracy over corruptions and severities."""
        return _mean(self.accuracy)

    @property
    def adapted_mean(self) -> float | None:
        """The same with adapted statistics."""
        return None if self.adapted is None else _mean(self.adapted)

    def record(self) -> dict[str, Any]:
        """In JSON's types."""
        return {
            "clean": self.clean,
            "mean": self.mean,
            "adapted_mean": self.adapted_mean,
            "severities": list(self.severities),
            "accuracy": {name: list(values) for name, values in self.accuracy.items()},
            "adapted": None if self.adapted is None else {name: list(v) for name, v in self.adapted.items()},
        }


def _mean(accuracy: Mapping[str, tuple[float, ...]]) -> float:
    return fmean(value for values in accuracy.values() for value in values)


def corruption_accuracy(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    corruptions: str | Sequence[str] | None = None,
    severities: int | Sequence[int] = SEVERITIES,
    adapt: bool = False,
    arrays: Path | str | None = None,
    route: str | None = None,
    batch_size: int = 256,
    seed: int = 0,
    rows: Tensor | None = None,
    progress: Progress | None = None,
) -> CorruptionScore:
    """Accuracy on images under each corruption and severity, and on the clean ones (D fig. 1).

    The corruptions are made on the device of the model (``advnorm.data.corrupt``); ``arrays`` is the folder of
    CIFAR-10-C to take them from instead, for test images of CIFAR-10 as ``x``: the first ones, or those at ``rows``;
    then frost and the four extra ones can be asked for too. ``adapt``: also with the batch statistics re-estimated on
    the corrupted images (D table 7), in a copy of the model. Corrupted images are held for one corruption and severity
    at a time.
    """
    known = list_corruptions() if arrays is None else CORRUPTIONS
    chosen, severities = _chosen(corruptions, known, arrays), numbers(severities)
    problems = setting_problems(model, route=route, statistics="running", batch_size=batch_size)
    problems += [f"unknown corruption {name!r}{did_you_mean(name, known)}" for name in chosen if name not in known]
    problems += [
        f"severity is 1, 2, 3, 4 or 5, got {level!r}"
        for level in severities
        if not isinstance(level, int) or level not in SEVERITIES
    ]
    problems += [] if chosen and severities else ["give at least one corruption and one severity"]
    if adapt and isinstance(model, nn.Module) and not adaptable(model):
        problems.append("the model has no batch statistics to adapt; use adapt=False")
    raise_all(problems, "bad corruptions")
    severities = tuple(sorted(set(severities)))  # along an axis
    check_images(x, y)
    corrupted = _made(x, seed, device_of(model), batch_size) if arrays is None else _stored(y, arrays, rows)
    other = adapting_copy(model) if adapt else None
    plain, adapted = ({name: [] for name in chosen} for _ in range(2))
    for done, (name, level) in enumerate((name, level) for name in chosen for level in severities):
        images = corrupted(name, level)
        plain[name].append(share(predicted(model, images, route=route, batch_size=batch_size) == y.cpu()))
        if other is not None:
            recalibrate(other, images, route=route, batch_size=batch_size)
            adapted[name].append(share(predicted(other, images, route=route, batch_size=batch_size) == y.cpu()))
        if progress is not None:
            progress(done + 1, len(chosen) * len(severities))
    return CorruptionScore(
        clean=share(predicted(model, x, route=route, batch_size=batch_size) == y.cpu()),
        severities=severities,
        accuracy={name: tuple(values) for name, values in plain.items()},
        adapted={name: tuple(values) for name, values in adapted.items()} if adapt else None,
    )


def _chosen(corruptions: Sequence[str] | str | None, known: Sequence[str], arrays: Any) -> list[str]:
    """What was asked for; else all that can be made, and with arrays frost too: the fifteen of the benchmark."""
    if corruptions is None:
        return [*list_corruptions(), *([] if arrays is None else ["frost"])]
    return [corruptions] if isinstance(corruptions, str) else list(corruptions)


def _made(x: Tensor, seed: int, device: torch.device, batch_size: int) -> Corrupted:
    def corrupted(name: str, level: int) -> Tensor:
        parts = []
        for rows in batches(len(x), batch_size):
            index = torch.arange(rows.start, rows.stop)
            parts.append(corrupt(x[rows].to(device), name, level, seed=seed, index=index).to(x.device))
        return torch.cat(parts)

    return corrupted


def _stored(y: Tensor, root: Path | str, rows: Tensor | None) -> Corrupted:
    chosen = torch.arange(len(y)) if rows is None else rows

    def corrupted(name: str, level: int) -> Tensor:
        images, labels = read_cifar10c(root, corruption=name, severity=level)
        if int(chosen.max()) >= IMAGES_PER_SEVERITY or not torch.equal(labels[chosen], y.cpu()):
            raise ConfigError(
                "the labels are not those of CIFAR-10-C; its arrays go with the test images of CIFAR-10, in order"
            )
        return images[chosen].float() / 255

    return corrupted


def adaptable(model: nn.Module) -> bool:
    """Whether a model has batch statistics that can be re-estimated."""
    routed = [norm for norm in routed_modules(model).values() if isinstance(norm, RoutedNorm)]
    plain = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    return bool(plain) or any(norm.plan.statistics == "batch" and not norm.plan.mixture for norm in routed)


def adapting_copy(model: nn.Module) -> nn.Module:
    """A copy whose statistics can be re-estimated: built-in batch norms become routed ones, of the same output."""
    twin = copy.deepcopy(unwrapped(model))
    if any(isinstance(module, _BatchNorm) for module in twin.modules()):
        convert_norm(twin, "bn")
    return twin


@dataclass(frozen=True, kw_only=True)
class CorruptionAccuracy(Finding):
    """Accuracy of networks under corruptions, as trained and with adapted statistics."""

    scores: Mapping[str, CorruptionScore]
    images: int
    seed: int
    arrays: bool
    conditions: Mapping[str, Any]

    def record(self) -> dict[str, Any]:
        return {
            "networks": {name: score.record() for name, score in self.scores.items()},
            "images": self.images,
            "corruptions": "CIFAR-10-C arrays" if self.arrays else f"made from the test images, seed {self.seed}",
            "conditions": dict(self.conditions),
        }

    def draw(self) -> Figure:
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D

        names = list(next(iter(self.scores.values())).accuracy)
        figure = Figure(figsize=(7.0, max(2.8, 1.6 + 0.24 * len(names))))
        left, right = figure.subplots(1, 2, width_ratios=(1.5, 1))
        handles = []
        for place, (label, score) in enumerate(self.scores.items()):
            shape = look(place)
            self._dots(left, score, shape, (place - (len(self.scores) - 1) / 2) * 0.6 / len(self.scores))
            self._lines(right, score, shape)
            handles.append((label, Line2D([], [], **shape)))
        if any(score.adapted for score in self.scores.values()):
            hollow: dict[str, Any] = {"color": "#555555", "linestyle": ":", "marker": "o", "markerfacecolor": "white"}
            handles.append(("statistics adapted (hollow)", Line2D([], [], **hollow)))
        left.set_yticks(range(len(names)), [name.replace("_", " ") for name in names])
        left.invert_yaxis()
        left.grid(True, axis="x")
        left.tick_params(axis="y", length=0)
        left.set(xlabel="accuracy (%), mean over severities", title="By corruption", xlim=(0, 100))
        right.set(xlabel="severity (0: clean)", ylabel="accuracy (%)", title="By severity", ylim=(0, 100))
        right.set_xticks((0, *next(iter(self.scores.values())).severities))
        legend(figure, [label for label, _ in handles], [handle for _, handle in handles])
        return figure

    @staticmethod
    def _dots(axes: Any, score: CorruptionScore, shape: Mapping[str, Any], shift: float) -> None:
        """A filled mark for each corruption and, joined to it, a hollow one for adapted statistics."""
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


@register("corruptions", summary="accuracy under common corruptions, adapted or not", paper="D fig. 1", several=True)
def corruptions_of_runs(
    subjects: Sequence[EvaluationTarget],
    *,
    corruptions: str | Sequence[str] | None = None,
    severities: int | Sequence[int] = SEVERITIES,
    adapt: bool = True,
    arrays: str | None = None,
    route: str | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> CorruptionAccuracy:
    """Networks under corruptions, through one branch or each; adapted where they have batch statistics.

    ``arrays`` is the folder of CIFAR-10-C; without it the corruptions are made from the test images.
    """
    seen = views(subjects, route)
    scores = {}
    for done, (name, subject, branch) in enumerate(seen):
        if progress is not None:
            progress(done, len(seen))
        scores[name] = corruption_accuracy(
            subject.model,
            subject.images,
            subject.labels,
            corruptions=corruptions,
            severities=severities,
            adapt=adapt and adaptable(subject.model),
            arrays=arrays,
            route=branch,
            batch_size=subject.batch_size,
            seed=seed,
            rows=subject.rows,
        )
    return CorruptionAccuracy(
        scores=scores,
        images=len(seen[0].subject.images),
        seed=seed,
        arrays=arrays is not None,
        conditions={"adapt": adapt, "runs": conditions(seen)},
    )
