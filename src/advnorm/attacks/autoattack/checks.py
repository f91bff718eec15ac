"""Warnings about the reliability of AutoAttack: the authors' checks of the model before and the result after it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FrameType

import torch
from torch import Tensor

from advnorm.attacks.autoattack.record import ReliabilityWarning
from advnorm.attacks.autoattack.settings import CascadeSettings
from advnorm.attacks.losses import minimum_classes
from advnorm.attacks.search import Search
from advnorm.attacks.victim import VictimModel


def warnings_before(
    victim: VictimModel, attack: CascadeSettings, stages: Mapping[str, Search], x: Tensor, logits: Tensor
) -> list[ReliabilityWarning]:
    """Check the model before the attack, as the authors do, and whether images of a batch influence each other."""
    warnings = []
    logits = _finite(logits)
    again = [_finite(victim.strict_logits(x)) for _ in range(4)]
    scale = logits.norm(dim=1).clamp_min(1e-10)
    randomized = max(((other - logits).norm(dim=1) / scale).max().item() for other in again) > 1e-4
    samples = attack.gradient_samples
    if randomized and samples is None:
        warnings.append(ReliabilityWarning("randomized", "two forwards of the same images differ; use version='rand'"))
    if not randomized and samples is not None and samples > 1:
        message = f"{samples} samples per gradient on a model that is not randomized; use version='standard'"
        warnings.append(ReliabilityWarning("deterministic", message))
    if not randomized and len(x) > 1:
        alone = _finite(torch.cat([victim.strict_logits(image) for image in x[:4].split(1)]))
        if (((alone - logits[:4]).norm(dim=1)) / scale[:4]).max().item() > 1e-3:
            message = "outputs depend on the other images of the batch; use statistics='running', or fix a branch"
            warnings.append(ReliabilityWarning("batch-dependent", message))
    if logits.min() > -1e-5 and logits.max() < 1 + 1e-5 and ((logits.sum(1) - 1).abs() < 1e-5).all():
        message = "the outputs look like probabilities, whose gradients vanish; return logits, without softmax"
        warnings.append(ReliabilityWarning("probabilities", message))
    if _differentiates(victim, x):
        message = "the forward computes gradients itself (a dynamic defence), against which AutoAttack may be too weak"
        warnings.append(ReliabilityWarning("dynamic", message))
    warnings += _class_warnings(stages, logits.shape[1])
    return warnings


def _finite(logits: Tensor) -> Tensor:
    """Replace infinite logits for a comparison: a class without a logit (-inf) is equal in both."""
    return logits.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def _class_warnings(stages: Mapping[str, Search], classes: int) -> list[ReliabilityWarning]:
    problems = []
    for name, search in stages.items():
        targets = getattr(search, "targets", 0)
        if targets > classes - 1:
            problems.append(f"{name} had {classes - 1} target classes instead of {targets}")
        if classes < minimum_classes(getattr(search, "loss", ""), targeted=bool(targets)):
            problems.append(f"{name} used the margin instead of the DLR loss")
    message = f"with {classes} classes, " + "; ".join(problems)
    return [ReliabilityWarning("few-classes", message)] if problems else []


def _differentiates(victim: VictimModel, x: Tensor) -> bool:
    """Whether the forward calls autograd, observed by a profile hook during one forward."""
    entries = {function.__code__ for function in (torch.autograd.grad, torch.autograd.backward)}
    called = False

    def watch(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal called
        called = called or (event == "call" and frame.f_code in entries)

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        victim.strict_logits(x)
    finally:
        sys.setprofile(before)
    return called


def warnings_after(
    names: tuple[str, ...], fooled_by: Tensor, no_gradient: Mapping[str, int]
) -> list[ReliabilityWarning]:
    """Signs of masked gradients: zero gradients, or a Square attack that beats the attacks before it."""
    warnings = []
    without = ", ".join(f"{name} on {count} images" for name, count in no_gradient.items() if count)
    if without:
        message = f"zero gradients: {without}; check for saturation, rounding or a huge scale of the logits"
        warnings.append(ReliabilityWarning("zero-gradients", message))
    return warnings + square_warnings(names, fooled_by, len(fooled_by))


def square_warnings(names: tuple[str, ...], fooled_by: Tensor, images: int) -> list[ReliabilityWarning]:
    """A warning if Square, after gradient attacks, fools more of ``images`` images than chance explains."""
    if "square" not in names[2:]:
        return []
    lowered = int((fooled_by == names.index("square")).sum()) / images
    message = (
        f"Square lowered the robust accuracy by another {100 * lowered:.2f} points, "
        "a sign of masked gradients; try more queries and restarts, or an adaptive attack"
    )
    return [ReliabilityWarning("square-better", message)] if lowered > 0.002 else []
