"""Local input gradient similarity of trained networks and along training (paper D, eq. 1, fig. 2, 4, 10 and 11)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Annotated, Any, get_args

import torch
from torch import Tensor, nn

from advnorm._core.errors import Problem, raise_problems
from advnorm._core.precision import float32_as
from advnorm._core.seeding import ImageNoise
from advnorm._core.settings import Setting
from advnorm._core.wrappers import device_of
from advnorm.analysis.base import BranchView, Finding, TableData, register_analysis, view_conditions
from advnorm.analysis.images import attack_images, even_slices, measure_accuracy, track
from advnorm.analysis.plots import Figure, Panel, each_value, legend_below, line_figure, line_style, new_figure
from advnorm.analysis.settings import (
    BatchSize,
    Seed,
    StatisticsMode,
    as_tuple,
    require_any,
    setting_problems,
)
from advnorm.attacks import Attack, predicting
from advnorm.attacks.inputs import validate_batch, validating_first_logits
from advnorm.objectives.ligs import Shift, loss_direction, shift_images
from advnorm.threat import length_problem, parse_length

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

    def __str__(self) -> str:
        left_out = f", {self.without_gradient} of them without a gradient" if self.without_gradient else ""
        return f"LIGS {self.mean:.4f} over {len(self.per_image)} images{left_out}"


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
    raise_problems(setting_problems(ligs, locals()) + _size_problems(size), "bad LIGS")
    size = parse_length(size)
    largest_label, device = validate_batch(x, y), device_of(model)
    cosines = []
    with float32_as("ieee", device), predicting(model, route=route, statistics=statistics) as predict:
        predict = validating_first_logits(predict, largest_label)
        for rows in even_slices(len(x), batch_size):
            images, labels = (part[rows].detach().to(device, copy=True) for part in (x, y))
            noise = ImageNoise(seed, torch.arange(rows.start, rows.stop, device=device)).fold("ligs")
            gradients = []
            for at in (images, shift_images(shift, images, labels, noise, size, predict)):
                at = at.detach().requires_grad_()
                gradients.append(loss_direction(predict(at), labels, at).flatten(1).double())
            a, b = gradients
            cosines.append(((a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1))).cpu())  # NaN (0/0) for a zero gradient
    return GradientSimilarities(per_image=torch.cat(cosines))


def _size_problems(size: Any) -> list[Problem]:
    """Return the problems of a shift size, which has the scale and the syntax of eps."""
    problem = length_problem("size", size, "Linf")
    return [problem] if problem else []


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

    def table(self) -> TableData:
        kinds = next(iter(self.similarities.values()))
        rows = [[name, *(f"{found.mean:.4f}" for found in row.values())] for name, row in self.similarities.items()]
        return ["network", *(SHIFT_NAMES[kind] for kind in kinds)], rows

    def draw(self) -> Figure:
        """Draw the mean and the middle half of the images, as paper D, fig. 2, at the end of training."""
        figure, (axes,) = new_figure()
        handles, labels = {}, []
        for place, (name, shifts) in enumerate(self.similarities.items()):
            x = [i + 0.6 * ((place + 0.5) / len(self.similarities) - 0.5) for i in range(len(shifts))]
            style: dict[str, Any] = {**line_style(place), "linestyle": "", "markersize": 6}
            low, high = ([one.per_image.nanquantile(share) for one in shifts.values()] for share in (0.25, 0.75))
            axes.vlines(x, low, high, color=style["color"], linewidth=3, alpha=0.35)
            (handles[name],) = axes.plot(x, [found.mean for found in shifts.values()], **style)
            labels = [SHIFT_NAMES[shift] for shift in shifts]
        axes.set_xticks(range(len(labels)), labels)
        axes.set(xlim=(-0.5, len(labels) - 0.5), ylabel="cosine: mean, middle half of images")
        axes.set_title(f"Similarity of input gradients under a shift of size {self.size:g}")
        legend_below(figure, handles)
        return figure


@register_analysis("ligs", summary="similarity of input gradients", paper="D fig. 2", takes="branches")
def ligs_of_runs(
    views: Sequence[BranchView],
    *,
    shifts: ShiftKinds = SHIFTS,
    size: ShiftSize = 0.01,
    statistics: StatisticsMode = "running",
    seed: Seed = 0,
) -> LIGSComparison:
    """Compute LIGS of several networks under several kinds of shift."""
    how: Any = {"size": size, "statistics": statistics, "seed": seed}
    similarities = {
        view.name: {shift: ligs(*view.data, shift=shift, **view.settings, **how) for shift in shifts}
        for view in track(views)
    }
    how["size"] = parse_length(size)
    return LIGSComparison(similarities=similarities, **how, conditions=view_conditions(views))


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

        def quantities(stage: TrainingStage) -> dict[str, float]:
            accuracies = {"Clean accuracy": stage.clean_accuracy, "Robust accuracy": stage.robust_accuracy}
            cosines = {f"LIGS, {SHIFT_NAMES[shift]}": value for shift, value in stage.ligs.items()}
            return {title: 100 * share for title, share in accuracies.items() if share is not None} | cosines

        along = {name: {one.epoch: quantities(one) for one in stages} for name, stages in self.series.items()}
        titles = next(found for epochs in along.values() for found in epochs.values())
        units = {title: "accuracy (%)" if title.endswith("accuracy") else "cosine" for title in titles}
        panels = [Panel(title, each_value(along, itemgetter(title)), {"ylabel": units[title]}) for title in titles]
        return line_figure(panels, xlabel="epoch", columns=min(3, len(panels)))


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
