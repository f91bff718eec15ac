"""Batch norm of a concatenated batch in eager mode: one fused operation for all parts, equal or not, on a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function, forward_ad
from torch.autograd.graph import increment_version

from advnorm._core.precision import at_least_float32
from advnorm._core.triton_kernels import load_kernels
from advnorm.norms import functional
from advnorm.norms.functional import Affine
from advnorm.norms.segments import Span

#: Type of the devices that run the kernels.
DEVICE = "cuda"

#: Precisions of the input. Statistics are float32 in all of them.
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

#: The memory formats, by number of dimensions, in which the values of all channels at a position are neighbours.
FORMATS = {2: torch.contiguous_format, 4: torch.channels_last, 5: torch.channels_last_3d}

#: Most values of a batch: offsets are 32-bit integers, also behind the last row.
MOST_VALUES = 2**31 - 2**24

#: Types of tensors that a kernel can read. Others are sharded, fake or wrapped.
PLAIN = (Tensor, nn.Parameter)

Bank = tuple[Tensor, Tensor, Tensor]


class Parts(NamedTuple):
    """Samples and statistics bank of each part of a batch; banks are numbered in their order."""

    samples: tuple[int, ...]
    banks: tuple[int, ...]


class _Call(NamedTuple):
    kernels: Any
    parts: Parts
    weights: int  # number of weights; the other parameters are biases
    stored: Any  # means, variances and numbers of batches to update, of all banks, or None
    momentum: float  # negative: a cumulative average
    eps: float


def find_kernels(x: Tensor, spans: Sequence[Span], values: Iterable[Tensor | None]) -> Any:
    """The kernels if they can normalize ``x`` with parameters and buffers ``values``, else None.

    A compiler fuses other operations itself.
    """
    if x.device.type != DEVICE or x.dtype not in DTYPES or torch.compiler.is_compiling():
        return None
    layout = FORMATS.get(x.dim())
    if layout is None or not x.is_contiguous(memory_format=layout) or x.numel() > MOST_VALUES:
        return None
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0 or type(x) not in PLAIN:
        return None
    for value in values:
        if value is not None and (type(value) not in PLAIN or value.device != x.device or not value.is_contiguous()):
            return None
    cost = "batch norms of concatenated batches need more and smaller kernels"
    kernels = load_kernels("advnorm.norms.fused_kernels", x.device, cost)
    fits = kernels is not None and sum(len(span.segments) for span in spans) <= kernels.MOST_PARTS
    return kernels if fits else None


def normalize_spans(
    kernels: Any,
    x: Tensor,
    spans: Sequence[Span],
    affine: Sequence[Affine],
    stored: Sequence[Bank] | None,
    momentum: float | None,
    eps: float,
) -> Tensor:
    """Normalize each span with its own moments, and scale each segment.

    Updates the ``stored`` banks of the spans as the built-in norm does, with an average that is cumulative if
    ``momentum`` is None.
    """
    parts = Parts(
        tuple(segment.rows for span in spans for segment in span.segments),
        tuple(number for number, span in enumerate(spans) for _ in span.segments),
    )
    weights, biases = ([value.contiguous() for value in values if value is not None] for values in zip(*affine))
    columns = None if stored is None else tuple(zip(*stored))
    factor = -1.0 if momentum is None else float(momentum)
    call = _Call(kernels, parts, len(weights), columns, factor, float(eps))
    y = _Normalize.apply(x, call, *weights, *biases)
    if columns is not None:
        increment_version([value for column in columns for value in column])
    return y  # pyright: ignore[reportReturnType]


class _Normalize(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, call: _Call, *affine: Tensor) -> Tensor:  # type: ignore[override]
        launch = call.kernels.launch_for(x, *call.parts)
        weights, biases = affine[: call.weights] or None, affine[call.weights :] or None
        y, statistics = call.kernels.forward(x, launch, weights, biases, call.eps, call.stored, call.momentum)
        ctx.save_for_backward(x, statistics, *affine)
        ctx.call, ctx.launch = call._replace(stored=None), launch
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, statistics, *affine = ctx.saved_tensors
        call: _Call = ctx.call
        weights, biases = affine[: call.weights], affine[call.weights :]
        if torch.is_grad_enabled():  # for second derivatives
            return _differentiable_gradients(ctx.needs_input_grad, grad, x, call, weights, biases)
        grad = grad.contiguous(memory_format=FORMATS[x.dim()])
        grad_x, *grads = call.kernels.backward(grad, x, statistics, ctx.launch, tuple(weights) or None)
        used = [gradient for grad_PC, values in zip(grads, (weights, biases)) if values for gradient in grad_PC]
        return grad_x, None, *used


def _differentiable_gradients(
    needs: Sequence[bool], grad: Tensor, x: Tensor, call: _Call, weights: Sequence[Tensor], biases: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    # Parts may share a parameter. Each copy then gets the gradient of its part.
    weights, biases = ([value.view_as(value) for value in values] for values in (weights, biases))
    y = _reference(x, call, weights, biases)
    inputs = (x, None, *weights, *biases)
    wanted = [value for value, need in zip(inputs, needs) if need and value is not None]
    found = iter(torch.autograd.grad(y, wanted, grad, create_graph=True))
    return tuple(next(found) if need else None for need in needs)


def _reference(x: Tensor, call: _Call, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    """The same mapping in operations that can be differentiated any number of times."""
    pieces = list(at_least_float32(x).split(call.parts.samples))
    for bank in dict.fromkeys(call.parts.banks):
        members = [number for number, other in enumerate(call.parts.banks) if other == bank]
        joined = torch.cat([pieces[number] for number in members])
        z = F.batch_norm(joined, None, None, training=True, eps=call.eps)
        for number, piece in zip(members, z.split([len(pieces[number]) for number in members])):
            weight, bias = (values[number] if values else None for values in (weights, biases))
            pieces[number] = functional.scaled(piece, weight, bias)
    return torch.cat(pieces).to(x.dtype)
