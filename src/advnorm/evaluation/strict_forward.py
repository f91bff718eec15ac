"""The forward that decides whether an image is classified correctly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from advnorm._core.precision import float32_as
from advnorm._core.records import digest
from advnorm._core.seeding import seed_generators
from advnorm.attacks import predicting
from advnorm.attacks.model_access import Predict
from advnorm.norms import Mode, frozen_mode


@dataclass(frozen=True, kw_only=True, eq=False)
class StrictForward:
    """A model in eval mode and float32 without TF32 and autocast, whose random draws follow from the seed."""

    model: nn.Module
    device: torch.device
    statistics: Mode
    seed: int

    @property
    def minimum_batch(self) -> int:
        """Smallest batch: with one value per channel, which one image may have, batch statistics do not exist."""
        return 1 if self.statistics == "running" else 2

    @contextmanager
    def through(self, route: str | None, *tags: Any) -> Iterator[Predict]:
        """Scope: yield the seeded forward through a branch, without gradients."""
        with self.seeded(route, *tags), self.differentiable(route) as predict, torch.no_grad():
            yield predict

    @contextmanager
    def differentiable(self, route: str | None) -> Iterator[Predict]:
        """Scope: yield the forward through a branch; the caller decides on gradients and seeds."""
        with (
            predicting(self.model, route=route, statistics=frozen_mode(self.statistics)) as predict,
            float32_as("ieee", self.device),
        ):
            yield predict

    @contextmanager
    def seeded(self, *tags: Any) -> Iterator[None]:
        """Scope: the draws of a randomized model follow from seed and tags. Restores the caller's generators.

        Different tags give independent draws. Renaming a tag changes the numbers of randomized models.
        """
        device, seed = self.device, int(digest(self.seed, *tags)[:15], 16)
        cuda = [torch.cuda.current_device() if device.index is None else device.index] if device.type == "cuda" else []
        with torch.random.fork_rng(cuda):
            seed_generators(seed, device)
            yield
