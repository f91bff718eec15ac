"""The attacks of an audit, from weak to strong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from advnorm._core.errors import Problem, unknown_name

Budget = Literal["quick", "standard", "full"]
#: Default number of images, spread evenly over the data; None: all.
BUDGET_IMAGES: Mapping[Budget, int | None] = {"quick": 200, "standard": 1000, "full": None}


@dataclass(frozen=True, kw_only=True)
class Rung:
    """An attack of the ladder. It runs on the survivors of earlier rungs, or with ``alone`` on every correct image."""

    attack: str
    text: str
    alone: bool = False
    gradients: bool = True
    needs_pixels: bool = False  # images of shape (channels, height, width)


def build_ladder(budget: Budget, classes: int) -> tuple[Rung, ...]:
    """Return the rungs of a budget for a model with this number of classes."""
    quick, full = budget == "quick", budget == "full"
    noise, square = ("noise-uniform", 1000) if quick else ("noise-uniform-restarts10", 5000)
    short = "-steps40" if quick else ""
    loss = "dlr" if classes > 2 else "cw"
    rungs = [
        Rung(attack=noise, text="random noise", alone=True, gradients=False),
        Rung(attack="fgsm", text="one step", alone=True),
        Rung(attack="pgd10", text="the usual claim", alone=True),
        Rung(attack="pgd10-cw", text="another loss", alone=True),
        Rung(attack="pgd50", text="more steps", alone=True),
    ]
    if full:
        rungs += [Rung(attack=f"pgd{n}", text="more steps", alone=True) for n in (100, 500)]
    rungs += [
        Rung(attack=f"pgd50-restarts{2 if quick else 5}-{loss}-worst", text="restarts, a loss without scale"),
        Rung(attack="apgd-ce" + short, text="adaptive steps"),
        Rung(attack="apgd-t" + short, text="targets each class"),
        Rung(attack="fab-t" + short, text="nearest boundary"),
        Rung(attack=f"square-queries{square}", text="without gradients", gradients=False, needs_pixels=True),
    ]
    return tuple(rungs)


def budget_problems(budget: object) -> list[Problem]:
    """Return the problem of an unknown budget."""
    return [] if budget in BUDGET_IMAGES else [unknown_name("budget", budget, BUDGET_IMAGES)]
