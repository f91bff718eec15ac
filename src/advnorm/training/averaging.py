"""Exponential moving average of a model, with a rule for the statistics of its norms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

from advnorm._core.precision import at_least_float32
from advnorm._core.wrappers import unwrap_model
from advnorm.training.sharding import local_tensors, shard_like


class EMA:
    """average ← d · average + (1 - d) · live, with d = min(decay, (1 + t) / (10 + t)) after t updates.

    The smaller d of the first updates forgets the initialization. Parameters are averaged, in float32 at least.
    ``buffers`` decides about floating buffers, which are the running statistics of norms: ``"copy"`` uses those of the
    live model, ``"average"`` averages them too. Neither are the statistics that the averaged weights would produce;
    ``recalibrate`` inside :meth:`swapped` estimates those. Integer buffers and buffers outside of the state dict are
    always the live model's.
    """

    def __init__(self, model: nn.Module, decay: float, *, buffers: Literal["copy", "average"] = "copy") -> None:
        self.decay, self.buffers, self.updates = decay, buffers, 0
        live = self._averaged(model)
        averages = {value: at_least_float32(value.detach()).clone() for value in live.values()}
        #: Averages by their names in the model's state dict.
        self.average = {name: averages[value] for name, value in live.items()}

    def _averaged(self, model: nn.Module) -> dict[str, Tensor]:
        """The tensors that are averaged, by their names in the state dict; a shared tensor has several names."""
        state = unwrap_model(model).state_dict(keep_vars=True)
        return {
            name: value
            for name, value in state.items()
            if isinstance(value, nn.Parameter) or (self.buffers == "average" and value.is_floating_point())
        }

    def _pairs(self, model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
        """Averages and their live tensors, each once."""
        live = self._averaged(model)
        pairs = {average: live[name] for name, average in self.average.items()}
        return list(pairs), list(pairs.values())

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Add the live model, after each step of the optimizer, without waiting for the device."""
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        average, live = self._pairs(model)
        live = [at_least_float32(value) for value in live]
        torch._foreach_lerp_(local_tensors(average), local_tensors(live), 1 - decay)  # pyright: ignore[reportPrivateImportUsage]
        self.updates += 1

    @contextmanager
    def swapped(self, model: nn.Module) -> Iterator[None]:
        """Scope: the model holds the average in its own tensors; afterwards it has its own bits again, buffers too."""
        average, live = self._pairs(model)
        inner = unwrap_model(model)
        everything = [*inner.parameters(), *inner.buffers()]
        kept = [value.detach().clone() for value in everything]
        try:
            with torch.no_grad():
                torch._foreach_copy_(local_tensors(live), local_tensors(average))  # pyright: ignore[reportPrivateImportUsage]
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(local_tensors(everything), local_tensors(kept))  # pyright: ignore[reportPrivateImportUsage]

    def restore(self, average: Mapping[str, Tensor], updates: int) -> None:
        """Continue from the ``average`` and the ``updates`` of another EMA of the same model."""
        for name, value in self.average.items():
            value.copy_(shard_like(average[name], value))
        self.updates = updates
