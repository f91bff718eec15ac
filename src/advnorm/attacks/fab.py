"""FAB: the smallest perturbation that changes the class, by steps onto the linearized decision boundary.

Source: Croce & Hein 2020, "Minimally distorted adversarial examples with a fast adaptive boundary attack".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from advnorm._core.seeding import ImageNoise
from advnorm._core.settings import Setting
from advnorm.attacks.apgd import VERIFY_EVERY, on_sphere
from advnorm.attacks.base import Restarts, Steps
from advnorm.attacks.geometry import threat_norm
from advnorm.attacks.losses import label_margin, misclassified
from advnorm.attacks.names import NameOption, count_options, register_attack
from advnorm.attacks.search import CandidateGrid, Search, SearchResult, ranked_targets, select_rows
from advnorm.attacks.victim import VictimModel
from advnorm.threat import ThreatModel, per_image


@dataclass(frozen=True, kw_only=True)
class FAB(Search):
    """``x ← (1 - α) (x + η d) + α (x_0 + η d_0)``, and back by ``β`` where it is adversarial (algorithm 1).

    ``d`` and ``d_0`` are the shortest steps from the point and from the image to the linearized boundary within the
    box; ``α = min(|d| / (|d| + |d_0|), alpha_max)``. A success is an adversarial point within eps. Without targets each
    step takes one backward pass per class. The first restart starts at the image, the others at random within eps / 2.
    ``minimal`` returns the nearest adversarial image that was found within eps: at a large eps, the distance.
    """

    steps: Steps = 100
    targets: Annotated[
        int, Setting("Number of most likely other classes to target; 0: the nearest boundary of all.", "[0, inf)")
    ] = 9
    restarts: Restarts = 1
    alpha_max: Annotated[float, Setting("Largest weight of the step from the image.", "[0, 1]")] = 0.1
    eta: Annotated[float, Setting("Overshoot across the boundary.", "[1, 2]")] = 1.05
    beta: Annotated[float, Setting("Share of the distance to the image after a success.", "[0, 1]")] = 0.9
    minimal: Annotated[bool, Setting("Continue after a success, to the nearest adversarial image.")] = False

    def variants(self, classes: int) -> int:
        return self.restarts * max(1, min(self.targets, classes - 1))

    def forwards(self, classes: int) -> int:
        return 2 * self.steps * self.variants(classes)

    def search(
        self, victim: VictimModel, x: Tensor, y: Tensor, noise: ImageNoise, *, start: Tensor | None = None
    ) -> SearchResult:
        """``start``: start of the first restart instead of the image; the targets are the most likely classes there."""
        clean = victim.strict_logits(x)
        grid = CandidateGrid(victim, self.threat, x, y, self.variants(clean.shape[1]))
        likely = clean if start is None else victim.strict_logits(start)
        target = ranked_targets(likely, y, max(1, self.targets)).repeat_interleave(self.restarts, 1).flatten()
        origin = grid.to_rows(x)
        far = grid.to_rows(torch.where(clean.argmax(1) != y, 0.0, torch.inf))  # a misclassified image has distance 0
        first = origin if start is None else grid.to_rows(start)
        state = _State(x=origin, y=grid.to_rows(y), target=target, point=first, distance=far, nearest=origin)
        if self.restarts > 1:
            later = (torch.arange(len(origin), device=x.device) % self.restarts) > 0
            halfway = origin + 0.5 * (on_sphere(self.threat, origin, grid.row_noise(noise)) - origin)
            state.point = torch.where(per_image(later, origin), halfway, first)
        if not self.minimal:
            grid.offer(origin, label_margin(grid.to_rows(clean), state.y))
            kept = grid.verify()
            state = state if kept is None else select_rows(state, kept)
        for step in range(1, self.steps + 1):
            if not len(state.y):
                break
            difference, normal = self._boundary(victim, state)
            if step == 1:
                grid.record_zero_gradients(normal)
            self._move(state, difference, normal)
            logits = victim.search_logits(state.point)
            within = threat_norm((state.point - state.x).flatten(1), self.threat)
            adversarial = misclassified(logits, state.y)
            closer = adversarial & (within < state.distance)
            state.distance = torch.where(closer, within, state.distance)
            if self.minimal:
                state.nearest = torch.where(per_image(closer, state.point), state.point, state.nearest)
            margin = victim.search_margin(logits, state.y)
            grid.offer(state.point, margin.masked_fill(within > self.threat.eps * (1 + 1e-6), torch.inf))
            back = state.x + self.beta * (state.point - state.x)
            state.point = torch.where(per_image(adversarial, state.point), back, state.point)
            if not self.minimal and step % VERIFY_EVERY == 0 and step < self.steps:
                kept = grid.verify()
                state = state if kept is None else select_rows(state, kept)
        found = grid.finish()
        return self._keep_nearest(found, state, victim, x, y) if self.minimal else found

    def _keep_nearest(
        self, found: SearchResult, state: _State, victim: VictimModel, x: Tensor, y: Tensor
    ) -> SearchResult:
        """Replace each image by the nearest one that a strict forward misclassifies, if that is within eps."""
        distance, variant = state.distance.view(len(x), -1).min(1)
        variants = state.distance.numel() // max(1, len(x))
        nearest = state.nearest[torch.arange(len(x), device=x.device) * variants + variant]
        fooled = distance.isfinite() & victim.misclassifies(nearest, y)
        found.distance = torch.where(fooled, self.threat.distance(nearest, x).to(distance.dtype), torch.inf)
        inside = found.distance <= self.threat.eps
        found.x_adv = torch.where(per_image(inside, x), nearest, found.x_adv)
        found.fooled = found.fooled | inside
        return found

    def _boundary(self, victim: VictimModel, state: _State) -> tuple[Tensor, Tensor]:
        """``z_t - z_y`` and its gradient, for the given target or for the class whose boundary is nearest."""
        if self.targets:

            def difference(logits: Tensor, part: slice) -> Tensor:
                own, other = (logits.gather(1, c[part, None])[:, 0] for c in (state.y, state.target))
                return other - own

            return victim.gradient(state.point, difference)[1:]
        logits, grads = victim.jacobian(state.point)
        rows = torch.arange(len(logits), device=logits.device)
        gap = logits - logits.gather(1, state.y[:, None])
        slope = grads - grads[rows, state.y][:, None]
        away = gap.abs() / threat_norm(slope.flatten(2), self.threat, dual=True).clamp_min(1e-12)
        nearest = away.nan_to_num(nan=torch.inf, posinf=torch.inf).scatter(1, state.y[:, None], torch.inf).argmin(1)
        return gap[rows, nearest], slope[rows, nearest]

    def _move(self, state: _State, difference: Tensor, normal: Tensor) -> None:
        """One step towards the boundary, biased towards the image: eq. 9 and 10 with the projections of section 3."""
        w = normal.flatten(1)
        # The linearized difference at the point and at the image; both are projected in one call.
        at_image = difference + (w * (state.x - state.point).flatten(1)).sum(1)
        points, values = torch.cat([state.point, state.x]).flatten(1), torch.cat([difference, at_image])
        d, d_image = onto_boundary(points, torch.cat([w, w]), values, self.threat).view(2, *state.x.shape)
        length, length_image = (threat_norm(v.flatten(1), self.threat).clamp_min(1e-8) for v in (d, d_image))
        alpha = per_image((length / (length + length_image)).clamp_max(self.alpha_max), state.x)
        ahead = (1 - alpha) * (state.point + self.eta * d) + alpha * (state.x + self.eta * d_image)
        # NaN from a difference or step beyond the range of float32: the pixel stays where it is.
        state.point = torch.where(ahead.isnan(), state.point, ahead.clamp(0, 1))


@dataclass
class _State:
    x: Tensor
    y: Tensor
    target: Tensor
    point: Tensor
    distance: Tensor  # of the nearest adversarial point
    nearest: Tensor


def onto_boundary(points: Tensor, w: Tensor, value: Tensor, threat: ThreatModel) -> Tensor:
    """The shortest ``d`` with ``w·d = -value`` and ``0 <= point + d <= 1``; the farthest corner if no point does.

    Each coordinate moves against ``sign(value)·w`` by some ``m_i`` within its ``room_i``, so that ``Σ|w_i| m_i =
    |value|``. Shortest in Linf: ``m_i = min(λ, room_i)``; in L2: ``min(λ |w_i|, room_i)``; in L1 the coordinates with
    the largest ``|w_i|`` move first, as far as possible.
    """
    down = w * value.sign()[:, None]
    weight, need = w.abs(), value.abs()[:, None]
    room = torch.where(down > 0, points, 1 - points).clamp_min(0)
    if threat.norm == "L1":
        order = weight.argsort(1, descending=True)
        gain = (weight * room).gather(1, order)
        before = gain.cumsum(1) - gain
        share = ((need - before) / gain.clamp_min(1e-30)).clamp(0, 1)
        moved = torch.zeros_like(room).scatter(1, order, share) * room
    elif threat.norm == "L2":
        moved = torch.minimum(_level(weight**2, room / weight.clamp_min(1e-30), need) * weight, room)
    else:
        moved = torch.minimum(_level(weight, room, need), room)
    return -down.sign() * moved


def _level(slope: Tensor, limit: Tensor, need: Tensor) -> Tensor:
    """The least λ with ``Σ slope_i min(λ, limit_i) >= need``, per row; 1e30 if the limits are too small.

    The sum is concave and piecewise linear in λ, so Newton's method from 0 never overshoots and terminates. The error
    after a few steps is far below FAB's overshoot.
    """
    cap = slope * limit
    level, total = torch.zeros_like(need), cap.sum(1, keepdim=True)
    free = torch.empty_like(slope)
    check_every = 2 if need.is_cuda else 1  # a check synchronizes the device
    for turn in range(1, 13):
        torch.gt(limit, level, out=free)  # as numbers: boolean masks are slow
        left = torch.linalg.vecdot(slope, free)[:, None]
        rest = need - total + torch.linalg.vecdot(cap, free)[:, None]
        before, level = level, torch.maximum(level, torch.where(left > 0, rest / left, 1e30))
        if turn % check_every == 0 and torch.equal(before, level):
            break
    return level


for _name, _settings, _summary in (
    ("fab", {"targets": 0}, "the nearest boundary of all classes"),
    ("fab-t", {}, "the boundary to each of the 9 most likely other classes"),
):
    _options = {**count_options("steps", "restarts"), "minimal": NameOption(setting="minimal", value=True)}
    _options |= count_options("targets") if _name == "fab-t" else {}
    register_attack(_name, settings=_settings, options=_options, summary=_summary, paper="A, C")(FAB)
