"""The attack as its cascade uses it: settings, stages, and the images that each stage attacks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from advnorm._core.errors import Problem
from advnorm.attacks.base import Attack
from advnorm.attacks.search import Search
from advnorm.attacks.surrogate import Precision


class CascadeSettings(Attack):
    """An attack whose stages run in turn on the images that are still robust.

    Subclasses are dataclasses. They declare ``precision`` (of the search; a float32 forward decides) and ``batch_size``
    (rows of one forward; None: a fast size) as settings.
    """

    needs_gradients = False  # on a model without gradients only Square runs
    #: After a search in another precision, FAB-T in float32 continues from the best points of robust images whose
    #: margin is at most this multiple of the difference of margins between the two precisions.
    close: ClassVar[float] = 8
    #: Names of the stages that continue from the best candidate of each image.
    continued: ClassVar[frozenset[str]] = frozenset()

    precision: Precision
    batch_size: int | None

    @property
    @abstractmethod
    def title(self) -> str:
        """The name of the attack in printed results."""

    @property
    def note(self) -> str:
        """A sentence about the meaning of the result, shown beside it; empty if there is nothing to say."""
        return ""

    @property
    def gradient_samples(self) -> int | None:
        """Number of forwards per gradient of an attack on randomized models; None for other attacks."""
        return None

    @abstractmethod
    def stages(self) -> dict[str, Search]:
        """The searches by name, in order."""

    def selected(self, stage: str, remaining: Tensor, zero_gradient: Tensor) -> Tensor:
        """Which of the robust images a stage attacks; by default all.

        ``remaining``: lowest margin so far as a share of the clean margin. ``zero_gradient``: whether a search started
        with a zero gradient.
        """
        return torch.ones_like(zero_gradient)

    def input_problems(self, shape: Sequence[int], classes: int) -> list[Problem]:
        return [problem for search in self.stages().values() for problem in search.input_problems(shape, classes)]
