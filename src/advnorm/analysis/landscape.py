"""The optimization landscape around a point of training (paper D, fig. 14 to 17, after Santurkar et al. 2018)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from advnorm._core.errors import ConfigError, raise_all
from advnorm._core.precision import float32_as
from advnorm._core.wrappers import device_of, unwrapped
from advnorm.analysis.base import Finding, batches, register
from advnorm.analysis.ligs import Statistics
from advnorm.analysis.views import (
    conditions,
    legend,
    look,
    number,
    numbers,
    one_domain_problems,
    setting_problems,
    views,
)
from advnorm.attacks import attacked
from advnorm.attacks.base import Progress, check_images, logits_of
from advnorm.evaluation.target import EvaluationTarget

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Learning rates around the 0.1 that the papers train with.
STEPS = (0.05, 0.1, 0.2, 0.3, 0.4)
#: Logits and labels to a mean loss.
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class LandscapePoint:
    """What happens at ``w - t ∇l(w)`` for each step size t: the loss there and how far the gradient has changed."""

    steps: tuple[float, ...]
    loss: float
    gradient_norm: float
    losses: tuple[float, ...]
    distances: tuple[float, ...]  # ||t ∇l(w)||
    gradient_changes: tuple[float, ...]  # ||∇l(w) - ∇l(w - t ∇l(w))||

    @property
    def smoothness_at(self) -> tuple[float, ...]:
        """Change of the gradient per distance moved; NaN where the gradient is zero and nothing moves."""
        pairs = zip(self.gradient_changes, self.distances)
        return tuple(change / distance if distance else math.nan for change, distance in pairs)

    @property
    def smoothness(self) -> float:
        """Effective β-smoothness: ``max_t ||∇l(w) - ∇l(w - t ∇l(w))|| / ||t ∇l(w)||``."""
        return _extremes(self.smoothness_at)[1]

    @property
    def loss_range(self) -> tuple[float, float]:
        """Lowest and highest loss along the direction, the starting point included."""
        return _extremes((self.loss, *self.losses))

    def record(self) -> dict[str, Any]:
        return {
            "loss": number(self.loss),
            "gradient_norm": number(self.gradient_norm),
            "losses": [number(value) for value in self.losses],
            "gradient_changes": [number(value) for value in self.gradient_changes],
            "smoothness_at": [number(value) for value in self.smoothness_at],
            "smoothness": number(self.smoothness),
        }


def _extremes(values: Sequence[float]) -> tuple[float, float]:
    """Lowest and highest; NaN where one is NaN, whatever the order."""
    low, high = torch.tensor(values, dtype=torch.float64).aminmax()
    return float(low), float(high)


def landscape(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    steps: float | Sequence[float] = STEPS,
    loss: Loss = F.cross_entropy,
    route: str | None = None,
    statistics: Statistics = "batch_frozen",
) -> LandscapePoint:
    """Loss variation, gradient change and effective β-smoothness along the gradient of one batch (paper D, app. H).

    ``steps`` are learning rates t: the loss is looked at in ``w - t ∇l(w)``, w being the parameters that are trained.
    ``batch_frozen`` normalizes by the batch's statistics, as training does, and feeds nothing. Dropout is off, so that
    only w differs. The model itself is never changed: the moved parameters are copies.
    """
    problems = setting_problems(model, route=route, statistics=statistics) + _step_problems(steps)
    problems += one_domain_problems(model, statistics)
    raise_all(problems, "bad landscape")
    check_images(x, y)
    model, device = unwrapped(model), device_of(model)
    start = {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}
    if not start:
        raise ConfigError("no parameter of the model is trained; set requires_grad on those to move")
    dtype = next(iter(start.values())).dtype

    def at(parameters: Mapping[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
        """The loss and its gradient; a parameter that plays no part, as in another branch, has gradient zero."""
        leaves = {name: value.detach().requires_grad_() for name, value in parameters.items()}
        logits = logits_of(functional_call(model, leaves, (x.to(dtype),)), len(x))
        value = loss(logits if logits.dtype == torch.float64 else logits.float(), y)
        gradients = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
        found = zip(leaves.items(), gradients)
        return float(value.detach()), {name: torch.zeros_like(w) if g is None else g.detach() for (name, w), g in found}

    with float32_as("ieee", device), attacked(model, route=route, statistics=statistics):
        x, y = (part.detach().to(device, copy=True) for part in (x, y))  # inference tensors have no gradients
        value, gradient = at(start)
        losses, distances, changes = [], [], []
        for step in numbers(steps):
            moved = {name: w - step * gradient[name] for name, w in start.items()}
            distances.append(_distance(moved, start))
            there, changed = at(moved)
            losses.append(there)
            changes.append(_distance(changed, gradient))
    return LandscapePoint(
        steps=tuple(float(step) for step in numbers(steps)),
        loss=value,
        gradient_norm=math.sqrt(sum(float(g.double().square().sum()) for g in gradient.values())),
        losses=tuple(losses),
        distances=tuple(distances),
        gradient_changes=tuple(changes),
    )


def _distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """l2 distance over all tensors, in float64."""
    return math.sqrt(sum(float((a[name].double() - b[name].double()).square().sum()) for name in a))


def _step_problems(steps: Any) -> list[str]:
    steps = list(steps) if isinstance(steps, Sequence) and not isinstance(steps, str) else [steps]
    good = [isinstance(step, int | float) and not isinstance(step, bool) and 0 < step < math.inf for step in steps]
    return [] if steps and all(good) else [f"steps must be learning rates above 0, such as {STEPS}, got {steps}"]


# -- along training ----------------------------------------------------------------------------------------------------


class LandscapeRecorder:
    """Looks at the landscape from inside a training loop, before the optimizer's step; settings of :func:`landscape`.

    >>> recorder = LandscapeRecorder(every=50)
    >>> for step, (x, y) in enumerate(loader):
    ...     recorder(step, model, x, y)
    ...     ...  # forward, backward, optimizer.step()
    >>> LandscapeTrend(series={"bn": recorder.points}).save("landscape")
    """

    def __init__(self, *, every: int = 1, **settings: Any) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ConfigError(f"every must be an integer of at least 1, got {every!r}")
        self.every = every
        self.settings = settings
        self.points: list[tuple[int, LandscapePoint]] = []

    def __call__(self, step: int, model: nn.Module, x: Tensor, y: Tensor) -> LandscapePoint | None:
        """Look, where the step's turn has come."""
        if step % self.every:
            return None
        point = landscape(model, x, y, **self.settings)
        self.points.append((step, point))
        return point


@dataclass(frozen=True, kw_only=True, eq=False)
class LandscapeTrend(Finding):
    """The landscape along training, by the name of each training: pairs of step and point."""

    series: Mapping[str, Sequence[tuple[int, LandscapePoint]]]
    conditions: Mapping[str, Any] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        return {
            "analysis": "landscape_along",
            "conditions": dict(self.conditions),
            "series": {
                name: [{"step": step, "steps": list(point.steps), **point.record()} for step, point in points]
                for name, points in self.series.items()
            },
        }

    def draw(self) -> Figure:
        """Paper D, fig. 14: bands hold all step sizes, the line is the effective β-smoothness."""
        figure, (loss, change, smoothness) = _panels("training step")
        handles = []
        for place, points in enumerate(self.series.values()):
            style = look(place) | {"marker": ""}
            colour, x = style["color"], [step for step, _ in points]
            for axes, ranges in (
                (loss, [point.loss_range for _, point in points]),
                (change, [_extremes(point.gradient_changes) for _, point in points]),
            ):
                low, high = zip(*ranges)
                axes.fill_between(x, low, high, color=colour, alpha=0.3, linewidth=0)
                for edge in (low, high):
                    axes.plot(x, edge, color=colour, marker="", linewidth=0.8)
            handles += smoothness.plot(x, [point.smoothness for _, point in points], **style)
        legend(figure, list(self.series), handles)
        return figure


# -- at a checkpoint ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class LandscapeFinding(Finding):
    """The landscape around trained networks: a point per batch of images, by network."""

    points: Mapping[str, Sequence[LandscapePoint]]
    statistics: str
    conditions: Mapping[str, Any] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        return {
            "analysis": "landscape",
            "statistics": self.statistics,
            "networks": {
                name: {
                    "conditions": self.conditions.get(name, {}),
                    "steps": list(points[0].steps),
                    "batches": [point.record() for point in points],
                }
                for name, points in self.points.items()
            },
        }

    def draw(self) -> Figure:
        """Each quantity over the step size: the mean over the batches, and from the lowest to the highest of them."""
        figure, (loss, change, smoothness) = _panels("step size (learning rate)")
        handles = []
        for place, points in enumerate(self.points.values()):
            steps = points[0].steps
            for axes, x, rows in (
                (loss, (0.0, *steps), [(point.loss, *point.losses) for point in points]),
                (change, steps, [point.gradient_changes for point in points]),
                (smoothness, steps, [point.smoothness_at for point in points]),
            ):
                values = torch.tensor(rows, dtype=torch.float64)
                style = look(place)
                axes.fill_between(x, values.amin(0), values.amax(0), color=style["color"], alpha=0.25, linewidth=0)
                (line,) = axes.plot(x, values.mean(0), **style)
            handles.append(line)
        legend(figure, list(self.points), handles)
        return figure


def _panels(x_label: str) -> tuple[Figure, Any]:
    """The three panels of paper D, fig. 14. Networks differ by orders of magnitude, so the last two are logarithmic."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 3.0))
    panels = figure.subplots(1, 3)
    titles = ("Loss along gradient", "Change of gradient", "β-smoothness")
    units = ("loss", "l2 distance", "change / distance moved")
    for axes, title, unit in zip(panels, titles, units):
        axes.set_title(title)
        axes.set_ylabel(unit)
        axes.set_xlabel(x_label)
    for axes in panels[1:]:
        axes.set_yscale("log")
    return figure, panels


@register("landscape", summary="loss and gradient along the gradient direction", paper="D fig. 14-17", several=True)
def landscape_of_runs(
    subjects: Sequence[EvaluationTarget],
    *,
    steps: float | Sequence[float] = STEPS,
    count: int = 4,
    route: str | None = None,
    statistics: Statistics = "batch_frozen",
    progress: Progress | None = None,
) -> LandscapeFinding:
    """The landscape around several networks, through one branch or each, on the first ``count`` batches of images."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ConfigError(f"count must be a number of batches of at least 1, got {count!r}")
    seen = views(subjects, route)
    found: dict[str, list[LandscapePoint]] = {}
    told = conditions(seen)
    for done, view in enumerate(seen):
        if progress is not None:
            progress(done, len(seen))
        subject = view.subject
        parts = list(batches(len(subject.images), subject.batch_size))[:count]
        told[view.name] |= {"images_looked_at": parts[-1].stop, "batch_size": parts[0].stop}
        found[view.name] = [
            landscape(
                subject.model,
                subject.images[rows],
                subject.labels[rows],
                steps=steps,
                route=view.route,
                statistics=statistics,
            )
            for rows in parts
        ]
    return LandscapeFinding(points=found, statistics=statistics, conditions=told)
