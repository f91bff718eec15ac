"""Parts that all models share: the layer factory, the input normalization and the base class."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from advnorm.norms import make_norm

# Never in place: without a norm, the shortcut may still need the input of an activation, and a hook on a norm must
# receive the output of the norm.
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "selu": nn.SELU,
    "silu": nn.SiLU,
}


class InputNorm(nn.Module):
    """(x - mean) / std per channel, so that models and attacks take images in [0, 1].

    The buffers are not in the state dict, which keeps the published keys. A model that was built on the meta device
    needs them set again after ``to_empty``.
    """

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1), persistent=False)
        self._shown = f"mean={mean}, std={std}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - self.mean) / self.std

    def extra_repr(self) -> str:
        return self._shown


@dataclass(frozen=True, kw_only=True)
class LayerFactory:
    """Builds the layers of a model from its options.

    Convolutions start from He normal with fan out and the gain of ReLU, whatever the activation. They have a bias only
    with ``norm="none"``, unless ``conv_bias`` is set. Linear layers start from the default of PyTorch.
    """

    num_classes: int = 10
    norm_name: str = "bn"
    norm_options: Mapping[str, Any] = field(default_factory=dict)
    width: float = 1.0
    activation: str = "relu"
    in_channels: int = 3
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    conv_bias: bool | None = None

    def channels(self, published: int) -> int:
        """Channels after the width multiplier: rounded, at least 8."""
        return max(8, round(published * self.width))

    def conv(self, in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> nn.Conv2d:
        bias = self.norm_name == "none" if self.conv_bias is None else self.conv_bias
        conv = nn.Conv2d(in_channels, out_channels, kernel, stride=stride, padding=kernel // 2, bias=bias)
        if conv.weight.is_meta:  # a configuration is validated with a network without memory
            return conv
        nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
        if conv.bias is not None:
            nn.init.zeros_(conv.bias)
        return conv

    def norm(self, channels: int) -> nn.Module:
        return make_norm(self.norm_name, channels, dim=2, **self.norm_options)

    def act(self) -> nn.Module:
        return ACTIVATIONS[self.activation]()


class ImageClassifier(nn.Module, ABC):
    """Base class of the models: input normalization, ``feature_map``, global average pooling, ``fc``."""

    fc: nn.Linear
    #: The arguments of ``create_model`` that build this network again.
    recipe: dict[str, Any]

    def __init__(self, layers: LayerFactory) -> None:
        super().__init__()
        mean, std = layers.mean, layers.std
        self.input_norm = None if mean is None or std is None else InputNorm(mean, std)

    @abstractmethod
    def feature_map(self, x: torch.Tensor) -> torch.Tensor:
        """The last feature map, B C H W, of normalized images."""

    def penultimate(self, x: torch.Tensor) -> torch.Tensor:
        """The pooled features that the classifier reads, B C: g(x) of paper D."""
        if self.input_norm is not None:
            x = self.input_norm(x)
        return F.adaptive_avg_pool2d(self.feature_map(x), 1).flatten(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.penultimate(x))
