"""Perturbations of batch statistics as tensors one can differentiate (paper B, eq. 3)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from advnorm._core.errors import ConfigError
from advnorm._core.wrappers import device_of
from advnorm.norms.routed import RoutedNorm
from advnorm.norms.routing import routed_modules

Delta = tuple[Tensor, Tensor]


class Perturbation(Mapping[str, Mapping[str, Delta]]):
    """``(δ_μ, δ_σ)`` for every statistics bank of every batch-fed norm, by the norm's name and the bank's."""

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
        """All deltas, the mean's before the std's, in one fixed order: what to differentiate."""
        return [tensor for banks in self._deltas.values() for delta in banks.values() for tensor in delta]

    def map(self, function: Callable[[Tensor], Tensor], tensors: Sequence[Tensor | None] | None = None) -> Perturbation:
        """A perturbation of the same layout, ``function`` of each delta (or of ``tensors``, in the same order).

        None stands for a tensor that took no part, as ``torch.autograd.grad(..., allow_unused=True)`` returns it.
        """
        own = self.tensors
        values = list(own if tensors is None else tensors)
        if len(values) != len(own):
            raise ConfigError(f"this perturbation has {len(own)} tensors, got {len(values)}")
        mapped = iter([function(torch.zeros_like(o) if v is None else v) for o, v in zip(own, values)])
        return Perturbation(
            {name: {bank: (next(mapped), next(mapped)) for bank in banks} for name, banks in self._deltas.items()}
        )

    def ascend(self, gradients: Sequence[Tensor | None], radius: float) -> Perturbation:
        """``θ = ε sign(g_θ)`` (paper B, algorithm 1, line 5), detached."""
        if radius < 0:
            raise ConfigError(f"radius must be at least 0, got {radius}")
        return self.map(lambda gradient: radius * gradient.detach().sign(), gradients)


def zero_perturbation(model: nn.Module, *, requires_grad: bool = True) -> Perturbation:
    """Zeros for every statistics bank of a model: the point ``θ = 0`` at which algorithm 1 of paper B differentiates.

    >>> delta = zero_perturbation(model)
    >>> with statistics(model, perturbation=delta):
    ...     loss = cross_entropy(model(x), y)
    >>> worst = delta.ascend(torch.autograd.grad(loss, delta.tensors), radius=0.1)
    """
    deltas = {}
    norms = routed_modules(model)
    device = device_of(model)  # for norms without any tensor
    for name, norm in norms.items():
        if not isinstance(norm, RoutedNorm) or norm.plan.statistics != "batch":
            continue
        own = [*norm.parameters(), *norm.buffers(), torch.empty(0, device=device)]
        like = next(t for t in own if t.is_floating_point())
        dtype = torch.promote_types(like.dtype, torch.float32)

        def zeros(norm: RoutedNorm = norm, like: Tensor = like, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(norm.shape, dtype=dtype, device=like.device, requires_grad=requires_grad)

        deltas[name] = {bank: (zeros(), zeros()) for bank in norm.plan.statistics_banks}
    if not deltas:
        raise ConfigError("the model has no batch-fed routed norm to perturb; convert it with advnorm.convert_norm")
    return Perturbation(deltas)
