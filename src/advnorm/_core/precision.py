"""Numeric precision: at least float32, and scopes for torch's switches of matrix products and cuDNN kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from operator import attrgetter
from typing import Any, Literal, cast

import torch
from torch import Tensor


def at_least_float32(value: Tensor) -> Tensor:
    """Return at least float32: half precision holds neither small steps nor the squares of small numbers."""
    return value.to(torch.promote_types(value.dtype, torch.float32))


#: Makes a new context manager at each call.
ContextFactory = Callable[[], AbstractContextManager[object]]


def float32_as(precision: Literal["ieee", "tf32"], device: torch.device) -> AbstractContextManager[None]:
    """Compute float32 exactly (``ieee``) or with TF32's shorter mantissa, without autocast, whatever the caller set.

    The CPU always computes float32 exactly.
    """
    tf32 = precision == "tf32"
    settings = {"matmul": "high" if tf32 else "highest", "cudnn": tf32}
    settings |= {name: precision if name.startswith("cu") else "ieee" for name in _SWITCHES}
    return _products(settings, torch.autocast(device.type, enabled=False))


def snapshot_precision(device: torch.device) -> ContextFactory:
    """Return a factory of scopes that restore the present precision switches and autocast state."""
    kind, settings = device.type, _settings()
    on, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    cached = torch.is_autocast_cache_enabled()
    return lambda: _products(settings, torch.autocast(kind, dtype, enabled=on, cache_enabled=cached))


@contextmanager
def _products(settings: Mapping[str, Any], autocast: torch.autocast) -> Iterator[None]:
    before = _settings()
    try:
        _set({name: settings.get(name) for name in before})
        with autocast:
            yield
    finally:
        _set(before)


#: Torch's switches by operation. Torch also keeps older switches for matrix products and cuDNN. Reading an older one,
#: as ``torch.backends.cudnn.flags`` does, raises if it disagrees with the newer one.
_SWITCHES = ("cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")


@cache
def _switches() -> dict[str, Any]:
    return {name: attrgetter(name)(torch.backends) for name in _SWITCHES}


def _settings() -> dict[str, Any]:
    settings: dict[str, Any] = {}
    with suppress(RuntimeError):  # the caller set a state that the older switches cannot express
        settings["matmul"] = torch.get_float32_matmul_precision()
    with suppress(RuntimeError):
        settings["cudnn"] = cast(Any, torch.backends.cudnn).allow_tf32
    return settings | {name: switch.fp32_precision for name, switch in _switches().items()}


def _set(settings: Mapping[str, Any]) -> None:
    # The older switches first, since they also set newer ones.
    if settings.get("matmul") is not None:
        torch.set_float32_matmul_precision(settings["matmul"])
    if settings.get("cudnn") is not None:
        cast(Any, torch.backends.cudnn).allow_tf32 = settings["cudnn"]
    for name, switch in _switches().items():
        switch.fp32_precision = settings[name]


@contextmanager
def choose_kernels(*, deterministic: bool, benchmark: bool = True) -> Iterator[None]:
    """Let cuDNN benchmark its convolutions and use the fastest, or use only those that always give the same bits.

    Benchmarking takes seconds; with ``benchmark=False`` cuDNN chooses by its heuristics.
    """
    cudnn: Any = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.deterministic
    cudnn.benchmark, cudnn.deterministic = benchmark and not deterministic, deterministic
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic = before
