"""mixup (Zhang et al. 2018) and CutMix (Yun et al. 2019) of each image and its neighbour in the shuffled batch."""

from __future__ import annotations

import math

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from advnorm.config.fields import TrainingSettings


def mix_batch(settings: TrainingSettings, x: Tensor, y: Tensor, *, classes: int, step: int) -> tuple[Tensor, Tensor]:
    """Return mixed images and soft labels: ``λ (x, y) + (1 - λ) (x', y')`` with one λ ~ Beta(α, α) per batch.

    CutMix replaces a box of the share 1 - λ of each image by the neighbour's; λ then is the share that remains. The
    draw depends on seed and step alone, so that all ranks and a resumed run draw the same.
    """
    if settings.mix == "none":
        return x, y
    draw = np.random.default_rng([settings.seed, step])
    share = float(draw.beta(settings.mix_alpha, settings.mix_alpha))
    if settings.mix == "mixup":
        images = share * x + (1 - share) * x.roll(1, 0)
    else:
        height, width = x.shape[-2:]
        sides = [round(length * math.sqrt(1 - share)) for length in (height, width)]
        centre = [int(draw.integers(length)) for length in (height, width)]
        (top, bottom), (left, right) = (
            (max(c - side // 2, 0), min(c - side // 2 + side, length))
            for c, side, length in zip(centre, sides, (height, width))
        )
        images = x.clone()
        images[..., top:bottom, left:right] = x.roll(1, 0)[..., top:bottom, left:right]
        share = 1 - (bottom - top) * (right - left) / (height * width)
    hard = F.one_hot(y, classes).to(x.dtype)
    return images, share * hard + (1 - share) * hard.roll(1, 0)
