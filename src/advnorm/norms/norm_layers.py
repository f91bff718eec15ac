"""All norm layers of a model, routed and built-in: their parameters, and forwards that do not update statistics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from advnorm._core.errors import ConfigError
from advnorm.norms.mixture import MixtureNorm
from advnorm.norms.rms import SampleRMSNorm
from advnorm.norms.routed_module import RoutedModule, routed_modules
from advnorm.norms.routed_norm import RoutedNorm
from advnorm.norms.scopes import Scope

#: Layers whose own parameters are norm parameters.
NORM_LAYERS = (RoutedNorm, MixtureNorm, SampleRMSNorm, _NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def norm_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Weights and biases of the norm layers, each once; biases of other layers are not included."""
    layers = (module for module in model.modules() if isinstance(module, NORM_LAYERS))
    return list(dict.fromkeys(value for layer in layers for value in layer.parameters(recurse=False)))


def batch_norms(model: nn.Module) -> dict[str, RoutedNorm]:
    """The norms of a model that have statistics banks, by name; raises if there are none."""
    norms = {name: module for name, module in routed_modules(model).items() if isinstance(module, RoutedNorm)}
    norms = {name: norm for name, norm in norms.items() if norm.plan.statistics == "batch"}
    if not norms:
        hint = "convert it with advnorm.convert_norm(model, 'bn')"
        raise ConfigError("no_statistics_bank", "the model has no routed batch norm", field="model", hint=hint)
    return norms


def override(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute until ``stack`` closes. No tensor is copied, so an autograd graph in use keeps its tensors."""
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def disable_updates(stack: ExitStack, norm: _NormBase) -> None:
    """Let a built-in norm in train mode use the statistics of the batch without storing them."""
    if not norm.track_running_stats:
        return
    if isinstance(norm, _InstanceNorm):  # updates its buffers whenever it has them
        for name in ("running_mean", "running_var"):
            override(stack, norm, name, None)
    override(stack, norm, "track_running_stats", False)


@contextmanager
def without_updates(model: nn.Module) -> Iterator[None]:
    """Scope: norms in train mode use the statistics of the batch without storing them; norms in eval mode stay so."""
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, RoutedModule):
                if (module.state.mode or ("batch" if module.training else None)) == "batch":
                    stack.enter_context(Scope(module, {"mode": "batch_frozen"}))
            elif isinstance(module, _NormBase) and module.training:
                disable_updates(stack, module)
        yield
