"""Training on features of other networks: figures 6, 7, 12 and 13 of paper D."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from advnorm.config import Config
from advnorm.papers.d.figures import (
    ALIGNMENT,
    CLOSE_TO_1,
    GAUSSIAN,
    TREND,
    VERY_LOW,
    WARMED,
    along_training,
    clean_accuracy,
    dense,
    ligs,
)
from advnorm.papers.d.trainings import DEVIATIONS, PGD10, robust, standard
from advnorm.studies.claims import Clause, Margin, Values, join_numbers, means_along_training
from advnorm.studies.registry import register_study
from advnorm.studies.study import Cell, Measure

NOT_LEARNED = Margin(15.0, "not learned: accuracy below {} %", "our margin: the paper's 10 % is chance")
FORGOTTEN = Margin(
    0.5, "a sharp decrease, most is forgotten: to less than {} of the peak", "our margin: most is a half"
)


def feature_training(recipe: str) -> Config:
    """Training of a ResNet18 on a feature data set (table 6): 150 epochs, decayed at 50 and 100."""
    targets = recipe in ("D_det", "D_conflict")
    return replace(standard("resnet18"), lr=0.1 if targets else 0.01, augment="none" if targets else "crop_flip")


def on_features(recipe: str, norm: str, *measures: Measure) -> Cell:
    """A network on features of a ResNet50 (app. E), robust for D_R; D_conflict starts from the images of D_R."""
    source = "source/robust" if recipe == "D_R" else "source/standard"
    images = "D_R/bn" if recipe == "D_conflict" else None
    dependencies = {"after": source, "features": recipe, "feature_images": images}
    return along_training(
        f"{recipe}/{norm}", dense(replace(feature_training(recipe), norm=norm)), *measures, **dependencies
    )


def sources() -> list[Cell]:
    """The networks that features are extracted from, a robust and a standard one."""
    configs = {"robust": robust("resnet50"), "standard": standard("resnet50")}
    return [
        Cell(name=f"source/{name}", config=config, measures=(PGD10,), clip=True) for name, config in configs.items()
    ]


_FEATURES = (*DEVIATIONS, "Table 5 is lost: eps and steps of the robust network that makes features are chosen here.")


@register_study(
    "D/fig6",
    cells=lambda: [
        *sources(),
        *(on_features(recipe, norm, *TREND) for norm in ("none", "bn") for recipe in ("D_R", "D_rand")),
    ],
    deviations=_FEATURES,
)
def fig6(values: Values) -> Iterator[Clause]:
    """LIGS is "very high" on D_R and on D_rand "eventually becomes very low".

    D_rand is not learned without BN. With BN it is learned after a warm-up, in which LIGS increases; then it plummets.
    """
    none, bn = (ligs(values, f"D_R/{norm}") for norm in ("none", "bn"))
    text = f"LIGS is above {CLOSE_TO_1:g} on D_R without BN and with it"
    yield Clause(f"{text}: {join_numbers(none, bn, form='.3f')}", min(none, bn) > CLOSE_TO_1, CLOSE_TO_1)
    low = ligs(values, "D_rand/bn")
    yield Clause(f"LIGS is below {VERY_LOW:g} on D_rand with BN: {low:.3f}", low < VERY_LOW, VERY_LOW)
    never = max(means_along_training(values, "D_rand/none", "shared/clean"))
    text = "D_rand is not learned without BN, at any moment"
    yield Clause(f"{text}: accuracy {never:.1f} at most", never < NOT_LEARNED, NOT_LEARNED)
    early, late = clean_accuracy(values, "D_rand/bn", WARMED), clean_accuracy(values, "D_rand/bn")
    text = "D_rand is not learned with BN after the warm-up"
    yield Clause(f"{text}: accuracy {early:.1f}", early < NOT_LEARNED, NOT_LEARNED)
    yield Clause(f"D_rand is learned with BN at the end: accuracy {late:.1f}", late >= NOT_LEARNED, NOT_LEARNED)
    accuracy, score = (means_along_training(values, "D_rand/bn", name) for name in ("shared/clean", GAUSSIAN))
    waiting = [at for at, one in zip(score, accuracy) if one < NOT_LEARNED] or score[:1]
    text = "with BN LIGS on D_rand increases before the network starts to learn"
    yield Clause.higher(text, max(waiting), score[0], form=".3f")


def _check_conflict(values: Values, recipe: str) -> Iterator[Clause]:
    """With BN the accuracy by robust features peaks early and falls sharply, and non-robust features overtake.

    Without BN the network "in the whole stage learns RFs while ignores NRFs".
    """

    def curves(norm: str) -> list[list[float]]:
        """Accuracy by robust features and by non-robust ones along training."""
        names = (f"aligned_with_{kind}_features/0" for kind in ("robust", "non_robust"))
        return [means_along_training(values, f"{recipe}/{norm}", name) for name in names]

    robust, other = curves("bn")
    yield Clause.higher("with BN robust features outweigh non-robust ones early", robust[0], other[0])
    yield Clause.lower("with BN non-robust features outweigh robust ones at the end", robust[-1], other[-1])
    text = f"with BN the accuracy by robust features falls to less than {FORGOTTEN:g} of its peak"
    peak = max(robust)
    yield Clause(f"{text}: {peak:.1f} to {robust[-1]:.1f}", robust[-1] < FORGOTTEN * peak, FORGOTTEN)
    text = "with BN the accuracy by non-robust features rises: at the end and at first"
    yield Clause.higher(text, other[-1], other[0])
    pairs = [*zip(*curves("none"))]
    least = min(pairs, key=lambda pair: pair[0] - pair[1])
    text = "without BN robust features outweigh non-robust ones at every moment"
    yield Clause.in_cases(text, [one > two for one, two in pairs], f"least {join_numbers(*least)}")


register_study(
    "D/fig7",
    cells=lambda: [
        *sources(),
        on_features("D_R", "bn", *TREND),
        *(on_features("D_conflict", norm, ALIGNMENT) for norm in ("none", "bn")),
    ],
    each=["D_conflict"],
    deviations=_FEATURES,
)(_check_conflict)
register_study(
    "D/fig13",
    cells=lambda: [sources()[1], *(on_features("D_det", norm, ALIGNMENT) for norm in ("none", "bn"))],
    each=["D_det"],
    deviations=_FEATURES,
)(_check_conflict)


@register_study(
    "D/fig12",
    cells=lambda: [*sources(), *(on_features(recipe, "bn", *TREND) for recipe in ("D_R", "D_NR", "D_rand"))],
    deviations=_FEATURES,
)
def fig12(values: Values) -> Iterator[Clause]:
    """LIGS is high on D_R, low on D_rand, and between on D_NR."""
    high, middle = ligs(values, "D_R/bn"), ligs(values, "D_NR/bn")
    yield Clause.higher("LIGS is higher on D_R than on D_NR", high, middle, form=".3f")
    yield Clause.higher("LIGS is higher on D_NR than on D_rand", middle, ligs(values, "D_rand/bn"), form=".3f")
