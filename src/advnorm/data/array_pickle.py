"""Pickles of byte arrays, read without the power to call anything: for the python form of CIFAR."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np


class _ByteType:
    """Stands in for ``numpy.dtype``: unsigned bytes and nothing else."""

    def __init__(self, kind: bytes, *_: Any) -> None:
        if kind != b"u1":
            raise pickle.UnpicklingError(f"an array of {kind!r}, only unsigned bytes (u1) are read")

    def __setstate__(self, state: Any) -> None:
        """Byte order and alignment, which a byte has not."""


class _ByteArray:
    """Stands in for ``numpy.ndarray``; its state is (version, shape, type, Fortran order?, content)."""

    value: np.ndarray

    def __init__(self, *_: Any) -> None:
        """Called by way of ``_reconstruct`` with an empty shape; the state brings the rest."""

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, fortran, content = state
        if not isinstance(kind, _ByteType) or not isinstance(content, bytes):
            raise pickle.UnpicklingError("an array without type or content")
        flat = np.frombuffer(bytearray(content), dtype=np.uint8)
        self.value = flat.reshape(shape, order="F" if fortran else "C")


# A pickle names functions and calls them. The names in CIFAR's files get the stand-ins above, any other is refused.
_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): _ByteArray,
    ("numpy", "ndarray"): _ByteArray,
    ("numpy", "dtype"): _ByteType,
}


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no file of this data set needs; refused")
        return _ALLOWED[module, name]


def read_array_pickle(content: bytes) -> dict[bytes, Any]:
    """A dictionary of byte arrays, lists, numbers and (Python 2) strings as bytes; anything else is refused by name."""
    found = _ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
    if not isinstance(found, dict):
        raise pickle.UnpicklingError(f"it holds a {type(found).__name__} instead of a dictionary")
    return {key: value.value if isinstance(value, _ByteArray) else value for key, value in found.items()}
