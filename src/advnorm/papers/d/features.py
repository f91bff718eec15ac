"""Fig. 6, 7, 12 and 13 of paper D: networks that train on features of other networks. No numbers are printed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

from advnorm.config import Config
from advnorm.papers.d.trainings import (
    ALIGNMENT,
    AT_FIRST,
    AT_LAST,
    PGD10,
    TREND,
    WARMED,
    along_training,
    clean_accuracy,
    ligs,
    robust,
    standard,
    value_at,
)
from advnorm.studies.claims import Clause, Values, join_numbers
from advnorm.studies.registry import register_study
from advnorm.studies.study import Cell, Measure

#: Accuracy in percent, of 10 classes, below which a data set is not learned.
NOT_LEARNED = 15


def learns(recipe: str) -> Config:
    """ResNet18 on a feature data set (table 6): 150 epochs, decayed at 50 and 100."""
    targets = recipe in ("D_det", "D_conflict")
    return replace(standard("resnet18"), lr=0.1 if targets else 0.01, augment="none" if targets else "crop_flip")


def on_features(recipe: str, norm: str, measures: tuple[Measure, ...]) -> Cell:
    """A network on features of a ResNet50 (app. E), robust for D_R; D_conflict starts from the images of D_R."""
    source = "source/robust" if recipe == "D_R" else "source/standard"
    features = "D_conflict:D_R/bn" if recipe == "D_conflict" else recipe
    config = replace(learns(recipe), norm=norm)
    return along_training(f"{recipe}/{norm}", config, measures, after=source, features=features)


def sources(*names: str) -> list[Cell]:
    """The networks that features are extracted from."""
    configs = {"robust": robust("resnet50"), "standard": standard("resnet50")}
    return [Cell(name=f"source/{name}", config=configs[name], measures=(PGD10,)) for name in names]


def _check_fig6(values: Values) -> Iterator[Clause]:
    """LIGS is above 0.9 on D_R and below 0.5 on D_rand. D_rand is not learned without BN, and learned late with it."""
    none, bn = (ligs(values, f"D_R/{norm}") for norm in ("none", "bn"))
    text = f"LIGS is above 0.9 on D_R without BN and with it: {join_numbers(none, bn, form='.3f')}"
    yield Clause(text, min(none, bn) > 0.9)
    low = ligs(values, "D_rand/bn")
    yield Clause(f"LIGS is below 0.5 on D_rand with BN: {low:.3f}", low < 0.5)
    never, early = clean_accuracy(values, "D_rand/none"), clean_accuracy(values, "D_rand/bn", WARMED)
    yield Clause(f"D_rand is not learned without BN: accuracy {never:.1f}", never < NOT_LEARNED)
    yield Clause(f"D_rand is not learned with BN after the warm-up: accuracy {early:.1f}", early < NOT_LEARNED)
    late = clean_accuracy(values, "D_rand/bn")
    yield Clause(f"D_rand is learned with BN at the end: accuracy {late:.1f}", late >= NOT_LEARNED)


@register_study("D/fig6", check=_check_fig6)
def fig6() -> Iterable[Cell]:
    yield from sources("robust", "standard")
    for norm in ("none", "bn"):
        yield on_features("D_R", norm, TREND)
        yield on_features("D_rand", norm, TREND)


def _check_conflict(values: Values, recipe: str) -> Iterator[Clause]:
    """With BN robust features decide early and non-robust ones at the end; without BN robust ones decide at the end."""

    def alignment(norm: str, moment: int) -> list[float]:
        """Accuracy by robust features and by non-robust ones."""
        names = (f"aligned_with_{kind}_features/0" for kind in ("robust", "non_robust"))
        return [value_at(values, f"{recipe}/{norm}", name, moment) for name in names]

    early, late, none = alignment("bn", AT_FIRST), alignment("bn", AT_LAST), alignment("none", AT_LAST)
    yield Clause.higher("with BN robust features outweigh non-robust ones early", *early)
    yield Clause.lower("with BN non-robust features outweigh robust ones at the end", *late)
    text = f"with BN the accuracy by robust features falls: {early[0]:.1f} to {late[0]:.1f}"
    yield Clause(text, early[0] > late[0])
    yield Clause.higher("without BN robust features outweigh non-robust ones at the end", *none)


@register_study("D/fig7", check=partial(_check_conflict, recipe="D_conflict"))
def fig7() -> Iterable[Cell]:
    yield from sources("robust", "standard")
    yield on_features("D_R", "bn", TREND)
    for norm in ("none", "bn"):
        yield on_features("D_conflict", norm, (ALIGNMENT,))


@register_study("D/fig13", check=partial(_check_conflict, recipe="D_det"))
def fig13() -> Iterable[Cell]:
    yield from sources("standard")
    for norm in ("none", "bn"):
        yield on_features("D_det", norm, (ALIGNMENT,))


def _check_fig12(values: Values) -> Iterator[Clause]:
    """LIGS is high on D_R, low on D_rand, and between on D_NR."""
    high, middle = ligs(values, "D_R/bn"), ligs(values, "D_NR/bn")
    yield Clause.higher("LIGS is higher on D_R than on D_NR", high, middle, form=".3f")
    yield Clause.higher("LIGS is higher on D_NR than on D_rand", middle, ligs(values, "D_rand/bn"), form=".3f")


@register_study("D/fig12", check=_check_fig12)
def fig12() -> Iterable[Cell]:
    yield from sources("robust", "standard")
    yield on_features("D_R", "bn", TREND)
    yield on_features("D_NR", "bn", TREND)
    yield on_features("D_rand", "bn", TREND)
