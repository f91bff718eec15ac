"""The embedded data: 1,797 handwritten digits, 8×8 pixels, that come with scikit-learn."""

from __future__ import annotations

import torch
from torch import Tensor

from advnorm._core.errors import ConfigError, did_you_mean


def digits(split: str = "train", *, test_share: float = 0.25, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Images ``(N, 1, 8, 8)`` in [0, 1] and labels of one split, drawn once for a seed."""
    from sklearn.datasets import load_digits

    if split not in ("train", "test"):
        raise ConfigError(f"unknown split {split!r}{did_you_mean(split, ('train', 'test'))}")
    pixels, classes = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    labels = torch.tensor(classes, dtype=torch.int64)
    share = test_share if isinstance(test_share, int | float) else 0
    cut = round(share * len(labels)) if 0 < share < 1 else 0
    if not 0 < cut < len(labels):
        raise ConfigError(
            f"test_share is the share of the {len(labels)} images to test with, in (0, 1) and with images left in both "
            f"splits, got {test_share!r}"
        )
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    chosen = order[cut:] if split == "train" else order[:cut]
    return images[chosen], labels[chosen]
