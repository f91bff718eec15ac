"""Perturbations of batch statistics as differentiable tensors (paper B, eq. 3)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from advnorm._core.errors import ConfigError
from advnorm._core.wrappers import device_of
from advnorm.norms.routed_module import routed_modules
from advnorm.norms.routed_norm import RoutedNorm

Delta = tuple[Tensor, Tensor]


class Perturbation(Mapping[str, Mapping[str, Delta]]):
    """``(δ_μ, δ_σ)`` of every statistics bank, by the name of the norm and of the bank."""

    def __init__(self, deltas: Mapping[str, Mapping[str, Delta]]) -> None:
        self._deltas = {name: dict(banks) for name, banks in deltas.items()}

    def __getitem__(self, name: str) -> Mapping[str, Delta]:
        return self._deltas[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._deltas)

    def __len__(self) -> int:
        return len(self._deltas)

    @property
    def tensors(self) -> list[Tensor]:
        """All deltas in a fixed order, that of the mean before that of the std, for ``torch.autograd.grad``."""
        return [tensor for banks in self._deltas.values() for delta in banks.values() for tensor in delta]

    def map(self, function: Callable[[Tensor], Tensor], tensors: Sequence[Tensor | None] | None = None) -> Perturbation:
        """Apply ``function`` to each delta, or to ``tensors`` in the same order.

        None stands for an unused tensor, as in the result of ``torch.autograd.grad(..., allow_unused=True)``.
        """
        own = self.tensors
        values = own if tensors is None else tensors
        mapped = iter([function(torch.zeros_like(o) if v is None else v) for o, v in zip(own, values, strict=True)])
        return Perturbation(
            {name: {bank: (next(mapped), next(mapped)) for bank in banks} for name, banks in self._deltas.items()}
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
    deltas, norms = {}, routed_modules(model)
    default = torch.empty(0, device=device_of(model))  # for norms without any tensor
    for name, norm in norms.items():
        if not isinstance(norm, RoutedNorm) or norm.plan.statistics != "batch":
            continue
        like = next(t for t in (*norm.parameters(), *norm.buffers(), default) if t.is_floating_point())
        zeros = partial(
            torch.zeros,
            norm.shape,
            dtype=torch.promote_types(like.dtype, torch.float32),
            device=like.device,
            requires_grad=requires_grad,
        )
        deltas[name] = {bank: (zeros(), zeros()) for bank in norm.plan.statistics_banks}
    if not deltas:
        raise no_statistics_bank()
    return Perturbation(deltas)


def no_statistics_bank() -> ConfigError:
    """The error for a model without a routed batch norm."""
    hint = "convert it with advnorm.convert_norm(model, 'bn')"
    return ConfigError("no_statistics_bank", "the model has no routed batch norm", field="model", hint=hint)
