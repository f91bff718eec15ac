"""Optimizers and their parameter groups."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from advnorm._core.errors import ConfigError
from advnorm.config.fields import TrainingSettings
from advnorm.norms.norm_layers import norm_parameters
from advnorm.training.sharding import is_sharded


def only_norms(model: nn.Module) -> None:
    """Freeze everything but the norm parameters (fine-tuning of paper E, sec. 4.4). Statistics are not frozen."""
    norms = set(norm_parameters(model))
    if not any(parameter.requires_grad for parameter in norms):
        message, hint = f"{type(model).__name__} has no norm parameters to train", "use train_only='all'"
        raise ConfigError("empty", message, field="train_only", hint=hint)
    for parameter in model.parameters():
        if parameter not in norms:
            parameter.requires_grad_(False)


def parameter_groups(model: nn.Module, settings: TrainingSettings) -> list[dict[str, Any]]:
    """The trainable parameters in the model's order; norm parameters have their own group if they do not decay.

    Biases of other layers decay like their weights.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if settings.norm_weight_decay:
        return [{"params": trainable, "weight_decay": settings.weight_decay}]
    norms = set(norm_parameters(model))
    groups = [
        {"params": [value for value in trainable if value not in norms], "weight_decay": settings.weight_decay},
        {"params": [value for value in trainable if value in norms], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def make_optimizer(model: nn.Module, settings: TrainingSettings) -> torch.optim.Optimizer:
    """Make SGD, Adam(W) (``momentum`` is its beta1), Adagrad (without it) or RMSProp over :func:`parameter_groups`.

    RMSProp has decay 0.9 and ε = 1 like the original ALP (paper E, table 3), in torch's form with ε outside of the root
    and s = 0 at first: ``s = 0.9 s + 0.1 g²; b = momentum b + g / (√s + 1); w = w - lr b``. Weight decay adds
    ``weight_decay * w`` to the gradient in all but AdamW, which subtracts ``lr * weight_decay * w`` from the weight.
    """
    lr, momentum, groups = settings.lr, settings.momentum, parameter_groups(model, settings)
    # None lets torch choose. Not every torch >= 2.11 has a fused CUDA kernel for Adagrad; none has one for RMSProp, or
    # for SGD on sharded parameters.
    whole = (p.is_cuda and p.is_floating_point() and not is_sharded(p) for g in groups for p in g["params"])
    fused = True if all(whole) else None
    if settings.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=settings.nesterov, fused=fused)
    if settings.optimizer == "adam":
        return torch.optim.Adam(groups, lr=lr, betas=(momentum, 0.999), fused=fused)
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=lr, betas=(momentum, 0.999), fused=fused)
    if settings.optimizer == "rmsprop":
        return torch.optim.RMSprop(groups, lr=lr, alpha=0.9, eps=1.0, momentum=momentum)
    return torch.optim.Adagrad(groups, lr=lr)
