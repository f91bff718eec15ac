"""Local input gradient similarity of trained networks and along training (paper D, eq. 1, fig. 2, 4, 10 and 11)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, get_args

import torch
from torch import Tensor, nn

from advnorm._core.errors import ConfigError, Problem, raise_problems
from advnorm._core.precision import float32_as
from advnorm._core.seeding import ImageNoise
from advnorm._core.settings import Setting
from advnorm._core.wrappers import device_of
from advnorm.analysis.base import Finding, register_analysis
from advnorm.analysis.batches import attack_images, even_slices, measure_accuracy, track
from advnorm.analysis.plots import Figure, legend_below, new_figure, series_style
from advnorm.analysis.settings import (
    BatchSize,
    EveryRouteSetting,
    Seed,
    StatisticsMode,
    as_tuple,
    model_problems,
    require_any,
    setting_problems,
)
from advnorm.analysis.targets import branch_views, view_conditions
from advnorm.attacks import Attack, predicting
from advnorm.attacks.base import Progress
from advnorm.attacks.inputs import validate_batch, validating_first_logits
from advnorm.attacks.model_access import Predict
from advnorm.evaluation.target import EvaluationTarget
from advnorm.objectives.ligs import Shift, loss_direction, shift_images
from advnorm.threat import ThreatModel, parse_length

SHIFTS: tuple[Shift, ...] = get_args(Shift)
SHIFT_NAMES = {"gaussian": "Gaussian noise", "uniform": "uniform noise", "fgsm": "FGSM", "pgd": "PGD, 7 steps"}
ShiftKinds = Annotated[Sequence[Shift], Setting("Kinds of shift between the compared gradients.")]
ShiftSize = Annotated[float | str, Setting("Size of the shift, such as 0.01 or '2/255'.")]


@dataclass(frozen=True, kw_only=True, eq=False)
class GradientSimilarities:
    """``cos(∇l(x, y), ∇l(x + ν, y))`` of every image, float64; NaN if a gradient is zero and has no direction."""

    RECORD = ("mean", "without_gradient", "per_image")

    per_image: Tensor

    @property
    def mean(self) -> float:
        """LIGS: the mean over the images with a gradient; NaN if no image has one."""
        return float(self.per_image.nanmean())

    @property
    def without_gradient(self) -> int:
        """The number of images that the mean leaves out."""
        return int(self.per_image.isnan().sum())

    def __float__(self) -> float:
        return self.mean

    def __str__(self) -> str:
        left_out = f", {self.without_gradient} of them without a gradient" if self.without_gradient else ""
        return f"LIGS {self.mean:.4f} over {len(self.per_image)} images{left_out}"

    def quantile(self, share: float) -> float:
        """Return the value below which this share of the images lies."""
        return float(self.per_image.nanquantile(share))


def ligs(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    shift: Annotated[Shift, Setting("Kind of shift between the compared gradients.")] = "gaussian",
    size: ShiftSize = 0.01,
    route: str | None = None,
    statistics: StatisticsMode = "running",
    seed: Seed = 0,
    batch_size: BatchSize = 256,
) -> GradientSimilarities:
    """Return ``LIGS = E cos(∇l(x, y), ∇l(x + ν, y))`` (paper D, eq. 1), with a value for each image.

    ``shift`` and ``size`` define ν: Gaussian with this deviation, uniform in ±size, or FGSM or 7-step PGD of this
    radius (app. B.4). With ``running`` statistics a value depends on its image alone, not on the batch. With
    ``batch_frozen`` the images of a batch share its statistics, and the gradient is that of their summed loss, as in
    the regularizer :class:`advnorm.objectives.LIGS`.
    """
    problems = setting_problems(ligs, locals()) + _size_problems(size) + model_problems(model, route, statistics)
    raise_problems(problems, "bad LIGS")
    size = parse_length(size)
    largest_label, device = validate_batch(x, y), device_of(model)
    cosines = []
    with float32_as("ieee", device), predicting(model, route=route, statistics=statistics) as predict:
        predict = validating_first_logits(predict, largest_label)
        for rows in even_slices(len(x), batch_size):
            images, labels = (part[rows].detach().to(device, copy=True) for part in (x, y))
            noise = ImageNoise(seed, torch.arange(rows.start, rows.stop, device=device)).fold("ligs")
            near = shift_images(shift, images, labels, noise, size, predict)
            cosines.append(_cosine(*(_gradient(predict, at, labels) for at in (images, near))).cpu())
    return GradientSimilarities(per_image=torch.cat(cosines))


def _size_problems(size: Any) -> list[Problem]:
    """Return the problems of a shift size, which has the scale and the syntax of eps."""
    try:
        ThreatModel(eps=size)
    except ConfigError as error:
        return [dataclasses.replace(problem, field="size") for problem in error.problems]
    return []


def _gradient(predict: Predict, x: Tensor, y: Tensor) -> Tensor:
    """Return ``∇_x l`` of each image, up to a factor."""
    x = x.detach().requires_grad_()
    return loss_direction(predict(x), y, x)


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    """Return the cosine of each image in float64; NaN (0/0) if a gradient is zero."""
    a, b = (gradient.flatten(1).double() for gradient in (a, b))
    return (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1))


# -- trained networks --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class LIGSComparison(Finding):
    """LIGS of networks under several kinds of shift: ``similarities[network][shift]``."""

    RECORD = ("analysis", "size", "statistics", "seed", "networks")
    analysis = "ligs"

    similarities: Mapping[str, Mapping[str, GradientSimilarities]]
    size: float
    statistics: str
    seed: int

    @property
    def networks(self) -> dict[str, Any]:
        """Conditions and similarities of each network."""
        return {
            name: {"conditions": self.conditions.get(name, {}), "shifts": shifts}
            for name, shifts in self.similarities.items()
        }

    def draw(self) -> Figure:
        """Draw the mean and the middle half of the images, as paper D, fig. 2, at the end of training."""
        figure, axes = new_figure()
        names = list(self.similarities)
        shifts = list(self.similarities[names[0]])
        handles = []
        for place, name in enumerate(names):
            values = [self.similarities[name][shift] for shift in shifts]
            x = [i + 0.6 * ((place + 0.5) / len(names) - 0.5) for i in range(len(shifts))]
            style: dict[str, Any] = {**series_style(place), "linestyle": "", "markersize": 6}
            low, high = ([found.quantile(share) for found in values] for share in (0.25, 0.75))
            axes.vlines(x, low, high, color=style["color"], linewidth=3, alpha=0.35)
            handles += axes.plot(x, [found.mean for found in values], **style)
        axes.set_xticks(range(len(shifts)), [SHIFT_NAMES[shift] for shift in shifts])
        axes.set(xlim=(-0.5, len(shifts) - 0.5), ylabel="cosine: mean, middle half of images")
        axes.set_title(f"Similarity of input gradients under a shift of size {self.size:g}")
        legend_below(figure, handles, names)
        return figure


@register_analysis("ligs", summary="similarity of input gradients under small shifts", paper="D fig. 2", several=True)
def ligs_of_runs(
    targets: Sequence[EvaluationTarget],
    *,
    shifts: ShiftKinds = SHIFTS,
    size: ShiftSize = 0.01,
    route: EveryRouteSetting = None,
    statistics: StatisticsMode = "running",
    seed: Seed = 0,
    progress: Progress | None = None,
) -> LIGSComparison:
    """Compute LIGS of several networks under several kinds of shift."""
    views = branch_views(targets, route)
    require_any(shifts, "shifts", ", ".join(SHIFTS))
    how: Any = {"size": size, "statistics": statistics, "seed": seed}
    similarities: dict[str, dict[str, GradientSimilarities]] = {}
    for name, target, branch in track(views, progress):
        how |= {"route": branch, "batch_size": target.batch_size}
        data = (target.model, target.images, target.labels)
        similarities[name] = {shift: ligs(*data, shift=shift, **how) for shift in shifts}
    return LIGSComparison(
        similarities=similarities,
        size=parse_length(size),
        statistics=statistics,
        seed=seed,
        conditions=view_conditions(views),
    )


# -- along training ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TrainingStage:
    """A network at one point of its training; robust accuracy if an attack was given."""

    epoch: float
    clean_accuracy: float
    robust_accuracy: float | None
    ligs: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, eq=False)
class LIGSTrend(Finding):
    """Clean accuracy, robust accuracy and LIGS along training, by the name of each training."""

    RECORD = ("analysis", "size", "conditions", "series")
    analysis = "ligs_along"

    series: Mapping[str, Sequence[TrainingStage]]
    size: float

    def draw(self) -> Figure:
        """Draw a panel for each quantity, a line for each training (paper D, fig. 4; with several shifts fig. 2)."""
        first = next(stage for stages in self.series.values() for stage in stages)
        panels = [("Clean accuracy", "accuracy (%)", lambda stage: 100 * stage.clean_accuracy)]
        if first.robust_accuracy is not None:
            panels.append(("Robust accuracy", "accuracy (%)", lambda stage: 100 * stage.robust_accuracy))
        for shift in first.ligs:
            panels.append((f"LIGS, {SHIFT_NAMES[shift]}", "cosine", lambda stage, shift=shift: stage.ligs[shift]))
        columns = min(3, len(panels))
        lines = -(-len(panels) // columns)
        figure, grid = new_figure(lines, columns, height=0.5 + 2.2 * lines, squeeze=False)
        grid = list(grid.flat)
        handles = []
        for axes, (title, unit, value) in zip(grid, panels):
            handles = [
                axes.plot([s.epoch for s in stages], [value(s) for s in stages], **series_style(place))[0]
                for place, stages in enumerate(self.series.values())
            ]
            axes.set(title=title, xlabel="epoch", ylabel=unit)
        for axes in grid[len(panels) :]:
            axes.remove()
        legend_below(figure, handles, list(self.series))
        return figure


def ligs_along(
    models: Mapping[str, Iterable[tuple[float, nn.Module]]],
    x: Tensor,
    y: Tensor,
    *,
    shifts: ShiftKinds = ("gaussian",),
    size: ShiftSize = 0.01,
    attack: Attack | None = None,
    route: str | None = None,
    statistics: StatisticsMode = "running",
    seed: Seed = 0,
    batch_size: BatchSize = 256,
) -> LIGSTrend:
    """Return LIGS with clean and, given an attack, robust accuracy along training (paper D, fig. 2, 4, 10 and 11).

    ``models``: the ``(epoch, model)`` pairs of each training, by its name and in order. They may come from a generator
    that continues training or loads checkpoints: each model is evaluated before the next one is requested.
    """
    raise_problems(setting_problems(ligs_along, locals()) + _size_problems(size), "bad LIGS")
    kinds = as_tuple(shifts)
    require_any(kinds, "shifts", ", ".join(SHIFTS))
    how: dict[str, Any] = {"route": route, "statistics": statistics, "batch_size": batch_size}
    series: dict[str, list[TrainingStage]] = {}
    for name, stages in models.items():
        for epoch, model in stages:
            values = {shift: ligs(model, x, y, shift=shift, size=size, seed=seed, **how).mean for shift in kinds}
            clean, robust = measure_accuracy(model, x, y, **how), None
            if attack is not None:
                routed = dataclasses.replace(attack, route=route, statistics=statistics)
                with float32_as("ieee", device_of(model)):
                    x_adv = attack_images(routed, model, x, y, batch_size=batch_size)
                robust = measure_accuracy(model, x_adv, y, **how)
            stage = TrainingStage(epoch=epoch, clean_accuracy=clean, robust_accuracy=robust, ligs=values)
            series.setdefault(name, []).append(stage)
    require_any(series, "models", "{'bn': [(1, model)]}")
    conditions = {"attack": attack and repr(attack), "seed": seed, "images": len(x), **how}
    return LIGSTrend(series=series, size=parse_length(size), conditions=conditions)
