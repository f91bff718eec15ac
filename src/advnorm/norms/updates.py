"""Forwards that do not update running statistics, for routed and built-in norms."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from advnorm.norms.routed_module import RoutedModule
from advnorm.norms.scopes import Scope


class AttributeOverrides:
    """Temporary attribute values. No tensor is copied, so an autograd graph that is still in use keeps its tensors."""

    def __init__(self) -> None:
        self._saved: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        self._saved.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def restore(self) -> None:
        while self._saved:
            owner, name, value = self._saved.pop()
            setattr(owner, name, value)


def disable_updates(overrides: AttributeOverrides, norm: _NormBase) -> None:
    """Let a built-in norm in train mode use the statistics of the batch without storing them."""
    if not norm.track_running_stats:
        return
    if isinstance(norm, _InstanceNorm):  # updates its buffers whenever it has them
        for name in ("running_mean", "running_var"):
            overrides.set(norm, name, None)
    overrides.set(norm, "track_running_stats", False)


@contextmanager
def without_updates(model: nn.Module) -> Iterator[None]:
    """Scope: norms in train mode use the statistics of the batch without storing them; norms in eval mode stay so."""
    overrides = AttributeOverrides()
    with ExitStack() as stack:
        stack.callback(overrides.restore)
        for module in model.modules():
            if isinstance(module, RoutedModule):
                if (module.state.mode or ("batch" if module.training else None)) == "batch":
                    stack.enter_context(Scope(module, {"mode": "batch_frozen"}))
            elif isinstance(module, _NormBase) and module.training:
                disable_updates(overrides, module)
        yield
