"""ResNets, He et al. 2016a: CIFAR and ImageNet stems, basic and bottleneck blocks, with and without shortcuts.

State dicts have the keys of torchvision: conv1, bn1, layer1.0.conv1, layer1.0.bn1, downsample.0, downsample.1, fc.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F

from advnorm.models.layers import ImageClassifier, LayerFactory
from advnorm.models.registry import IMAGENET_MEAN, IMAGENET_STD, register_model

BASIC, BOTTLENECK = (3, 3), (1, 3, 1)  # kernels of a block; a bottleneck has 4 times its inner channels as output
Shortcut = Literal["conv", "pad", "none"]


class PadShortcut(nn.Module):
    """Option A of He et al. 2016a: take every ``stride``-th position and pad the new channels with zeros."""

    def __init__(self, stride: int, new_channels: int) -> None:
        super().__init__()
        self.stride, self.new_channels = stride, new_channels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.new_channels))


class ResidualBlock(nn.Module):
    """act(shortcut(x) + norm(conv(… act(norm(conv(x)))))), He et al. 2016a, fig. 5.

    The stride is on the first 3x3 convolution, as in torchvision (v1.5). With ``shortcut="none"`` nothing is added.
    """

    norm_in_shortcut = True

    def __init__(
        self,
        layers: LayerFactory,
        in_channels: int,
        channels: int,
        *,
        kernels: tuple[int, ...],
        stride: int,
        shortcut: Shortcut,
    ) -> None:
        super().__init__()
        self.depth = len(kernels)
        self.out_channels = 4 * channels if kernels == BOTTLENECK else channels
        self.has_shortcut = shortcut != "none"
        self.act = layers.act()
        widths = [in_channels, *[channels] * (self.depth - 1), self.out_channels]
        for i, kernel in enumerate(kernels):
            conv_stride = stride if i == kernels.index(3) else 1
            self.add_layer(i + 1, layers.conv(widths[i], widths[i + 1], kernel, conv_stride), layers)
        self.downsample: nn.Module | None = None
        if self.has_shortcut and (stride != 1 or in_channels != self.out_channels):
            if shortcut == "pad":
                self.downsample = PadShortcut(stride, self.out_channels - in_channels)
            else:
                self.downsample = nn.Sequential(layers.conv(in_channels, self.out_channels, 1, stride))
                if self.norm_in_shortcut:
                    self.downsample.append(layers.norm(self.out_channels))

    def add_layer(self, i: int, conv: nn.Conv2d, layers: LayerFactory) -> None:
        """Register the i-th convolution of the branch and its norm."""
        self.add_module(f"conv{i}", conv)
        self.add_module(f"bn{i}", layers.norm(conv.out_channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x
        # By attribute, because surgery replaces attributes and not entries of a list.
        for i in range(1, self.depth + 1):
            out = getattr(self, f"bn{i}")(getattr(self, f"conv{i}")(out))
            if i < self.depth:
                out = self.act(out)
        if self.has_shortcut:
            out = out + (x if self.downsample is None else self.downsample(x))
        return self.act(out)


class ResNet(ImageClassifier):
    """Stem, ``layer1`` … ``layerN``, pooling, ``fc``; stages after the first halve the resolution."""

    block: type[ResidualBlock] = ResidualBlock
    stem_norm = True

    def __init__(
        self,
        layers: LayerFactory,
        *,
        depths: tuple[int, ...],
        kernels: tuple[int, ...] = BASIC,
        channels: tuple[int, ...] = (64, 128, 256, 512),
        stem_channels: int | None = None,
        stem: Literal["cifar", "imagenet"] = "cifar",
        shortcut: Shortcut = "conv",
    ) -> None:
        super().__init__(layers)
        width = layers.channels(stem_channels or channels[0])
        kernel, stride = (7, 2) if stem == "imagenet" else (3, 1)
        self.conv1 = layers.conv(layers.in_channels, width, kernel, stride)
        if self.stem_norm:
            self.bn1 = layers.norm(width)
        self.act = layers.act()
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1) if stem == "imagenet" else None

        self.stages = len(depths)
        for stage, (depth, published) in enumerate(zip(depths, channels, strict=True)):
            blocks = nn.Sequential()
            for i in range(depth):
                stride = 2 if stage > 0 and i == 0 else 1
                inner = layers.channels(published)
                block = self.block(layers, width, inner, kernels=kernels, stride=stride, shortcut=shortcut)
                if layers.norm_name == "none" and block.has_shortcut:
                    with torch.no_grad():  # keeps the variance after all branches of order 1
                        getattr(block, f"conv{len(kernels)}").weight.mul_(sum(depths) ** -0.5)
                blocks.append(block)
                width = block.out_channels
            self.add_module(f"layer{stage + 1}", blocks)
        self.fc = nn.Linear(width, layers.num_classes)

    def stem(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(self.bn1(self.conv1(x)))
        return x if self.maxpool is None else self.maxpool(x)

    def feature_map(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for stage in range(1, self.stages + 1):
            x = getattr(self, f"layer{stage}")(x)
        return x


# The three depths of He et al. 2016a that all stems and block orders share.
DEPTHS = {18: (BASIC, (2, 2, 2, 2)), 34: (BASIC, (3, 4, 6, 3)), 50: (BOTTLENECK, (3, 4, 6, 3))}

# ResNet-200: He et al. 2016b. Paper E does not print the blocks of ResNet-338, 518 and 638 (sec. 5: "adding more
# residual blocks"). Here stages 2 and 3 grow in the ratio 24:36 of ResNet-200, and depth = 3 * sum + 2 fixes the rest.
IMAGENET_DEPTHS = DEPTHS | {
    101: (BOTTLENECK, (3, 4, 23, 3)),
    152: (BOTTLENECK, (3, 8, 36, 3)),
    200: (BOTTLENECK, (3, 24, 36, 3)),
    338: (BOTTLENECK, (3, 42, 64, 3)),
    518: (BOTTLENECK, (3, 66, 100, 3)),
    638: (BOTTLENECK, (3, 82, 124, 3)),
}

for _depth, (_kernels, _depths) in DEPTHS.items():
    register_model(f"resnet{_depth}")(partial(ResNet, depths=_depths, kernels=_kernels))
register_model("resnet18_noshortcut")(partial(ResNet, depths=(2, 2, 2, 2), shortcut="none"))

for _depth in (20, 56):  # sec. 4.2 of He et al. 2016a: 6n + 2 layers
    _small = partial(ResNet, depths=((_depth - 2) // 6,) * 3, channels=(16, 32, 64))
    register_model(f"resnet{_depth}")(partial(_small, shortcut="pad"))
    register_model(f"resnet{_depth}_noshortcut")(partial(_small, shortcut="none"))

for _depth, (_kernels, _depths) in IMAGENET_DEPTHS.items():
    _build = partial(ResNet, depths=_depths, kernels=_kernels, stem="imagenet")
    register_model(f"imagenet_resnet{_depth}", mean=IMAGENET_MEAN, std=IMAGENET_STD)(_build)
