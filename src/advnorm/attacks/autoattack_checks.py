"""Reasons to doubt a number of AutoAttack: the authors' checks of the model before it, and of the answer after it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FrameType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from advnorm.attacks.autoattack_record import Flag
from advnorm.attacks.losses import least_classes
from advnorm.attacks.search import Search, Victim

if TYPE_CHECKING:
    from advnorm.attacks.autoattack import AutoAttack


def flags_before(
    victim: Victim, attack: AutoAttack, stages: Mapping[str, Search], x: Tensor, logits: Tensor
) -> list[Flag]:
    """The authors' checks of the model before the attack, and whether images influence each other."""
    flags = []
    logits = _finite(logits)
    again = [_finite(victim.strict(x)) for _ in range(4)]
    scale = logits.norm(dim=1).clamp_min(1e-10)
    randomized = max(((other - logits).norm(dim=1) / scale).max().item() for other in again) > 1e-4
    if randomized and attack.version != "rand":
        flags.append(Flag("randomized", "two forwards of the same images differ; use version='rand'"))
    if not randomized and attack.version == "rand" and attack.samples > 1:
        message = f"{attack.samples} samples per gradient on a model that is not randomized; use version='standard'"
        flags.append(Flag("deterministic", message))
    if not randomized and len(x) > 1:
        alone = _finite(torch.cat([victim.strict(image) for image in x[:4].split(1)]))
        if (((alone - logits[:4]).norm(dim=1)) / scale[:4]).max().item() > 1e-3:
            message = (
                "the output for an image depends on the other images of its batch (batch statistics at test time?), "
                "so that the verdict does too; use statistics='running', or fix a branch"
            )
            flags.append(Flag("batch-dependent", message))
    if logits.min() > -1e-5 and logits.max() < 1 + 1e-5 and ((logits.sum(1) - 1).abs() < 1e-5).all():
        message = "the outputs look like probabilities, whose gradients vanish; return the logits, without softmax"
        flags.append(Flag("probabilities", message))
    if _differentiates(victim, x):
        message = "the forward computes gradients itself (a dynamic defence), against which AutoAttack may not suffice"
        flags.append(Flag("dynamic", message))
    flags += _flags_of_classes(stages, logits.shape[1])
    return flags


def _finite(logits: Tensor) -> Tensor:
    """To be compared: a class without a logit (-inf) is the same in both."""
    return logits.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def _flags_of_classes(stages: Mapping[str, Search], classes: int) -> list[Flag]:
    problems = []
    for name, search in stages.items():
        targets = getattr(search, "targets", 0)
        if targets > classes - 1:
            problems.append(f"{name} had {classes - 1} target classes in place of {targets}")
        if classes < least_classes(getattr(search, "loss", ""), targeted=bool(targets)):
            problems.append(f"{name} used the margin in place of the DLR loss")
    message = f"with {classes} classes, " + "; ".join(problems)
    return [Flag("few-classes", message)] if problems else []


def _differentiates(victim: Victim, x: Tensor) -> bool:
    """Whether the forward calls autograd: seen by a profiler for the length of one forward."""
    entries = {function.__code__ for function in (torch.autograd.grad, torch.autograd.backward)}
    called = False

    def watch(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal called
        called = called or (event == "call" and frame.f_code in entries)

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        victim.strict(x)
    finally:
        sys.setprofile(before)
    return called


def flags_after(names: tuple[str, ...], fooled_by: Tensor, no_gradient: Mapping[str, int]) -> list[Flag]:
    """Signs of masked gradients: where attacks met none, and where Square does better than those before it."""
    flags = []
    without = ", ".join(f"{name} on {count} images" for name, count in no_gradient.items() if count)
    if without:
        message = (
            f"zero gradients met {without}, where attacks by gradients cannot be trusted; "
            "look for saturation, rounding or a huge scale of the logits"
        )
        flags.append(Flag("zero-gradients", message))
    return flags + square_flags(names, fooled_by, len(fooled_by))


def square_flags(names: tuple[str, ...], fooled_by: Tensor, images: int) -> list[Flag]:
    """Whether Square, after attacks by gradients, fools more of so many images than chance explains."""
    if "square" not in names[2:]:
        return []
    lowered = int((fooled_by == names.index("square")).sum()) / images
    message = (
        f"Square lowered the robust accuracy by another {100 * lowered:.2f} points, "
        "which points to masked gradients; try more queries and restarts, or an adaptive attack"
    )
    return [Flag("square-better", message)] if lowered > 0.002 else []
