"""Triton kernels for batch norm of a concatenated batch: each part with its own statistics, without slices or copies.

The input is a matrix of rows (samples and positions) by channels, as a channels-last tensor is stored. A *block* is up
to ``height`` consecutive rows of one part. A program handles some channels of one block. Forward and backward run two
kernels each. The first kernel reduces each block to partial results. Each program of the second kernel merges the
partial results of its statistics bank, then maps its rows. It starts at the last rows, which the cache still holds.

Partial moments are means and sums of squared deviations, merged by the formula of Chan, Golub and LeVeque (1983), so
that a mean far from zero costs no precision. No kernel uses atomics: equal inputs give equal bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

#: Largest number of parts: each has arguments of its own, because a change of a tuple would compile a kernel again.
MOST_PARTS = 4

#: Arguments that describe the blocks: first row and first block of parts 1 to 3, and of the end; rows in a block; and
#: channels in units of ``VECTOR``, which tells the compiler that a row starts at a multiple of it.
LAYOUT = (
    *("start_1", "start_2", "start_3", "rows"),
    *("block_1", "block_2", "block_3", "blocks"),
    *("height", "units"),
)


class Tiling(NamedTuple):
    """Sizes that only affect the speed."""

    elements: int = 4096  # values of a tile, which a program loads at once
    widest: int = 64  # most channels of a tile
    programs: int = 3  # per multiprocessor; its registers hold this many
    warps: int = 8  # per program
    stages: int = 3  # tiles that a program loads in advance, and the current one
    merged: int = 32  # blocks whose partial results are merged at once


TILING = Tiling()


class Launch(NamedTuple):
    """Grid and arguments that depend on the shape of the batch only."""

    grid: tuple[int, int]
    layout: tuple[int, ...]  # in the order of ``LAYOUT``
    banks: tuple[int, ...]  # of each part
    sizes: dict[str, Any]  # constants of all kernels
    spans: dict[str, Any]  # more constants of the kernels that merge: for each part, the parts that share its bank


@lru_cache(maxsize=4096)
def plan_launch(
    samples: tuple[int, ...],
    banks: tuple[int, ...],
    positions: int,
    channels: int,
    itemsize: int,
    device: torch.device,
    tiling: Tiling,
) -> Launch:
    """Divide parts of ``samples`` samples, which use ``banks`` 0, 1, ... in this order, into blocks."""
    parts = len(samples)
    widths = [width for width in (128, 64, 32, 16) if width <= tiling.widest]
    width = min(widths, key=lambda width: -(-channels // width) * width)  # the widest that wastes fewest channels
    tile, tiles_across = tiling.elements // width, -(-channels // width)
    wanted = max(parts, _multiprocessors(device) * tiling.programs // tiles_across)
    rows = [count * positions for count in samples]
    height = -(-sum(rows) // (wanted - parts + 1))  # so that no more blocks than wanted result
    height = -(-height // tile) * tile
    starts, blocks = [0], [0]
    for count in rows:
        starts.append(starts[-1] + count)
        blocks.append(blocks[-1] - (-count // height))
    vector = math.gcd(channels, 16 // itemsize)
    layout = (*_padded(starts), *_padded(blocks), height, channels // vector)
    sizes = {"PARTS": parts, "VECTOR": vector, "TILE": tile, "WIDTH": width, "STAGES": tiling.stages}
    sizes |= {"BANKS": banks, "num_warps": tiling.warps}
    firsts = tuple(banks.index(bank) for bank in banks)
    ends = tuple(first + banks.count(bank) for first, bank in zip(firsts, banks))
    spans = {"FIRST": firsts, "END": ends, "MERGED": tiling.merged}
    return Launch((tiles_across, blocks[-1]), layout, banks, sizes, spans)


def _padded(edges: Sequence[int]) -> tuple[int, ...]:
    """The edges after the first; missing parts are empty."""
    return (*edges[1:], *(edges[-1],) * (MOST_PARTS + 1 - len(edges)))


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def launch_for(x: Tensor, samples: tuple[int, ...], banks: tuple[int, ...]) -> Launch:
    """The launch for the parts of ``x``."""
    positions = x.numel() // (x.shape[0] * x.shape[1])
    return plan_launch(samples, banks, positions, x.shape[1], x.itemsize, x.device, TILING)


Values = Sequence[Tensor] | None

#: Running mean, running variance and number of batches of each bank.
Stored = tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]


def forward(
    x: Tensor, launch: Launch, weights: Values, biases: Values, eps: float, stored: Stored | None, momentum: float
) -> tuple[Tensor, Tensor]:
    """Return the output, and mean and inverse standard deviation of each bank, ``(banks, 2, channels)``.

    ``stored`` banks are updated with weight ``momentum``; if it is negative, with a cumulative average.
    """
    channels = x.shape[1]
    y = torch.empty_like(x)
    banks = launch.banks[-1] + 1
    statistics = x.new_empty((banks, 2, channels), dtype=torch.float32)
    partial = x.new_empty((launch.grid[1], 2, channels), dtype=torch.float32)
    means, variances, counts = stored or (None, None, None)
    with torch.cuda.device_of(x):
        _run(_batch_norm_moments, launch, x, partial, counts)
        values = x, y, partial, statistics, weights, biases, means, variances, counts, eps, momentum
        _run(_batch_norm_output, launch, *values, **launch.spans)
    return y, statistics


def backward(
    grad: Tensor, x: Tensor, statistics: Tensor, launch: Launch, weights: Values
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the input and, ``(parts, channels)``, of weights and biases."""
    channels, parts = x.shape[1], launch.sizes["PARTS"]
    grad_x = torch.empty_like(x)
    grad_weight, grad_bias = x.new_empty((2, parts, channels), dtype=torch.float32)
    partial = x.new_empty((launch.grid[1], 2, channels), dtype=torch.float32)
    with torch.cuda.device_of(x):
        _run(_batch_norm_sums, launch, grad, x, partial, statistics)
        values = grad, x, grad_x, partial, statistics, weights, grad_weight, grad_bias
        _run(_batch_norm_gradient, launch, *values, **launch.spans)
    return grad_x, grad_weight, grad_bias


def _run(kernel: Any, launch: Launch, *values: Any, **constants: Any) -> None:
    kernel[launch.grid](*values, *launch.layout, **launch.sizes, **constants)


def try_out(device: torch.device) -> None:
    """Run all kernels on a small input; raise where Triton does not work."""
    x = torch.zeros((2, 1), device=device)
    launch = launch_for(x, (1, 1), (0, 0))
    _, statistics = forward(x, launch, None, None, 1.0, None, 0.0)
    backward(x, x, statistics, launch, None)


@triton.jit
def _locate(block, starts, blocks, height, PARTS: tl.constexpr):
    """The part of a block, its first row and the end of its rows."""
    part = block * 0
    first, end = block * height, block * 0 + starts[1]
    for p in tl.static_range(1, PARTS):
        beyond = block >= blocks[p]
        part = tl.where(beyond, p, part)
        first = tl.where(beyond, starts[p] + (block - blocks[p]) * height, first)
        end = tl.where(beyond, starts[p + 1], end)
    return part, first, tl.minimum(first + height, end)


@triton.jit
def _of_part(part, values, PARTS: tl.constexpr):
    """The value of a part."""
    chosen = part * 0 + values[0]
    for p in tl.static_range(1, PARTS):
        chosen = tl.where(part == p, values[p], chosen)
    return chosen


@triton.jit
def _edges_of_bank(part, edges, FIRST: tl.constexpr, END: tl.constexpr, PARTS: tl.constexpr):
    """First and last edge of the parts that share the bank of a part."""
    low, high = part * 0 + edges[FIRST[0]], part * 0 + edges[END[0]]
    for p in tl.static_range(1, PARTS):
        low, high = tl.where(part == p, edges[FIRST[p]], low), tl.where(part == p, edges[END[p]], high)
    return low, high


@triton.jit
def _tile(row, end, column, channels):
    """Offsets of the values of a tile, and which of them exist."""
    inside = (row < end)[:, None] & (column < channels)[None, :]
    return row[:, None] * channels + column[None, :], inside


@triton.jit
def _load(x, offset, inside):
    return tl.load(x + offset, inside, other=0.0).to(tl.float32)


@triton.jit
def _merge_lanes(count, mean, squares):
    """Count, mean and sum of squared deviations, per column, of sets with the same along the first dimension."""
    total = tl.sum(count, 0)
    merged = tl.sum(count[:, None] * mean, 0) / total
    apart = mean - merged[None, :]
    return total, merged, tl.sum(squares + count[:, None] * apart * apart, 0)


@triton.jit(do_not_specialize=LAYOUT)
def _batch_norm_moments(
    x, partial, counts,
    start_1, start_2, start_3, rows, block_1, block_2, block_3, blocks, height, units,
    PARTS: tl.constexpr, BANKS: tl.constexpr,
    VECTOR: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Mean and sum of squared deviations of each block. Counts the batch, so that the next kernel reads the count."""
    channels = units * VECTOR
    block = tl.program_id(1)
    if counts is not None:  # noqa: SIM102 (the compiler decides this one)
        if tl.program_id(0) + block == 0:
            for bank in tl.static_range(len(counts)):
                tl.store(counts[bank], tl.load(counts[bank]) + 1)
    starts, firsts = (0, start_1, start_2, start_3, rows), (0, block_1, block_2, block_3, blocks)
    _, first, end = _locate(block, starts, firsts, height, PARTS)
    column, lane = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH), tl.arange(0, TILE)
    mean, squares = tl.zeros((TILE, WIDTH), tl.float32), tl.zeros((TILE, WIDTH), tl.float32)
    seen = 0.0
    for row in tl.range(first, end, TILE, num_stages=STAGES):
        offset, inside = _tile(row + lane, end, column, channels)
        value = _load(x, offset, inside)
        seen += 1.0
        apart = tl.where((row + lane < end)[:, None], value - mean, 0.0)
        mean += apart * (1.0 / seen)
        squares += apart * (value - mean)
    count = ((end - first - lane + TILE - 1) // TILE).to(tl.float32)
    _, mean, squares = _merge_lanes(count, mean, squares)
    target = partial + block * 2 * channels + column
    tl.store(target, mean, column < channels)
    tl.store(target + channels, squares, column < channels)


@triton.jit(do_not_specialize=LAYOUT)
def _batch_norm_output(
    x, y, partial, statistics, weights, biases, means, variances, counts, eps, momentum,
    start_1, start_2, start_3, rows, block_1, block_2, block_3, blocks, height, units,
    PARTS: tl.constexpr, BANKS: tl.constexpr,
    VECTOR: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
    FIRST: tl.constexpr, END: tl.constexpr, MERGED: tl.constexpr,
):  # fmt: skip
    """Merge the moments of the bank, normalize and scale. The first block of a bank updates its statistics."""
    channels = units * VECTOR
    block = tl.program_id(1)
    starts, firsts = (0, start_1, start_2, start_3, rows), (0, block_1, block_2, block_3, blocks)
    part, first, end = _locate(block, starts, firsts, height, PARTS)
    low, high = _edges_of_bank(part, firsts, FIRST, END, PARTS)
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    real = column < channels

    count = tl.zeros((MERGED,), tl.float32)
    mean, squares = tl.zeros((MERGED, WIDTH), tl.float32), tl.zeros((MERGED, WIDTH), tl.float32)
    for at in range(low, high, MERGED):
        other = at + tl.arange(0, MERGED)
        _, other_first, other_end = _locate(other, starts, firsts, height, PARTS)
        added = tl.where(other < high, other_end - other_first, 0).to(tl.float32)
        inside = (other < high)[:, None] & real[None, :]
        source = partial + other[:, None] * 2 * channels + column[None, :]
        apart = tl.load(source, inside, other=0.0) - mean
        total = count + added
        share = added / tl.maximum(total, 1.0)
        mean += apart * share[:, None]
        squares += tl.load(source + channels, inside, other=0.0) + apart * apart * (count * share)[:, None]
        count = total
    total, mean, squares = _merge_lanes(count, mean, squares)
    invstd = tl.rsqrt(squares / total + eps)

    if block == low:
        target = statistics + _of_part(part, BANKS, PARTS) * 2 * channels + column
        tl.store(target, mean, real)
        tl.store(target + channels, invstd, real)
        if means is not None:
            for p in tl.static_range(PARTS):
                if part == p:
                    factor = momentum
                    if momentum < 0:
                        factor = 1.0 / tl.load(counts[BANKS[p]]).to(tl.float32)
                    _update(means[BANKS[p]] + column, mean, factor, real)
                    _update(variances[BANKS[p]] + column, squares / (total - 1.0), factor, real)

    scale, shift = invstd, tl.zeros((WIDTH,), tl.float32)
    for p in tl.static_range(PARTS):
        if weights is not None:
            scale = tl.where(part == p, invstd * tl.load(weights[p] + column, real, other=0.0).to(tl.float32), scale)
        if biases is not None:
            shift = tl.where(part == p, tl.load(biases[p] + column, real, other=0.0).to(tl.float32), shift)
    tiles = tl.cdiv(end - first, TILE)
    for number in tl.range(0, tiles, num_stages=STAGES):
        row = first + (tiles - 1 - number) * TILE + tl.arange(0, TILE)
        offset, inside = _tile(row, end, column, channels)
        value = (_load(x, offset, inside) - mean[None, :]) * scale[None, :] + shift[None, :]
        tl.store(y + offset, value.to(y.dtype.element_ty), inside)


@triton.jit
def _update(stored, value, factor, real):
    old = tl.load(stored, real, other=0.0).to(tl.float32)
    tl.store(stored, (old * (1.0 - factor) + value * factor).to(stored.dtype.element_ty), real)


@triton.jit(do_not_specialize=LAYOUT)
def _batch_norm_sums(
    grad, x, partial, statistics,
    start_1, start_2, start_3, rows, block_1, block_2, block_3, blocks, height, units,
    PARTS: tl.constexpr, BANKS: tl.constexpr,
    VECTOR: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The sum of the gradients of each block, and the sum of their products with the centred inputs."""
    channels = units * VECTOR
    block = tl.program_id(1)
    starts, firsts = (0, start_1, start_2, start_3, rows), (0, block_1, block_2, block_3, blocks)
    part, first, end = _locate(block, starts, firsts, height, PARTS)
    column, lane = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH), tl.arange(0, TILE)
    real = column < channels
    mean = tl.load(statistics + _of_part(part, BANKS, PARTS) * 2 * channels + column, real, other=0.0)
    sums, products = tl.zeros((TILE, WIDTH), tl.float32), tl.zeros((TILE, WIDTH), tl.float32)
    for row in tl.range(first, end, TILE, num_stages=STAGES):
        offset, inside = _tile(row + lane, end, column, channels)
        upstream = _load(grad, offset, inside)
        sums += upstream
        products += upstream * (_load(x, offset, inside) - mean[None, :])
    target = partial + block * 2 * channels + column
    tl.store(target, tl.sum(sums, 0), real)
    tl.store(target + channels, tl.sum(products, 0), real)


@triton.jit(do_not_specialize=LAYOUT)
def _batch_norm_gradient(
    grad, x, grad_x, partial, statistics, weights, grad_weight, grad_bias,
    start_1, start_2, start_3, rows, block_1, block_2, block_3, blocks, height, units,
    PARTS: tl.constexpr, BANKS: tl.constexpr,
    VECTOR: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
    FIRST: tl.constexpr, END: tl.constexpr, MERGED: tl.constexpr,
):  # fmt: skip
    """Merge the sums of the bank and map the gradient. The first block of a part stores those of its parameters."""
    channels = units * VECTOR
    block = tl.program_id(1)
    starts, firsts = (0, start_1, start_2, start_3, rows), (0, block_1, block_2, block_3, blocks)
    part, first, end = _locate(block, starts, firsts, height, PARTS)
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    real = column < channels
    bank = _of_part(part, BANKS, PARTS)
    mean = tl.load(statistics + bank * 2 * channels + column, real, other=0.0)
    invstd = tl.load(statistics + bank * 2 * channels + channels + column, real, other=0.0)

    scale = invstd
    through_mean, through_std = tl.zeros((WIDTH,), tl.float32), tl.zeros((WIDTH,), tl.float32)
    for p in tl.static_range(PARTS):
        stop = tl.where(bank == BANKS[p], firsts[p + 1], firsts[p])  # no block if the part has another bank
        sums, products = tl.zeros((MERGED, WIDTH), tl.float32), tl.zeros((MERGED, WIDTH), tl.float32)
        for at in range(firsts[p], stop, MERGED):
            other = at + tl.arange(0, MERGED)
            inside = (other < stop)[:, None] & real[None, :]
            source = partial + other[:, None] * 2 * channels + column[None, :]
            sums += tl.load(source, inside, other=0.0)
            products += tl.load(source + channels, inside, other=0.0)
        sum_C, product_C = tl.sum(sums, 0), tl.sum(products, 0)
        if block == firsts[p]:
            tl.store(grad_bias + p * channels + column, sum_C, real)
            tl.store(grad_weight + p * channels + column, product_C * invstd, real)
        if weights is not None:
            weight = tl.load(weights[p] + column, real, other=0.0).to(tl.float32)
            scale = tl.where(part == p, invstd * weight, scale)
            sum_C, product_C = sum_C * weight, product_C * weight
        through_mean += tl.where(bank == BANKS[p], sum_C, 0.0)  # even if the weight of another bank is NaN
        through_std += tl.where(bank == BANKS[p], product_C, 0.0)
    # The moments depend on every sample of the bank.
    low, high = _edges_of_bank(part, starts, FIRST, END, PARTS)
    share = invstd / (high - low).to(tl.float32)
    constant, slope = through_mean * share, through_std * share * invstd * invstd
    tiles = tl.cdiv(end - first, TILE)
    for number in tl.range(0, tiles, num_stages=STAGES):
        row = first + (tiles - 1 - number) * TILE + tl.arange(0, TILE)
        offset, inside = _tile(row, end, column, channels)
        upstream, apart = _load(grad, offset, inside), _load(x, offset, inside) - mean[None, :]
        value = upstream * scale[None, :] - apart * slope[None, :] - constant[None, :]
        tl.store(grad_x + offset, value.to(grad_x.dtype.element_ty), inside)
