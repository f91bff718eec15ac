"""Perturbations of batch statistics as differentiable tensors (paper B, eq. 3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from advnorm._core.wrappers import device_of
from advnorm.norms import functional
from advnorm.norms.norm_layers import batch_norms

Delta = tuple[Tensor, Tensor]


class Perturbation(dict[str, dict[str, Delta]]):
    """``(δ_μ, δ_σ)`` of every statistics bank, by the name of the norm and of the bank."""

    @property
    def tensors(self) -> list[Tensor]:
        """All deltas in a fixed order, that of the mean before that of the std, for ``torch.autograd.grad``."""
        return [tensor for banks in self.values() for delta in banks.values() for tensor in delta]

    def map(self, function: Callable[[Tensor], Tensor], tensors: Sequence[Tensor | None] | None = None) -> Perturbation:
        """Apply ``function`` to each delta, or to ``tensors`` in the same order.

        None stands for an unused tensor, as in the result of ``torch.autograd.grad(..., allow_unused=True)``.
        """
        own = self.tensors
        values = own if tensors is None else tensors
        mapped = iter([function(torch.zeros_like(o) if v is None else v) for o, v in zip(own, values, strict=True)])
        return Perturbation(
            {name: {bank: (next(mapped), next(mapped)) for bank in banks} for name, banks in self.items()}
        )

    def sign_step(self, gradients: Sequence[Tensor | None], radius: float) -> Perturbation:
        """``θ = ε sign(g_θ)`` (paper B, algorithm 1, line 5), detached."""
        return self.map(lambda gradient: radius * gradient.detach().sign(), gradients)


def zero_perturbation(model: nn.Module, *, requires_grad: bool = True) -> Perturbation:
    """Zeros for every statistics bank of a model: the point ``θ = 0`` where algorithm 1 of paper B differentiates.

    >>> delta = zero_perturbation(model)
    >>> with statistics(model, perturbation=delta):
    ...     loss = cross_entropy(model(x), y)
    >>> worst = delta.sign_step(torch.autograd.grad(loss, delta.tensors), radius=0.1)
    """
    deltas, norms = {}, batch_norms(model)
    default = torch.empty(0, device=device_of(model))  # for norms without any tensor
    for name, norm in norms.items():
        like = next(t for t in (*norm.parameters(), *norm.buffers(), default) if t.is_floating_point())
        dtype = functional.accumulate_dtype(like)
        zeros = partial(torch.zeros, norm.shape, dtype=dtype, device=like.device, requires_grad=requires_grad)
        deltas[name] = {bank: (zeros(), zeros()) for bank in norm.plan.statistics_banks}
    return Perturbation(deltas)
