"""Generated images that a network can learn: a coarse random pattern for each class, with noise on it."""

from __future__ import annotations

import torch

from advnorm._core.errors import Problem, raise_problems
from advnorm._core.seeding import ImageNoise
from advnorm.data.image_data import ImageData
from advnorm.data.registry import register_dataset


@register_dataset("synthetic", summary="a random pattern for each class with noise, generated", needs_root=False)
def read_synthetic(
    split: str = "train",
    *,
    size: int = 512,
    classes: int = 10,
    image_size: int = 32,
    channels: int = 3,
    seed: int = 0,
) -> ImageData:
    """Return images ``(size, channels, image_size, image_size)`` as bytes; both splits have the same patterns."""
    counts = {"size": size, "classes": classes, "image_size": image_size, "channels": channels}
    problems = [
        Problem(code="out_of_range", message="{field} must be at least 1", field=name, got=count)
        for name, count in counts.items()
        if count < 1
    ]
    raise_problems(problems, "bad data")
    patterns = ImageNoise(seed, torch.arange(classes)).fold("pattern").uniform((channels, 4, 4))
    patterns = torch.nn.functional.interpolate(patterns, size=(image_size, image_size))
    labels = torch.arange(size) % classes
    noise = ImageNoise(seed, torch.arange(size)).fold(split).uniform((channels, image_size, image_size))
    images = (255 * (0.8 * patterns[labels] + 0.2 * noise)).byte()
    return ImageData(name="synthetic", split=split, images=images, labels=labels, num_classes=classes)
