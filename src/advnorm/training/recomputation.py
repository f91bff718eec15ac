"""Activation checkpointing: blocks of a network keep their inputs and compute the rest again in the backward."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from advnorm._core.errors import ConfigError
from advnorm.norms import checkpoint_context, routed_modules


def recompute_blocks(model: nn.Module) -> int:
    """Checkpoint the blocks of a model in place; return their number. Names and outputs stay.

    A block is a module inside a ``Sequential`` or a ``ModuleList`` that has several layers with parameters and contains
    no other block. The recomputation uses the scopes of the forward and updates no bank.
    """
    if any(isinstance(module, _NormBase) and module.track_running_stats for module in model.modules()):
        message = "{field} would update built-in batch norms twice"
        hint = "convert the model first: advnorm.convert_norm(model, 'bn')"
        raise ConfigError("not_supported", message, field="recompute", hint=hint)
    lists = [module for module in model.modules() if isinstance(module, nn.Sequential | nn.ModuleList)]
    found = {child for module in lists for child in module if _has_layers(child)}
    blocks = [block for block in found if not any(inner in found for inner in block.modules() if inner is not block)]
    if not blocks:
        message = f"{type(model).__name__} has no blocks of layers whose activations could be computed again"
        raise ConfigError("not_supported", message, field="recompute", hint="use recompute=false, or accumulate")
    for block in blocks:
        block.__class__ = _recomputing(type(block))
    return len(blocks)


def _has_layers(module: nn.Module) -> bool:
    return sum(bool(list(layer.parameters(recurse=False))) for layer in module.modules() if layer is not module) > 1


@cache
def _recomputing(kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass of the same name whose forward is checkpointed."""

    def forward(self: nn.Module, *inputs: Any, **options: Any) -> Any:
        run = partial(kind.forward, self)
        if not torch.is_grad_enabled():
            return run(*inputs, **options)
        scopes = {"context_fn": checkpoint_context(self)} if routed_modules(self) else {}
        return checkpoint(run, *inputs, use_reentrant=False, **scopes, **options)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
