"""Forwards that leave the running statistics alone, whatever kind of norm keeps them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from advnorm.norms.routing import Routed, Scope


class Flags:
    """Attributes set for a while. Nothing is copied, so that a graph that is alive keeps its tensors."""

    def __init__(self) -> None:
        self._saved: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        self._saved.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def restore(self) -> None:
        while self._saved:
            owner, name, value = self._saved.pop()
            setattr(owner, name, value)


def stop_feeding(flags: Flags, norm: _NormBase) -> None:
    """Let a built-in norm in train mode use the batch's statistics and store nothing."""
    if not norm.track_running_stats:
        return
    if isinstance(norm, _InstanceNorm):  # feeds its buffers whenever it has them
        for name in ("running_mean", "running_var"):
            flags.set(norm, name, None)
    flags.set(norm, "track_running_stats", False)


@contextmanager
def without_feeding(model: nn.Module) -> Iterator[None]:
    """Scope: norms in train mode use the batch's statistics and store nothing; those in eval mode stay as they are."""
    flags = Flags()
    with ExitStack() as stack:
        stack.callback(flags.restore)
        for module in model.modules():
            if isinstance(module, Routed) and (module.state.mode or ("batch" if module.training else None)) == "batch":
                stack.enter_context(Scope(module, {"mode": "batch_frozen"}))
            elif isinstance(module, _NormBase) and module.training:
                stop_feeding(flags, module)
        yield
