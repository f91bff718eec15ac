"""Objectives around other objectives."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from advnorm._core.errors import ConfigError, Problem, raise_problems
from advnorm.norms import RoutedModule
from advnorm.norms.norm_layers import without_updates
from advnorm.objectives.base import Objective
from advnorm.objectives.execution import EAGER, CraftedBatch, Execution, ObjectiveOutput


def _inner(name: str) -> Any:
    """An attribute of the wrapped objective."""
    return property(
        lambda self: getattr(self.objective, name), lambda self, value: setattr(self.objective, name, value)
    )


class Wrapper(Objective):
    """An objective around another one, which has the attack, the statistics and the seed.

    Subclasses declare their settings as keyword-only parameters and pass them on; this class validates all of them and
    sets them as attributes.
    """

    def __init__(self, objective: Objective, **options: Any) -> None:
        raise_problems(self.option_problems(**options), f"bad {type(self).__name__}")
        if not isinstance(objective, Objective):
            message = f"{type(self).__name__} wraps an objective such as Hybrid(model, attack)"
            raise ConfigError("wrong_type", message, field="objective", got=objective)
        nn.Module.__init__(self)
        self.objective = objective
        for name, value in self.convert_settings(options)[0].items():
            setattr(self, name, value)

    @classmethod
    def option_problems(cls, **options: Any) -> list[Problem]:
        """All problems of these options."""
        settings, problems = cls.convert_settings(options)
        return problems + cls.setting_problems(**settings)

    @classmethod
    def setting_problems(cls, **settings: Any) -> list[Problem]:
        """The problems of a complete set of settings that are in their types and ranges."""
        return []

    @classmethod
    def options(cls) -> dict[str, inspect.Parameter]:
        """The wrapper's own options."""
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

    attack = _inner("attack")  # pyright: ignore[reportIncompatibleMethodOverride]
    statistics = _inner("statistics")  # pyright: ignore[reportIncompatibleMethodOverride]
    label_smoothing, seed = map(_inner, ("label_smoothing", "seed"))

    def trained_domains(self) -> tuple[str, ...]:
        return self.objective.trained_domains()

    def images_per_domain(self, batch_size: int) -> dict[str, int]:
        return self.objective.images_per_domain(batch_size)

    @property
    def innermost(self) -> Objective:
        return self.objective.innermost

    def craft(self, x: Tensor, y: Tensor, index: Tensor, execution: Execution = EAGER) -> Tensor:
        return self.objective.craft(x, y, index, execution)

    def craft_batch(
        self, x: Tensor, y: Tensor, index: Tensor | None = None, execution: Execution = EAGER
    ) -> CraftedBatch:
        return self.objective.craft_batch(x, y, index, execution)

    def validate_images(self, x: Tensor) -> None:
        self.objective.validate_images(x)

    def compute_loss(self, batch: CraftedBatch, execution: Execution = EAGER) -> ObjectiveOutput:
        return self.objective.compute_loss(batch, execution)

    def run_forwards(self, batch: CraftedBatch) -> None:
        self.objective.run_forwards(batch)

    @property
    def class_names(self) -> tuple[str, ...]:
        return type(self).__name__, *self.objective.class_names

    def describe(self) -> str:
        return f"{type(self).__name__}({self.objective.describe()}, {self.extra_repr()})"

    def extra_repr(self) -> str:
        return ""


@contextmanager
def leaving_no_trace(model: nn.Module) -> Iterator[None]:
    """Scope: forwards update no norm, and every other buffer has its value again afterwards."""
    owners = [module for module in model.modules() if not isinstance(module, RoutedModule | _NormBase)]
    buffers = [(owner, name, b) for owner in owners for name, b in owner._buffers.items() if b is not None]
    kept = [(buffer._version, buffer.clone()) for _, _, buffer in buffers]
    try:
        with without_updates(model):
            yield
    finally:
        for (owner, name, buffer), (version, value) in zip(buffers, kept):
            owner._buffers[name] = buffer
            if buffer._version != version:  # a buffer that did not change may be part of a live graph
                with torch.no_grad():
                    buffer.copy_(value)
