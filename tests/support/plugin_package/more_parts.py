"""A model, a data set, an analysis and an adapter, as a separate package adds them."""

from dataclasses import dataclass

import torch
from matplotlib.figure import Figure
from torch import nn

import advnorm
from advnorm import data
from advnorm.analysis.base import Finding, register_analysis
from advnorm.models import register_model
from advnorm.surgery import register_adapter


class ScaledNorm(nn.BatchNorm2d):
    """A batch norm under another name."""


register_adapter(ScaledNorm, "batch_norm_2d")


@register_model("plugin_net", mean=None, std=None)
def plugin_net(layers):
    model = nn.Sequential(
        nn.Conv2d(layers.in_channels, 4, 3), ScaledNorm(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(4, layers.num_classes),
    )  # fmt: skip
    advnorm.convert_norm(model, layers.norm_name, **layers.norm_options)
    return model


@data.register_dataset("plugin_stripes", summary="horizontal and vertical stripes", needs_root=False)
def plugin_stripes(split):
    labels = torch.arange(64) % 2
    images = (torch.arange(8) % 2).expand(64, 1, 8, 8).float()
    noise = torch.rand(64, 1, 8, 8, generator=torch.Generator().manual_seed(len(split))) / 2
    images = torch.where(labels.view(-1, 1, 1, 1).bool(), images, images.mT) / 2 + noise
    return data.ImageData(name="plugin_stripes", split=split, images=images, labels=labels, num_classes=2)


@dataclass(frozen=True, kw_only=True, eq=False)
class ParameterCount(Finding):
    RECORD = ("parameters",)
    parameters: int

    def draw(self):
        return Figure()

    def table(self):
        return ("parameters",), ((str(self.parameters),),)


@register_analysis("plugin_count", summary="number of parameters", takes="run")
def plugin_count(target):
    return ParameterCount(parameters=sum(p.numel() for p in target.model.parameters()))
