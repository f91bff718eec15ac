"""The hash of :mod:`advnorm._core.seeding` on a GPU: one kernel instead of seventy PyTorch operations.

Words are unsigned 32-bit integers, which wrap; the PyTorch version masks them. Every bit is the same.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

#: Largest number of keys that one program folds, and of values that one program draws for an image.
KEYS, NUMBERS = 128, 1024


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def _with_word(low, high, word):
    low = _mix(low + word)
    return low, _mix(high ^ _mix(low + 0x9E3779B9))


@triton.jit(do_not_specialize=["first", "second", "stride", "count"])
def _fold(low, high, tag, first, second, stride, new_low, new_high, count, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = row < count
    a, b = tl.load(low + row, inside).to(tl.uint32), tl.load(high + row, inside).to(tl.uint32)
    if tag is None:
        a, b = _with_word(a, b, first.to(tl.uint32))
        a, b = _with_word(a, b, second.to(tl.uint32))
    else:
        words = tl.load(tag + row * stride, inside)
        a, b = _with_word(a, b, words.to(tl.uint32))
        a, b = _with_word(a, b, (words >> 32).to(tl.uint32))
    tl.store(new_low + row, a.to(tl.int64), inside)
    tl.store(new_high + row, b.to(tl.int64), inside)


@triton.jit(do_not_specialize=["count", "blocks"])
def _draw(low, high, out, count, blocks, FLOAT: tl.constexpr, SIZE: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)  # the first dimension of a grid can be larger than the others
    row = program // blocks
    place = (program % blocks) * SIZE + tl.arange(0, SIZE)
    a, b = tl.load(low + row).to(tl.uint32), tl.load(high + row).to(tl.uint32)
    words = _mix(_mix(place.to(tl.uint32) + a) ^ b)
    numbers = (words >> 8).to(tl.float32) * 5.9604644775390625e-08 if FLOAT else words.to(tl.int64)  # 2**-24
    tl.store(out + row * count + place, numbers, place < count)


def fold(key: tuple[Tensor, Tensor], tag: Tensor | tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Mix a tag into keys: two words for all keys, or an integer for all or for each key."""
    low, high = (part.contiguous() for part in key)
    new = torch.empty_like(low), torch.empty_like(high)
    values, stride, words = None, 0, (0, 0)
    if isinstance(tag, Tensor):
        values = tag.to(torch.int64).expand_as(low)
        stride = values.stride(0)
    else:
        words = tag
    if len(low):
        grid = (triton.cdiv(len(low), KEYS),)
        _launch(low, _fold, grid, low, high, values, *map(_signed, words), stride, *new, len(low), SIZE=KEYS)
    return new


def draw(key: tuple[Tensor, Tensor], count: int, dtype: torch.dtype) -> Tensor:
    """Draw ``(N, count)`` words as int64, or uniform numbers in [0, 1) as float32."""
    low, high = (part.contiguous() for part in key)
    out = torch.empty((len(low), count), dtype=dtype, device=low.device)
    if out.numel():
        size = min(NUMBERS, triton.next_power_of_2(count))
        blocks = triton.cdiv(count, size)
        settings = {"FLOAT": dtype == torch.float32, "SIZE": size}
        _launch(low, _draw, (len(low) * blocks,), low, high, out, count, blocks, **settings)
    return out


def _signed(word: int) -> int:
    """The same 32 bits as a signed integer: another width of an argument would compile the kernel again."""
    return word - (word >> 31 << 32)


def _launch(where: Tensor, kernel: Any, grid: tuple[int, ...], *arguments: Any, **settings: Any) -> None:
    with torch.cuda.device_of(where):
        kernel[grid](*arguments, **settings)
