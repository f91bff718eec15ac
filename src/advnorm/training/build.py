"""The parts of a training that follow from its configuration: loader, model and objective."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, TypedDict

import torch
from torch import nn

from advnorm._core.settings import Setting
from advnorm.config import Config
from advnorm.data import FolderData, ImageData, make_loader
from advnorm.data.loader import Loader
from advnorm.models import create_model
from advnorm.objectives import OBJECTIVES, REGULARIZERS, SECOND_PASSES, Objective
from advnorm.surgery import convert_head
from advnorm.training.ranks import Ranks


def resolve_auto(config: Config, device: torch.device) -> Config:
    """The configuration with what ``auto`` means on a device."""
    on_cuda = device.type == "cuda"
    whole = on_cuda and config.parallel == "ddp"  # parts of parameters are contiguous, and their gathering not compiled
    compiled = whole and not config.recompute
    here = {"precision": "bf16" if on_cuda else "float32", "channels_last": whole, "compile": compiled}
    return replace(config, **{name: value for name, value in here.items() if getattr(config, name) == "auto"})


def build_loader(
    data: ImageData | FolderData, config: Config, ranks: Ranks, workers: int | None, **settings: Any
) -> Loader:
    """Build the loader of this process; ``settings`` are those of the batches."""
    place: dict[str, Any] = {"device": ranks.device, "rank": ranks.rank, "world": ranks.world}
    return make_loader(data, channels_last=config.channels_last is True, workers=workers, **place, **settings)


Classes = Annotated[int, Setting("Number of classes.", "[1, 2147483647]")]


class DataProperties(TypedDict):
    """The properties of a data set that a model and a record need."""

    name: str
    images: int
    image_shape: tuple[int, int, int]
    num_classes: Classes
    fingerprint: str


def data_properties(data: ImageData | FolderData) -> dict[str, Any]:
    """The properties of a data set that a model and a record need."""
    return {
        "name": data.name,
        "images": len(data),
        "image_shape": list(data.image_shape),
        "num_classes": data.num_classes,
        "fingerprint": data.fingerprint,
    }


def describe_images(data: ImageData | FolderData) -> str:
    """``1,000 images of 3×32×32, 10 classes``: number, shape, preparation and classes of images."""
    shape = "×".join(map(str, data.image_shape))
    how = f" ({data.preparation})" if isinstance(data, FolderData) else ""
    return f"{len(data):,} images of {shape}{how}, {data.num_classes} classes"


def build_model(config: Config, data: Mapping[str, Any]) -> nn.Module:
    """Build the untrained model of a configuration for data with these :func:`data_properties`."""
    norm_options = dict(config.norm_options)
    if config.sync_statistics:
        norm_options["sync"] = True
    options = network_options(config, data)
    model = create_model(config.model.name, norm=config.norm, norm_options=norm_options, **options)
    if config.dual_head:
        convert_head(model)
    return model


def network_options(config: Config, data: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of ``create_model`` that do not concern the norm, for data with these :func:`data_properties`.

    Only images of three channels have a published mean and deviation. Others are not normalized unless the model's
    options set it.
    """
    channels = data["image_shape"][0]
    options = {"num_classes": data["num_classes"], "in_channels": channels, **config.model.options}
    if channels != 3 and not {"mean", "std", "normalize"} & set(config.model.options):
        options["normalize"] = False
    return options


def build_objective(config: Config, model: nn.Module) -> Objective:
    """Build the objective of a configuration around a model, with its regularizer and its second pass."""
    kind = OBJECTIVES.get(config.objective.name)
    attack = config.build_attack() if kind.needs_attack else None
    objective: Objective = kind(model, attack, label_smoothing=config.label_smoothing, **config.objective.options)
    objective.seed = config.seed
    if config.regularizer is not None:
        objective = REGULARIZERS.get(config.regularizer.name)(objective, **config.regularizer.options)
    if config.second_pass is not None:
        objective = SECOND_PASSES.get(config.second_pass.name)(objective, **config.second_pass.options)
    return objective
