"""The base class of the searches in AutoAttack, and the bookkeeping of their candidates."""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from advnorm._core.seeding import ImageNoise
from advnorm.attacks.base import Attack
from advnorm.attacks.model_access import Predict, never_alone
from advnorm.attacks.victim import VictimModel
from advnorm.threat import ThreatModel, per_image

S = TypeVar("S")


@dataclass
class SearchResult:
    """For each image an adversarial image, or the candidate nearest to the decision boundary."""

    x_adv: Tensor
    #: Whether a strict forward misclassifies ``x_adv``.
    fooled: Tensor
    #: Lowest margin (logit of the label minus the largest other logit) in the search; inf without a valid candidate.
    margin: Tensor
    #: Whether a gradient search started with a zero gradient in all variants.
    zero_gradient: Tensor
    #: FAB with ``minimal``: the smallest distance of an adversarial image, inside the ball or not.
    distance: Tensor | None = None

    def to(self, device: torch.device) -> SearchResult:
        """Return a copy on another device."""
        return SearchResult(**{name: value.to(device) for name, value in vars(self).items() if value is not None})


class CandidateGrid:
    """The best candidate of each image, over ``variants`` (targets, restarts) that run side by side.

    Rows are image-major: the variants of an image are adjacent. A search passes its points to :meth:`offer` and calls
    :meth:`verify` at intervals. Verification projects the best candidate of each image and evaluates it with a strict
    forward; a misclassified image is dropped with all its variants. An image's result depends on its own rows only,
    so dropping other images changes nothing but the time. A ``patient`` grid verifies at the end only: one draw of a
    randomized model proves little.
    """

    #: Share of finished rows above which they are dropped: at once, since copying the others is cheaper than a pass.
    DROP = 0.0

    def __init__(
        self,
        victim: VictimModel,
        threat: ThreatModel,
        x: Tensor,
        y: Tensor,
        variants: int = 1,
        *,
        patient: bool = False,
    ) -> None:
        self.victim, self.threat, self.variants, self.patient = victim, threat, variants, patient
        no = torch.zeros_like(y, dtype=torch.bool)
        self._result = SearchResult(x.clone(), no, x.new_full((len(x),), torch.inf), zero_gradient=no.clone())
        self._clean = x
        self._images = torch.arange(len(x), device=x.device)
        self._x, self._y = x, y
        self._point, self._margin = x.clone(), self._result.margin.clone()  # of the candidate
        self._lowest = self._margin.clone()  # of candidates that verification rejected
        self._done = self._result.fooled.clone()

    def to_rows(self, per_image: Tensor) -> Tensor:
        """Repeat a value of each image for each of its rows."""
        return per_image.repeat_interleave(self.variants, 0)

    def row_noise(self, noise: ImageNoise) -> ImageNoise:
        """Independent noise for each row."""
        index = torch.arange(len(noise), device=noise.device)
        variant = torch.arange(self.variants, device=noise.device).repeat(len(noise))
        return noise.select(self.to_rows(index)).fold("variant").fold(variant)

    def offer(self, points: Tensor, margin: Tensor) -> None:
        """Compare a point of each row with the best candidate; margin inf excludes a point. Needs no device sync."""
        margin, variant = margin.nan_to_num(nan=torch.inf, posinf=torch.inf).view(-1, self.variants).min(1)
        better = (margin < self._margin) & ~self._done
        if self.variants > 1:
            points = points[torch.arange(len(variant), device=variant.device) * self.variants + variant]
        self._point = torch.where(per_image(better, points), points, self._point)
        self._margin = torch.where(better, margin, self._margin)

    def record_zero_gradients(self, gradient: Tensor) -> None:
        """Record the images whose gradient is zero in all variants."""
        self._result.zero_gradient[self._images] = (gradient.flatten(1) == 0).all(1).view(-1, self.variants).all(1)

    def verify(self, finished: Tensor | None = None) -> Tensor | None:
        """Verify the candidates. Return the rows to keep if rows are dropped, else None.

        Misclassified images are dropped, and images that the search marks as ``finished``.
        """
        if self.patient and finished is None:
            return None
        suspects = ((self._margin <= self.victim.tolerance) & ~self._done).nonzero()[:, 0]
        if len(suspects):
            candidates = self.threat.project(self._point[suspects], self._x[suspects])
            fooled = self.victim.misclassifies(candidates, self._y[suspects])
            self._point[suspects] = candidates
            self._done[suspects] = fooled
            # A rejected candidate is replaced by the next one, whatever its margin.
            self._lowest[suspects] = torch.minimum(self._lowest[suspects], self._margin[suspects])
            self._margin[suspects] = torch.where(fooled, self._margin[suspects], torch.inf)
        dropped = self._done if finished is None else self._done | finished
        if int(dropped.sum()) < min(len(dropped), max(1, math.ceil(self.DROP * len(dropped)))):
            return None
        self._result.x_adv[self._images] = self._point
        self._result.fooled[self._images] = self._done
        self._result.margin[self._images] = torch.minimum(self._margin, self._lowest)
        kept = (~dropped).nonzero()[:, 0]
        for name in ("_images", "_x", "_y", "_point", "_margin", "_lowest", "_done"):
            setattr(self, name, getattr(self, name)[kept])
        return (kept[:, None] * self.variants + torch.arange(self.variants, device=kept.device)).flatten()

    def finish(self) -> SearchResult:
        """Verify the remaining candidates. Images that resist keep their best candidate, projected."""
        self.verify(finished=torch.ones_like(self._done))
        result = self._result
        robust = (~result.fooled).nonzero()[:, 0]
        result.x_adv[robust] = self.threat.project(result.x_adv[robust], self._clean[robust])
        return result


def select_rows(state: S, rows: Tensor) -> S:
    """Select rows of a tensor, of noise, or of each field of a dataclass of these."""
    value: Any = state
    if isinstance(value, Tensor):
        return cast(S, value[rows])
    if isinstance(value, ImageNoise):
        return cast(S, value.select(rows))
    fields = {field.name: select_rows(getattr(value, field.name), rows) for field in dataclasses.fields(value)}
    return dataclasses.replace(value, **fields)


def ranked_targets(logits: Tensor, y: Tensor, count: int) -> Tensor:
    """The ``count`` most likely classes other than the label, ``(N, count)``; fewer if there are fewer classes."""
    others = logits.scatter(1, y[:, None], -torch.inf)
    return others.topk(min(count, logits.shape[1] - 1), dim=1).indices


@dataclass(frozen=True, kw_only=True)
class Search(Attack):
    """An attack that keeps the best candidate of each image and stops for an image once the model misclassifies it."""

    @abstractmethod
    def search(self, victim: VictimModel, x: Tensor, y: Tensor, noise: ImageNoise) -> SearchResult:
        """Search adversarial images inside the threat model."""

    @abstractmethod
    def variants(self, classes: int) -> int:
        """Number of rows that an image takes in the batches of the search."""

    @abstractmethod
    def forwards(self, classes: int) -> int:
        """Approximate number of forwards for an image that resists."""

    def guide(self, predict: Predict, x: Tensor) -> Predict:
        """Return the forward that guides the search; ``predict`` decides."""
        return predict

    def perturb(self, predict: Predict, x: Tensor, y: Tensor, noise: ImageNoise) -> Tensor:
        predict = never_alone(predict) if self.statistics == "batch_frozen" else predict
        return self.search(VictimModel(predict, search_predict=self.guide(predict, x)), x, y, noise).x_adv
