"""The embedded data set: 1,797 handwritten digits of 8×8 pixels that come with scikit-learn."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from advnorm._core.errors import ConfigError, raise_problems, unknown_name
from advnorm._core.settings import Setting
from advnorm.data.registry import register_dataset

TestShare = Annotated[float, Setting("Share of the images in the test split.", "(0, 1)")]


@register_dataset(
    "digits", summary="1,797 handwritten digits, 1×8×8, embedded (scikit-learn)", num_classes=10, needs_root=False
)
def digits(split: str = "train", *, test_share: TestShare = 0.25, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return images ``(N, 1, 8, 8)`` in [0, 1] and labels of one split; ``seed`` draws the split."""
    from sklearn.datasets import load_digits

    if split not in ("train", "test"):
        raise_problems([unknown_name("split", split, ("train", "test"))])
    pixels, classes = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    labels = torch.tensor(classes, dtype=torch.int64)
    cut = round(test_share * len(labels))
    if not 0 < cut < len(labels):
        message = f"{{field}} must leave some of the {len(labels)} images in both splits"
        raise ConfigError("out_of_range", message, field="test_share", got=test_share)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    chosen = order[cut:] if split == "train" else order[:cut]
    return images[chosen], labels[chosen]
