"""Learning rates by step."""

from __future__ import annotations

import math

from advnorm.config.fields import TrainingSettings

# One-cycle starts from lr / 25 and ends with a ten-thousandth of that: the defaults of torch.
_START, _END = 25.0, 1e4


def learning_rate(settings: TrainingSettings, step: int, steps_per_epoch: int) -> float:
    """The rate of step 0, 1, …: a function of the step alone, so that a resumed run continues exactly.

    With T steps in all, of which W warm up:

    - step: lr · gamma^(number of milestones, in epochs, that are reached)
    - cosine: lr · (1 + cos(π (step - W) / (T - W))) / 2, which would be 0 at step T
    - one_cycle: cosine from lr/25 to lr at step ``peak_share`` T - 1, then cosine to lr/250000 at step T - 1, like
      torch's ``OneCycleLR``; it has its own warm-up
    - constant: lr

    The first W steps have the factor (step + 1) / W; cosine decays from there on.
    """
    rate, total = settings.lr, settings.epochs * steps_per_epoch
    warmup = round(settings.warmup_epochs * steps_per_epoch)
    if settings.schedule == "one_cycle":
        return _one_cycle(step, rate, total, settings.peak_share)
    if step < warmup:
        rate = rate * (step + 1) / warmup
    elif settings.schedule == "cosine":
        rate = rate * (1 + math.cos(math.pi * (step - warmup) / (total - warmup))) / 2
    if settings.schedule == "step":
        # A quotient, not a product: k / n rounds to the very float that a user writes for it.
        rate *= settings.gamma ** sum(milestone <= step / steps_per_epoch for milestone in settings.milestones)
    return rate


def _one_cycle(step: int, lr: float, total: int, peak_share: float) -> float:
    """Smith & Topin 2018 with two cosine phases; like in torch, each ends one step early."""
    peak, end = peak_share * total - 1, total - 1
    if step <= peak:
        return _cosine(lr / _START, lr, step / peak if peak else 1.0)
    return _cosine(lr, lr / _START / _END, (step - peak) / (end - peak))


def _cosine(start: float, end: float, share: float) -> float:
    return end + (start - end) / 2 * (1 + math.cos(math.pi * share))
