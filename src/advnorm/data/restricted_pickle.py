"""Unpickling of byte arrays without executing code, for the Python version of CIFAR.

Our own because every library reads these files with ``pickle.load``, which runs any function that a file names.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np


class _ByteType:
    """Replaces ``numpy.dtype``; accepts unsigned bytes only."""

    def __init__(self, kind: bytes, *_: Any) -> None:
        if kind != b"u1":
            raise pickle.UnpicklingError(f"it holds an array of type {kind!r}; only unsigned bytes (u1) are allowed")

    def __setstate__(self, state: Any) -> None:
        """Ignore byte order and alignment, which do not apply to bytes."""


class _ByteArray:
    """Replaces ``numpy.ndarray``; its state is (version, shape, type, is_fortran, content)."""

    value: np.ndarray

    def __init__(self, *_: Any) -> None:
        """Accept the empty shape that ``_reconstruct`` passes."""

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, is_fortran, content = state
        if not isinstance(kind, _ByteType) or not isinstance(content, bytes):
            raise pickle.UnpicklingError("it holds an array without type or content")
        flat = np.frombuffer(bytearray(content), dtype=np.uint8)
        self.value = flat.reshape(shape, order="F" if is_fortran else "C")


_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): _ByteArray,
    ("numpy", "ndarray"): _ByteArray,
    ("numpy", "dtype"): _ByteType,
}


class _ByteArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it calls {module}.{name}, which is not allowed")
        return _ALLOWED[module, name]


def unpickle_byte_arrays(content: bytes) -> dict[bytes, Any]:
    """Return a pickled dictionary of byte arrays, lists, numbers and (Python 2) strings as bytes."""
    value = _ByteArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
    if not isinstance(value, dict):
        raise pickle.UnpicklingError(f"it holds a {type(value).__name__} instead of a dictionary")
    return {key: item.value if isinstance(item, _ByteArray) else item for key, item in value.items()}
