"""The attacks of an audit, from weak to strong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from advnorm._core.errors import Problem, unknown_name

Budget = Literal["quick", "standard", "full"]
#: Default number of images, spread evenly over the data; None: all.
BUDGET_IMAGES: Mapping[Budget, int | None] = {"quick": 200, "standard": 1000, "full": None}

#: Suffix of attacks that are computed on a distilled copy.
FROM_COPY = " from copy"


@dataclass(frozen=True, kw_only=True)
class Rung:
    """An attack of the ladder. It runs on images that are still robust, or with ``alone`` on every correct image."""

    attack: str
    text: str
    alone: bool = False
    gradients: bool = True
    needs_pixels: bool = False  # images of shape (channels, height, width)
    distances: bool = False  # finds the nearest adversarial image of each image, at any distance


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
        Rung(
            attack=f"fab-t-{'steps30-targets2' if quick else 'steps50-targets3'}-minimal",
            text="smallest perturbation",
            alone=True,
            distances=True,
        ),
        Rung(attack=f"pgd50-restarts{2 if quick else 5}-{loss}-worst", text="restarts, a loss without scale"),
        Rung(attack="apgd-ce" + short, text="adaptive steps"),
        Rung(attack="apgd-t" + short, text="targets each class"),
        Rung(attack="fab-t" + short, text="nearest boundary"),
        Rung(attack=f"square-queries{square}", text="without gradients", gradients=False, needs_pixels=True),
    ]
    return tuple(rungs)


@dataclass(frozen=True, kw_only=True)
class Obstacles:
    """Obstacles to gradient attacks that were found in a model."""

    blocked: bool = False  # functions without a gradient, or with a part of it only
    missing: bool = False  # gradients that are zero or not finite
    random: bool = False
    shattered: bool = False  # gradients that change their direction from point to point
    misleading: bool = False  # gradients that attacks without gradients beat

    def __bool__(self) -> bool:
        return self.blocked or self.missing or self.random or self.shattered or self.misleading


def adaptive_rungs(budget: Budget, obstacles: Obstacles) -> tuple[Rung, ...]:
    """Return attacks that overcome the obstacles found; they run on the images that are still robust."""
    quick = budget == "quick"
    steps = "-steps40" if quick else ""
    bpda = "-bpda" if obstacles.blocked else ""
    names = {}
    if obstacles or not quick:
        names[f"apgd-margin-t{steps}"] = "targets each class, by the margin"
    if obstacles.random:
        names[f"apgd-eot{steps}{bpda}"] = "mean gradient over random draws" + (", BPDA" if bpda else "")
        names[f"apgd-eot{steps}-targets3{bpda}"] = "the same towards three classes"
    elif obstacles.blocked:
        names[f"apgd-bpda{steps}"] = "backward pass without obstacles (BPDA)"
        names[f"apgd-bpda{steps}-restarts3-targets9"] = "the same towards each class, with restarts"
    if obstacles.shattered or obstacles.blocked:
        names[f"apgd-smooth{steps}{bpda}"] = "mean gradient around each point" + (", BPDA" if bpda else "")
        names[f"apgd-smooth{steps}-targets9{bpda}"] = "the same towards each class"
    return tuple(Rung(attack=name, text=text) for name, text in names.items())


def copy_rungs(budget: Budget) -> tuple[Rung, ...]:
    """Return attacks that are computed on a distilled copy and transferred."""
    steps = "-steps40" if budget == "quick" else ""
    names = {
        "pgd50": "transferred from a trained copy",
        "pgd50-cw": "another loss, transferred",
        f"apgd-margin-t{steps}": "targets each class, transferred",
    }
    return tuple(Rung(attack=name + FROM_COPY, text=text, alone=name == "pgd50") for name, text in names.items())


def budget_problems(budget: object) -> list[Problem]:
    """Return the problem of an unknown budget."""
    return [] if budget in list(BUDGET_IMAGES) else [unknown_name("budget", budget, BUDGET_IMAGES)]
