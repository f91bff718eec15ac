"""Fig. 14 to 17 of paper D: the optimization landscape, measured early, while the network still learns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from advnorm.papers.d.trainings import (
    AT_FIRST,
    LANDSCAPE,
    NORMED,
    NORMS,
    SHORTCUTS,
    along_training,
    fixup,
    standard,
    value_at,
)
from advnorm.studies.claims import Clause, Values, for_each, join_numbers
from advnorm.studies.registry import register_study
from advnorm.studies.study import Cell


def _smoothness(values: Values, cell: str) -> float:
    """Effective β-smoothness early in training, averaged over batches. At the end the gradients are too small."""
    paths = {path.partition("/")[2] for name, path in values if name == cell and path.endswith("/smoothness")}
    if not paths:
        raise KeyError(cell)
    return sum(value_at(values, cell, path, AT_FIRST) for path in paths) / len(paths)


def _check_fig14(values: Values) -> Iterator[Clause]:
    """In ResNet18 gradients are smoother with BN than without a norm, and not smoother with IN, LN and GN."""
    beta = {norm: _smoothness(values, norm) for norm in NORMS}
    none, least = beta["none"], min(beta[norm] for norm in NORMED if norm != "bn")
    yield Clause.lower("β-smoothness is lower with BN than without a norm", beta["bn"], none, form=".4g")
    text = "β-smoothness is no lower with IN, LN and GN than without a norm"
    yield Clause(f"{text}: {least:.4g} at least and {none:.4g}", none <= least)


@register_study("D/fig14", check=_check_fig14)
def fig14() -> Iterable[Cell]:
    for norm in NORMS:
        yield along_training(norm, replace(standard("resnet18"), norm=norm), (LANDSCAPE,))


def _check_fig15(values: Values) -> Iterator[Clause]:
    """Gradients are smoother with every norm than without, and with BN by more than twice as much as with others."""
    beta = {norm: _smoothness(values, norm) for norm in NORMS}
    gains = {norm: beta["none"] - beta[norm] for norm in NORMED}
    most = max(beta[norm] for norm in NORMED)
    text = "β-smoothness is lower with every norm than without"
    yield Clause(f"{text}: {most:.4g} at most and {beta['none']:.4g}", min(gains.values()) > 0)
    others = [gains[norm] for norm in NORMED if norm != "bn"]
    text = "BN lowers β-smoothness by more than twice as much as IN, LN and GN"
    twice = all(gains["bn"] > 2 * other for other in others)
    yield Clause(f"{text}: {gains['bn']:.4g} and {max(others):.4g} at most", twice)


@register_study("D/fig15", check=_check_fig15)
def fig15() -> Iterable[Cell]:
    # The caption names VGG16 with and without BN; the text discusses all norms, in a ResNet50 that no figure shows.
    for norm in NORMS:
        yield along_training(norm, replace(standard("vgg16"), norm=norm), (LANDSCAPE,))


def _check_fig16(values: Values) -> Iterator[Clause]:
    """The shortcut has a trivial influence on the smoothness: less than a factor of 2."""
    cut, whole = _smoothness(values, "resnet18_noshortcut"), _smoothness(values, "resnet18")
    text = "β-smoothness is within a factor of 2 without the shortcut and with it"
    yield Clause(f"{text}: {join_numbers(cut, whole, form='.4g')}", 0.5 < cut / whole < 2)


@register_study("D/fig16", check=_check_fig16)
def fig16() -> Iterable[Cell]:
    for model in ("resnet18", "resnet18_noshortcut"):
        yield along_training(model, standard(model), (LANDSCAPE,))


def _check_fig17(values: Values) -> Iterator[Clause]:
    """Gradients are less smooth with Fixup than with BN."""

    def clauses(model: str) -> Iterator[Clause]:
        fixed, bn = _smoothness(values, f"fixup_{model}"), _smoothness(values, model)
        yield Clause.higher(f"{model}: β-smoothness is higher with Fixup than with BN", fixed, bn, form=".4g")

    yield from for_each(SHORTCUTS, clauses)


@register_study("D/fig17", check=_check_fig17)
def fig17() -> Iterable[Cell]:
    for model in SHORTCUTS:
        yield along_training(model, standard(model), (LANDSCAPE,))
        yield along_training(f"fixup_{model}", fixup(model), (LANDSCAPE,))
