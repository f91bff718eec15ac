"""VGG for CIFAR, Simonyan & Zisserman 2015: convolutions, then one linear layer instead of three."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import nn

from advnorm.models.layers import ImageClassifier, LayerFactory
from advnorm.models.registry import register_model

CHANNELS = (64, 128, 256, 512, 512)


class VGG(ImageClassifier):
    """Five stages of (conv, norm, act) x n and a 2x2 max pooling: inputs of 32x32 or more.

    The convolutions have a bias with every norm, as in the published CIFAR code (kuangliu/pytorch-cifar).
    """

    def __init__(self, layers: LayerFactory, *, depths: tuple[int, ...]) -> None:
        super().__init__(layers)
        layers = replace(layers, conv_bias=True)
        self.features = nn.Sequential()
        width = layers.in_channels
        for depth, published in zip(depths, CHANNELS, strict=True):
            out = layers.channels(published)
            for _ in range(depth):
                self.features.extend([layers.conv(width, out, 3), layers.norm(out), layers.act()])
                width = out
            self.features.append(nn.MaxPool2d(2))
        self.fc = nn.Linear(width, layers.num_classes)

    def feature_map(self, x: torch.Tensor) -> torch.Tensor:
        return self.features(x)


for _name, _depths in {"vgg11": (1, 1, 2, 2, 2), "vgg16": (2, 2, 3, 3, 3), "vgg19": (2, 2, 4, 4, 4)}.items():
    register_model(_name)(partial(VGG, depths=_depths))
