"""Wrappers that hold a model, compiled and data-parallel ones, and where and how exact a model is."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside ``torch.compile``, DDP and DataParallel, in any order."""
    while True:
        if isinstance(model, DistributedDataParallel | DataParallel):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # pyright: ignore[reportAssignmentType]
        else:
            return model


def parallel_wrappers(model: nn.Module) -> list[str]:
    """Kinds of the data-parallel wrappers inside a model, which know its parameters by heart."""
    kinds = {type(module).__name__ for module in model.modules()}
    return sorted(kind for kind in kinds if "DataParallel" in kind or kind.startswith("FSDP"))


def device_of(model: nn.Module) -> torch.device:
    """Where a model's tensors are; the CPU for one without any."""
    return next((tensor.device for tensor in [*model.parameters(), *model.buffers()]), torch.device("cpu"))


def dtype_of(model: nn.Module) -> torch.dtype:
    """The precision of a model's parameters, which images are brought into; float32 for one without any."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
