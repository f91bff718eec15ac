"""Process-group helpers whose gradients are those of one process on the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

ProcessGroup = dist.ProcessGroup


def world_size(group: ProcessGroup | None = None) -> int:
    """Number of ranks in ``group``; 1 without a process group."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def rank(group: ProcessGroup | None = None) -> int:
    """Rank of this process in ``group``; 0 without a process group."""
    return dist.get_rank(group) if dist.is_available() and dist.is_initialized() else 0


class _AllReduceSum(Function):
    """Sum over ranks. Its gradient is also a sum over ranks, so it can be differentiated twice."""

    @staticmethod
    def forward(ctx, value: Tensor, group: ProcessGroup | None) -> Tensor:  # type: ignore[override]
        ctx.group = group
        total = value.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _AllReduceSum.apply(grad, ctx.group), None  # pyright: ignore[reportReturnType]


def all_gather_rows(value: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Return a differentiable stack of every rank's ``value``: shape ``(ranks, *value.shape)``.

    A sum of one-hot placements needs one collective for the forward and one for the backward.
    """
    placed = value.new_zeros((world_size(group), *value.shape))
    placed = torch.cat([placed[: rank(group)], value[None], placed[rank(group) + 1 :]])
    return _AllReduceSum.apply(placed, group)  # pyright: ignore[reportReturnType]


@torch.no_grad()
def mean_over_ranks(tensors: Sequence[Tensor], group: ProcessGroup | None = None) -> list[Tensor]:
    """Return the mean of each tensor over the ranks, by one collective."""
    if world_size(group) == 1 or not tensors:
        return list(tensors)
    widest = reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    flat = torch.cat([tensor.reshape(-1).to(widest) for tensor in tensors])
    dist.all_reduce(flat, group=group)
    flat /= world_size(group)
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view_as(tensor).to(tensor.dtype) for part, tensor in zip(parts, tensors)]
