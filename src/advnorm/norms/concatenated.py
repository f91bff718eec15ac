"""Batch norm of a concatenated batch of equal parts as one operation on the whole batch.

The built-in kernel takes one set of statistics per call, so that the parts of a batch are normalized apart and then
copied together. Here the parts are a dimension of a view. A compiler fuses this form with the operations around it: a
compiled network then reads and writes as many bytes as with the built-in norm. The gradient is written out, because
automatic differentiation of the same formula reads the batch more often.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from advnorm._core.precision import at_least_float32
from advnorm.norms import functional


def normalize_parts(
    x: Tensor, banks: int, parts: int, weight_PC: Tensor | None, bias_PC: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalize each of ``banks`` equal shares of the batch with its moments; scale each of ``parts`` equal shares.

    ``parts`` is a multiple of ``banks``. Returns the output, and mean and biased variance of each bank,
    ``(banks, channels)``, without gradient.
    """
    y_PNC, mean_BC, var_BC = _NormalizeParts.apply(x, banks, parts, weight_PC, bias_PC, eps)  # pyright: ignore
    # A view that the function itself returned could not be changed in place, as activations do.
    return y_PNC.flatten(0, 1), mean_BC, var_BC


class _NormalizeParts(Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, banks: int, parts: int, weight_PC: Tensor | None, bias_PC: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        mean_BC, var_BC = functional.moments(functional.grouped(x, banks))
        mean_PC, scale_PC = (_repeat(values, parts) for values in (mean_BC, (var_BC + eps).rsqrt()))
        ctx.save_for_backward(x, mean_PC, scale_PC, weight_PC)
        ctx.banks = banks
        ctx.mark_non_differentiable(mean_BC, var_BC)
        if weight_PC is not None:
            scale_PC = scale_PC * weight_PC
        y = functional.standardize(functional.grouped(x, parts), mean_PC, scale_PC)
        if bias_PC is not None:
            y = y + functional.channelwise(bias_PC, y.dim())
        return y.to(x.dtype), mean_BC, var_BC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_PNC: Tensor, *_: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, mean_PC, invstd_PC, weight_PC = ctx.saved_tensors
        parts, banks = len(mean_PC), ctx.banks
        grad_PNC = at_least_float32(grad_PNC)
        centred_PNC = functional.grouped(x, parts) - functional.channelwise(mean_PC, grad_PNC.dim())
        dims = [1, *range(3, grad_PNC.dim())]
        sum_PC, product_PC = grad_PNC.sum(dims), (grad_PNC * centred_PNC).sum(dims)
        scale_PC = invstd_PC if weight_PC is None else invstd_PC * weight_PC
        # The moments depend on every sample of the bank.
        values = x[: len(x) // banks, 0].numel()
        through_mean = _bank_sums(scale_PC * sum_PC, banks) / values
        through_std = _bank_sums(scale_PC * product_PC, banks) * invstd_PC.square() / values
        slope, offset, scale = (functional.channelwise(v, x.dim() + 1) for v in (through_std, through_mean, scale_PC))
        grad_x = (grad_PNC * scale - centred_PNC * slope - offset).to(x.dtype).flatten(0, 1)
        needs_weight, needs_bias = ctx.needs_input_grad[3:5]
        grad_weight = product_PC * invstd_PC if needs_weight else None
        return grad_x, None, None, grad_weight, sum_PC if needs_bias else None, None


def _repeat(values_BC: Tensor, parts: int) -> Tensor:
    """The values of the bank of each part, ``(parts, channels)``."""
    return values_BC.repeat_interleave(parts // len(values_BC), 0) if parts > len(values_BC) else values_BC


def _bank_sums(values_PC: Tensor, banks: int) -> Tensor:
    """The sums over the parts of each bank, for each part."""
    if len(values_PC) == banks:
        return values_PC
    return _repeat(values_PC.unflatten(0, (banks, -1)).sum(1), len(values_PC))
