"""Objectives around other objectives."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from advnorm._core.errors import ConfigError, Problem, raise_problems
from advnorm.norms import RoutedModule
from advnorm.norms.norm_layers import without_updates
from advnorm.objectives.base import Objective


def _inner(name: str) -> Any:
    """An attribute or method of the wrapped objective."""
    return property(
        lambda self: getattr(self.objective, name), lambda self, value: setattr(self.objective, name, value)
    )


class Wrapper(Objective):
    """An objective around another one, which has the model and the attack. Subclasses define the loss."""

    def __init__(self, objective: Objective, **options: Any) -> None:
        raise_problems(self.option_problems(**options), f"bad {type(self).__name__}")
        if not isinstance(objective, Objective):
            message = f"{type(self).__name__} wraps an objective such as Hybrid(model, attack)"
            raise ConfigError("wrong_type", message, field="objective", got=objective)
        nn.Module.__init__(self)
        self.objective = objective
        for name, value in self.convert_settings(options)[0].items():
            setattr(self, name, value)

    innermost, attack = map(_inner, ("innermost", "attack"))  # pyright: ignore[reportIncompatibleMethodOverride]
    model, statistics, label_smoothing, seed = map(_inner, ("model", "statistics", "label_smoothing", "seed"))
    needs_attack, domains, trained_domains = map(_inner, ("needs_attack", "domains", "trained_domains"))
    tested_domains = _inner("tested_domains")
    images_per_domain, validate_images = map(_inner, ("images_per_domain", "validate_images"))
    craft, craft_batch = map(_inner, ("craft", "craft_batch"))

    @classmethod
    def options(cls) -> Mapping[str, inspect.Parameter]:
        """The wrapper's own settings."""
        return {name: p for name, p in super().options().items() if name not in Objective.options()}

    @classmethod
    def option_problems(cls, **options: Any) -> list[Problem]:
        """All problems of these options."""
        settings, problems = cls.convert_settings(options)
        return problems + cls.setting_problems(**settings)

    @classmethod
    def setting_problems(cls, **settings: Any) -> list[Problem]:
        """The problems of a complete set of settings that are in their types and ranges."""
        return []

    def describe(self) -> str:
        return f"{type(self).__name__}({self.objective.describe()}, {self.extra_repr()})"

    def describe_choices(self) -> str:
        return f"{type(self).__name__}({self.objective.describe_choices()}, {self.extra_repr()})"

    def extra_repr(self) -> str:
        return self.setting_words()


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
