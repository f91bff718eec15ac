"""Random numbers that belong to an image: independent of the batch, its order, the device and the world size.

Every number is a hash of (seed, tags, image index, draw, position). No state has to be shared, saved or restored, and
torch's global generators are not used.
"""

from __future__ import annotations

import hashlib
import importlib
import math
import operator
import warnings
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
from torch import Tensor

from advnorm._core.errors import ConfigError, Description, first_line

_WORD = 0xFFFFFFFF
_INITIAL = (0x243F6A88, 0x85A308D3)  # the first digits of pi, an arbitrary constant
_ODD = 0x9E3779B9


def _mix(x: Any) -> Any:
    """Bijection of 32-bit words held in int64: xorshift, multiply, as in C. Wellons' hash prospector (bias 0.107).

    Both multipliers are below 2**31, so that no product overflows int64 and every device computes the same bits.
    """
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _WORD
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _WORD
    return x ^ (x >> 15)


def _words(tag: int | str | Tensor) -> tuple[int | Tensor, int | Tensor]:
    """The low and high 32-bit words of an integer, or of the hash of a string."""
    if isinstance(tag, str):
        tag = int.from_bytes(hashlib.blake2b(tag.encode(), digest_size=8).digest(), "little")
    return tag & _WORD, (tag >> 32) & _WORD


class ImageNoise:
    """Independent random numbers for each of N images, identified by ``index``, their positions in the data set.

    >>> noise = ImageNoise(seed=0, index=torch.arange(10))
    >>> start = noise.fold("restart").fold(3).uniform((3, 32, 32), draw=0)
    """

    def __init__(self, seed: int, index: Tensor) -> None:
        if index.dim() != 1 or index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
            got = Description(f"{index.dtype} of shape {tuple(index.shape)}")
            words, hint = "{field} must give one integer per image", "use for example torch.arange(len(x))"
            raise ConfigError("wrong_shape", words, field="index", got=got, hint=hint)
        index = index.long()
        low, high = (torch.full_like(index, word) for word in _fold(_INITIAL, operator.index(seed)))
        self._key = _fold((low, high), index)

    @classmethod
    def _from_key(cls, key: tuple[Tensor, Tensor]) -> ImageNoise:
        noise = cls.__new__(cls)
        noise._key = key
        return noise

    def __len__(self) -> int:
        return len(self._key[0])

    @property
    def device(self) -> torch.device:
        """The device of the numbers."""
        return self._key[0].device

    def fold(self, tag: int | str | Tensor) -> ImageNoise:
        """Return an independent stream, for example per restart; a tensor gives one tag for all images or for each."""
        return self._from_key(_fold(self._key, tag))

    def select(self, which: Tensor) -> ImageNoise:
        """Return the noise of some images, by mask or by position; each image keeps its own."""
        return self._from_key((self._key[0][which], self._key[1][which]))

    def bits(self, shape: Sequence[int], draw: int | str | Tensor = 0) -> Tensor:
        """Draw uniform 32-bit words, ``(N, *shape)``, as int64."""
        return self._drawn(shape, draw, torch.int64)

    def uniform(self, shape: Sequence[int], draw: int | str | Tensor = 0) -> Tensor:
        """Draw float32 in [0, 1), multiples of 2**-24."""
        return self._drawn(shape, draw, torch.float32)

    def _drawn(self, shape: Sequence[int], draw: int | str | Tensor, dtype: torch.dtype) -> Tensor:
        key, count = _fold(self._key, draw), math.prod(shape)
        kernels = _kernels(key[0])
        numbers = _draw(key, count, dtype) if kernels is None else kernels.draw(key, count, dtype)
        return numbers.reshape(len(self), *shape)

    def normal(self, shape: Sequence[int], draw: int | str | Tensor = 0) -> Tensor:
        """Draw standard normal float32: the Box-Muller transform in float64, rounded once at the end."""
        radius, angle = self.bits((2, *shape), draw).double().unbind(1)
        radius = (-2 * ((radius + 0.5) * 2.0**-32).log()).sqrt()
        return (radius * (angle * (2 * math.pi * 2.0**-32)).cos()).float()

    def integers(self, high: int, shape: Sequence[int] = (), draw: int | str | Tensor = 0) -> Tensor:
        """Draw int64 in [0, high), for high up to 2**31 (Lemire's multiply and shift; bias below high / 2**32)."""
        return (self.bits(shape, draw) * high) >> 32

    def signs(self, shape: Sequence[int], draw: int | str | Tensor = 0) -> Tensor:
        """Draw float32 -1 or 1 with equal probability."""
        return ((self.bits(shape, draw) >> 31) * 2 - 1).float()


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed torch's generators of the CPU and of ``device``; ``torch.manual_seed`` would seed all GPUs."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.init()  # before it, there are no generators
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(seed)


Key = TypeVar("Key", int, Tensor)


def _fold(key: tuple[Key, Key], tag: int | str | Tensor) -> tuple[Key, Key]:
    """Mix a tag into 64-bit keys: a bijection of the key, so that two images never collide."""
    if isinstance(tag, Tensor) and tag.dim() == 0 and tag.device.type == "cpu":
        tag = int(tag)
    low, high = key
    kernels = _kernels(low)
    if kernels is not None:
        return kernels.fold(key, tag if isinstance(tag, Tensor) else _words(tag))
    for word in _words(tag):
        low = _mix((low + word) & _WORD)
        high = _mix(high ^ _mix((low + _ODD) & _WORD))
    return low, high  # pyright: ignore[reportReturnType]


def _draw(key: tuple[Tensor, Tensor], count: int, dtype: torch.dtype) -> Tensor:
    """Draw ``(N, count)`` words as int64, or uniform numbers as float32."""
    low_N, high_N = key
    counter = torch.arange(count, device=low_N.device)
    words = _mix(_mix((counter + low_N[:, None]) & _WORD) ^ high_N[:, None])
    return (words >> 8).float() * 2.0**-24 if dtype == torch.float32 else words


def _kernels(low: int | Tensor) -> Any:
    """The Triton kernels if the key is on a GPU where Triton works, else None; compiled code is fused anyway."""
    if not isinstance(low, Tensor) or not low.is_cuda or torch.compiler.is_compiling():
        return None
    return _with_triton(low.device)


@cache
def _with_triton(device: torch.device) -> Any:
    """Load and test the kernels once per device: Triton needs a compiler, a writable folder and a supported GPU."""
    if find_spec("triton") is None:
        return None
    try:
        kernels = importlib.import_module("advnorm._core.noise_kernels")
        key = torch.zeros(1, dtype=torch.int64, device=device)
        kernels.draw(kernels.fold((key, key), (0, 0)), 1, torch.int64)
    except Exception as error:  # it fails in many ways
        words = f"Triton does not work here, so noise needs more and smaller kernels: {first_line(error)}"
        warnings.warn(words, stacklevel=2)
        return None
    return kernels
