"""Which layers of a model are norms, routed and built-in."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from advnorm.norms.mixture import MixtureNorm
from advnorm.norms.routed_norm import RoutedNorm

#: Layers whose own parameters are norm parameters.
NORM_LAYERS = (RoutedNorm, MixtureNorm, _NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def norm_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Weights and biases of the norm layers, each once; biases of other layers are not included."""
    layers = (module for module in model.modules() if isinstance(module, NORM_LAYERS))
    return list(dict.fromkeys(value for layer in layers for value in layer.parameters(recurse=False)))
