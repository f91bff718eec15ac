"""Fig. 1, 2, 4, 5 and 8 to 11 of paper D: corruptions and LIGS along training. The paper prints no numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from advnorm.config import Named
from advnorm.papers.d.trainings import (
    ALL_LIGS,
    AT_FIRST,
    AT_LAST,
    CORRUPTIONS,
    NORMED,
    NORMS,
    SHORTCUTS,
    TREND,
    along_training,
    clean_accuracy,
    fixup,
    imagenet,
    ligs,
    robust,
    robust_accuracy,
    standard,
    with_norm,
)
from advnorm.studies.claims import Clause, Values, for_each, join_numbers, mean, means_along_training
from advnorm.studies.registry import register_study
from advnorm.studies.study import Cell

#: "Noise corruptions, i.e. Gaussian/Speckle/Shot" (sec. 3.2). Speckle noise exists in CIFAR-10-C only.
NOISE, SPECKLE_NOISE = ("gaussian_noise", "shot_noise"), "speckle_noise"
FOG_AND_CONTRAST = ("fog", "contrast")
#: A difference of LIGS that counts as trivial; the paper names none.
TRIVIAL = 0.05


def _check_fig1(values: Values) -> Iterator[Clause]:
    """Standard training: without a norm, noise does less harm, and fog and contrast more, than with any norm.

    Contrast does least harm with IN, and every corruption more with BN than with IN, LN and GN. With every norm and
    without one, adversarial training makes noise do less harm, and fog and contrast more. Speckle noise is optional.
    """

    def accuracy(training: str, norm: str, *corruptions: str) -> float:
        paths = [f"networks/run/accuracy/{name}/{level}" for name in corruptions for level in range(5)]
        return sum(mean(values, f"{training}/{norm}", path) for path in paths) / len(paths)

    plain, strong = partial(accuracy, "standard"), partial(accuracy, "robust")
    paths = [path.split("/") for cell, path in values if cell == "standard/bn"]
    every = sorted({parts[3] for parts in paths if len(parts) == 5 and parts[2] == "accuracy"})
    noise = [*NOISE, *({SPECKLE_NOISE} & {*every})]
    claims = {  # the higher accuracy and the lower one
        "noise does less harm without a norm than with one": {
            with_norm(norm): (plain("none", *noise), plain(norm, *noise)) for norm in NORMED
        },
        "fog and contrast do more harm without a norm than with one": {
            f"{name} {with_norm(norm)}": (plain(norm, name), plain("none", name))
            for name in FOG_AND_CONTRAST
            for norm in NORMED
        },
        "contrast does less harm with IN than without or with another norm": {
            with_norm(norm): (plain("in", "contrast"), plain(norm, "contrast")) for norm in NORMS if norm != "in"
        },
        "every corruption does more harm with BN than with IN, LN and GN": {
            f"{name} {with_norm(norm)}": (plain(norm, name), plain("bn", name)) for name in every for norm in NORMED[1:]
        },
        "noise does less harm after adversarial training": {
            with_norm(norm): (strong(norm, *noise), plain(norm, *noise)) for norm in NORMS
        },
        "fog and contrast do more harm after adversarial training": {
            f"{name} {with_norm(norm)}": (plain(norm, name), strong(norm, name))
            for name in FOG_AND_CONTRAST
            for norm in NORMS
        },
    }
    for text, pairs in claims.items():
        held = [high > low for high, low in pairs.values()]
        least = min(pairs, key=lambda case: pairs[case][0] - pairs[case][1])
        high, low = pairs[least]
        yield Clause.in_cases(text, held, f"least {least}: accuracy {high:.1f} over {low:.1f}")


@register_study("D/fig1", check=_check_fig1)
def fig1() -> Iterable[Cell]:
    for training, base in (("standard", standard("vgg16")), ("robust", robust("vgg16"))):
        for norm in NORMS:
            yield Cell(name=f"{training}/{norm}", config=replace(base, norm=norm), measures=(CORRUPTIONS,))


def _check_fig2(values: Values) -> Iterator[Clause]:
    """Under every kind of shift LIGS falls during training, and is always higher without BN than with it."""

    def clauses(shift: str) -> Iterator[Clause]:
        path = f"networks/run/shifts/{shift}/mean"
        none, bn = (means_along_training(values, norm, path) for norm in ("none", "bn"))
        text = f"{none[0]:.3f} to {none[-1]:.3f} without BN, {bn[0]:.3f} to {bn[-1]:.3f} with it"
        yield Clause(f"{shift}: LIGS falls during training: {text}", none[0] > none[-1] and bn[0] > bn[-1])
        least = min(above - below for above, below in zip(none, bn, strict=True))
        yield Clause(f"{shift}: LIGS is always higher without BN than with it: by {least:.3f} at least", least > 0)

    yield from for_each(ALL_LIGS.options["shifts"], clauses)


@register_study("D/fig2", check=_check_fig2)
def fig2() -> Iterable[Cell]:
    # The paper does not name the network: here that of fig. 4.
    for norm in ("none", "bn"):
        yield along_training(norm, replace(standard("resnet18"), norm=norm), (ALL_LIGS,))


def _check_less_robust(values: Values, norms: Iterable[str]) -> Iterator[Clause]:
    """In standard training norms always have a lower LIGS, and a lower robust accuracy at the end.

    In adversarial training LIGS stays close to 1 (0.9), and norms make less of a difference.
    """

    def ligs_along_training(cell: str) -> list[float]:
        return means_along_training(values, cell, "networks/run/shifts/gaussian/mean")

    def differences(training: str, norm: str) -> list[float]:
        none, normed = (ligs_along_training(f"{training}/{name}") for name in ("none", norm))
        return [a - b for a, b in zip(none, normed)]

    def clauses(norm: str) -> Iterator[Clause]:
        name, lower = norm.upper(), differences("standard", norm)
        text = f"standard training: LIGS is always lower with {name} than without a norm"
        yield Clause(f"{text}: by {min(lower):.3f} at least", min(lower) > 0)
        normed, none = (robust_accuracy(values, f"standard/{kind}") for kind in (norm, "none"))
        yield Clause.lower(f"standard training: {name} is less robust than no norm", normed, none)
        least = min(ligs_along_training(f"robust/{norm}"))
        yield Clause(f"adversarial training: LIGS stays above 0.9 with {name}: {least:.3f} at least", least > 0.9)
        text = f"{name} makes less of a difference to LIGS in adversarial training than in standard training"
        yield Clause.lower(text, abs(differences("robust", norm)[-1]), lower[-1], form=".3f")

    yield from for_each(norms, clauses)


def _standard_and_robust(norms: Iterable[str]) -> Iterable[Cell]:
    for training, base in (("standard", standard("resnet18")), ("robust", robust("resnet18"))):
        for norm in ("none", *norms):
            yield along_training(f"{training}/{norm}", replace(base, norm=norm), TREND)


@register_study("D/fig4", check=partial(_check_less_robust, norms=("bn",)))
def fig4() -> Iterable[Cell]:
    return _standard_and_robust(("bn",))


@register_study("D/fig10", check=partial(_check_less_robust, norms=NORMED[1:]))
def fig10() -> Iterable[Cell]:
    return _standard_and_robust(NORMED[1:])


def _check_fig5(values: Values) -> Iterator[Clause]:
    """The regularizer raises LIGS, and robust accuracy by 10 points or more; clean accuracy loses at most 5."""

    def clauses(norm: str) -> Iterator[Clause]:
        both, text = (norm, f"{norm}/ligs"), f"{with_norm(norm)} the regularizer"
        before, after = (ligs(values, cell) for cell in both)
        yield Clause(f"{text} raises LIGS: {before:.3f} to {after:.3f}", after > before)
        before, after = (robust_accuracy(values, cell) for cell in both)
        raised = after >= before + 10
        yield Clause(f"{text} raises robust accuracy by 10 points or more: {before:.1f} to {after:.1f}", raised)
        before, after = (clean_accuracy(values, cell) for cell in both)
        kept = after >= before - 5
        yield Clause(f"{text} costs at most 5 points of clean accuracy: {before:.1f} to {after:.1f}", kept)

    yield from for_each(("none", "bn"), clauses)


@register_study("D/fig5", check=_check_fig5)
def fig5() -> Iterable[Cell]:
    # The paper gives neither network nor weight nor norm: here those of fig. 4, and the weight 1.
    for norm in ("none", "bn"):
        config = replace(standard("resnet18"), norm=norm)
        yield along_training(norm, config, TREND)
        yield along_training(f"{norm}/ligs", replace(config, regularizer=Named("ligs", weight=1.0)), TREND)


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


def _check_fig8(values: Values) -> Iterator[Clause]:
    """No factor changes LIGS as much as removing BN does; width, SELU and Adam raise it, depth lowers it.

    A high weight decay or learning rate raises it early and lowers it at the end.
    """

    def change(factor: str, moment: int = AT_LAST) -> float:
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


@register_study("D/fig8", check=_check_fig8)
def fig8() -> Iterable[Cell]:
    base = standard("resnet18")
    for name, changes in {"base": {}, "none": {"norm": "none"}, **FACTORS}.items():
        yield along_training(name, replace(base, **changes), TREND)


def _check_fig9(values: Values) -> Iterator[Clause]:
    """The shortcut has a trivial influence on LIGS. Fixup has a higher LIGS than BN at comparable accuracy."""

    def clauses(model: str) -> Iterator[Clause]:
        cut, bn = ligs(values, f"{model}_noshortcut"), ligs(values, model)
        text = f"{model}: LIGS differs by at most {TRIVIAL} without the shortcut and with it"
        yield Clause(f"{text}: {join_numbers(cut, bn, form='.3f')}", abs(cut - bn) <= TRIVIAL)
        fixed = ligs(values, f"fixup_{model}")
        yield Clause.higher(f"{model}: LIGS is higher with Fixup than with BN", fixed, bn, form=".3f")
        both = clean_accuracy(values, f"fixup_{model}"), clean_accuracy(values, model)
        yield Clause.comparable(f"{model}: Fixup and BN are comparably accurate", *both)

    yield from for_each(SHORTCUTS, clauses)


@register_study("D/fig9", check=_check_fig9)
def fig9() -> Iterable[Cell]:
    for model in SHORTCUTS:
        yield along_training(model, standard(model), TREND)
        yield along_training(f"{model}_noshortcut", standard(f"{model}_noshortcut"), TREND)
        yield along_training(f"fixup_{model}", fixup(model), TREND)


def _check_fig11(values: Values) -> Iterator[Clause]:
    """On ImageNet norms have a lower LIGS; BN is the most accurate, IN the least."""

    def clauses(model: str) -> Iterator[Clause]:
        scores = {norm: ligs(values, f"{model}/{norm}") for norm in NORMS}
        clean = {norm: clean_accuracy(values, f"{model}/{norm}") for norm in NORMS}
        order = sorted(NORMS, key=lambda norm: clean[norm])
        most = max(scores[norm] for norm in NORMED)
        text = f"{model}: LIGS is lower with every norm than without"
        yield Clause(f"{text}: {most:.3f} at most and {scores['none']:.3f}", most < scores["none"])
        text = ", ".join(f"{norm} {clean[norm]:.1f}" for norm in order)
        extremes = order[0], order[-1]
        yield Clause(f"{model}: IN is the least accurate and BN the most: {text}", extremes == ("in", "bn"))

    yield from for_each(("resnet18", "resnet50"), clauses)


@register_study("D/fig11", check=_check_fig11)
def fig11() -> Iterable[Cell]:
    for model in ("resnet18", "resnet50"):
        for norm in NORMS:
            yield along_training(f"{model}/{norm}", replace(imagenet(model), norm=norm), TREND)
