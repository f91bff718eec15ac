"""A network of 24,000 parameters for tests, demos and 8x8 digits."""

from __future__ import annotations

import torch
from torch import nn

from advnorm.models.layers import ImageClassifier, LayerFactory
from advnorm.models.registry import register_model


@register_model("small_cnn", mean=None, std=None)
class SmallCNN(ImageClassifier):
    """Three 3x3 convolutions with norm and activation; the last two halve the resolution."""

    def __init__(self, layers: LayerFactory) -> None:
        super().__init__(layers)
        self.act = layers.act()
        width = layers.in_channels
        for i, (published, stride) in enumerate(((16, 1), (32, 2), (64, 2)), 1):
            out = layers.channels(published)
            self.add_module(f"conv{i}", layers.conv(width, out, 3, stride))
            self.add_module(f"bn{i}", layers.norm(out))
            width = out
        self.fc = nn.Linear(width, layers.num_classes)

    def feature_map(self, x: torch.Tensor) -> torch.Tensor:
        for i in range(1, 4):
            x = self.act(getattr(self, f"bn{i}")(getattr(self, f"conv{i}")(x)))
        return x
