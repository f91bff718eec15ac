"""Put new modules in the place of old ones, with their mode, hooks and shared tensors."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from advnorm._core.errors import SurgeryError
from advnorm._core.wrappers import parallel_wrappers
from advnorm.norms.routed_module import validate_module
from advnorm.surgery.report import SurgeryReport

#: Hooks of a module. Their dictionaries move as they are, so that a handle still removes its hook.
_HOOKS = tuple(name for name in vars(nn.Module()) if "_hook" in name)


class BankCopies:
    """Copies of a tensor, one per bank. The first bank keeps the original; tensors that were shared stay shared."""

    def __init__(self) -> None:
        self._copies: dict[tuple[int, int], torch.Tensor] = {}

    def get(self, tensor: Any, bank: int) -> Any:
        """The tensor of bank number ``bank``."""
        if tensor is None or bank == 0:
            return tensor
        key = (id(tensor), bank)
        if key not in self._copies:
            copy = tensor.detach().clone()
            is_parameter = isinstance(tensor, nn.Parameter)
            self._copies[key] = nn.Parameter(copy, requires_grad=tensor.requires_grad) if is_parameter else copy
        return self._copies[key]


class Replacement(NamedTuple):
    """How to build a new module, and the change in words."""

    build: Callable[[BankCopies], nn.Module]
    change: str = ""
    changes_outputs: bool = False


def validate_convertible(model: nn.Module) -> None:
    """Raise if ``model`` is not a module, or inside a wrapper that keeps a list of its parameters."""
    validate_module(model)
    wrappers = parallel_wrappers(model)
    if wrappers:
        message = f"the model is wrapped in {', '.join(wrappers)}, which would not use new parameters"
        raise SurgeryError("not_supported", message, field="model", hint="convert first, then wrap")


def find_additions(module: nn.Module, parts: Sequence[str] = ()) -> str | None:
    """What a module has beyond its class and the known ``parts``, and what a replacement would lose."""
    if "forward" in vars(module):
        return "has its own forward and may do more than its class"
    known = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    tensors = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    names = (*tensors, *dict(module.named_children()))
    more = [name for name in names if name not in known and name.split(".")[0] not in parts]
    return f"has {', '.join(more)}, which its class does not have, and may do more" if more else None


def move_hooks(old: nn.Module, new: nn.Module) -> nn.Module:
    """Give ``new`` the mode and the hooks of ``old``."""
    new.training = old.training
    for name in _HOOKS:
        setattr(new, name, getattr(old, name))
    return new


def rebind_hooks(module: nn.Module) -> nn.Module:
    """Let hooks that receive their module receive ``module``."""
    hooks: Any = module._load_state_dict_pre_hooks.values()
    for hook in hooks:
        if getattr(hook, "with_module", False):
            hook.module = weakref.ref(module)
    return module


def replace_modules(
    model: nn.Module, replacements: Mapping[nn.Module, Replacement], report: SurgeryReport
) -> SurgeryReport:
    """Build every new module, then put all of them in place, also where a module is held twice."""
    if model in replacements:
        message = f"the model itself is a {type(model).__name__} and cannot be replaced in place"
        raise SurgeryError("not_supported", message, field="model", hint="wrap it in nn.Sequential")
    before = _count_parameters(model)
    copies = BankCopies()
    built = {old: replacement.build(copies) for old, replacement in replacements.items()}
    changes = {name: replacements[module].change for name, module in model.named_modules() if module in built}
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child in built:
                parent._modules[name] = rebind_hooks(built[child])
    after = _count_parameters(model)
    return dataclasses.replace(report, replaced=changes, parameters_before=before, parameters_after=after)


def _count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
