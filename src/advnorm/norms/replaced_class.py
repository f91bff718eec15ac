"""The class of a replaced norm: its forward with the tensors of a bank, and an empty instance to restore it from."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn

_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


def empty_copy(norm: nn.Module) -> nn.Module:
    """A module of the same class and settings without tensors, children and hooks; the constructor does not run."""
    new = type(norm).__new__(type(norm))
    nn.Module.__init__(new)
    new.__dict__.update({name: value for name, value in vars(norm).items() if name not in _MODULE_ATTRIBUTES})
    for content in ("_parameters", "_buffers", "_modules"):
        setattr(new, content, dict.fromkeys(getattr(norm, content)))
    new._non_persistent_buffers_set = {*norm._non_persistent_buffers_set}
    return new


def eps_name(norm: nn.Module) -> str | None:
    """The attribute that holds the constant that is added to the variance."""
    return next((name for name in ("eps", "variance_epsilon", "epsilon") if name in vars(norm)), None)


def bank_views(owner: Any) -> dict[str, nn.Module]:
    """For each affine bank of a per-sample norm, an instance of the replaced class with the parameters of that bank.

    It owns no tensor and is no child of ``owner``: weight, bias, mode and the other parts are looked up in ``owner`` at
    each access. So parameters that are moved, sharded, parametrized or replaced need no update here.
    """
    template: nn.Module | None = owner.template
    if template is None or owner.plan.statistics == "batch":
        return {}
    views = {bank: empty_copy(template) for bank in owner.plan.affine_banks}
    for bank, view in views.items():
        view.__class__ = _view_class(type(template), (*owner.parts, "training"), eps_name(template))
        view.__dict__.update(_owner=owner, _bank=bank)
    return views


@cache
def _view_class(norm_class: type[nn.Module], shared: tuple[str, ...], eps: str | None) -> type[nn.Module]:
    """A subclass, so that ``super()`` works, whose properties come before the instance's own attributes."""
    looked_up: dict[str, Any] = {name: property(lambda view, name=name: getattr(view._owner, name)) for name in shared}
    if eps is not None:
        looked_up[eps] = property(lambda view: view._owner.eps)
    for index, name in enumerate(("weight", "bias")):
        looked_up[name] = property(lambda view, index=index: view._owner.affine_bank(view._bank)[index])
    return type(norm_class.__name__, (norm_class,), looked_up)
