"""The figures of paper D. The paper prints no numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from advnorm.config import Config, Named
from advnorm.papers.d.trainings import CORRUPTIONS_AND_SPECKLE, NORM_NAMES, NORMED, PGD10, imagenet, robust, standard
from advnorm.studies.claims import Clause, Values, epochs_of, join_numbers, mean, means_along_training
from advnorm.studies.registry import register_study
from advnorm.studies.study import Cell, Measure

#: "Noise corruptions, i.e. Gaussian/Speckle/Shot" (sec. 3.2).
NOISE = ("gaussian_noise", "speckle_noise", "shot_noise")
FOG_AND_CONTRAST = ("fog", "contrast")
#: A difference of LIGS that counts as trivial; the paper names none.
TRIVIAL = 0.05
#: Networks with a variant without shortcut and a variant with Fixup initialization.
SHORTCUTS = ("resnet20", "resnet56")
#: Gaussian noise of deviation 0.01 (app. B.4), and all four kinds.
LIGS = Measure(name="ligs", options={"shifts": ["gaussian"], "size": 0.01, "limit": 1000})
ALL_LIGS = Measure(name="ligs", options={"shifts": ["gaussian", "uniform", "fgsm", "pgd"], "size": 0.01, "limit": 1000})
ALIGNMENT = Measure(name="alignment", options={"limit": None}, scale=100)
LANDSCAPE = Measure(name="landscape", options={"limit": 1000})
TREND = (PGD10, LIGS)
#: Indices of the moments of a training.
AT_FIRST, WARMED, AT_LAST = 0, 1, -1


def fixup(model: str) -> Config:
    """Fixup initialization instead of BN."""
    return replace(standard(model), model=Named(f"fixup_{model}"), norm="none")


def along_training(name: str, config: Config, *measures: Measure, **dependencies: Any) -> Cell:
    """A cell that is measured at every snapshot of its training."""
    along = tuple(replace(one, checkpoint="along") for one in measures)
    return Cell(name=name, config=config, measures=along, **dependencies)


def norms_along_training(config: Config, norms: Iterable[str], *measures: Measure, prefix: str = "") -> list[Cell]:
    """A training with each of several norms, measured at every snapshot."""
    return [along_training(f"{prefix}{norm}", replace(config, norm=norm), *measures) for norm in norms]


def value_at(values: Values, cell: str, value: str, moment: int) -> float:
    """Return a value at a moment of the training, or at its last moment if it has fewer."""
    epochs = epochs_of(values, cell, value)
    return mean(values, cell, f"{epochs[min(moment, len(epochs) - 1)]}/{value}")


def clean_accuracy(values: Values, cell: str, moment: int = AT_LAST) -> float:
    return value_at(values, cell, "shared/clean", moment)


def robust_accuracy(values: Values, cell: str) -> float:
    return value_at(values, cell, "shared/pgd10", AT_LAST)


def ligs(values: Values, cell: str, moment: int = AT_LAST) -> float:
    return value_at(values, cell, "networks/run/shifts/gaussian/mean", moment)


def with_norm(norm: str) -> str:
    return "without a norm" if norm == "none" else f"with {norm.upper()}"


def _fig1_cells() -> Iterable[Cell]:
    for training, base in (("standard", standard("vgg16")), ("robust", robust("vgg16"))):
        for norm in NORM_NAMES:
            yield Cell(name=f"{training}/{norm}", config=replace(base, norm=norm), measures=(CORRUPTIONS_AND_SPECKLE,))


@register_study("D/fig1", cells=_fig1_cells)
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
)
def fig2(values: Values, shift: str) -> Iterator[Clause]:
    """Under every kind of shift LIGS falls during training, and is always higher without BN than with it."""
    path = f"networks/run/shifts/{shift}/mean"
    none, bn = (means_along_training(values, norm, path) for norm in ("none", "bn"))
    text = f"{none[0]:.3f} to {none[-1]:.3f} without BN, {bn[0]:.3f} to {bn[-1]:.3f} with it"
    yield Clause(f"{shift}: LIGS falls during training: {text}", none[0] > none[-1] and bn[0] > bn[-1])
    least = min(above - below for above, below in zip(none, bn, strict=True))
    yield Clause(f"{shift}: LIGS is always higher without BN than with it: by {least:.3f} at least", least > 0)


def _check_less_robust(values: Values, norm: str) -> Iterator[Clause]:
    """In standard training norms always have a lower LIGS, and a lower robust accuracy at the end.

    In adversarial training LIGS stays close to 1 (0.9), and norms make less of a difference.
    """

    def ligs_along_training(cell: str) -> list[float]:
        return means_along_training(values, cell, "networks/run/shifts/gaussian/mean")

    def differences(training: str) -> list[float]:
        none, normed = (ligs_along_training(f"{training}/{name}") for name in ("none", norm))
        return [a - b for a, b in zip(none, normed)]

    name, lower = norm.upper(), differences("standard")
    text = f"standard training: LIGS is always lower with {name} than without a norm"
    yield Clause(f"{text}: by {min(lower):.3f} at least", min(lower) > 0)
    normed, none = (robust_accuracy(values, f"standard/{kind}") for kind in (norm, "none"))
    yield Clause.lower(f"standard training: {name} is less robust than no norm", normed, none)
    least = min(ligs_along_training(f"robust/{norm}"))
    yield Clause(f"adversarial training: LIGS stays above 0.9 with {name}: {least:.3f} at least", least > 0.9)
    text = f"{name} makes less of a difference to LIGS in adversarial training than in standard training"
    yield Clause.lower(text, abs(differences("robust")[-1]), lower[-1], form=".3f")


def _standard_and_robust(norms: Iterable[str]) -> Iterable[Cell]:
    for training, base in (("standard", standard("resnet18")), ("robust", robust("resnet18"))):
        yield from norms_along_training(base, ("none", *norms), *TREND, prefix=f"{training}/")


for _name, _norms in (("D/fig4", ("bn",)), ("D/fig10", NORMED[1:])):
    register_study(_name, cells=partial(_standard_and_robust, _norms), each=_norms)(_check_less_robust)


def _fig5_cells() -> Iterable[Cell]:
    # The paper gives neither network nor weight nor norm: here those of fig. 4, and the weight 1.
    for norm in ("none", "bn"):
        config = replace(standard("resnet18"), norm=norm)
        yield along_training(norm, config, *TREND)
        yield along_training(f"{norm}/ligs", replace(config, regularizer=Named("ligs", weight=1.0)), *TREND)


@register_study("D/fig5", cells=_fig5_cells, each=("none", "bn"))
def fig5(values: Values, norm: str) -> Iterator[Clause]:
    """The regularizer raises LIGS, and robust accuracy by 10 points or more; clean accuracy loses at most 5."""
    both, text = (norm, f"{norm}/ligs"), f"{with_norm(norm)} the regularizer"
    before, after = (ligs(values, cell) for cell in both)
    yield Clause(f"{text} raises LIGS: {before:.3f} to {after:.3f}", after > before)
    before, after = (robust_accuracy(values, cell) for cell in both)
    raised = after >= before + 10
    yield Clause(f"{text} raises robust accuracy by 10 points or more: {before:.1f} to {after:.1f}", raised)
    before, after = (clean_accuracy(values, cell) for cell in both)
    yield Clause(f"{text} costs at most 5 points of clean accuracy: {before:.1f} to {after:.1f}", after >= before - 5)


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
)
def fig8(values: Values) -> Iterator[Clause]:
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


@register_study(
    "D/fig9",
    cells=lambda: [
        along_training(config.model.name, config, *TREND)
        for model in SHORTCUTS
        for config in (standard(model), standard(f"{model}_noshortcut"), fixup(model))
    ],
    each=SHORTCUTS,
)
def fig9(values: Values, model: str) -> Iterator[Clause]:
    """The shortcut has a trivial influence on LIGS. Fixup has a higher LIGS than BN at comparable accuracy."""
    cut, bn = ligs(values, f"{model}_noshortcut"), ligs(values, model)
    text = f"{model}: LIGS differs by at most {TRIVIAL} without the shortcut and with it"
    yield Clause(f"{text}: {join_numbers(cut, bn, form='.3f')}", abs(cut - bn) <= TRIVIAL)
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


# -- training on features of other networks ----------------------------------------------------------------------------


#: Accuracy in percent, of 10 classes, below which a data set is not learned.
NOT_LEARNED = 15


def learns(recipe: str) -> Config:
    """ResNet18 on a feature data set (table 6): 150 epochs, decayed at 50 and 100."""
    targets = recipe in ("D_det", "D_conflict")
    return replace(standard("resnet18"), lr=0.1 if targets else 0.01, augment="none" if targets else "crop_flip")


def on_features(recipe: str, norm: str, *measures: Measure) -> Cell:
    """A network on features of a ResNet50 (app. E), robust for D_R; D_conflict starts from the images of D_R."""
    source = "source/robust" if recipe == "D_R" else "source/standard"
    images = "D_R/bn" if recipe == "D_conflict" else None
    dependencies = {"after": source, "features": recipe, "feature_images": images}
    return along_training(f"{recipe}/{norm}", replace(learns(recipe), norm=norm), *measures, **dependencies)


def sources() -> list[Cell]:
    """The networks that features are extracted from, a robust and a standard one."""
    configs = {"robust": robust("resnet50"), "standard": standard("resnet50")}
    return [Cell(name=f"source/{name}", config=config, measures=(PGD10,)) for name, config in configs.items()]


@register_study(
    "D/fig6",
    cells=lambda: [
        *sources(),
        *(on_features(recipe, norm, *TREND) for norm in ("none", "bn") for recipe in ("D_R", "D_rand")),
    ],
)
def fig6(values: Values) -> Iterator[Clause]:
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


def _check_conflict(values: Values, recipe: str) -> Iterator[Clause]:
    """With BN robust features decide early and non-robust ones at the end; without BN robust ones decide at the end."""

    def alignment(norm: str, moment: int) -> list[float]:
        """Accuracy by robust features and by non-robust ones."""
        names = (f"aligned_with_{kind}_features/0" for kind in ("robust", "non_robust"))
        return [value_at(values, f"{recipe}/{norm}", name, moment) for name in names]

    early, late, none = alignment("bn", AT_FIRST), alignment("bn", AT_LAST), alignment("none", AT_LAST)
    yield Clause.higher("with BN robust features outweigh non-robust ones early", *early)
    yield Clause.lower("with BN non-robust features outweigh robust ones at the end", *late)
    yield Clause(f"with BN the accuracy by robust features falls: {early[0]:.1f} to {late[0]:.1f}", early[0] > late[0])
    yield Clause.higher("without BN robust features outweigh non-robust ones at the end", *none)


register_study(
    "D/fig7",
    cells=lambda: [
        *sources(),
        on_features("D_R", "bn", *TREND),
        *(on_features("D_conflict", norm, ALIGNMENT) for norm in ("none", "bn")),
    ],
    each=["D_conflict"],
)(_check_conflict)
register_study(
    "D/fig13",
    cells=lambda: [sources()[1], *(on_features("D_det", norm, ALIGNMENT) for norm in ("none", "bn"))],
    each=["D_det"],
)(_check_conflict)


@register_study(
    "D/fig12",
    cells=lambda: [*sources(), *(on_features(recipe, "bn", *TREND) for recipe in ("D_R", "D_NR", "D_rand"))],
)
def fig12(values: Values) -> Iterator[Clause]:
    """LIGS is high on D_R, low on D_rand, and between on D_NR."""
    high, middle = ligs(values, "D_R/bn"), ligs(values, "D_NR/bn")
    yield Clause.higher("LIGS is higher on D_R than on D_NR", high, middle, form=".3f")
    yield Clause.higher("LIGS is higher on D_NR than on D_rand", middle, ligs(values, "D_rand/bn"), form=".3f")


# -- the optimization landscape, measured early, while the network still learns ----------------------------------------


def _smoothness(values: Values, cell: str) -> float:
    """Effective β-smoothness early in training, averaged over batches. At the end the gradients are too small."""
    paths = {path.partition("/")[2] for name, path in values if name == cell and path.endswith("/smoothness")}
    if not paths:
        raise KeyError(cell)
    return sum(value_at(values, cell, path, AT_FIRST) for path in paths) / len(paths)


@register_study("D/fig14", cells=lambda: norms_along_training(standard("resnet18"), NORM_NAMES, LANDSCAPE))
def fig14(values: Values) -> Iterator[Clause]:
    """In ResNet18 gradients are smoother with BN than without a norm, and not smoother with IN, LN and GN."""
    beta = {norm: _smoothness(values, norm) for norm in NORM_NAMES}
    none, least = beta["none"], min(beta[norm] for norm in NORMED if norm != "bn")
    yield Clause.lower("β-smoothness is lower with BN than without a norm", beta["bn"], none, form=".4g")
    text = "β-smoothness is no lower with IN, LN and GN than without a norm"
    yield Clause(f"{text}: {least:.4g} at least and {none:.4g}", none <= least)


# The caption names VGG16 with and without BN; the text discusses all norms, in a ResNet50 that no figure shows.
@register_study("D/fig15", cells=lambda: norms_along_training(standard("vgg16"), NORM_NAMES, LANDSCAPE))
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
    cells=lambda: [along_training(model, standard(model), LANDSCAPE) for model in ("resnet18", "resnet18_noshortcut")],
)
def fig16(values: Values) -> Iterator[Clause]:
    """The shortcut has a trivial influence on the smoothness: less than a factor of 2."""
    cut, whole = _smoothness(values, "resnet18_noshortcut"), _smoothness(values, "resnet18")
    text = "β-smoothness is within a factor of 2 without the shortcut and with it"
    yield Clause(f"{text}: {join_numbers(cut, whole, form='.4g')}", 0.5 < cut / whole < 2)


@register_study(
    "D/fig17",
    cells=lambda: [
        along_training(config.model.name, config, LANDSCAPE)
        for model in SHORTCUTS
        for config in (standard(model), fixup(model))
    ],
    each=SHORTCUTS,
)
def fig17(values: Values, model: str) -> Iterator[Clause]:
    """Gradients are less smooth with Fixup than with BN."""
    fixed, bn = _smoothness(values, f"fixup_{model}"), _smoothness(values, model)
    yield Clause.higher(f"{model}: β-smoothness is higher with Fixup than with BN", fixed, bn, form=".4g")
