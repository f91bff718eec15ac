"""Generated images that a network can learn: a coarse random pattern for each class, with noise on it."""

from __future__ import annotations

from typing import Annotated

import torch

from advnorm._core.errors import ConfigError
from advnorm._core.memory import physical_memory
from advnorm._core.seeding import ImageNoise
from advnorm._core.settings import Setting
from advnorm.data.image_data import ImageData
from advnorm.data.registry import register_dataset

#: Pixels that are generated at once.
CHUNK = 2**24


@register_dataset("synthetic", summary="a random pattern for each class with noise, generated", needs_root=False)
def read_synthetic(
    split: str = "train",
    *,
    size: Annotated[int, Setting("Number of images.", "[1, inf)")] = 512,
    classes: Annotated[int, Setting("Number of classes.", "[1, inf)")] = 10,
    image_size: Annotated[int, Setting("Height and width in pixels.", "[1, inf)")] = 32,
    channels: Annotated[int, Setting("Number of channels.", "[1, inf)")] = 3,
    seed: int = 0,
) -> ImageData:
    """Return images ``(size, channels, image_size, image_size)`` as bytes; both splits have the same patterns."""
    image_bytes, pattern_bytes = channels * image_size**2, 4 * channels * (16 + image_size**2)
    needed = size * (16 + image_bytes) + classes * pattern_bytes
    if needed > (memory := physical_memory()):
        message = f"{{field}} gives images of {needed / 2**30:,.1f} GiB, and this machine has {memory / 2**30:,.1f} GiB"
        hint = "lower size, classes, image_size or channels"
        raise ConfigError("out_of_range", message, field="size", got=size, hint=hint)
    patterns = ImageNoise(seed, torch.arange(classes)).fold("pattern").uniform((channels, 4, 4))
    patterns = torch.nn.functional.interpolate(patterns, size=(image_size, image_size))
    labels = torch.arange(size) % classes
    images = torch.empty(size, channels, image_size, image_size, dtype=torch.uint8)
    for rows in torch.arange(size).split(max(1, CHUNK // image_bytes)):
        noise = ImageNoise(seed, rows).fold(split).uniform((channels, image_size, image_size))
        images[rows] = (255 * (0.8 * patterns[labels[rows]] + 0.2 * noise)).byte()
    return ImageData(name="synthetic", split=split, images=images, labels=labels, num_classes=classes)
