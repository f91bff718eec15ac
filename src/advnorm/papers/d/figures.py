"""The figures of paper D. The paper prints no numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

from advnorm.config import Config, Named
from advnorm.papers.d.trainings import (
    CORRUPTED,
    CORRUPTIONS_AND_SPECKLE,
    DEVIATIONS,
    NORM_NAMES,
    NORMED,
    PGD10,
    imagenet,
    robust,
    standard,
)
from advnorm.studies.claims import Clause, Margin, Values, epochs_of, join_numbers, mean, means_along_training
from advnorm.studies.registry import register_study
from advnorm.studies.study import Cell, Measure

#: "Noise corruptions, i.e. Gaussian/Speckle/Shot" (sec. 3.2).
NOISE = ("gaussian_noise", "speckle_noise", "shot_noise")
FOG_AND_CONTRAST = ("fog", "contrast")
TRIVIAL = Margin(0.05, "a trivial difference of LIGS: up to {}", "our margin: the paper names none")
CLOSE_TO_1 = Margin(0.9, "LIGS close to 1, very high: above {}", "the paper's words for D_R: more than 0.9")
VERY_LOW = Margin(0.5, "very low LIGS: below {}", "our margin: the paper names none")
LARGE_MARGIN = Margin(10.0, "a large margin: {} points or more", "our margin: the paper names none")
SMALL_INFLUENCE = Margin(5.0, "a small influence: up to {} points", "our margin: the paper names none")
#: Networks with a variant without shortcut and a variant with Fixup initialization.
SHORTCUTS = ("resnet20", "resnet56")
#: Gaussian noise of deviation 0.01 (app. B.4), and all four kinds.
LIGS = Measure(name="ligs", options={"shifts": ["gaussian"], "size": 0.01, "limit": 1000})
ALL_LIGS = Measure(name="ligs", options={"shifts": ["gaussian", "uniform", "fgsm", "pgd"], "size": 0.01, "limit": 1000})
ALIGNMENT = Measure(name="alignment", options={"limit": None}, scale=100)
LANDSCAPE = Measure(name="landscape", options={"limit": 1000})
TREND = (PGD10, LIGS)
GAUSSIAN = "networks/run/shifts/gaussian/mean"
#: Moments of a training as shares of its epochs: the first and the last one measured, and the end of the warm-up.
AT_FIRST, WARMED, AT_LAST = 0.0, 20 / 150, 1.0
#: Epochs of 150 after which curves are measured whose course matters: densely at first, then every tenth.
DENSE = (1, 2, 3, 5, 7, *range(10, 40, 5), *range(40, 151, 10))


def fixup(model: str) -> Config:
    """Fixup initialization instead of BN."""
    return replace(standard(model), model=Named(f"fixup_{model}"), norm="none")


def along_training(name: str, config: Config, *measures: Measure, **dependencies: Any) -> Cell:
    """A cell that is measured at every snapshot of its training."""
    along = tuple(replace(one, checkpoint="along") for one in measures)
    return Cell(name=name, config=config, measures=along, clip=True, **dependencies)


def dense(config: Config) -> Config:
    """The same training with more snapshots."""
    return replace(config, snapshots=DENSE)


def norms_along_training(config: Config, norms: Iterable[str], *measures: Measure, prefix: str = "") -> list[Cell]:
    """A training with each of several norms, measured at every snapshot."""
    return [along_training(f"{prefix}{norm}", replace(config, norm=norm), *measures) for norm in norms]


def value_at(values: Values, cell: str, value: str, moment: float) -> float:
    """Return a value at the last snapshot up to a share of the training, at least at the first."""
    epochs = epochs_of(values, cell, value)
    last = max([epochs[0], *(epoch for epoch in epochs if epoch <= moment * epochs[-1])])
    return mean(values, cell, f"{last}/{value}")


def clean_accuracy(values: Values, cell: str, moment: float = AT_LAST) -> float:
    return value_at(values, cell, "shared/clean", moment)


def robust_accuracy(values: Values, cell: str) -> float:
    return value_at(values, cell, "shared/pgd10", AT_LAST)


def ligs(values: Values, cell: str, moment: float = AT_LAST) -> float:
    return value_at(values, cell, GAUSSIAN, moment)


def with_norm(norm: str) -> str:
    return "without a norm" if norm == "none" else f"with {norm.upper()}"


def _fig1_cells() -> Iterable[Cell]:
    for training, base in (("standard", standard("vgg16")), ("robust", robust("vgg16"))):
        for norm in NORM_NAMES:
            yield Cell(
                name=f"{training}/{norm}",
                config=replace(base, norm=norm),
                measures=(CORRUPTIONS_AND_SPECKLE,),
                clip=True,
            )


@register_study("D/fig1", cells=_fig1_cells, deviations=(*DEVIATIONS, CORRUPTED))
def fig1(values: Values) -> Iterator[Clause]:
    """Standard training: without a norm, noise does less harm, and fog and contrast more, than with any norm.

    Contrast does least harm with IN, and every corruption more with BN than with IN, LN and GN. With every norm and
    without one, adversarial training makes noise do less harm, and fog and contrast more.
    """

    def accuracy(training: str, norm: str, *corruptions: str) -> float:
        paths = [f"networks/run/accuracy/{name}/{level}" for name in corruptions for level in range(5)]
        return sum(mean(values, f"{training}/{norm}", path) for path in paths) / len(paths)

    plain, strong = partial(accuracy, "standard"), partial(accuracy, "robust")
    paths = [path.split("/") for cell, path in values if cell == "standard/bn"]
    every = sorted({parts[3] for parts in paths if len(parts) == 5 and parts[2] == "accuracy"})
    claims = {  # the higher accuracy and the lower one
        "noise does less harm without a norm than with one": {
            with_norm(norm): (plain("none", *NOISE), plain(norm, *NOISE)) for norm in NORMED
        },
        "fog and contrast do more harm without a norm than with one": {
            f"{name} {with_norm(norm)}": (plain(norm, name), plain("none", name))
            for name in FOG_AND_CONTRAST
            for norm in NORMED
        },
        "contrast does less harm with IN than without or with another norm": {
            with_norm(norm): (plain("in", "contrast"), plain(norm, "contrast")) for norm in NORM_NAMES if norm != "in"
        },
        "every corruption does more harm with BN than with IN, LN and GN": {
            f"{name} {with_norm(norm)}": (plain(norm, name), plain("bn", name)) for name in every for norm in NORMED[1:]
        },
        "noise does less harm after adversarial training": {
            with_norm(norm): (strong(norm, *NOISE), plain(norm, *NOISE)) for norm in NORM_NAMES
        },
        "fog and contrast do more harm after adversarial training": {
            f"{name} {with_norm(norm)}": (plain(norm, name), strong(norm, name))
            for name in FOG_AND_CONTRAST
            for norm in NORM_NAMES
        },
    }
    for text, pairs in claims.items():
        held = [high > low for high, low in pairs.values()]
        least = min(pairs, key=lambda case: pairs[case][0] - pairs[case][1])
        high, low = pairs[least]
        yield Clause.in_cases(text, held, f"least {least}: accuracy {high:.1f} over {low:.1f}")


# The paper does not name the network: here that of fig. 4.
@register_study(
    "D/fig2",
    cells=lambda: norms_along_training(standard("resnet18"), ("none", "bn"), ALL_LIGS),
    each=ALL_LIGS.options["shifts"],
    deviations=(*DEVIATIONS, "The paper does not name the network: ResNet18 here, as in figure 4."),
)
def fig2(values: Values, shift: str) -> Iterator[Clause]:
    """ "A general trend that the LIGS decreases with training", and "consistently" higher without BN than with it.

    A curve that first rises does not decrease with training: no rise between two snapshots is more than trivial.
    """
    path = f"networks/run/shifts/{shift}/mean"
    none, bn = (means_along_training(values, norm, path) for norm in ("none", "bn"))
    for name, curve in (("without BN", none), ("with BN", bn)):
        rise = max((after - before for before, after in pairwise(curve)), default=0.0)
        text = f"{shift}: {name} LIGS falls during training and never rises by more than {TRIVIAL:g}"
        shown = f"{curve[0]:.3f} to {curve[-1]:.3f}, the largest step {rise:+.3f}"
        yield Clause(f"{text}: {shown}", curve[-1] < curve[0] and rise <= TRIVIAL, TRIVIAL)
    least = min(above - below for above, below in zip(none, bn, strict=True))
    yield Clause(f"{shift}: LIGS is always higher without BN than with it: by {least:.3f} at least", least > 0)


def _check_less_robust(values: Values, norm: str) -> Iterator[Clause]:
    """In standard training norms always have a lower LIGS, and a lower robust accuracy at the end.

    In adversarial training LIGS stays close to 1 (0.9), and norms make less of a difference.
    """

    def ligs_along_training(cell: str) -> list[float]:
        return means_along_training(values, cell, GAUSSIAN)

    def differences(training: str) -> list[float]:
        none, normed = (ligs_along_training(f"{training}/{name}") for name in ("none", norm))
        return [a - b for a, b in zip(none, normed)]

    name, lower = norm.upper(), differences("standard")
    text = f"standard training: LIGS is always lower with {name} than without a norm"
    yield Clause(f"{text}: by {min(lower):.3f} at least", min(lower) > 0)
    normed, none = (robust_accuracy(values, f"standard/{kind}") for kind in (norm, "none"))
    yield Clause.lower(f"standard training: {name} is less robust than no norm", normed, none)
    least = min(ligs_along_training(f"robust/{norm}"))
    text = f"adversarial training: LIGS stays above {CLOSE_TO_1:g} with {name}"
    yield Clause(f"{text}: {least:.3f} at least", least > CLOSE_TO_1, CLOSE_TO_1)
    text = f"{name} makes less of a difference to LIGS in adversarial training than in standard training"
    yield Clause.lower(text, abs(differences("robust")[-1]), lower[-1], form=".3f")


def _standard_and_robust(norms: Iterable[str]) -> Iterable[Cell]:
    for training, base in (("standard", standard("resnet18")), ("robust", robust("resnet18"))):
        yield from norms_along_training(base, ("none", *norms), *TREND, prefix=f"{training}/")


for _name, _norms in (("D/fig4", ("bn",)), ("D/fig10", NORMED[1:])):
    register_study(_name, cells=partial(_standard_and_robust, _norms), each=_norms, deviations=DEVIATIONS)(
        _check_less_robust
    )


def _fig5_cells() -> Iterable[Cell]:
    # The paper gives neither network nor weight nor norm: here those of fig. 4, and the weight 1.
    for norm in ("none", "bn"):
        config = replace(standard("resnet18"), norm=norm)
        yield along_training(norm, config, *TREND)
        yield along_training(f"{norm}/ligs", replace(config, regularizer=Named("ligs", weight=1.0)), *TREND)


@register_study(
    "D/fig5",
    cells=_fig5_cells,
    each=("none", "bn"),
    deviations=(
        *DEVIATIONS,
        "Network, norm and weight are not printed: ResNet18 without a norm and with BN, weight 1.",
    ),
)
def fig5(values: Values, norm: str) -> Iterator[Clause]:
    """Regularized LIGS improves robust accuracy "by a large margin despite small influence on clean accuracy"."""
    both, text = (norm, f"{norm}/ligs"), f"{with_norm(norm)} the regularizer"
    before, after = (ligs(values, cell) for cell in both)
    yield Clause(f"{text} raises LIGS: {before:.3f} to {after:.3f}", after > before)
    before, after = (robust_accuracy(values, cell) for cell in both)
    gain = f"{text} raises robust accuracy by {LARGE_MARGIN:g} points or more"
    yield Clause(f"{gain}: {before:.1f} to {after:.1f}", after >= before + LARGE_MARGIN, LARGE_MARGIN)
    before, after = (clean_accuracy(values, cell) for cell in both)
    cost = f"{text} costs at most {SMALL_INFLUENCE:g} points of clean accuracy"
    yield Clause(f"{cost}: {before:.1f} to {after:.1f}", after >= before - SMALL_INFLUENCE, SMALL_INFLUENCE)


#: What fig. 8 changes in the ResNet18 with BN. The text names three activations, three optimizers and the learning rate
#: 0.5. The other values are chosen here; Adagrad and Adam have their usual learning rates.
FACTORS: dict[str, dict[str, Any]] = {
    "width/0.5": {"model": Named("resnet18", width=0.5)},
    "width/2": {"model": Named("resnet18", width=2.0)},
    "depth/34": {"model": Named("resnet34")},
    "depth/50": {"model": Named("resnet50")},
    "activation/leaky_relu": {"model": Named("resnet18", activation="leaky_relu")},
    "activation/selu": {"model": Named("resnet18", activation="selu")},
    "weight_decay/0": {"weight_decay": 0.0},
    "weight_decay/0.005": {"weight_decay": 5e-3},
    "lr/0.01": {"lr": 0.01},
    "lr/0.5": {"lr": 0.5},
    "optimizer/adagrad": {"optimizer": "adagrad", "lr": 0.01},
    "optimizer/adam": {"optimizer": "adam", "lr": 0.001},
}


@register_study(
    "D/fig8",
    cells=lambda: [
        along_training(name, replace(standard("resnet18"), **changes), *TREND)
        for name, changes in {"base": {}, "none": {"norm": "none"}, **FACTORS}.items()
    ],
    deviations=(*DEVIATIONS, "Most values of the factors are not printed; FACTORS lists those chosen here."),
)
def fig8(values: Values) -> Iterator[Clause]:
    """No factor changes LIGS as much as removing BN does; width, SELU and Adam raise it, depth lowers it.

    A high weight decay or learning rate raises it early and lowers it at the end.
    """

    def change(factor: str, moment: float = AT_LAST) -> float:
        return ligs(values, factor, moment=moment) - ligs(values, "base", moment=moment)

    without = change("none")
    factors = (Clause(f"{factor} {change(factor):+.3f}", abs(change(factor)) < without) for factor in FACTORS)
    yield Clause.conjunction(f"no factor changes LIGS as much as removing BN does, {without:+.3f}", factors)
    for factor in ("width/2", "activation/selu", "optimizer/adam"):
        yield Clause(f"{factor} raises LIGS: {change(factor):+.3f}", change(factor) > 0)
    depths = [change("depth/34"), change("depth/50")]
    yield Clause(f"depth/34 and depth/50 lower LIGS: {join_numbers(*depths, form='+.3f')}", max(depths) < 0)
    for high in ("weight_decay/0.005", "lr/0.5"):
        early, late = change(high, AT_FIRST), change(high)
        text = f"{high} raises LIGS early and lowers it at the end: {join_numbers(early, late, form='+.3f')}"
        yield Clause(text, early > 0 > late)


@register_study(
    "D/fig9",
    cells=lambda: [
        along_training(config.model.name, config, *TREND)
        for model in SHORTCUTS
        for config in (standard(model), standard(f"{model}_noshortcut"), fixup(model))
    ],
    each=SHORTCUTS,
    deviations=DEVIATIONS,
)
def fig9(values: Values, model: str) -> Iterator[Clause]:
    """The shortcut has a trivial influence on LIGS. Fixup has a higher LIGS than BN at comparable accuracy."""
    cut, bn = ligs(values, f"{model}_noshortcut"), ligs(values, model)
    text = f"{model}: LIGS differs by at most {TRIVIAL:g} without the shortcut and with it"
    yield Clause(f"{text}: {join_numbers(cut, bn, form='.3f')}", abs(cut - bn) <= TRIVIAL, TRIVIAL)
    fixed = ligs(values, f"fixup_{model}")
    yield Clause.higher(f"{model}: LIGS is higher with Fixup than with BN", fixed, bn, form=".3f")
    both = clean_accuracy(values, f"fixup_{model}"), clean_accuracy(values, model)
    yield Clause.comparable(f"{model}: Fixup and BN are comparably accurate", *both)


@register_study(
    "D/fig11",
    cells=lambda: [
        cell
        for model in ("resnet18", "resnet50")
        for cell in norms_along_training(imagenet(model), NORM_NAMES, *TREND, prefix=f"{model}/")
    ],
    each=("resnet18", "resnet50"),
    deviations=("The epochs on ImageNet are not printed: 90 here.",),
)
def fig11(values: Values, model: str) -> Iterator[Clause]:
    """On ImageNet norms have a lower LIGS; BN is the most accurate, IN the least."""
    scores = {norm: ligs(values, f"{model}/{norm}") for norm in NORM_NAMES}
    clean = {norm: clean_accuracy(values, f"{model}/{norm}") for norm in NORM_NAMES}
    order = sorted(NORM_NAMES, key=lambda norm: clean[norm])
    most = max(scores[norm] for norm in NORMED)
    text = f"{model}: LIGS is lower with every norm than without"
    yield Clause(f"{text}: {most:.3f} at most and {scores['none']:.3f}", most < scores["none"])
    text = ", ".join(f"{norm} {clean[norm]:.1f}" for norm in order)
    extremes = order[0], order[-1]
    yield Clause(f"{model}: IN is the least accurate and BN the most: {text}", extremes == ("in", "bn"))
