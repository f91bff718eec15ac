"""Optimizers and their parameter groups."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from advnorm._core.errors import ConfigError, Problem, raise_problems, unknown_name
from advnorm.norms.norm_layers import norm_parameters

OPTIMIZERS = ("sgd", "adam", "adagrad", "rmsprop")


def only_norms(model: nn.Module) -> None:
    """Freeze everything but the norm parameters (fine-tuning of paper E, sec. 4.4). Statistics are not frozen."""
    norms = set(norm_parameters(model))
    if not any(parameter.requires_grad for parameter in norms):
        raise ConfigError(
            "empty",
            f"{type(model).__name__} has no norm parameters to train",
            field="train_only",
            hint="use train_only='all', or a model whose norms have trainable affine parameters",
        )
    for parameter in model.parameters():
        if parameter not in norms:
            parameter.requires_grad_(False)


def parameter_groups(model: nn.Module, *, weight_decay: float, norm_weight_decay: bool) -> list[dict[str, Any]]:
    """The trainable parameters in the model's order; norm parameters have their own group if they do not decay.

    Biases of other layers decay like their weights.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise ConfigError(
            "empty", f"{type(model).__name__} has no trainable parameters", hint="set requires_grad on some of them"
        )
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
    """Make SGD, Adam (``momentum`` is its beta1), Adagrad (without momentum) or RMSProp over :func:`parameter_groups`.

    RMSProp has decay 0.9 and ε = 1 like the original ALP (paper E, table 3), in torch's form with ε outside of the root
    and s = 0 at first: ``s = 0.9 s + 0.1 g²; b = momentum b + g / (√s + 1); w = w - lr b``. Weight decay adds
    ``weight_decay * w`` to the gradient in all four.
    """
    problems = [] if optimizer in OPTIMIZERS else [unknown_name("optimizer", optimizer, OPTIMIZERS)]
    ranges = (
        ("lr", lr, lr >= 0, "at least 0"),
        ("momentum", momentum, 0 <= momentum < 1, "at least 0 and below 1"),
        ("weight_decay", weight_decay, weight_decay >= 0, "at least 0"),
    )
    problems += [
        Problem(code="out_of_range", message=f"{{field}} must be {allowed}", field=field, got=value)
        for field, value, good, allowed in ranges
        if not good
    ]
    if nesterov and (optimizer != "sgd" or momentum == 0):
        message = "{field} needs optimizer='sgd' and a momentum above 0"
        problems.append(Problem(code="conflict", message=message, field="nesterov"))
    raise_problems(problems, "bad optimizer")
    groups = parameter_groups(model, weight_decay=weight_decay, norm_weight_decay=norm_weight_decay)
    # None lets torch choose. Not every torch >= 2.11 has a fused CUDA kernel for Adagrad; none has one for RMSProp.
    fused = True if all(p.is_cuda and p.is_floating_point() for g in groups for p in g["params"]) else None
    if optimizer == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=nesterov, fused=fused)
    if optimizer == "adam":
        return torch.optim.Adam(groups, lr=lr, betas=(momentum, 0.999), fused=fused)
    if optimizer == "rmsprop":
        return torch.optim.RMSprop(groups, lr=lr, alpha=0.9, eps=1.0, momentum=momentum)
    return torch.optim.Adagrad(groups, lr=lr)
