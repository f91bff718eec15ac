"""Images that cost nothing and can be learned: a coarse random pattern per class, and noise on it."""

from __future__ import annotations

import torch

from advnorm._core.errors import ConfigError, did_you_mean, raise_all
from advnorm._core.seeding import ImageNoise
from advnorm.data.sets import ImageData


def synthetic(
    split: str = "train",
    *,
    size: int = 512,
    classes: int = 10,
    image_size: int = 32,
    channels: int = 3,
    seed: int = 0,
) -> ImageData:
    """Images ``(size, channels, image_size, image_size)`` as bytes; both splits share the patterns."""
    if split not in ("train", "test"):
        raise ConfigError(f"unknown split {split!r}{did_you_mean(split, ('train', 'test'))}")
    counts = {"size": size, "classes": classes, "image_size": image_size, "channels": channels}
    raise_all([f"{name} must be at least 1, got {count}" for name, count in counts.items() if count < 1], "bad data")
    patterns = ImageNoise(seed, torch.arange(classes)).fold("pattern").uniform((channels, 4, 4))
    patterns = torch.nn.functional.interpolate(patterns, size=(image_size, image_size))
    labels = torch.arange(size) % classes
    noise = ImageNoise(seed, torch.arange(size)).fold(split).uniform((channels, image_size, image_size))
    images = (255 * (0.8 * patterns[labels] + 0.2 * noise)).byte()
    return ImageData(name="synthetic", split=split, images=images, labels=labels, num_classes=classes)
