"""Local input gradient similarity of trained networks and along training (paper D, eq. 1, fig. 2, 4, 10 and 11)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn

from advnorm._core.errors import ConfigError, raise_all
from advnorm._core.precision import float32_as
from advnorm._core.seeding import ImageNoise
from advnorm._core.wrappers import device_of
from advnorm.analysis.base import Finding, batches, register
from advnorm.analysis.views import (
    conditions,
    legend,
    look,
    number,
    one_domain_problems,
    setting_problems,
    views,
)
from advnorm.attacks import Attack, attacked, input_gradient
from advnorm.attacks.base import Predict, Progress, check_images, checked
from advnorm.attacks.losses import cross_entropy
from advnorm.evaluation.target import EvaluationTarget
from advnorm.objectives.ligs import LIGS, Shift, shifted
from advnorm.threat import parse_length

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Statistics = Literal["running", "batch_frozen"]
SHIFTS: tuple[Shift, ...] = get_args(Shift)
SHIFT_NAMES = {"gaussian": "Gaussian noise", "uniform": "uniform noise", "fgsm": "FGSM", "pgd": "PGD, 7 steps"}


@dataclass(frozen=True, kw_only=True, eq=False)
class Similarities:
    """``cos(∇l(x, y), ∇l(x + ν, y))`` of every image, float64; NaN where a gradient is zero and has no direction."""

    per_image: Tensor

    @property
    def mean(self) -> float:
        """LIGS: the mean over the images that have gradients; NaN where none has."""
        return float(self.per_image.nanmean())

    @property
    def without_gradient(self) -> int:
        """How many images the mean leaves out."""
        return int(self.per_image.isnan().sum())

    def __float__(self) -> float:
        return self.mean

    def __str__(self) -> str:
        left_out = f", {self.without_gradient} of them without a gradient" if self.without_gradient else ""
        return f"LIGS {self.mean:.4f} over {len(self.per_image)} images{left_out}"

    def quantile(self, share: float) -> float:
        """The value that this share of the images lies below."""
        return float(self.per_image.nanquantile(share))

    def record(self) -> dict[str, Any]:
        return {
            "mean": number(self.mean),
            "without_gradient": self.without_gradient,
            "per_image": [number(value) for value in self.per_image.tolist()],
        }


def ligs(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    shift: Shift = "gaussian",
    size: float | str = 0.01,
    route: str | None = None,
    statistics: Statistics = "running",
    seed: int = 0,
    batch_size: int = 256,
) -> Similarities:
    """``LIGS = E cos(∇l(x, y), ∇l(x + ν, y))`` (paper D, eq. 1), a value per image.

    ``shift`` and ``size`` give ν: Gaussian of that deviation, uniform in ±size, or FGSM or 7-step PGD of that radius
    (app. B.4). With ``running`` statistics each value is that of the image alone, whatever the batch size. With
    ``batch_frozen`` images of a batch hang together by its statistics, and the gradient is that of their summed loss,
    as in the regularizer :class:`advnorm.objectives.LIGS`.
    """
    problems = LIGS.setting_problems(shift=shift, size=size)
    problems += setting_problems(model, route=route, statistics=statistics, batch_size=batch_size)
    problems += one_domain_problems(model, statistics)
    raise_all(problems, "bad LIGS")
    size = parse_length(size)
    largest_label, device = check_images(x, y), device_of(model)
    found = []
    with float32_as("ieee", device), attacked(model, route=route, statistics=statistics) as predict:
        predict = checked(predict, largest_label)
        for rows in batches(len(x), batch_size):
            images, labels = (part[rows].detach().to(device, copy=True) for part in (x, y))
            noise = ImageNoise(seed, torch.arange(rows.start, rows.stop, device=device)).fold("ligs")
            near = shifted(shift, images, labels, noise, size, predict)
            found.append(_cosine(*(_gradient(predict, at, labels) for at in (images, near))).cpu())
    return Similarities(per_image=torch.cat(found))


def _gradient(predict: Predict, x: Tensor, y: Tensor) -> Tensor:
    """``∇_x l`` of each image; in float64, as float32 loses ``p_y - 1`` where a network is sure."""
    x = x.detach().requires_grad_()
    return input_gradient(cross_entropy(predict(x).double(), y), x)


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    """Cosine per image in float64, whatever the lengths; 0/0, which is NaN, for a gradient that is zero."""
    a, b = (gradient.flatten(1).double() for gradient in (a, b))
    return (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1))


# -- trained networks --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class LigsFinding(Finding):
    """LIGS of networks under several kinds of shift: ``similarities[network][shift]``."""

    similarities: Mapping[str, Mapping[str, Similarities]]
    size: float
    statistics: str
    seed: int
    conditions: Mapping[str, Any] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        return {
            "analysis": "ligs",
            "size": self.size,
            "statistics": self.statistics,
            "seed": self.seed,
            "networks": {
                name: {
                    "conditions": self.conditions.get(name, {}),
                    "shifts": {shift: found.record() for shift, found in shifts.items()},
                }
                for name, shifts in self.similarities.items()
            },
        }

    def draw(self) -> Figure:
        """Paper D, fig. 2 at the end of training: the mean, and where the middle half of the images lies."""
        from matplotlib.figure import Figure

        figure = Figure()
        axes = figure.subplots()
        names = list(self.similarities)
        shifts = list(self.similarities[names[0]])
        handles = []
        for place, name in enumerate(names):
            values = [self.similarities[name][shift] for shift in shifts]
            x = [i + 0.6 * ((place + 0.5) / len(names) - 0.5) for i in range(len(shifts))]
            style: dict[str, Any] = {**look(place), "linestyle": "", "markersize": 6}
            low, high = ([found.quantile(share) for found in values] for share in (0.25, 0.75))
            axes.vlines(x, low, high, color=style["color"], linewidth=3, alpha=0.35)
            handles += axes.plot(x, [found.mean for found in values], **style)
        axes.set_xticks(range(len(shifts)), [SHIFT_NAMES[shift] for shift in shifts])
        axes.set_xlim(-0.5, len(shifts) - 0.5)
        axes.set_ylabel("cosine: mean, middle half of images")
        axes.set_title(f"How alike input gradients stay under a shift of size {self.size:g}")
        legend(figure, names, handles)
        return figure


@register("ligs", summary="similarity of input gradients under small shifts", paper="D fig. 2", several=True)
def ligs_of_runs(
    subjects: Sequence[EvaluationTarget],
    *,
    shifts: Sequence[Shift] = SHIFTS,
    size: float | str = 0.01,
    route: str | None = None,
    statistics: Statistics = "running",
    seed: int = 0,
    progress: Progress | None = None,
) -> LigsFinding:
    """LIGS of several networks, through one branch or each, under several kinds of shift."""
    seen, kinds = views(subjects, route), named_shifts(shifts)
    settings: dict[str, Any] = {"size": size, "statistics": statistics, "seed": seed}
    found: dict[str, dict[str, Similarities]] = {}
    for done, (name, subject, branch) in enumerate(seen):
        if progress is not None:
            progress(done, len(seen))
        data = (subject.model, subject.images, subject.labels)
        settings |= {"route": branch, "batch_size": subject.batch_size}
        found[name] = {shift: ligs(*data, shift=shift, **settings) for shift in kinds}
    return LigsFinding(
        similarities=found,
        size=parse_length(size),
        statistics=statistics,
        seed=seed,
        conditions=conditions(seen),
    )


def named_shifts(shifts: Shift | Sequence[Shift]) -> tuple[Shift, ...]:
    """Kinds of shift, checked before any long work; one may come without a list."""
    chosen: tuple[Shift, ...] = (shifts,) if isinstance(shifts, str) else tuple(shifts)
    problems = [problem for shift in chosen for problem in LIGS.setting_problems(shift=shift)]
    raise_all(problems if chosen else ["no shift given; name some of " + ", ".join(SHIFTS)], "bad LIGS")
    return chosen


# -- along training ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A network at one moment of its training; robust accuracy where an attack was given."""

    epoch: float
    clean_accuracy: float
    robust_accuracy: float | None
    ligs: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, eq=False)
class LigsTrend(Finding):
    """Clean accuracy, robust accuracy and LIGS along training, by the name of each training."""

    series: Mapping[str, Sequence[Stage]]
    size: float
    conditions: Mapping[str, Any] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        return {
            "analysis": "ligs_along",
            "size": self.size,
            "conditions": dict(self.conditions),
            "series": {
                name: [
                    vars(stage) | {"ligs": {shift: number(value) for shift, value in stage.ligs.items()}}
                    for stage in stages
                ]
                for name, stages in self.series.items()
            },
        }

    def draw(self) -> Figure:
        """A panel for each quantity, a line for each training (paper D, fig. 4; with several shifts fig. 2)."""
        from matplotlib.figure import Figure

        first = next(stage for stages in self.series.values() for stage in stages)
        panels = [("Clean accuracy", "accuracy (%)", lambda stage: 100 * stage.clean_accuracy)]
        if first.robust_accuracy is not None:
            panels.append(("Robust accuracy", "accuracy (%)", lambda stage: 100 * stage.robust_accuracy))
        for shift in first.ligs:
            panels.append((f"LIGS, {SHIFT_NAMES[shift]}", "cosine", lambda stage, shift=shift: stage.ligs[shift]))
        columns = min(3, len(panels))
        lines = -(-len(panels) // columns)
        figure = Figure(figsize=(7, 0.5 + 2.2 * lines))
        grid = list(figure.subplots(lines, columns, squeeze=False).flat)
        handles = []
        for axes, (title, unit, value) in zip(grid, panels):
            handles = [
                axes.plot([s.epoch for s in stages], [value(s) for s in stages], **look(place))[0]
                for place, stages in enumerate(self.series.values())
            ]
            axes.set_title(title)
            axes.set_ylabel(unit)
            axes.set_xlabel("epoch")
        for axes in grid[len(panels) :]:
            axes.remove()
        legend(figure, list(self.series), handles)
        return figure


def ligs_along(
    models: Mapping[str, Iterable[tuple[float, nn.Module]]],
    x: Tensor,
    y: Tensor,
    *,
    shifts: Shift | Sequence[Shift] = "gaussian",
    size: float | str = 0.01,
    attack: Attack | None = None,
    route: str | None = None,
    statistics: Statistics = "running",
    seed: int = 0,
    batch_size: int = 256,
) -> LigsTrend:
    """LIGS with clean and, given an attack, robust accuracy along training (paper D, fig. 2, 4, 10 and 11).

    ``models``: for the name of each training its ``(epoch, model)`` pairs in order. They may come from a generator that
    trains on or loads one checkpoint after the other: each model is looked at before the next is asked for.
    """
    kinds = named_shifts(shifts)
    how: dict[str, Any] = {"route": route, "statistics": statistics, "batch_size": batch_size}
    series: dict[str, list[Stage]] = {}
    for name, stages in models.items():
        for epoch, model in stages:
            values = {shift: ligs(model, x, y, shift=shift, size=size, seed=seed, **how).mean for shift in kinds}
            clean, robust = _accuracies(model, x, y, attack, **how)
            stage = Stage(epoch=epoch, clean_accuracy=clean, robust_accuracy=robust, ligs=values)
            series.setdefault(name, []).append(stage)
    if not series:
        raise ConfigError("no model to look at; give (epoch, model) pairs by the name of their training")
    told = {"attack": attack and repr(attack), "seed": seed, "images": len(x), **how}
    return LigsTrend(series=series, size=parse_length(size), conditions=told)


def _accuracies(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    attack: Attack | None,
    *,
    route: str | None,
    statistics: Statistics,
    batch_size: int,
) -> tuple[float, float | None]:
    """Clean accuracy, and under the attack, both through the same branch."""
    device = device_of(model)
    if attack is not None:
        attack = dataclasses.replace(attack, route=route, statistics=statistics)
    right, robust = 0, 0
    with float32_as("ieee", device):
        for rows in batches(len(x), batch_size):
            images, labels = x[rows].to(device), y[rows].to(device)
            index = torch.arange(rows.start, rows.stop)
            x_adv = None if attack is None else attack(model, images, labels, index=index)
            with attacked(model, route=route, statistics=statistics) as predict, torch.no_grad():
                right += int((predict(images).argmax(1) == labels).sum())
                if x_adv is not None:
                    robust += int((predict(x_adv).argmax(1) == labels).sum())
    return right / len(x), None if attack is None else robust / len(x)
