"""Fixup ResNets, Zhang, Dauphin & Ma 2019: residual networks that train without any norm."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from advnorm.models.layers import LayerFactory
from advnorm.models.registry import register_model
from advnorm.models.resnet import DEPTHS, ResidualBlock, ResNet


def _scalar(value: float) -> nn.Parameter:
    return nn.Parameter(torch.full((1,), value))


class FixupBlock(ResidualBlock):
    """Block with a scalar bias before and after each convolution and one scalar multiplier (fig. 1, right)."""

    norm_in_shortcut = False
    bias1a: nn.Parameter

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.scale = _scalar(1.0)

    def add_layer(self, i: int, conv: nn.Conv2d, layers: LayerFactory) -> None:
        self.register_parameter(f"bias{i}a", _scalar(0.0))
        self.add_module(f"conv{i}", conv)
        self.register_parameter(f"bias{i}b", _scalar(0.0))

    def branch(self, x: torch.Tensor) -> torch.Tensor:
        for i in range(1, self.depth + 1):
            x = getattr(self, f"conv{i}")(x + getattr(self, f"bias{i}a"))
            if i < self.depth:
                x = self.act(x + getattr(self, f"bias{i}b"))
        return x * self.scale + getattr(self, f"bias{self.depth}b")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = x if self.downsample is None else self.downsample(x + self.bias1a)
        return self.act(self.branch(x) + shortcut)


class FixupResNet(ResNet):
    """ResNet without norms under the three rules of sec. 3.

    1. The classifier and the last convolution of each branch start at zero.
    2. The other m - 1 convolutions of a branch start at He's scale times L^(-1/(2m-2)), L the number of branches.
    3. :class:`FixupBlock`, the stem and the classifier have scalar multipliers (1) and biases (0).
    """

    block = FixupBlock
    stem_norm = False

    def __init__(self, layers: LayerFactory, **options: Any) -> None:
        super().__init__(replace(layers, conv_bias=False), **options)
        self.bias1, self.bias2 = _scalar(0.0), _scalar(0.0)
        blocks = [module for module in self.modules() if isinstance(module, FixupBlock)]
        with torch.no_grad():
            for block in blocks:
                for i in range(1, block.depth):
                    getattr(block, f"conv{i}").weight.mul_(len(blocks) ** (-1 / (2 * block.depth - 2)))
                getattr(block, f"conv{block.depth}").weight.zero_()
            self.fc.weight.zero_()
            self.fc.bias.zero_()

    def stem(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.conv1(x) + self.bias1)

    def penultimate(self, x: torch.Tensor) -> torch.Tensor:
        return super().penultimate(x) + self.bias2


for _depth in (20, 56):
    _build = partial(FixupResNet, depths=((_depth - 2) // 6,) * 3, channels=(16, 32, 64), shortcut="pad")
    register_model(f"fixup_resnet{_depth}", has_norm=False)(_build)
for _depth in (18, 50):
    _kernels, _depths = DEPTHS[_depth]
    register_model(f"fixup_resnet{_depth}", has_norm=False)(partial(FixupResNet, depths=_depths, kernels=_kernels))
