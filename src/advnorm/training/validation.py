"""Accuracy on held-out images, which chooses the best checkpoint; the test set plays no part."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from advnorm._core.memory import AdaptiveBatchSize
from advnorm._core.precision import float32_as
from advnorm.attacks import predicting
from advnorm.config import Config
from advnorm.config.fields import PrecisionName
from advnorm.data import FolderData, ImageData, split_held_out
from advnorm.data.loader import Batch
from advnorm.norms import domains, frozen_mode
from advnorm.training.build import build_loader
from advnorm.training.ranks import Ranks
from advnorm.training.step_program import autocast

#: Images at a time, per process.
BATCH = {"cpu": 250, "cuda": 1000}


class _Stopped(Exception):
    """A stop before all images are evaluated."""


class Validation:
    """Clean and attacked accuracy on held-out images; their sum is the ``score`` (paper C, app. B).

    Images of a domain outside ``tested`` go through the first branch inside: classical training on ``dual_bn`` never
    updates the clean banks, and AdvProp uses the clean branch for all images. The attack runs in the precision of
    training unless its name sets one; accuracies are forwards in float32.
    """

    def __init__(
        self,
        data: ImageData | FolderData,
        config: Config,
        ranks: Ranks,
        *,
        tested: Sequence[str],
        workers: int | None,
        with_clean: bool = True,
    ) -> None:
        self.with_clean = with_clean
        self.ranks, self.tested, self.name = ranks, tested, config.validation_attack
        self.precision: PrecisionName = config.precision
        self.attack = config.build_validation_attack()
        if config.validation_images is not None and config.validation_images < len(data):
            # Not the first ones: the images of a folder are sorted by class.
            data = split_held_out(data, config.validation_images, config.seed)[1]  # pyright: ignore[reportArgumentType]
        self.images = len(data)
        self.memory = AdaptiveBatchSize()  # large images: a training step may hold fewer of them
        batches: dict[str, Any] = {"batch_size": BATCH[ranks.device.type] * ranks.world, "drop_last": False}
        self.loader = build_loader(data, config, ranks, workers, augment="none", shuffle=False, **batches)

    def branch(self, model: nn.Module, domain: str) -> str | None:
        """The branch that evaluates a domain's images; None for a model without branches."""
        known = domains(model)
        return next((name for name in (domain, *self.tested) if name in self.tested and name in known), None)

    @torch.no_grad()
    def __call__(self, model: nn.Module, stopped: Callable[[], bool] = lambda: False) -> dict[str, float] | None:
        """Accuracies named ``clean`` and by the attack, and the ``score``; None if ``stopped`` returned True.

        Without ``with_clean``, the accuracy under the attack alone.
        ``stopped`` is called before each batch, and between the attack's steps if there is one process.
        """
        with suppress(_Stopped):
            return self._evaluate(model, stopped)
        return None

    def _evaluate(self, model: nn.Module, stopped: Callable[[], bool]) -> dict[str, float]:
        device = self.ranks.device
        clean, adv = self.branch(model, "clean"), self.branch(model, "adv")
        attack = dataclasses.replace(self.attack, route=adv, statistics=frozen_mode(self.attack.statistics))

        def raise_if_stopped(*_: int) -> None:
            if stopped():
                raise _Stopped

        if self.ranks.world == 1:
            attack = dataclasses.replace(attack, progress=raise_if_stopped)

        def count(batch: Batch, part: slice) -> Tensor:
            """Correct answers on attacked and on untouched images."""
            x, y, index = (value[part] for value in batch)
            found = torch.zeros(2, dtype=torch.float64, device=device)
            with autocast(self.precision, device):
                x_adv = attack(model, x, y, index=index)
            for position, (images, branch) in enumerate(((x_adv, adv), (x, clean))[: 1 + self.with_clean]):
                with float32_as("ieee", device), predicting(model, route=branch) as predict, torch.no_grad():
                    found[position] = (predict(images).argmax(1) == y).sum()
            return found

        right = torch.zeros(2, dtype=torch.float64, device=device)
        for batch in self.loader.epoch(0):
            raise_if_stopped()
            right += sum(self.memory.map(len(batch.x), partial(count, batch)))
        if self.ranks.world > 1:
            dist.all_reduce(right)
        attacked, untouched = (right / self.images).tolist()
        if not self.with_clean:
            return {self.name: attacked}
        return {"clean": untouched, self.name: attacked, "score": untouched + attacked}
