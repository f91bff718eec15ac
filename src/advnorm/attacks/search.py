"""What the searches of AutoAttack share: access to the model, images that leave once fooled, fast projections."""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from advnorm._core.memory import AdaptiveBatchSize
from advnorm._core.precision import ContextFactory
from advnorm._core.seeding import ImageNoise
from advnorm.attacks.base import Attack, Predict, input_gradient
from advnorm.attacks.losses import cw_margin
from advnorm.threat import ThreatModel, per_image

S = TypeVar("S")


def bucket(rows: int, step: int) -> int:
    """A number of rows that is not less: a multiple of ``step``, or a power of two below it.

    cuDNN looks for its kernels anew for every size, which takes as long as many forwards.
    """
    return -(-rows // step) * step if rows > step else min(step, 1 << (rows - 1).bit_length())


def never_alone(predict: Predict) -> Predict:
    """``predict`` with statistics of the batch: a search may be left with one image, which goes with a copy of itself.

    A norm that sees one value per channel has no statistics; where it sees more, the copy changes none.
    """
    return lambda x: predict(torch.cat([x, x]))[:1] if len(x) == 1 else predict(x)


def filled(x: Tensor, rows: int) -> Tensor:
    """The images, and the first one again up to so many rows."""
    return x if len(x) == rows else torch.cat([x, x[:1].detach().expand(rows - len(x), *x.shape[1:])])


class Victim:
    """The model as a search sees it: logits and gradients of ``search``, verdicts of the strict ``predict`` alone.

    ``search`` is ``predict`` itself or a faster stand-in for it, whose margins differ by up to ``tolerance``, or are no
    numbers where it overflows.
    ``precision`` is the scope that it runs in, its gradients too.
    """

    def __init__(
        self,
        predict: Predict,
        *,
        search: Predict | None = None,
        precision: ContextFactory = nullcontext,
        tolerance: float = 0.0,
        memory: AdaptiveBatchSize | None = None,
    ) -> None:
        self.predict, self.search, self.tolerance = predict, search or predict, tolerance
        self.precision = precision
        self.memory = memory or AdaptiveBatchSize()
        self.forwards = self.backwards = 0  # in images
        self.tick: Callable[[], object] | None = None  # called before every call of the model

    def strict(self, x: Tensor) -> Tensor:
        """Logits that decide."""
        return self._logits(self.predict, x)

    def logits(self, x: Tensor) -> Tensor:
        """Logits that guide the search."""
        with self.precision():
            return self._logits(self.search, x)

    def margin(self, logits: Tensor, y: Tensor) -> Tensor:
        """The search's margins; where a stand-in has no finite one the image may be fooled, and is to be judged.

        Where the model itself gives NaN it is.
        """
        margin = margin_of(logits, y)
        if self.search is self.predict:
            return margin.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        return margin.nan_to_num(nan=self.tolerance, posinf=self.tolerance, neginf=self.tolerance)

    def fooled(self, x: Tensor, y: Tensor) -> Tensor:
        """Whether the strict prediction differs from the label; NaN predicts nothing."""
        logits = self.strict(x)
        return (logits.argmax(1) != y) | logits.isnan().any(1)

    def gradient(
        self, x: Tensor, value: Callable[[Tensor, slice], Tensor], samples: int = 1
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, values and the values' gradients; for a randomized model their means over ``samples`` forwards.

        A gradient that is not finite counts as zero, so that one bad image or pixel stays where it is, and a value that
        is no number as the lowest, so that every number is better.
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
        with self.precision():
            logits, values, grad = _joined(self.memory.map(len(x), work))
        values = values.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
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

        with self.precision():
            logits, grads = _joined(self.memory.map(len(x), work))
        self._count(len(x), backwards=False)
        self.backwards += len(x) * logits.shape[1]
        return logits, grads.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)

    def _logits(self, predict: Predict, x: Tensor) -> Tensor:
        self._count(len(x), backwards=False)
        with torch.no_grad():
            parts = self.memory.map(len(x), lambda part: predict(x[part]))
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
        self._clean = x
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
        self._point = torch.where(per_image(better, points), points, self._point)
        self._margin = torch.where(better, margin, self._margin)

    def note_gradients(self, gradient: Tensor) -> None:
        """Remember the images whose gradient is zero in all variants."""
        self._found.zero_gradient[self._images] = (gradient.flatten(1) == 0).all(1).view(-1, self.variants).all(1)

    def settle(self, finished: Tensor | None = None) -> Tensor | None:
        """Judge the candidates; the rows to keep where it pays to drop the others (none: all), else None.

        Dropped are images that are fooled, and those that the search has ``finished`` with.
        """
        suspects = ((self._margin <= self.victim.tolerance) & ~self._done).nonzero()[:, 0]
        if len(suspects):
            candidates = self.threat.project(self._point[suspects], self._x[suspects])
            fooled = self.victim.fooled(candidates, self._y[suspects])
            self._point[suspects] = candidates
            self._done[suspects] = fooled
            # A candidate that the strict forward refutes makes way for the next one.
            self._lowest[suspects] = torch.minimum(self._lowest[suspects], self._margin[suspects])
            self._margin[suspects] = torch.where(fooled, self._margin[suspects], torch.inf)
        left = self._done if finished is None else self._done | finished
        if int(left.sum()) < min(len(left), max(1, math.ceil(self.DROP * len(left)))):
            return None
        for whole, part in (
            (self._found.x_adv, self._point),
            (self._found.fooled, self._done),
            (self._found.margin, torch.minimum(self._margin, self._lowest)),
        ):
            whole[self._images] = part
        kept = (~left).nonzero()[:, 0]
        for name in ("_images", "_x", "_y", "_point", "_margin", "_lowest", "_done"):
            setattr(self, name, getattr(self, name)[kept])
        return (kept[:, None] * self.variants + torch.arange(self.variants, device=kept.device)).flatten()

    def finish(self) -> Found:
        """Judge what is left. What was not fooled keeps its best point, projected."""
        self.settle(finished=torch.ones_like(self._done))
        found = self._found
        robust = (~found.fooled).nonzero()[:, 0]
        found.x_adv[robust] = self.threat.project(found.x_adv[robust], self._clean[robust])
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


def margin_of(logits: Tensor, y: Tensor) -> Tensor:
    """``z_y - max_{j≠y} z_j``: at most 0 where the label does not win."""
    return -cw_margin(logits, y)


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
        predict = never_alone(predict) if self.statistics == "batch_frozen" else predict
        return self.search(Victim(predict), x, y, noise).x_adv

    def counted(self, *labels: str, least: int = 1) -> list[str]:
        """Problems with settings that must be integers of at least ``least``."""
        values = {label: getattr(self, label) for label in labels}
        return [
            f"{label} must be an integer of at least {least}, got {value!r}"
            for label, value in values.items()
            if isinstance(value, bool) or not isinstance(value, int) or value < least
        ]


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
        return (x + delta * per_image(eps / length.clamp_min(eps), x)).clamp(0, 1)

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
