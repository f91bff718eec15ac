"""Models inside compiled and data-parallel wrappers, and the device and precision of a model."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the model inside ``torch.compile``, DDP and DataParallel wrappers, in any order."""
    while True:
        if isinstance(model, DistributedDataParallel | DataParallel):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # pyright: ignore[reportAssignmentType]
        else:
            return model


def parallel_wrappers(model: nn.Module) -> list[str]:
    """Class names of the data-parallel wrappers inside a model, which hold references to its parameters."""
    kinds = {type(module).__name__ for module in model.modules()}
    return sorted(kind for kind in kinds if "DataParallel" in kind or kind.startswith("FSDP"))


_CPU = torch.device("cpu")


def device_of(model: nn.Module, default: torch.device = _CPU) -> torch.device:
    """The device of a model's tensors; ``default`` for a model without any."""
    return next((tensor.device for tensor in [*model.parameters(), *model.buffers()]), default)


def dtype_of(model: nn.Module) -> torch.dtype:
    """The dtype of a model's parameters, and so of its inputs; float32 for a model without any."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
