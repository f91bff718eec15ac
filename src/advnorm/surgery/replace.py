"""Put new modules in the place of old ones, with their mode and hooks, and report the changes."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from advnorm._core.errors import SurgeryError
from advnorm._core.wrappers import parallel_wrappers
from advnorm.norms.routed_module import RoutedModule, validate_module

#: Names of the tensors of the built-in norms and of ``nn.Linear``.
AFFINE, STATISTICS = ("weight", "bias"), ("running_mean", "running_var", "num_batches_tracked")

#: Hooks of a module. Their dictionaries move as they are, so that a handle still removes its hook.
_HOOKS = tuple(name for name in vars(nn.Module()) if "_hook" in name)


@dataclass(frozen=True, kw_only=True)
class SurgeryReport:
    """The modules that a conversion replaced, and those that it kept with the reason."""

    norm: str
    domains: tuple[str, ...]
    replaced: Mapping[str, str] = field(default_factory=dict)
    kept: Mapping[str, str] = field(default_factory=dict)
    new_parameters: int = 0
    notes: Sequence[str] = ()

    def __str__(self) -> str:
        width = max((len(name) for name in [*self.replaced, *self.kept]), default=0)
        return "\n".join(
            [
                f"{self.norm}: {len(self.replaced)} replaced, {len(self.kept)} kept; "
                f"domains: {', '.join(self.domains)}; {self.new_parameters:+,} parameters",
                *(f"  {name:<{width}}  {change}" for name, change in self.replaced.items()),
                *(f"  {name:<{width}}  kept: {reason}" for name, reason in self.kept.items()),
                *(f"  note: {note}" for note in self.notes),
            ]
        )


def validate_model(model: nn.Module) -> None:
    """Raise if ``model`` is not a module, or inside a wrapper that keeps a list of its parameters."""
    validate_module(model)
    wrappers = parallel_wrappers(model)
    if wrappers:
        message = f"the model is wrapped in {', '.join(wrappers)}, which would not use new parameters"
        raise SurgeryError("not_supported", message, field="model", hint="convert first, then wrap")


def other_parts(module: nn.Module) -> list[str]:
    """The names of children and tensors besides weight, bias and statistics."""
    own = {**module._parameters, **module._buffers, **module._modules}
    return [name for name, value in own.items() if value is not None and name not in AFFINE + STATISTICS]


def validate_class(
    module: nn.Module,
    parts: Sequence[str] = (),
    *,
    field: str = "",
    hint: str = "make it a plain module of its class first",
) -> None:
    """Raise if a module has more than its class and the known ``parts``, which a replacement would lose."""
    more = [name for name in other_parts(module) if name not in parts]
    if more or "forward" in vars(module):
        message = f"{type(module).__name__} has {', '.join(more) or 'its own forward'} and may do more than its class"
        raise SurgeryError("not_supported", message, field=field, hint=hint)


def replace_modules(model: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> int:
    """Put new modules in the place of old ones, wherever the model refers to them; return the added parameters."""
    if model in replacements:
        message = f"the model itself is a {type(model).__name__} and cannot be replaced in place"
        raise SurgeryError("not_supported", message, field="model", hint="wrap it in nn.Sequential")
    before = sum(parameter.numel() for parameter in model.parameters())

    def replacement(_: str, module: nn.Module) -> nn.Module:
        return move_hooks(module, replacements[module]) if module in replacements else module

    map_modules(model, replacement)
    return sum(parameter.numel() for parameter in model.parameters()) - before


def map_modules(model: nn.Module, change: Callable[[str, nn.Module], nn.Module]) -> None:
    """Put ``change(name, module)`` in the place of each module that ``model`` refers to.

    References are children, plain attributes, and items of lists, dicts and tuples.
    """
    entered = {id(vars(model))}
    holders: deque[tuple[str, Any]] = deque([("", vars(model))])

    def changed(name: str, value: Any) -> Any:
        if isinstance(value, tuple):
            values = [changed(f"{name}.{index}", item) for index, item in enumerate(value)]
            if all(new is old for new, old in zip(values, value)):
                return value
            return type(value)(*values) if hasattr(value, "_fields") else type(value)(values)
        if isinstance(value, nn.Module):
            new = change(name, value)
            if new is not value or isinstance(value, RoutedModule):  # what a routed norm hides is no part of the model
                return new
        if isinstance(value, (nn.Module, dict, list)):
            holder = vars(value) if isinstance(value, nn.Module) else value
            if id(holder) not in entered:
                entered.add(id(holder))
                holders.append((name, holder))
        return value

    while holders:
        prefix, holder = holders.popleft()
        for key, value in holder.items() if isinstance(holder, dict) else enumerate(holder):
            if isinstance(value, (nn.Module, dict, list, tuple)):
                name = prefix if key == "_modules" else f"{prefix}.{key}".lstrip(".")
                new = changed(name, value)
                if new is not value:
                    holder[key] = new


def move_hooks(old: nn.Module, new: nn.Module) -> nn.Module:
    """Give ``new`` the mode and the hooks of ``old``; hooks that receive their module receive ``new``."""
    new.training = old.training
    for name in _HOOKS:
        setattr(new, name, getattr(old, name))
    hooks: Any = new._load_state_dict_pre_hooks.values()
    for hook in hooks:
        if getattr(hook, "with_module", False):
            hook.module = weakref.ref(new)
    return new
