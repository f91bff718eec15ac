"""Inputs and outputs of an objective: how its network runs, a crafted batch, an output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

#: Images to what the model returns.
NetworkForward = Callable[[Tensor], Any]
#: Images, labels and image identities to adversarial images.
Craft = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How an objective runs its network and crafts adversarial images; by default with the plain network.

    A step program passes compiled functions and graph replays here. They change rounding and speed, not the loss.
    """

    #: The network's forward in training and in the attack; None: the model itself.
    network: NetworkForward | None = None
    #: Images to logits that the attack differentiates instead of the network's, such as those of a folded copy.
    surrogate: Callable[[Tensor], Tensor] | None = None
    #: Crafts the adversarial images; None: :meth:`Objective.craft` with this execution.
    craft: Craft | None = None


#: The plain network.
EAGER = Execution()


class CraftedBatch(NamedTuple):
    """Images with labels and identities, and their adversarial counterparts if the objective attacks.

    Attributes:
        x: Images ``(N, C, H, W)`` in pixel scale.
        y: Labels ``(N,)``.
        index: Positions of the images in the data set, which identify their noise.
        x_adv: Adversarial images, or None if the objective attacks nothing.
    """

    x: Tensor
    y: Tensor
    index: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
    x_adv: Tensor | None = None

    def take(self, rows: Tensor) -> CraftedBatch:
        """Select rows of every tensor."""
        return self.map(lambda value: value[rows])

    def map(self, change: Callable[[Tensor], Tensor]) -> CraftedBatch:
        """Apply a function to every tensor."""
        return CraftedBatch(*(change(value) for value in self if value is not None))


class ObjectiveOutput(NamedTuple):
    """One evaluation of an objective.

    Attributes:
        loss: The scalar that training differentiates.
        logits: The logits of each domain, by domain.
        terms: Numbers for the log by name, such as ``adv_ce``; detached scalars.
        labels: The labels of the logits, by domain.
    """

    loss: Tensor
    logits: dict[str, Tensor]
    terms: dict[str, Tensor]
    labels: dict[str, Tensor]

    def detached(self) -> ObjectiveOutput:
        logits = {domain: value.detach() for domain, value in self.logits.items()}
        return self._replace(loss=self.loss.detach(), logits=logits)

    def __repr__(self) -> str:
        """Numbers, and shapes instead of logits, so that a printed step fits on a few lines."""
        terms = {name: round(float(value), 4) for name, value in self.terms.items()}
        shapes = {domain: tuple(values.shape) for domain, values in self.logits.items()}
        return f"{type(self).__name__}(loss={float(self.loss.detach()):.4f}, terms={terms}, logits={shapes})"
