"""Auto-PGD: gradient ascent that adapts its own step size.

Sources: Croce & Hein 2020, "Reliable evaluation of adversarial robustness with an ensemble of diverse parameter-free
attacks" (algorithm 1, Linf and L2); Croce & Hein 2021, "Mind the box: l1-APGD for sparse adversarial attacks" (L1).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import torch
from torch import Tensor

from advnorm._core.seeding import ImageNoise
from advnorm._core.settings import Setting
from advnorm.attacks.base import Restarts, Steps
from advnorm.attacks.geometry import fast_projection, threat_norm
from advnorm.attacks.losses import LOSSES, label_margin, minimum_classes
from advnorm.attacks.model_access import Predict
from advnorm.attacks.names import NameOption, count_options, register_attack
from advnorm.attacks.search import CandidateGrid, Search, SearchResult, ranked_targets, select_rows
from advnorm.attacks.straight_through import StraightPredict
from advnorm.attacks.victim import VictimModel
from advnorm.threat import ThreatModel, per_image

#: Logits, labels and targets to the values that are maximized, one per row.
Value = Callable[[Tensor, Tensor, Tensor], Tensor]
#: Steps between two verifications of the candidates.
VERIFY_EVERY = 5
#: APGD also verifies after its first steps, in which it fools most images. It does not for randomized models, because
#: each verification is another draw.
VERIFY_FIRST = 3
STRAIGHT = NameOption(setting="straight", value=True)


@dataclass(frozen=True, kw_only=True)
class APGD(Search):
    """Gradient ascent with momentum and a step size that halves at checkpoints without enough progress.

    L1: sparse steps whose sparsity adapts, in balls of ``3·eps``, ``2·eps`` and ``eps`` for 30, 30, 40 % of the steps.
    """

    steps: Steps = 100
    loss: Annotated[Literal["ce", "cw", "dlr"], Setting("`ce`, `cw` margin or `dlr`.")] = "ce"
    targets: Annotated[int, Setting("Number of most likely other classes to target; 0: untargeted.", "[0, inf)")] = 0
    restarts: Restarts = 1
    samples: Annotated[int, Setting("Forwards per gradient, for randomized models.", "[1, inf)")] = 1
    rho: Annotated[float, Setting("Share of rising steps below which the step size halves.", "(0, 1)")] = 0.75
    smoothing: Annotated[
        float, Setting("Gradients are means over points within this share of eps; 0: at the point.", "[0, 1]")
    ] = 0.0
    patient: Annotated[bool, Setting("Continue after a success, for the worst case of a randomized model.")] = False
    straight: Annotated[bool, Setting("Replace functions without a gradient in the backward pass (BPDA).")] = False

    def variants(self, classes: int) -> int:
        return self.restarts * max(1, min(self.targets, classes - 1))

    def forwards(self, classes: int) -> int:
        return (self.steps + 1) * self.samples * self.variants(classes)

    def guide(self, predict: Predict, x: Tensor) -> Predict:
        return StraightPredict(predict, x) if self.straight else predict

    def search(
        self, victim: VictimModel, x: Tensor, y: Tensor, noise: ImageNoise, *, start: Tensor | None = None
    ) -> SearchResult:
        """Search from random points, or from ``start``, whose most likely classes are then the targets.

        L1 uses ``start`` for the targets only, because its search begins outside the ball.
        """
        clean = victim.strict_logits(x)
        classes = clean.shape[1]
        grid = CandidateGrid(victim, self.threat, x, y, self.variants(classes), patient=self.patient)
        likely = clean if start is None else victim.strict_logits(start)
        target = ranked_targets(likely, y, max(1, self.targets)).repeat_interleave(self.restarts, 1).flatten()
        rows = _Rows(x=grid.to_rows(x), y=grid.to_rows(y), target=target, noise=grid.row_noise(noise))
        first = rows.x if start is None else grid.to_rows(start)
        grid.offer(rows.x, label_margin(grid.to_rows(clean), rows.y))
        kept = grid.verify()
        if kept is not None:
            rows, first = select_rows(rows, kept), select_rows(first, kept)
        if len(rows.y):
            measure = partial(self._gradient, victim=victim, value=self._value(classes))
            early = VERIFY_FIRST if self.samples == 1 else 0
            ascend = partial(_ascend, measure=measure, victim=victim, grid=grid, early=early)
            if self.threat.norm == "L1":
                self._sparse(rows, ascend)
            else:
                first = on_sphere(self.threat, rows.x, rows.noise) if start is None else first
                ascend(rows, first, rule=_Dense(self.threat, self.steps, self.rho))
        return grid.finish()

    def _gradient(
        self, rows: _Rows, point: Tensor, step: int, *, victim: VictimModel, value: Value
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, values and gradients at the points; with smoothing, the mean gradient of points around them."""

        def objective(logits: Tensor, part: slice) -> Tensor:
            return value(logits, rows.y[part], rows.target[part])

        if not self.smoothing:
            return victim.gradient(point, objective, self.samples)
        total: list[Tensor] = []
        for sample in range(self.samples):
            around = on_sphere(self.threat, point, rows.noise.fold("smoothing").fold(step).fold(sample))
            found = victim.gradient(point + self.smoothing * (around - point), objective)[1:]
            total = [a + b for a, b in zip(total, found)] if total else list(found)
        values, grads = (part / self.samples for part in total)
        return victim.search_logits(point), values, grads

    def _sparse(self, rows: _Rows, ascend: Callable[..., Tensor]) -> None:
        early = math.ceil(0.3 * self.steps)
        point = rows.x + rows.noise.normal(rows.x.shape[1:], "start")
        for factor, steps in ((3, early), (2, early), (1, max(self.steps - 2 * early, 1))):
            rule = _Sparse(ThreatModel(norm="L1", eps=factor * self.threat.eps), steps)
            point = ascend(rows, fast_projection(rule.threat, rows.x)(point), rule=rule, counts=factor == 1)

    def _value(self, classes: int) -> Value:
        few = classes < minimum_classes(self.loss, targeted=bool(self.targets))
        loss = LOSSES["cw" if few else "published_ce" if self.loss == "ce" else self.loss]
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
class _Ascent:
    """The state of APGD for each row."""

    rows: _Rows
    point: Tensor
    gradient: Tensor
    value: Tensor
    previous: Tensor  # the point before
    best: Tensor  # the point of the highest value so far, with its gradient
    best_gradient: Tensor
    best_value: Tensor
    step: Tensor
    # Linf and L2: increases of the value since the last checkpoint, best value there, whether the step was halved there
    rises: Tensor
    checked_value: Tensor
    halved: Tensor
    # L1: number of coordinates in which the best point differed from the image at the last checkpoint
    moved: Tensor

    def back_to_best(self, where: Tensor) -> None:
        """Continue from the best point in some of the rows."""
        wide = per_image(where, self.point)
        self.point = torch.where(wide, self.best, self.point)
        self.gradient = torch.where(wide, self.best_gradient, self.gradient)


def _ascend(
    rows: _Rows,
    start: Tensor,
    *,
    measure: Callable[[_Rows, Tensor, int], tuple[Tensor, Tensor, Tensor]],
    victim: VictimModel,
    grid: CandidateGrid,
    rule: _Dense | _Sparse,
    counts: bool = True,
    early: int = 0,
) -> Tensor:
    """Maximize the values by ``rule`` and return the best points. If ``counts``, offer every point to the grid."""

    def gradient(rows: _Rows, point: Tensor, step: int) -> tuple[Tensor, Tensor]:
        logits, values, grads = measure(rows, point, step)
        if counts:
            grid.offer(point, victim.search_margin(logits, rows.y))
        return values, grads

    values, grads = gradient(rows, start, 0)
    if counts:
        grid.record_zero_gradients(grads)
    c = _Ascent(
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
    project, checked = fast_projection(rule.threat, rows.x), 0
    for step in range(1, rule.steps + 1):
        point = project(rule.ahead(c, project, first=step == 1))
        c.previous, c.point = c.point, point
        values, c.gradient = gradient(c.rows, point, step)
        c.rises += values > c.value
        better = values > c.best_value
        c.best = torch.where(per_image(better, point), point, c.best)
        c.best_gradient = torch.where(per_image(better, point), c.gradient, c.best_gradient)
        c.best_value = torch.where(better, values, c.best_value)
        c.value = values
        if step in rule.checkpoints:
            rule.check(c, step - checked)
            checked = step
        if counts and (step <= early or step % VERIFY_EVERY == 0) and step < rule.steps:
            kept = grid.verify()
            if kept is not None:
                if not len(kept):
                    break
                c = select_rows(c, kept)
                project = fast_projection(rule.threat, c.rows.x)
    return c.best


class _Dense:
    """Linf and L2: algorithm 1 of Croce & Hein 2020, steps of steepest ascent."""

    def __init__(self, threat: ThreatModel, steps: int, rho: float) -> None:
        self.threat, self.steps, self.rho, self.first_step = threat, steps, rho, 2 * threat.eps
        # w_j = ceil(p_j · steps) with p_{j+1} = p_j + max(p_j - p_{j-1} - 0.03, 0.06), p_1 = 0.22, in whole steps.
        length, shrink, least = (max(int(part * steps), 1) for part in (0.22, 0.03, 0.06))
        self.checkpoints, at = set[int](), length
        while at <= steps:
            self.checkpoints.add(at)
            length = max(length - shrink, least)
            at += length

    def ahead(self, c: _Ascent, project: Callable[[Tensor], Tensor], *, first: bool) -> Tensor:
        """``x + α (P(x + η s) - x) + (1 - α) (x - x_previous)`` with α = 0.75, and 1 in the first step."""
        target = project(c.point + per_image(c.step, c.point) * self.threat.steepest(c.gradient))
        if first:
            return target
        return c.point + 0.75 * (target - c.point) + 0.25 * (c.point - c.previous)

    def check(self, c: _Ascent, since: int) -> None:
        """Halve the step and return to the best point where the values rose too rarely or nothing changed."""
        halve = (c.rises <= self.rho * since) | (~c.halved & (c.checked_value >= c.best_value))
        c.halved, c.checked_value, c.rises = halve, c.best_value, torch.zeros_like(c.rises)
        c.step = torch.where(halve, c.step / 2, c.step)
        c.back_to_best(halve)


class _Sparse:
    """L1: Croce & Hein 2021, section 4: few coordinates per step, and fewer while the best point gets sparser."""

    def __init__(self, threat: ThreatModel, steps: int) -> None:
        self.threat, self.steps, self.first_step = threat, steps, threat.eps
        self.checkpoints = range(0, steps + 1, max(int(0.04 * steps), 1))

    def ahead(self, c: _Ascent, project: Callable[[Tensor], Tensor], *, first: bool) -> Tensor:
        """The sign of the largest gradients, of L1 length η."""
        size = c.gradient.flatten(1).abs()
        count = (c.moved / 1.5).ceil().long().clamp(1, size.shape[1])
        threshold = size.sort(1, descending=True).values.gather(1, count[:, None] - 1)
        signs = c.gradient.flatten(1).sign() * (size >= threshold)
        length = c.step / signs.abs().sum(1).clamp_min(1)
        return c.point + (length[:, None] * signs).view(c.point.shape)

    def check(self, c: _Ascent, since: int) -> None:
        eps = self.threat.eps
        moved = (c.best != c.rows.x).flatten(1).sum(1)
        sparser = moved < 0.95 * c.moved
        c.step = torch.where(sparser, eps, (c.step / 1.5).clamp_min(eps / 10))
        c.moved = moved
        c.back_to_best(sparser)


def on_sphere(threat: ThreatModel, x: Tensor, noise: ImageNoise) -> Tensor:
    """A random direction of length eps (uniform for Linf, otherwise Gaussian), clipped to the box."""
    shape = x.shape[1:]
    direction = 2 * noise.uniform(shape, "start") - 1 if threat.norm == "Linf" else noise.normal(shape, "start")
    length = threat_norm(direction.flatten(1), threat).clamp_min(1e-12)
    return threat.project(x + threat.eps * direction / per_image(length, x), x)


for _name, _settings, _summary in (
    ("apgd-ce", {"loss": "ce"}, "Auto-PGD on the cross-entropy"),
    ("apgd-dlr", {"loss": "dlr"}, "Auto-PGD on the DLR loss"),
    ("apgd-t", {"loss": "dlr", "targets": 9}, "Auto-PGD on the DLR loss towards the 9 most likely other classes"),
    ("apgd-margin-t", {"loss": "cw", "targets": 9}, "Auto-PGD on the margin towards the 9 most likely other classes"),
    ("apgd-eot", {"loss": "cw", "samples": 20, "patient": True}, "Auto-PGD on the mean margin of a randomized model"),
    ("apgd-smooth", {"loss": "cw", "samples": 10, "smoothing": 0.2}, "Auto-PGD on gradients averaged around a point"),
):
    _options = {**count_options("steps", "restarts", "samples", "targets"), "bpda": STRAIGHT}
    register_attack(_name, settings=_settings, options=_options, summary=_summary, paper="A, C")(APGD)
register_attack(
    "apgd-bpda",
    settings={"loss": "cw", "straight": True},
    options=count_options("steps", "restarts", "samples", "targets"),
    summary="Auto-PGD on the margin with BPDA",
)(APGD)
