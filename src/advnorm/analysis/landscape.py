"""The optimization landscape around a point of training (paper D, fig. 14 to 17, after Santurkar et al. 2018)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from advnorm._core.errors import ConfigError, raise_problems
from advnorm._core.precision import float32_as
from advnorm._core.settings import Setting
from advnorm._core.wrappers import device_of, unwrap_model
from advnorm.analysis.base import BranchView, Finding, TableData, register_analysis, to_record, view_conditions
from advnorm.analysis.images import even_slices, track
from advnorm.analysis.plots import Figure, Panel, each_value, line_figure
from advnorm.analysis.settings import StatisticsMode, as_tuple, setting_problems
from advnorm.attacks import predicting
from advnorm.attacks.inputs import validate_batch
from advnorm.attacks.model_access import extract_logits

#: Learning rates around 0.1, with which the papers train.
STEPS = (0.05, 0.1, 0.2, 0.3, 0.4)
StepSizes = Annotated[Sequence[float], Setting("Learning rates of the step along the gradient.", "(0, inf)")]
#: Maps logits and labels to a mean loss.
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class LandscapePoint:
    """The loss and the change of the gradient at ``w - t ∇l(w)`` for each step size t."""

    RECORD = ("loss", "gradient_norm", "losses", "gradient_changes", "smoothness_at", "smoothness")

    steps: tuple[float, ...]
    loss: float
    gradient_norm: float
    losses: tuple[float, ...]
    distances: tuple[float, ...]  # ||t ∇l(w)||
    gradient_changes: tuple[float, ...]  # ||∇l(w) - ∇l(w - t ∇l(w))||

    @property
    def smoothness_at(self) -> tuple[float, ...]:
        """Change of the gradient per distance; NaN if the gradient is zero."""
        pairs = zip(self.gradient_changes, self.distances)
        return tuple(change / distance if distance else math.nan for change, distance in pairs)

    @property
    def smoothness(self) -> float:
        """Effective β-smoothness: ``max_t ||∇l(w) - ∇l(w - t ∇l(w))|| / ||t ∇l(w)||``; NaN if any quotient is NaN."""
        return float(torch.tensor(self.smoothness_at, dtype=torch.float64).amax())

    @property
    def loss_range(self) -> tuple[float, float]:
        """Lowest and highest loss along the direction, including the starting point; NaN if any loss is NaN."""
        low, high = torch.tensor((self.loss, *self.losses), dtype=torch.float64).aminmax()
        return float(low), float(high)


def landscape(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    steps: StepSizes = STEPS,
    loss: Loss = F.cross_entropy,
    route: str | None = None,
    statistics: StatisticsMode = "batch_frozen",
) -> LandscapePoint:
    """Return loss variation, gradient change and effective β-smoothness along the gradient of a batch (D, app. H).

    ``steps`` are learning rates t: the loss is computed at ``w - t ∇l(w)``, where w are the trainable parameters.
    ``batch_frozen`` normalizes by the batch's statistics, as training does, without an update. Dropout is off, so that
    only w differs. The model itself stays unchanged, because the moved parameters are copies.
    """
    raise_problems(setting_problems(landscape, locals()), "bad landscape")
    steps = as_tuple(steps)
    validate_batch(x, y)
    model, device = unwrap_model(model), device_of(model)
    start = {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}
    if not start:
        hint = "set requires_grad on the parameters to move"
        raise ConfigError("not_supported", "the model has no trainable parameter", field="model", hint=hint)
    dtype = next(iter(start.values())).dtype

    def evaluate(parameters: Mapping[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
        """Return the loss and its gradient; an unused parameter, as in another branch, has gradient zero."""
        leaves = {name: value.detach().requires_grad_() for name, value in parameters.items()}
        logits = extract_logits(functional_call(model, leaves, (x.to(dtype),)), len(x))
        value = loss(logits if logits.dtype == torch.float64 else logits.float(), y)
        gradients = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
        found = zip(leaves.items(), gradients)
        return float(value.detach()), {name: torch.zeros_like(w) if g is None else g.detach() for (name, w), g in found}

    with float32_as("ieee", device), predicting(model, route=route, statistics=statistics):
        x, y = (part.detach().to(device, copy=True) for part in (x, y))  # inference tensors have no gradients
        value, gradient = evaluate(start)
        losses, distances, changes = [], [], []
        for step in steps:
            moved = {name: w - step * gradient[name] for name, w in start.items()}
            distances.append(_distance(moved, start))
            there, changed = evaluate(moved)
            losses.append(there)
            changes.append(_distance(changed, gradient))
    return LandscapePoint(
        steps=tuple(float(step) for step in steps),
        loss=value,
        gradient_norm=math.sqrt(sum(float(g.double().square().sum()) for g in gradient.values())),
        losses=tuple(losses),
        distances=tuple(distances),
        gradient_changes=tuple(changes),
    )


def _distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Return the L2 distance over all tensors, in float64."""
    return math.sqrt(sum(float((a[name].double() - b[name].double()).square().sum()) for name in a))


# -- along training ----------------------------------------------------------------------------------------------------


class LandscapeRecorder:
    """Compute the landscape inside a training loop, before the optimizer's step; settings of :func:`landscape`.

    >>> recorder = LandscapeRecorder(every=50)
    >>> for step, (x, y) in enumerate(loader):
    ...     recorder(step, model, x, y)
    ...     ...  # forward, backward, optimizer.step()
    >>> LandscapeTrend(series={"bn": recorder.points}).save("landscape")
    """

    def __init__(
        self, *, every: Annotated[int, Setting("Steps between two points.", "[1, inf)")] = 1, **settings: Any
    ) -> None:
        raise_problems(setting_problems(LandscapeRecorder, {"every": every}))
        self.every = every
        self.settings = settings
        self.points: list[tuple[int, LandscapePoint]] = []

    def __call__(self, step: int, model: nn.Module, x: Tensor, y: Tensor) -> LandscapePoint | None:
        """Compute a point at every ``every``-th step."""
        if step % self.every:
            return None
        point = landscape(model, x, y, **self.settings)
        self.points.append((step, point))
        return point


@dataclass(frozen=True, kw_only=True, eq=False)
class LandscapeTrend(Finding):
    """The landscape along training, by the name of each training: pairs of step and point."""

    series: Mapping[str, Sequence[tuple[int, LandscapePoint]]]

    def record(self) -> dict[str, Any]:
        return {
            "analysis": "landscape_along",
            "conditions": to_record(self.conditions),
            "series": {
                name: [{"step": step, "steps": list(point.steps), **to_record(point)} for step, point in points]
                for name, points in self.series.items()
            },
        }

    def draw(self) -> Figure:
        """Draw mean and range over all step sizes, and the effective β-smoothness (paper D, fig. 14)."""
        points = {name: dict(pairs) for name, pairs in self.series.items()}
        loss = each_value(points, lambda point: (point.loss, *point.losses))
        change = each_value(points, lambda point: point.gradient_changes)
        return _draw("training step", loss, change, each_value(points, lambda point: point.smoothness))


# -- at a checkpoint ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class LandscapeComparison(Finding):
    """The landscape around trained networks: a point for each batch of images, by network."""

    RECORD = ("analysis", "statistics", "networks")
    analysis = "landscape"

    points: Mapping[str, Sequence[LandscapePoint]]
    statistics: str

    @property
    def networks(self) -> dict[str, Any]:
        """Conditions, step sizes and points of each network."""
        return {
            name: {"conditions": self.conditions.get(name, {}), "steps": points[0].steps, "batches": points}
            for name, points in self.points.items()
        }

    def table(self) -> TableData:
        rows = []
        for name, points in self.points.items():
            numbers = zip(*((point.loss, point.gradient_norm, point.smoothness) for point in points))
            rows.append([name, *(f"{fmean(values):.4g}" for values in numbers)])
        return ["network", "loss", "norm of the gradient", "effective β-smoothness"], rows

    def draw(self) -> Figure:
        """Draw each quantity by step size: the mean over the batches and their range."""

        def along(values: Callable[[LandscapePoint], Sequence[float]], *start: float) -> dict[str, dict[float, Any]]:
            return {
                name: dict(zip((*start, *points[0].steps), zip(*map(values, points))))
                for name, points in self.points.items()
            }

        loss = along(lambda point: (point.loss, *point.losses), 0.0)
        change = along(lambda point: point.gradient_changes)
        return _draw("step size (learning rate)", loss, change, along(lambda point: point.smoothness_at))


def _draw(xlabel: str, *quantities: Mapping[str, Mapping[Any, Any]]) -> Figure:
    """Draw the three panels of paper D, fig. 14. Networks differ by orders of magnitude: two are logarithmic."""
    titles = ("Loss along gradient", "Change of gradient", "β-smoothness")
    units = ("loss", "l2 distance", "change / distance moved")
    scales = ("linear", "log", "log")
    panels = [
        Panel(title, lines, {"ylabel": unit, "yscale": scale})
        for title, lines, unit, scale in zip(titles, quantities, units, scales)
    ]
    return line_figure(panels, xlabel=xlabel, columns=3)


@register_analysis(
    "landscape", summary="loss along the gradient", paper="D fig. 14-17", takes="branches", measure=landscape
)
def landscape_of_runs(
    views: Sequence[BranchView],
    *,
    count: Annotated[int, Setting("Number of batches.", "[1, inf)")] = 4,
    statistics: StatisticsMode = "batch_frozen",
    **settings: Any,
) -> LandscapeComparison:
    """Compute the landscape around several networks on the first ``count`` batches of images."""
    points: dict[str, list[LandscapePoint]] = {}
    conditions = view_conditions(views)
    settings["statistics"] = statistics
    for name, target, branch in track(views):
        parts = list(even_slices(len(target.images), target.batch_size))[:count]
        conditions[name] |= {"images_used": parts[-1].stop, "batch_size": parts[0].stop}
        points[name] = [
            landscape(target.model, target.images[rows], target.labels[rows], route=branch, **settings)
            for rows in parts
        ]
    return LandscapeComparison(points=points, statistics=statistics, conditions=conditions)
