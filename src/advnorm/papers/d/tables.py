"""The tables of paper D. The available text lacks tables 4 and 5."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from advnorm.papers.d.trainings import (
    CORRUPTED,
    CORRUPTIONS,
    DEVIATIONS,
    FGSM,
    NORM_NAMES,
    NORMED,
    PGD10,
    PGD20,
    imagenet,
    robust,
    standard,
)
from advnorm.studies.claims import Clause, Margin, Values, join_numbers, mean
from advnorm.studies.registry import register_study
from advnorm.studies.study import Cell, Measure

#: Networks of table 1 by data set.
SMALL = [("SVHN", "VGG11"), ("SVHN", "VGG16"), *(("CIFAR10", model) for model in ("VGG11", "VGG16", "ResNet50"))]
LARGE = [("ImageNet", model) for model in ("VGG16", "VGG19", "ResNet18", "ResNet50")]
#: Without VGG: the paper had no weights with IN, LN and GN.
LARGE2 = [("ImageNet", "ResNet18"), ("ImageNet", "ResNet50")]


def _network(data: str, model: str, norm: str, *measures: Measure) -> Cell:
    base = imagenet(model.lower()) if data == "ImageNet" else standard(model.lower(), data.lower())
    return Cell(
        name=_cell_name(data, model, norm), config=replace(base, norm=norm), measures=measures or PGD20, clip=True
    )


def _cell_name(data: str, model: str, norm: str) -> str:
    return f"{data}/{model}/{norm}".lower()


def _locate(label: Mapping[str, Any], column: str) -> tuple[str, str]:
    return _cell_name(label.get("dataset", "CIFAR10"), label["model"], label["norm"]), f"shared/{column}"


@register_study(
    "D/table1",
    locate=_locate,
    cells=lambda: [_network(*network, norm) for network in [*LARGE, *SMALL] for norm in ("none", "bn")],
    each=[*SMALL, *LARGE],
    deviations=DEVIATIONS,
)
def table1(values: Values, network: tuple[str, str]) -> Iterator[Clause]:
    """BN raises the clean accuracy and lowers the accuracy under every attack, in every network, also on ImageNet."""
    data, model = network

    def effects_of_bn() -> Iterator[Clause]:
        for name in ("clean", *(name for measure in PGD20 for name in measure.options["attacks"])):
            bn, none = (mean(values, _cell_name(data, model, norm), f"shared/{name}") for norm in ("bn", "none"))
            yield Clause(f"{name} {join_numbers(bn, none)}", bn > none if name == "clean" else bn < none)

    text = f"{model} on {data} is better on clean images and worse under attack with BN than without"
    yield Clause.conjunction(text, effects_of_bn())


@register_study(
    "D/table2",
    cells=lambda: [_network(*network, norm) for network in [*LARGE2, *SMALL] for norm in NORM_NAMES],
    each=[*SMALL, *LARGE2],
    deviations=(*DEVIATIONS, "The table is lost: networks and attacks follow table 1."),
)
def table2(values: Values, network: tuple[str, str]) -> Iterator[Clause]:
    """Every norm lowers the accuracy under l2-PGD; IN lowers it most, except in ResNet50 on CIFAR10."""
    data, model = network
    pgd = {norm: mean(values, _cell_name(data, model, norm), "shared/pgd l2 0.25") for norm in NORM_NAMES}
    lowest, best = min(pgd, key=lambda norm: pgd[norm]), max(pgd[norm] for norm in NORMED)
    text = f"{model} on {data} under l2-PGD"
    yield Clause(f"{text}: every norm is below none: {best:.1f} at most and {pgd['none']:.1f}", best < pgd["none"])
    if (data, model) != ("CIFAR10", "ResNet50"):
        least = min(accuracy for norm, accuracy in pgd.items() if norm != "in")
        yield Clause(f"{text}: IN is the lowest: {pgd['in']:.1f}, the others {least:.1f} at least", lowest == "in")


def _table3_cells() -> Iterable[Cell]:
    # The last network of each kind is evaluated with all networks of its kind; each makes features of 1000 test images.
    for training, base in (("standard", standard("vgg16")), ("robust", robust("vgg16"))):
        names = [f"{training}/{norm}" for norm in NORM_NAMES]
        transfer = Measure(name="transfer", options={"beside": names[:-1], "limit": 1000})
        for name, norm in zip(names, NORM_NAMES):
            measures = (PGD10, transfer) if name == names[-1] else (PGD10,)
            yield Cell(name=name, config=replace(base, norm=norm), measures=measures, clip=True)


@register_study(
    "D/table3",
    cells=_table3_cells,
    deviations=(*DEVIATIONS, "Table 5 is lost: eps 0.5, 7 steps of 0.1 in adversarial training are chosen here."),
)
def table3(values: Values) -> Iterator[Clause]:
    """Features of robust networks transfer better than those of standard networks; of these, no norm transfers best.

    "Especially IN": of all norms, the features of IN transfer worst.
    """

    def transfer(training: str, source: str) -> float:
        """Accuracy on the features of one network, averaged over the other networks."""
        last, names = f"{training}/{NORM_NAMES[-1]}", [f"{training}/{norm}" for norm in NORM_NAMES]
        paths = [f"accuracy/{training}/{source}/{name}" for name in names if name != f"{training}/{source}"]
        return sum(mean(values, last, path) for path in paths) / len(paths)

    plain, strong = ({norm: transfer(training, norm) for norm in NORM_NAMES} for training in ("standard", "robust"))
    means = [100 * sum(found.values()) / len(found) for found in (strong, plain)]
    text = f"features of robust networks transfer better than those of standard networks: {join_numbers(*means)}"
    yield Clause(text, sum(strong.values()) > sum(plain.values()))
    others = ", ".join(f"{norm} {100 * plain[norm]:.1f}" for norm in NORMED)
    text = f"of the standard networks the one without a norm transfers best: {100 * plain['none']:.1f}, {others}"
    yield Clause(text, all(plain["none"] > plain[norm] for norm in NORMED))
    least = min(plain[norm] for norm in NORMED if norm != "in")
    text = "of the standard networks the one with IN transfers worst"
    yield Clause(f"{text}: {join_numbers(100 * plain['in'], 100 * least)}", plain["in"] < least)


_MODELS7 = {"VGG-16": "vgg16", "ResNet-18": "resnet18"}


def _locate7(label: Mapping[str, Any], column: str) -> tuple[str, str]:
    """The column ``clean`` also has corrupted images, with the statistics of training."""
    return _MODELS7[label["model"]], f"networks/run/{'mean' if column == 'clean' else 'adapted_mean'}"


EIGHT = Margin(7.5, "a boost of 8 %: {} points or more", "the paper's words, rounded: it prints 7.5 and 8.4")


@register_study(
    "D/table7",
    locate=_locate7,
    cells=lambda: [Cell(name=model, config=standard(model), measures=(CORRUPTIONS,)) for model in _MODELS7.values()],
    each=[*_MODELS7.values()],
    deviations=(*DEVIATIONS, CORRUPTED),
)
def table7(values: Values, cell: str) -> Iterator[Clause]:
    """Statistics of the corrupted images lead "to a boost of 8%"; a larger boost supports the claim too."""
    gain = mean(values, cell, "networks/run/adapted_mean") - mean(values, cell, "networks/run/mean")
    text = f"{cell} gains {EIGHT:g} points or more from statistics of the corrupted images: {gain:+.1f}"
    yield Clause(text, round(gain, 9) >= EIGHT, EIGHT)


_MODELS8 = ("VGG11", "VGG16", "ResNet50")


@register_study(
    "D/table8",
    locate=_locate,
    cells=lambda: [_network("CIFAR10", model, norm, FGSM) for model in _MODELS8 for norm in ("none", "bn")],
    each=_MODELS8,
    deviations=DEVIATIONS,
)
def table8(values: Values, model: str) -> Iterator[Clause]:
    """Under FGSM networks are more accurate with BN."""
    names = [_cell_name("CIFAR10", model, norm) for norm in ("bn", "none")]
    bn, none = (mean(values, name, "shared/fgsm linf 4/255") for name in names)
    yield Clause.higher(f"{model} is more accurate under FGSM with BN than without", bn, none)
