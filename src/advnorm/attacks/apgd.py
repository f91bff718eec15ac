"""Auto-PGD, and what the searches of AutoAttack share: access to the model, and images that leave once fooled.

Sources: Croce & Hein 2020, "Reliable evaluation of adversarial robustness with an ensemble of diverse parameter-free
attacks" (algorithm 1, Linf and L2); Croce & Hein 2021, "Mind the box: l1-APGD for sparse adversarial attacks" (L1).
"""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from advnorm._core.errors import AdvnormError, did_you_mean
from advnorm._core.seeding import ImageNoise
from advnorm.attacks.base import Attack, Option, Predict, input_gradient, register
from advnorm.attacks.losses import LOSSES
from advnorm.threat import ThreatModel

R = TypeVar("R")
S = TypeVar("S")

# -- what the searches share -------------------------------------------------------------------------------------------


class Halving:
    """A batch size that halves when memory runs out; only the part that failed is tried again.

    >>> logits = torch.cat(Halving(512).over(len(x), lambda part: model(x[part])))
    """

    def __init__(self, size: int | None = None) -> None:
        self.size = size
        self.halved: list[int] = []  # the sizes that were too large

    def over(self, count: int, work: Callable[[slice], R]) -> list[R]:
        """Results of ``work`` on consecutive parts of ``range(count)``, none larger than the size in force."""
        done: list[R] = []
        start = 0
        while start < count:
            stop = count if self.size is None else min(count, start + self.size)
            try:
                done.append(work(slice(start, stop)))
            except torch.OutOfMemoryError as error:
                if stop - start == 1:
                    raise AdvnormError(
                        "memory does not suffice for a single image; free memory, or use a smaller model or image"
                    ) from error
                self.halved.append(stop - start)
                self.size = (stop - start) // 2
            else:
                start = stop
                continue
            # Outside of the except clause, whose traceback would keep the failed part's activations alive.
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        return done


class Victim:
    """The model as a search sees it: logits and gradients of ``search``, verdicts of the strict ``predict`` alone.

    ``search`` is ``predict`` itself or a faster stand-in for it, whose margins differ by up to ``tolerance``.
    """

    def __init__(
        self, predict: Predict, *, search: Predict | None = None, tolerance: float = 0.0, memory: Halving | None = None
    ) -> None:
        self.predict, self.search, self.tolerance = predict, search or predict, tolerance
        self.memory = memory or Halving()
        self.forwards = self.backwards = 0  # in images
        self.tick: Callable[[], object] | None = None  # called before every call of the model

    def strict(self, x: Tensor) -> Tensor:
        """Logits that decide."""
        return self._logits(self.predict, x)

    def logits(self, x: Tensor) -> Tensor:
        """Logits that guide the search."""
        return self._logits(self.search, x)

    def fooled(self, x: Tensor, y: Tensor) -> Tensor:
        """Whether the strict prediction differs from the label."""
        return self.strict(x).argmax(1) != y

    def gradient(
        self, x: Tensor, value: Callable[[Tensor, slice], Tensor], samples: int = 1
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, values and the values' gradients; for a randomized model their means over ``samples`` forwards.

        A gradient that is not finite counts as zero, so that one bad image or pixel stays where it is.
        """

        def work(part: slice) -> tuple[Tensor, ...]:
            points = x[part].detach().requires_grad_()
            total: list[Tensor] = []
            for _ in range(samples):
                with torch.enable_grad():
                    logits = self.search(points)
                    value_N = value(logits, part)
                seen = [logits.detach(), value_N.detach(), input_gradient(value_N, points)]
                total = [a + b for a, b in zip(total, seen)] if total else seen
            return tuple(t / samples for t in total) if samples > 1 else tuple(total)

        self._count(len(x) * samples, backwards=True)
        logits, values, grad = _joined(self.memory.over(len(x), work))
        return logits, values, grad.contiguous().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)

    def jacobian(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits ``(N, K)`` and the gradient of each, ``(N, K, ...)``: K backward passes."""

        def work(part: slice) -> tuple[Tensor, ...]:
            points = x[part].detach().requires_grad_()
            with torch.enable_grad():
                logits = self.search(points)
                columns = logits.sum(0)
            grads = [torch.autograd.grad(c, points, retain_graph=True)[0] for c in columns]
            return logits.detach(), torch.stack(grads, 1)

        logits, grads = _joined(self.memory.over(len(x), work))
        self._count(len(x), backwards=False)
        self.backwards += len(x) * logits.shape[1]
        return logits, grads.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)

    def _logits(self, predict: Predict, x: Tensor) -> Tensor:
        self._count(len(x), backwards=False)
        with torch.no_grad():
            parts = self.memory.over(len(x), lambda part: predict(x[part]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _count(self, images: int, *, backwards: bool) -> None:
        self.forwards += images
        self.backwards += images * backwards
        if self.tick is not None:
            self.tick()


def _joined(parts: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    return parts[0] if len(parts) == 1 else tuple(torch.cat(column) for column in zip(*parts))


@dataclass
class Found:
    """What a search found for each image: an adversarial image, or the nearest to one that it has seen."""

    x_adv: Tensor
    fooled: Tensor
    #: The lowest that the search saw of the label's logit less the largest other one; inf where nothing counted.
    margin: Tensor
    #: Images for which a search by gradients had none to begin with, in any variant.
    zero_gradient: Tensor
    #: FAB: the smallest distance of an adversarial image, inside the ball or not.
    distance: Tensor | None = None

    def to(self, device: torch.device) -> Found:
        """The same on another device."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        moved: dict[str, Any] = {name: None if value is None else value.to(device) for name, value in values.items()}
        return Found(**moved)


class Grid:
    """Images under attack in ``variants`` (targets, restarts) that run side by side, image-major rows.

    A search shows its points by :meth:`see` and calls :meth:`settle` now and then: the best point of each image is
    projected and judged strictly, and a fooled image leaves with all its variants. An image's fate depends on its own
    rows alone, so dropping others changes nothing but the time.
    """

    #: Rows are given up when this share of the images is done with: copying costs less than carrying them along.
    DROP = 0.25

    def __init__(self, victim: Victim, threat: ThreatModel, x: Tensor, y: Tensor, variants: int = 1) -> None:
        self.victim, self.threat, self.variants = victim, threat, variants
        no = torch.zeros_like(y, dtype=torch.bool)
        self._found = Found(x.clone(), no, x.new_full((len(x),), torch.inf), zero_gradient=no.clone())
        self._images = torch.arange(len(x), device=x.device)
        self._x, self._y = x, y
        self._point, self._margin = x.clone(), self._found.margin.clone()  # of the candidate
        self._lowest = self._margin.clone()  # of those that were refuted
        self._done = self._found.fooled.clone()

    def rows(self, per_image: Tensor) -> Tensor:
        """A value of each image, for each of its rows."""
        return per_image.repeat_interleave(self.variants, 0)

    def noise(self, noise: ImageNoise) -> ImageNoise:
        """Noise of its own for each row."""
        index = torch.arange(len(noise), device=noise.device)
        variant = torch.arange(self.variants, device=noise.device).repeat(len(noise))
        return noise.select(self.rows(index)).fold("variant").fold(variant)

    def see(self, points: Tensor, margin: Tensor) -> None:
        """Take in a point of each row with its margin; inf: it does not count. Nothing waits for the device."""
        margin, variant = margin.nan_to_num(nan=torch.inf, posinf=torch.inf).view(-1, self.variants).min(1)
        better = (margin < self._margin) & ~self._done
        if self.variants > 1:
            points = points[torch.arange(len(variant), device=variant.device) * self.variants + variant]
        self._point = torch.where(per_row(better, points), points, self._point)
        self._margin = torch.where(better, margin, self._margin)

    def note_gradients(self, gradient: Tensor) -> None:
        """Remember the images whose gradient is zero in all variants."""
        self._found.zero_gradient[self._images] = (gradient.flatten(1) == 0).all(1).view(-1, self.variants).all(1)

    def settle(self, *, last: bool = False) -> Tensor | None:
        """Judge the candidates; the rows to keep where it pays to drop the others (none: all fooled), else None."""
        suspects = ((self._margin <= self.victim.tolerance) & ~self._done).nonzero()[:, 0]
        if len(suspects):
            candidates = self.threat.project(self._point[suspects], self._x[suspects])
            fooled = self.victim.fooled(candidates, self._y[suspects])
            self._point[suspects] = candidates
            self._done[suspects] = fooled
            # A candidate that the strict forward refutes makes way for the next one.
            self._lowest[suspects] = torch.minimum(self._lowest[suspects], self._margin[suspects])
            self._margin[suspects] = torch.where(fooled, self._margin[suspects], torch.inf)
        done = int(self._done.sum())
        if not last and done < max(1, math.ceil(self.DROP * len(self._done))):
            return None
        for whole, part in (
            (self._found.x_adv, self._point),
            (self._found.fooled, self._done),
            (self._found.margin, torch.minimum(self._margin, self._lowest)),
        ):
            whole[self._images] = part
        kept = (~self._done).nonzero()[:, 0]
        for name in ("_images", "_x", "_y", "_point", "_margin", "_lowest", "_done"):
            setattr(self, name, getattr(self, name)[kept])
        return (kept[:, None] * self.variants + torch.arange(self.variants, device=kept.device)).flatten()

    def finish(self) -> Found:
        """Judge what is left. What was not fooled keeps its best point, projected."""
        self.settle(last=True)
        found = self._found
        found.x_adv[self._images] = self.threat.project(found.x_adv[self._images], self._x)
        return found


def take(state: S, rows: Tensor) -> S:
    """Some rows of a tensor, of noise, or of each field of a dataclass of these."""
    value: Any = state
    if isinstance(value, Tensor):
        return cast(S, value[rows])
    if isinstance(value, ImageNoise):
        return cast(S, value.select(rows))
    fields = {field.name: take(getattr(value, field.name), rows) for field in dataclasses.fields(value)}
    return dataclasses.replace(value, **fields)


def per_row(value_N: Tensor, like: Tensor) -> Tensor:
    """``(N,)`` as ``(N, 1, ...)``, to broadcast over images."""
    return value_N.view(-1, *(1,) * (like.dim() - 1))


def margin_of(logits: Tensor, y: Tensor) -> Tensor:
    """``z_y - max_{j≠y} z_j``: at most 0 where the label does not win."""
    own = y[:, None]
    return logits.gather(1, own)[:, 0] - logits.scatter(1, own, -torch.inf).amax(1)


def norm_of(rows: Tensor, threat: ThreatModel, *, dual: bool = False) -> Tensor:
    """The threat's norm of each row of ``(..., features)``, or its dual norm."""
    order = {"Linf": math.inf, "L2": 2.0, "L1": 1.0}[threat.norm]
    if dual:
        order = {math.inf: 1.0, 2.0: 2.0, 1.0: math.inf}[order]
    return torch.linalg.vector_norm(rows, order, dim=-1)


def ranked_targets(logits: Tensor, y: Tensor, count: int) -> Tensor:
    """The ``count`` most likely classes other than the label, ``(N, count)``; fewer where there are no more."""
    others = logits.scatter(1, y[:, None], -torch.inf)
    return others.topk(min(count, logits.shape[1] - 1), dim=1).indices


@dataclass(frozen=True, kw_only=True)
class Search(Attack):
    """An attack that keeps the best point of each image and stops for an image when it has fooled the model."""

    @abstractmethod
    def search(self, victim: Victim, x: Tensor, y: Tensor, noise: ImageNoise) -> Found:
        """Look for adversarial images inside the threat model; ``victim`` counts, splits and judges."""

    @abstractmethod
    def variants(self, classes: int) -> int:
        """How many rows an image takes in the search's batches."""

    @abstractmethod
    def forwards(self, classes: int) -> int:
        """About how many forwards the search spends on an image that resists."""

    def perturb(self, predict: Predict, x: Tensor, y: Tensor, noise: ImageNoise) -> Tensor:
        return self.search(Victim(predict), x, y, noise).x_adv

    def counted(self, *labels: str, least: int = 1) -> list[str]:
        """Problems with settings that must be integers of at least ``least``."""
        values = {label: getattr(self, label) for label in labels}
        return [
            f"{label} must be an integer of at least {least}, got {value!r}"
            for label, value in values.items()
            if isinstance(value, bool) or not isinstance(value, int) or value < least
        ]


# -- Auto-PGD ----------------------------------------------------------------------------------------------------------

#: Logits, labels and targets to the value that is ascended, one per row.
Value = Callable[[Tensor, Tensor, Tensor], Tensor]
#: Candidates are judged, and images dropped, every so many steps.
SETTLE_EVERY = 5


@dataclass(frozen=True, kw_only=True)
class APGD(Search):
    """Gradient ascent with momentum and a step size that halves at checkpoints where it does not pay.

    ``loss``: ``ce``, ``cw`` or ``dlr``. ``targets``: 0, or towards each of this many most likely other classes.
    ``samples``: forwards per gradient, for randomized models (expectation over transformation).
    L1: sparse steps whose sparsity adapts, in balls of ``3·eps``, ``2·eps`` and ``eps`` for 30, 30, 40 % of the steps.
    """

    steps: int = 100
    loss: str = "ce"
    targets: int = 0
    restarts: int = 1
    samples: int = 1
    rho: float = 0.75

    def problems(self) -> list[str]:
        problems = super().problems() + self.counted("steps", "restarts", "samples") + self.counted("targets", least=0)
        allowed = [name for name, loss in LOSSES.items() if loss.targeted is not None]
        if self.loss not in allowed:
            problems.append(f"unknown loss {self.loss!r}{did_you_mean(self.loss, allowed)}")
        if not isinstance(self.rho, float) or not 0 < self.rho < 1:
            problems.append(f"rho must lie between 0 and 1, got {self.rho!r}")
        return problems

    def variants(self, classes: int) -> int:
        return self.restarts * max(1, min(self.targets, classes - 1))

    def forwards(self, classes: int) -> int:
        return (self.steps + 1) * self.samples * self.variants(classes)

    def search(self, victim: Victim, x: Tensor, y: Tensor, noise: ImageNoise) -> Found:
        clean = victim.strict(x)
        classes = clean.shape[1]
        grid = Grid(victim, self.threat, x, y, self.variants(classes))
        target = ranked_targets(clean, y, max(1, self.targets)).repeat_interleave(self.restarts, 1).flatten()
        rows = _Rows(x=grid.rows(x), y=grid.rows(y), target=target, noise=grid.noise(noise))
        grid.see(rows.x, margin_of(grid.rows(clean), rows.y))
        kept = grid.settle()
        rows = rows if kept is None else take(rows, kept)
        if len(rows.y):
            climb = partial(_climb, victim=victim, grid=grid, value=self._value(classes), samples=self.samples)
            if self.threat.norm == "L1":
                self._sparse(rows, climb)
            else:
                climb(rows, on_sphere(self.threat, rows.x, rows.noise), rule=_Dense(self.threat, self.steps, self.rho))
        return grid.finish()

    def _sparse(self, rows: _Rows, climb: Callable[..., Tensor]) -> None:
        early = math.ceil(0.3 * self.steps)
        point = rows.x + rows.noise.normal(rows.x.shape[1:], "start")
        for factor, steps in ((3, early), (2, early), (1, max(self.steps - 2 * early, 1))):
            rule = _Sparse(ThreatModel(norm="L1", eps=factor * self.threat.eps), steps)
            point = climb(rows, near(rule.threat, rows.x)(point), rule=rule, counts=factor == 1)

    def _value(self, classes: int) -> Value:
        # DLR divides by a difference to the third logit, or to the fourth with a target.
        few = classes < (4 if self.targets else 3)
        loss = LOSSES["cw" if self.loss == "dlr" and few else self.loss]
        if not self.targets:
            return lambda logits, y, _target: loss.untargeted(logits, y)
        assert loss.targeted is not None
        return loss.targeted


@dataclass
class _Rows:
    x: Tensor
    y: Tensor
    target: Tensor
    noise: ImageNoise


@dataclass
class _Climb:
    """What APGD carries along for each row."""

    rows: _Rows
    point: Tensor
    gradient: Tensor
    value: Tensor
    previous: Tensor  # the point before
    best: Tensor  # the point of the highest value so far, with its gradient
    best_gradient: Tensor
    best_value: Tensor
    step: Tensor
    # Linf and L2: rises of the value since the last checkpoint, best value there, whether the step was halved there
    rises: Tensor
    checked_value: Tensor
    halved: Tensor
    # L1: how many coordinates the best point moved at the last checkpoint; 1.5 times fewer move in a step
    moved: Tensor

    def back_to_best(self, where: Tensor) -> None:
        """Go on from the best point in some of the rows."""
        wide = per_row(where, self.point)
        self.point = torch.where(wide, self.best, self.point)
        self.gradient = torch.where(wide, self.best_gradient, self.gradient)


def _climb(
    rows: _Rows,
    start: Tensor,
    *,
    victim: Victim,
    grid: Grid,
    value: Value,
    samples: int,
    rule: _Dense | _Sparse,
    counts: bool = True,
) -> Tensor:
    """Ascend by ``rule``; the points of the highest value. Where it ``counts``, the grid sees every point."""

    def gradient(rows: _Rows, point: Tensor) -> tuple[Tensor, Tensor]:
        def objective(logits: Tensor, part: slice) -> Tensor:
            return value(logits, rows.y[part], rows.target[part])

        logits, values, grads = victim.gradient(point, objective, samples)
        if counts:
            grid.see(point, margin_of(logits, rows.y))
        return values, grads

    values, grads = gradient(rows, start)
    if counts:
        grid.note_gradients(grads)
    c = _Climb(
        rows=rows,
        point=start,
        gradient=grads,
        value=values,
        previous=start,
        best=start,
        best_gradient=grads,
        best_value=values,
        step=torch.full_like(values, rule.first_step),
        rises=torch.zeros_like(values),
        checked_value=values,
        halved=torch.ones_like(values, dtype=torch.bool),
        moved=(start != rows.x).flatten(1).sum(1),
    )
    project, checked = near(rule.threat, rows.x), 0
    for step in range(1, rule.steps + 1):
        point = project(rule.ahead(c, project, first=step == 1))
        c.previous, c.point = c.point, point
        values, c.gradient = gradient(c.rows, point)
        c.rises += values > c.value
        better = values > c.best_value
        c.best = torch.where(per_row(better, point), point, c.best)
        c.best_gradient = torch.where(per_row(better, point), c.gradient, c.best_gradient)
        c.best_value = torch.where(better, values, c.best_value)
        c.value = values
        if step in rule.checkpoints:
            rule.check(c, step - checked)
            checked = step
        if counts and step % SETTLE_EVERY == 0 and step < rule.steps:
            kept = grid.settle()
            if kept is not None:
                if not len(kept):
                    break
                c = take(c, kept)
                project = near(rule.threat, c.rows.x)
    return c.best


class _Dense:
    """Linf and L2: algorithm 1 of Croce & Hein 2020, steps along the steepest ascent."""

    def __init__(self, threat: ThreatModel, steps: int, rho: float) -> None:
        self.threat, self.steps, self.rho, self.first_step = threat, steps, rho, 2 * threat.eps
        # w_j = ceil(p_j · steps) with p_{j+1} = p_j + max(p_j - p_{j-1} - 0.03, 0.06), p_1 = 0.22, in whole steps.
        length, shrink, least = (max(int(part * steps), 1) for part in (0.22, 0.03, 0.06))
        self.checkpoints, at = set[int](), length
        while at <= steps:
            self.checkpoints.add(at)
            length = max(length - shrink, least)
            at += length

    def ahead(self, c: _Climb, project: Callable[[Tensor], Tensor], *, first: bool) -> Tensor:
        """``x + α (P(x + η s) - x) + (1 - α) (x - x_previous)`` with α = 0.75, and 1 in the first step."""
        target = project(c.point + per_row(c.step, c.point) * self.threat.steepest(c.gradient))
        if first:
            return target
        return c.point + 0.75 * (target - c.point) + 0.25 * (c.point - c.previous)

    def check(self, c: _Climb, since: int) -> None:
        """Halve the step where it rose too seldom, or neither the step nor the best value changed; back to the best."""
        halve = (c.rises <= self.rho * since) | (~c.halved & (c.checked_value >= c.best_value))
        c.halved, c.checked_value, c.rises = halve, c.best_value, torch.zeros_like(c.rises)
        c.step = torch.where(halve, c.step / 2, c.step)
        c.back_to_best(halve)


class _Sparse:
    """L1: Croce & Hein 2021, section 4: few coordinates a step, and fewer while the best point gets sparser."""

    def __init__(self, threat: ThreatModel, steps: int) -> None:
        self.threat, self.steps, self.first_step = threat, steps, threat.eps
        self.checkpoints = range(0, steps + 1, max(int(0.04 * steps), 1))

    def ahead(self, c: _Climb, project: Callable[[Tensor], Tensor], *, first: bool) -> Tensor:
        """The sign of the largest gradients, of L1 length η."""
        size = c.gradient.flatten(1).abs()
        count = (c.moved / 1.5).ceil().long().clamp(1, size.shape[1])
        threshold = size.sort(1, descending=True).values.gather(1, count[:, None] - 1)
        signs = c.gradient.flatten(1).sign() * (size >= threshold)
        length = c.step / signs.abs().sum(1).clamp_min(1)
        return c.point + (length[:, None] * signs).view(c.point.shape)

    def check(self, c: _Climb, since: int) -> None:
        eps = self.threat.eps
        moved = (c.best != c.rows.x).flatten(1).sum(1)
        sparser = moved < 0.95 * c.moved
        c.step = torch.where(sparser, eps, (c.step / 1.5).clamp_min(eps / 10))
        c.moved = moved
        c.back_to_best(sparser)


def on_sphere(threat: ThreatModel, x: Tensor, noise: ImageNoise) -> Tensor:
    """A random direction of length eps (uniform for Linf, else Gaussian), cut off by the box."""
    shape = x.shape[1:]
    direction = 2 * noise.uniform(shape, "start") - 1 if threat.norm == "Linf" else noise.normal(shape, "start")
    length = norm_of(direction.flatten(1), threat).clamp_min(1e-12)
    return threat.project(x + threat.eps * direction / per_row(length, x), x)


def near(threat: ThreatModel, x: Tensor) -> Callable[[Tensor], Tensor]:
    """Projection onto ball and box for a search: as fast as may be, since the grid projects exactly what it judges.

    L2: onto the ball, then the box. L1: onto their intersection, which is what makes L1 attacks strong.
    """
    if threat.norm == "Linf":
        return threat.projection(x)
    eps = threat.inner_radius(x[0].numel())
    if threat.norm == "L1":
        return lambda point: onto_l1_and_box(x, point, eps)

    def project(point: Tensor) -> Tensor:
        delta = point - x
        length = norm_of(delta.flatten(1), threat)
        return (x + delta * per_row(eps / length.clamp_min(eps), x)).clamp(0, 1)

    return project


def onto_l1_and_box(x: Tensor, point: Tensor, eps: float) -> Tensor:
    """The point of ``{||p - x||_1 <= eps} ∩ [0, 1]^d`` nearest to ``point`` in L2 (Croce & Hein 2021, prop. 2.1).

    It moves from x by ``min(max(|δ_i| - λ, 0), room_i)`` towards the point, with the least λ >= 0 that fits: found by
    bisection down to a linear piece, then exactly.
    """
    delta = (point - x).flatten(1)
    size = delta.abs()
    room = torch.where(delta > 0, 1 - x.flatten(1), x.flatten(1))
    low = torch.zeros_like(size[:, :1])
    high = size.amax(1, keepdim=True)
    for _ in range(24):
        middle = (low + high) / 2
        outside = torch.minimum((size - middle).clamp_min(0), room).sum(1, keepdim=True) > eps
        low, high = torch.where(outside, middle, low), torch.where(outside, high, middle)
    sloping = (size > low) & (size - room < low)
    full = torch.where(size - room >= low, room, 0).sum(1, keepdim=True)
    shrink = (full + torch.where(sloping, size, 0).sum(1, keepdim=True) - eps) / sloping.sum(1, keepdim=True)
    # Only where there was something to shrink; between low and high the sum is linear, up to rounding.
    shrink = torch.where((low > 0) & shrink.isfinite(), torch.minimum(torch.maximum(shrink, low), high), high)
    inside = torch.minimum(size, room).sum(1, keepdim=True) <= eps
    moved = torch.minimum((size - torch.where(inside, 0, shrink)).clamp_min(0), room)
    return (x + (moved * delta.sign()).view(x.shape)).clamp(0, 1)


_OPTIONS = {name: Option(setting=name, parse=int) for name in ("steps", "restarts", "samples")}
_PAPER = "A, C"
register("apgd-ce", partial(APGD, loss="ce"), options=_OPTIONS, summary="Auto-PGD on the cross-entropy", paper=_PAPER)
register("apgd-dlr", partial(APGD, loss="dlr"), options=_OPTIONS, summary="Auto-PGD on the DLR loss", paper=_PAPER)
register(
    "apgd-t",
    partial(APGD, loss="dlr", targets=9),
    options=_OPTIONS,
    summary="Auto-PGD on the DLR loss towards each of the 9 most likely other classes",
    paper=_PAPER,
)
