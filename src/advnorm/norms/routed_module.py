"""The base class of modules that treat samples by their domain, and how to find them in a model."""

from __future__ import annotations

import copy
import threading
from typing import Any

import torch
from torch import nn

from advnorm._core.errors import ConfigError, Description, RouteError
from advnorm._core.wrappers import unwrap_model
from advnorm.norms.plan import Plan
from advnorm.norms.segments import Segment, split_batch
from advnorm.norms.state import UNSCOPED, ScopeState


class RoutedModule(nn.Module):
    """A module that treats samples by their domain. Scopes set its ``state``."""

    plan: Plan
    state: ScopeState

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.state = UNSCOPED
        self.scopes: tuple[Any, ...] = ()  # the open scopes, outermost first
        self._last_split: tuple[Any, tuple[Segment, ...]] = (None, ())

    def __getstate__(self) -> dict[str, Any]:
        # A copy or a pickle made inside a scope starts outside of it. It is not compiled: the graph runs the original.
        state = {**self.__dict__, "state": UNSCOPED, "scopes": (), "_last_split": (None, ())}
        state.pop("_compiled_call_impl", None)
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> RoutedModule:
        group = getattr(self, "process_group", None)
        if group is not None:
            memo[id(group)] = group  # a copy communicates with the same ranks
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        clone.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return clone

    def recomputing(self) -> bool:
        """Whether this forward is a recomputation by gradient checkpointing."""
        return self.state.recomputing or (not torch.compiler.is_compiling() and in_backward())

    def segments(self, batch: int, *, needs_route: bool) -> tuple[Segment, ...]:
        """Split a batch of ``batch`` samples by the open scopes."""
        state = self.state
        if torch.compiler.is_compiling():
            return split_batch(self.plan, state, batch, needs_route)
        if state.thread is not None and state.thread != threading.get_ident() and not in_backward():
            hint = "give each thread its own copy of the model (copy.deepcopy), or use one process per device"
            raise RouteError("wrong_thread", "another thread opened the scope of this model", hint=hint)
        key = (state.route, state.forwarded, state.pair, state.component, state.groups, batch, needs_route)
        last = self._last_split
        if last[0] != key:
            last = self._last_split = (key, split_batch(self.plan, state, batch, needs_route))
        return last[1]


def in_backward() -> bool:
    """Whether a backward pass is running in this thread; a forward is then a recomputation by checkpointing."""
    return torch._C._current_graph_task_id() != -1


def validate_module(model: Any) -> None:
    """Raise unless ``model`` is an ``nn.Module``."""
    if not isinstance(model, nn.Module):
        got, hint = Description(type(model).__name__), "wrap a function in a module"
        raise ConfigError("wrong_type", "{field} must be an nn.Module", field="model", got=got, hint=hint)


def routed_modules(model: nn.Module) -> dict[str, RoutedModule]:
    """The routed modules of a model by name. A module that the model holds twice is listed once."""
    validate_module(model)
    return {name: module for name, module in unwrap_model(model).named_modules() if isinstance(module, RoutedModule)}


def list_routed(model: nn.Module) -> list[RoutedModule]:
    """The modules of :func:`routed_modules` in the same order, without the time that names cost."""
    seen: dict[nn.Module, None] = {}
    stack = [model]
    while stack:
        module = stack.pop()
        if module not in seen:
            seen[module] = None
            stack.extend(child for child in reversed(module._modules.values()) if child is not None)
    return [module for module in seen if isinstance(module, RoutedModule)]


def mixture_norms(model: nn.Module) -> dict[str, RoutedModule]:
    """The norms of a model that weight their statistics by the input, by name."""
    return {name: module for name, module in routed_modules(model).items() if module.plan.mixture}


def domains(model: nn.Module) -> tuple[str, ...]:
    """The domains of a model's routed modules, in order; empty for a plain model."""
    return tuple(dict.fromkeys(d for module in routed_modules(model).values() for d in module.plan.domains))
