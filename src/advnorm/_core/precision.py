"""How exact products of float32 numbers are on NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, cast

import torch

#: Makes a scope, as often as it is called.
Scope = Callable[[], AbstractContextManager[object]]


def float32_as(precision: Literal["ieee", "tf32"], device: torch.device) -> AbstractContextManager[None]:
    """Scope: float32 as such (``ieee``) or with TF32's shorter mantissa, and no autocast, whatever the caller set."""
    return _products((precision,) * 2, torch.autocast(device.type, enabled=False))


def as_set(device: torch.device) -> Scope:
    """Makes scopes in which all of it is as it is now."""
    kind, precisions = device.type, [switch.fp32_precision for switch in _switches()]
    on, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    cached = torch.is_autocast_cache_enabled()
    return lambda: _products(precisions, torch.autocast(kind, dtype, enabled=on, cache_enabled=cached))


def _switches() -> tuple[Any, Any]:
    return torch.backends.cuda.matmul, cast(Any, torch.backends.cudnn).conv


@contextmanager
def _products(precisions: Sequence[str], autocast: torch.autocast) -> Iterator[None]:
    switches = _switches()
    before = [switch.fp32_precision for switch in switches]
    try:
        for switch, precision in zip(switches, precisions):
            switch.fp32_precision = precision
        with autocast:
            yield
    finally:
        for switch, value in zip(switches, before):
            switch.fp32_precision = value
