"""What wraps an objective and is one itself."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from advnorm._core.errors import ConfigError
from advnorm.norms.feeding import without_feeding
from advnorm.norms.routing import Routed
from advnorm.objectives.base import Images, Objective, Step


def _of_the_inner(name: str) -> Any:
    """An attribute that is the wrapped objective's."""
    return property(
        lambda self: getattr(self.objective, name), lambda self, value: setattr(self.objective, name, value)
    )


class Wrapper(Objective):
    """An objective around another; what is set on it (attack, statistics, seed) is set on the one inside."""

    def __init__(self, objective: Objective) -> None:
        if not isinstance(objective, Objective):
            raise ConfigError(
                f"{type(self).__name__} wraps an objective such as Hybrid(model, attack), got {objective!r:.80}"
            )
        nn.Module.__init__(self)
        self.objective = objective

    @classmethod
    def options(cls) -> dict[str, inspect.Parameter]:
        """The wrapper's own options; the wrapped objective has its own."""
        return {name: p for name, p in super().options().items() if name not in Objective.options()}

    @property
    def model(self) -> nn.Module:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.objective.model

    @property
    def needs_attack(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.objective.needs_attack

    @property
    def domains(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.objective.domains

    #: Settings of the objective inside, which makes the forwards.
    attack = _of_the_inner("attack")  # pyright: ignore[reportIncompatibleMethodOverride]
    statistics = _of_the_inner("statistics")  # pyright: ignore[reportIncompatibleMethodOverride]
    label_smoothing, seed, through, climbed = map(_of_the_inner, ("label_smoothing", "seed", "through", "climbed"))

    def trained_domains(self) -> tuple[str, ...]:
        return self.objective.trained_domains()

    def counts(self, batch: int) -> dict[str, int]:
        return self.objective.counts(batch)

    def adversarial(self, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        return self.objective.adversarial(x, y, index)

    def look(self, x: Tensor) -> None:
        self.objective.look(x)

    @property
    def bare(self) -> Objective:
        return self.objective.bare

    def images(self, x: Tensor, y: Tensor, index: Tensor | None = None) -> Images:
        return self.objective.images(x, y, index)

    def measured(self, images: Images) -> Step:
        return self.objective.measured(images)

    def forwards(self, images: Images) -> None:
        self.objective.forwards(images)

    @property
    def kinds(self) -> tuple[str, ...]:
        return type(self).__name__, *self.objective.kinds

    @property
    def recipe(self) -> str:
        return f"{type(self).__name__}({self.objective.recipe}, {self.extra_repr()})"

    def extra_repr(self) -> str:
        return ""


@contextmanager
def leaving_no_trace(model: nn.Module) -> Iterator[None]:
    """Scope: forwards beside those of the objective itself feed no norm, and every other buffer is as it was after."""
    owners = [module for module in model.modules() if not isinstance(module, Routed | _NormBase)]
    buffers = [(owner, name, b) for owner in owners for name, b in owner._buffers.items() if b is not None]
    kept = [(buffer._version, buffer.clone()) for _, _, buffer in buffers]
    try:
        with without_feeding(model):
            yield
    finally:
        for (owner, name, buffer), (version, value) in zip(buffers, kept):
            owner._buffers[name] = buffer
            if buffer._version != version:  # others may be part of a graph that is alive
                with torch.no_grad():
                    buffer.copy_(value)
