"""The optimization landscape while a network still learns: figures 14 to 17 of paper D."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from statistics import fmean

from advnorm.config import Config
from advnorm.papers.d.figures import (
    LANDSCAPE,
    SHORTCUTS,
    along_training,
    dense,
    fixup,
    norms_along_training,
)
from advnorm.papers.d.trainings import DEVIATIONS, NORM_NAMES, NORMED, standard
from advnorm.studies.claims import Clause, Margin, Values, epochs_of, join_numbers, means_along_training
from advnorm.studies.registry import register_study
from advnorm.studies.study import Cell

SAME_SMOOTHNESS = Margin(2.0, "a trivial influence on smoothness: less than a factor of {}", "our margin")
_LANDSCAPE = (
    *DEVIATIONS,
    "β-smoothness is averaged, in logarithms, over the snapshots of the first half of the training: at the end the "
    "gradients vanish. The figures also draw loss variation and gradient change, which the records contain.",
)


def _smoothness(values: Values, cell: str) -> float:
    """Effective β-smoothness, averaged over batches and, in logarithms, over the first half of the training."""
    paths = {path.partition("/")[2] for name, path in values if name == cell and path.endswith("/smoothness")}
    if not paths:
        raise KeyError(cell)
    curve = [fmean(found) for found in zip(*(means_along_training(values, cell, path) for path in sorted(paths)))]
    epochs = epochs_of(values, cell, min(paths))
    half = [value for epoch, value in zip(epochs, curve) if epoch <= epochs[-1] / 2] or curve[:1]
    return math.exp(fmean(math.log(max(value, 1e-12)) for value in half))


def _landscapes(config: Config, norms: Iterable[str]) -> list[Cell]:
    return norms_along_training(dense(config), norms, LANDSCAPE)


@register_study("D/fig14", cells=lambda: _landscapes(standard("resnet18"), NORM_NAMES), deviations=_LANDSCAPE)
def fig14(values: Values) -> Iterator[Clause]:
    """In ResNet18 gradients are smoother with BN than without a norm, and not smoother with IN, LN and GN."""
    beta = {norm: _smoothness(values, norm) for norm in NORM_NAMES}
    none, least = beta["none"], min(beta[norm] for norm in NORMED if norm != "bn")
    yield Clause.lower("β-smoothness is lower with BN than without a norm", beta["bn"], none, form=".4g")
    text = "β-smoothness is no lower with IN, LN and GN than without a norm"
    yield Clause(f"{text}: {least:.4g} at least and {none:.4g}", none <= least)


# The caption names VGG16 with and without BN; the text discusses all norms, in a ResNet50 that no figure shows.
@register_study(
    "D/fig15",
    cells=lambda: _landscapes(standard("vgg16"), NORM_NAMES),
    deviations=(
        *_LANDSCAPE,
        "The text discusses all norms in a ResNet50 that no figure shows: VGG16 as in the caption.",
    ),
)
def fig15(values: Values) -> Iterator[Clause]:
    """Gradients are smoother with every norm than without, and with BN by more than twice as much as with others."""
    beta = {norm: _smoothness(values, norm) for norm in NORM_NAMES}
    gains = {norm: beta["none"] - beta[norm] for norm in NORMED}
    most = max(beta[norm] for norm in NORMED)
    text = "β-smoothness is lower with every norm than without"
    yield Clause(f"{text}: {most:.4g} at most and {beta['none']:.4g}", min(gains.values()) > 0)
    others = [gains[norm] for norm in NORMED if norm != "bn"]
    text = "BN lowers β-smoothness by more than twice as much as IN, LN and GN"
    twice = all(gains["bn"] > 2 * other for other in others)
    yield Clause(f"{text}: {gains['bn']:.4g} and {max(others):.4g} at most", twice)


@register_study(
    "D/fig16",
    cells=lambda: [
        along_training(model, dense(standard(model)), LANDSCAPE) for model in ("resnet18", "resnet18_noshortcut")
    ],
    deviations=_LANDSCAPE,
)
def fig16(values: Values) -> Iterator[Clause]:
    """The shortcut has a "trivial influence on the gradient stability"."""
    cut, whole = _smoothness(values, "resnet18_noshortcut"), _smoothness(values, "resnet18")
    text = f"β-smoothness is within a factor of {SAME_SMOOTHNESS:g} without the shortcut and with it"
    held = 1 / SAME_SMOOTHNESS < cut / whole < SAME_SMOOTHNESS
    yield Clause(f"{text}: {join_numbers(cut, whole, form='.4g')}", held, SAME_SMOOTHNESS)


@register_study(
    "D/fig17",
    cells=lambda: [
        along_training(config.model.name, dense(config), LANDSCAPE)
        for model in SHORTCUTS
        for config in (standard(model), fixup(model))
    ],
    each=SHORTCUTS,
    deviations=_LANDSCAPE,
)
def fig17(values: Values, model: str) -> Iterator[Clause]:
    """Gradients are less smooth with Fixup than with BN."""
    fixed, bn = _smoothness(values, f"fixup_{model}"), _smoothness(values, model)
    yield Clause.higher(f"{model}: β-smoothness is higher with Fixup than with BN", fixed, bn, form=".4g")
