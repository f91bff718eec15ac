"""Branches of a model: the domains that its norms treat differently at test time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from advnorm.norms import RoutedModule, mixture_norms, routed_modules


def branches(model: nn.Module) -> tuple[str, ...]:
    """Return the domains between which a forward must choose by a route; none for a model without routed norms."""
    plans: Iterable[Any] = (module.plan for module in routed_modules(model).values())
    return tuple(dict.fromkeys(d for plan in plans if plan.routed and not plan.mixture for d in plan.domains))


def same_branch(model: nn.Module, route: str | None) -> str | None:
    """Return the route if the model has a branch of this name, else None."""
    return route if route in branches(model) else None


def mixing_norms(model: nn.Module) -> dict[str, RoutedModule]:
    """Return the norms that weight their statistics by the input, unless an enclosing scope fixes a component."""
    return {name: module for name, module in mixture_norms(model).items() if module.state.component is None}
