"""What turns gradients into steps: parameter groups, the optimizer, and the learning rate of every step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from advnorm._core.errors import ConfigError, did_you_mean, raise_all
from advnorm.norms.layers import norm_parameters

OPTIMIZERS = ("sgd", "adam", "adagrad", "rmsprop")
SCHEDULES = ("step", "cosine", "one_cycle", "constant")

# One-cycle starts from lr / 25 and ends with a ten-thousandth of that: the defaults of torch.
_START, _END = 25.0, 1e4


def only_norms(model: nn.Module) -> None:
    """Freeze everything but the norm parameters: fine-tuning of paper E, sec. 4.4. Statistics stay as they are."""
    norms = set(norm_parameters(model))
    if not any(parameter.requires_grad for parameter in norms):
        raise ConfigError(
            f"{type(model).__name__} has no norm parameters to train; use train_only='all', or a model whose norms "
            "have affine parameters that are not frozen"
        )
    for parameter in model.parameters():
        if parameter not in norms:
            parameter.requires_grad_(False)


def parameter_groups(model: nn.Module, *, weight_decay: float, norm_weight_decay: bool) -> list[dict[str, Any]]:
    """The trainable parameters, each once and in the model's order; norm parameters apart where they do not decay.

    Biases of other layers decay like their weights.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise ConfigError(f"{type(model).__name__} has no trainable parameters; set requires_grad on some of them")
    if norm_weight_decay:
        return [{"params": trainable, "weight_decay": weight_decay}]
    norms = set(norm_parameters(model))
    groups = [
        {"params": [value for value in trainable if value not in norms], "weight_decay": weight_decay},
        {"params": [value for value in trainable if value in norms], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def make_optimizer(
    model: nn.Module,
    *,
    optimizer: str,
    lr: float,
    momentum: float = 0.9,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    norm_weight_decay: bool = True,
) -> torch.optim.Optimizer:
    """SGD, Adam (``momentum`` is its beta1), Adagrad (which has none) or RMSProp over :func:`parameter_groups`.

    RMSProp has decay 0.9 and ε = 1, as the original ALP has it (paper E, table 3), in torch's form with ε outside of
    the root and s = 0 at first: ``s = 0.9 s + 0.1 g²; b = momentum b + g / (√s + 1); w = w - lr b``. Weight decay adds
    ``weight_decay * w`` to the gradient in all four.
    """
    problems = []
    if optimizer not in OPTIMIZERS:
        problems.append(f"unknown optimizer {optimizer!r}{did_you_mean(optimizer, OPTIMIZERS)}")
    if not lr >= 0:
        problems.append(f"lr must be at least 0, got {lr}")
    if not 0 <= momentum < 1:
        problems.append(f"momentum must be at least 0 and below 1, got {momentum}")
    if not weight_decay >= 0:
        problems.append(f"weight_decay must be at least 0, got {weight_decay}")
    if nesterov and (optimizer != "sgd" or momentum == 0):
        problems.append("nesterov needs optimizer='sgd' and a momentum above 0")
    raise_all(problems, "bad optimizer")
    groups = parameter_groups(model, weight_decay=weight_decay, norm_weight_decay=norm_weight_decay)
    # None leaves the choice to torch. Adagrad: not every torch >= 2.11 has a fused kernel for CUDA; RMSProp: none has.
    fused = True if all(p.is_cuda and p.is_floating_point() for g in groups for p in g["params"]) else None
    if optimizer == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=nesterov, fused=fused)
    if optimizer == "adam":
        return torch.optim.Adam(groups, lr=lr, betas=(momentum, 0.999), fused=fused)
    if optimizer == "rmsprop":
        return torch.optim.RMSprop(groups, lr=lr, alpha=0.9, eps=1.0, momentum=momentum)
    return torch.optim.Adagrad(groups, lr=lr)


def learning_rate(
    step: int,
    *,
    schedule: str,
    lr: float,
    epochs: float,
    steps_per_epoch: int,
    milestones: Sequence[float] = (),
    gamma: float = 0.1,
    warmup_epochs: float = 0.0,
    peak_share: float = 0.3,
) -> float:
    """The rate of step 0, 1, …: a function of the step alone, so that a resumed run continues exactly.

    With T steps in all, of which W warm up:

    - step: lr · gamma^(number of milestones, in epochs, that are reached)
    - cosine: lr · (1 + cos(π (step - W) / (T - W))) / 2, which would be 0 at step T
    - one_cycle: cosine from lr/25 to lr at step ``peak_share`` T - 1, then cosine to lr/250000 at step T - 1, like
      torch's ``OneCycleLR``; it rises by itself and takes no warm-up
    - constant: lr

    The first W steps have the factor (step + 1) / W; cosine decays from there on.
    """
    total, warmup = round(epochs * steps_per_epoch), round(warmup_epochs * steps_per_epoch)
    problems = []
    if schedule not in SCHEDULES:
        problems.append(f"unknown schedule {schedule!r}{did_you_mean(schedule, SCHEDULES)}")
    if not 0 <= step < total:
        problems.append(f"step must be 0 to {total - 1} ({epochs} epochs of {steps_per_epoch} steps), got {step}")
    if not 0 <= warmup_epochs <= epochs:
        problems.append(f"warmup_epochs must be 0 to {epochs}, the epochs of the run, got {warmup_epochs}")
    if schedule == "one_cycle":
        if warmup_epochs:
            problems.append("one_cycle warms up by itself; set warmup_epochs=0 and peak_share instead")
        if not 0 <= peak_share <= 1:
            problems.append(f"peak_share must be 0 to 1, got {peak_share}")
    raise_all(problems, "bad schedule")
    if schedule == "one_cycle":
        return _one_cycle(step, lr, total, peak_share)
    if step < warmup:
        rate = lr * (step + 1) / warmup
    elif schedule == "cosine":
        rate = lr * (1 + math.cos(math.pi * (step - warmup) / (total - warmup))) / 2
    else:
        rate = lr
    if schedule == "step":
        # A quotient, not a product: k / n rounds to the very float that a user writes for it.
        rate *= gamma ** sum(milestone <= step / steps_per_epoch for milestone in milestones)
    return rate


def _one_cycle(step: int, lr: float, total: int, peak_share: float) -> float:
    """Smith & Topin 2018 with two cosine phases, whose bounds are those of torch: a step early each."""
    peak, end = peak_share * total - 1, total - 1
    if step <= peak:
        return _cosine(lr / _START, lr, step / peak if peak else 1.0)
    return _cosine(lr, lr / _START / _END, (step - peak) / (end - peak))


def _cosine(start: float, end: float, share: float) -> float:
    return end + (start - end) / 2 * (1 + math.cos(math.pi * share))
