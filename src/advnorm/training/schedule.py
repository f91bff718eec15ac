"""Learning rates by step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from advnorm._core.errors import Problem, raise_problems, unknown_name

SCHEDULES = ("step", "cosine", "one_cycle", "constant")

# One-cycle starts from lr / 25 and ends with a ten-thousandth of that: the defaults of torch.
_START, _END = 25.0, 1e4


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The learning rate as a function of the step alone, so that a resumed run continues exactly.

    With T steps in all, of which W warm up:

    - step: lr · gamma^(number of milestones, in epochs, that are reached)
    - cosine: lr · (1 + cos(π (step - W) / (T - W))) / 2, which would be 0 at step T
    - one_cycle: cosine from lr/25 to lr at step ``peak_share`` T - 1, then cosine to lr/250000 at step T - 1, like
      torch's ``OneCycleLR``; it has its own warm-up
    - constant: lr

    The first W steps have the factor (step + 1) / W; cosine decays from there on.
    """

    name: str
    lr: float
    epochs: float
    steps_per_epoch: int
    milestones: tuple[float, ...] = ()
    gamma: float = 0.1
    warmup_epochs: float = 0.0
    peak_share: float = 0.3

    def __post_init__(self) -> None:
        problems = []
        if self.name not in SCHEDULES:
            problems.append(unknown_name("schedule", self.name, SCHEDULES))
        if not 0 <= self.warmup_epochs <= self.epochs:
            message = f"{{field}} must be 0 to {self.epochs}, the epochs of the run"
            problems.append(
                Problem(code="out_of_range", message=message, field="warmup_epochs", got=self.warmup_epochs)
            )
        if self.name == "one_cycle" and self.warmup_epochs:
            message, hint = "one_cycle has its own warm-up", "set warmup_epochs=0 and use peak_share"
            problems.append(Problem(code="conflict", message=message, field="warmup_epochs", hint=hint))
        if self.name == "one_cycle" and not 0 <= self.peak_share <= 1:
            message = "{field} must be 0 to 1"
            problems.append(Problem(code="out_of_range", message=message, field="peak_share", got=self.peak_share))
        raise_problems(problems, "bad schedule")

    def learning_rate(self, step: int) -> float:
        """The rate of step 0, 1, …"""
        total = round(self.epochs * self.steps_per_epoch)
        warmup = round(self.warmup_epochs * self.steps_per_epoch)
        if self.name == "one_cycle":
            return _one_cycle(step, self.lr, total, self.peak_share)
        if step < warmup:
            rate = self.lr * (step + 1) / warmup
        elif self.name == "cosine":
            rate = self.lr * (1 + math.cos(math.pi * (step - warmup) / (total - warmup))) / 2
        else:
            rate = self.lr
        if self.name == "step":
            # A quotient, not a product: k / n rounds to the very float that a user writes for it.
            rate *= self.gamma ** sum(milestone <= step / self.steps_per_epoch for milestone in self.milestones)
        return rate


def _one_cycle(step: int, lr: float, total: int, peak_share: float) -> float:
    """Smith & Topin 2018 with two cosine phases; like in torch, each ends one step early."""
    peak, end = peak_share * total - 1, total - 1
    if step <= peak:
        return _cosine(lr / _START, lr, step / peak if peak else 1.0)
    return _cosine(lr, lr / _START / _END, (step - peak) / (end - peak))


def _cosine(start: float, end: float, share: float) -> float:
    return end + (start - end) / 2 * (1 + math.cos(math.pi * share))
