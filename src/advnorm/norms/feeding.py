"""Forwards in training that leave the running statistics alone, whatever kind of norm keeps them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from advnorm.norms.routing import Routed, Scope


@contextmanager
def without_feeding(model: nn.Module) -> Iterator[None]:
    """Scope: norms in train mode use the batch's statistics and store nothing; those in eval mode stay as they are.

    Flags are flipped, nothing is copied back: a graph that is alive keeps its tensors.
    """
    saved = []

    def put(module: nn.Module, name: str, value: object) -> None:
        saved.append((module, name, getattr(module, name)))
        setattr(module, name, value)

    with ExitStack() as scopes:
        try:
            for module in model.modules():
                if not module.training:
                    continue
                if isinstance(module, Routed):
                    if module.state.mode is None:
                        scopes.enter_context(Scope(module, {"mode": "batch_frozen"}))
                elif isinstance(module, _NormBase) and module.track_running_stats:
                    if isinstance(module, _InstanceNorm):  # feeds its buffers whenever it has them
                        put(module, "running_mean", None)
                        put(module, "running_var", None)
                    put(module, "track_running_stats", False)
            yield
        finally:
            for module, name, value in reversed(saved):
                setattr(module, name, value)
