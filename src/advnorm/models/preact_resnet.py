"""Pre-activation ResNets for CIFAR, He et al. 2016b, and Wide ResNets, Zagoruyko & Komodakis 2016."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from advnorm.models.layers import LayerFactory
from advnorm.models.registry import register_model
from advnorm.models.resnet import DEPTHS, ResidualBlock, ResNet


class PreActBlock(ResidualBlock):
    """x + conv(act(norm(… conv(act(norm(x)))))); a projection reads the first activation and has no norm."""

    norm_in_shortcut = False

    def add_layer(self, i: int, conv: nn.Conv2d, layers: LayerFactory) -> None:
        self.add_module(f"bn{i}", layers.norm(conv.in_channels))
        self.add_module(f"conv{i}", conv)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, shortcut = x, x
        for i in range(1, self.depth + 1):
            out = self.act(getattr(self, f"bn{i}")(out))
            if i == 1 and self.downsample is not None:
                shortcut = self.downsample(out)
            out = getattr(self, f"conv{i}")(out)
        return out + shortcut if self.has_shortcut else out


class PreActResNet(ResNet):
    """ResNet with pre-activation blocks and a bare convolution as stem.

    By default there is no norm after the last block, as in the widely used CIFAR code (kuangliu/pytorch-cifar), whose
    PreAct-ResNet-18 has 11,171,146 parameters. ``final_norm=True`` adds norm and activation there, as in He et al.
    """

    block = PreActBlock
    stem_norm = False

    def __init__(self, layers: LayerFactory, *, final_norm: bool = False, **options: Any) -> None:
        super().__init__(layers, **options)
        self.bn_final = layers.norm(self.fc.in_features) if final_norm else None

    def stem(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv1(x)

    def feature_map(self, x: torch.Tensor) -> torch.Tensor:
        x = super().feature_map(x)
        return x if self.bn_final is None else self.act(self.bn_final(x))


for _depth, (_kernels, _depths) in DEPTHS.items():
    _build = partial(PreActResNet, depths=_depths, kernels=_kernels)
    register_model(f"preact_resnet{_depth}", options={"final_norm": bool})(_build)

for _depth, _k in ((28, 10), (34, 10), (40, 2)):  # WRN-d-k: k times the channels, no dropout
    _channels = (16 * _k, 32 * _k, 64 * _k)
    _wide = partial(PreActResNet, depths=((_depth - 4) // 6,) * 3, channels=_channels, stem_channels=16)
    register_model(f"wrn_{_depth}_{_k}")(partial(_wide, final_norm=True))
