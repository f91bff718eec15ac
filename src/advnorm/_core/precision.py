"""How exact products of float32 numbers are on NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch


@contextmanager
def float32_as(precision: Literal["ieee", "tf32"], device: torch.device) -> Iterator[None]:
    """Scope: float32 as such (``ieee``) or with TF32's shorter mantissa, and no autocast, whatever the caller set."""
    switches: tuple[Any, Any] = (torch.backends.cuda.matmul, cast(Any, torch.backends.cudnn).conv)
    before = [switch.fp32_precision for switch in switches]
    try:
        for switch in switches:
            switch.fp32_precision = precision
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        for switch, value in zip(switches, before):
            switch.fp32_precision = value
