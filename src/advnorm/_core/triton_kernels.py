"""Load modules of Triton kernels where Triton works."""

from __future__ import annotations

import importlib
import warnings
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

from advnorm._core.errors import first_line


@cache
def load_kernels(module: str, device: torch.device, cost: str) -> Any:
    """Import a module of Triton kernels and run its ``try_out`` once per device; None without Triton.

    Triton needs a compiler, a writable folder and a supported GPU. Where it fails, a warning names the ``cost``.
    """
    if find_spec("triton") is None:
        return None
    try:
        kernels = importlib.import_module(module)
        kernels.try_out(device)
    except Exception as error:  # it fails in many ways
        warnings.warn(f"Triton does not work here, so {cost}: {first_line(error)}", stacklevel=2)
        return None
    return kernels
