"""The tables and figures of paper E's main part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

from advnorm.config import Config
from advnorm.papers.e.trainings import (
    DEPTHS,
    DEVIATIONS,
    EVALUATION_STEPS,
    accuracies,
    adversarial,
    alp,
    cell,
    clean_cell,
    consistent_strategies,
    deeper_cells,
    depth,
    hybrid,
    locate,
    mbn,
    name_of,
    norms_tuned,
    robust_accuracy,
    running,
)
from advnorm.studies.claims import (
    COMPARABLE,
    SIGNIFICANT,
    Clause,
    Margin,
    Values,
    are_robust,
    for_each,
    join_numbers,
    mean,
)
from advnorm.studies.registry import STUDIES, register_study
from advnorm.studies.study import Cell, Measure

SHARES = (0.2, 0.4, 0.6, 0.8, 1.0)
ASYMPTOTIC = Margin(
    0.95,
    "asymptotic: PGD-2000 leaves robustness, at least {} of PGD-500's",
    "our margin: the paper calls a fall from 39.5 to 39.0 marginal, and falls to 0.84 and less not asymptotic",
)
ALMOST_EQUAL = Margin(0.25, "almost equivalent: within {} of a deviation", "our margin: the paper names none")
DIFFERENT = Margin(0.1, "significantly different: by more than {} of their size", "our margin: the paper names none")
#: "res_3" is the stage conv3_x of He et al. The paper does not name the block and the norm.
RES3 = "layer2.1.bn2"

# -- section 4.1: clean images -----------------------------------------------------------------------------------------


@register_study(
    "E/fig1",
    locate=locate,
    cells=lambda: [cell(adversarial()), *(cell(hybrid(share=share)) for share in SHARES)],
    deviations=DEVIATIONS,
)
def fig1(values: Values) -> Iterator[Clause]:
    """Training without any clean images is most robust, by a large margin over the baseline."""
    best = robust_accuracy(values, adversarial())
    others = [robust_accuracy(values, hybrid(share=share)) for share in SHARES]
    text = "training without clean images is"
    yield Clause.robust(f"{text} robust under PGD-2000", best)
    most = max(others)
    yield Clause(f"{text} more robust than with any share of them: {best:.1f} and {most:.1f} at most", best > most)
    yield Clause.far_higher(f"{text} far more robust than with all of them", best, others[-1])


def _is_asymptotic(values: Values, config: Config) -> tuple[str, bool]:
    """Describe the end of a curve, and whether it is asymptotic."""
    before, after = (robust_accuracy(values, config, steps) for steps in (500, 2000))
    held = are_robust(after) and after >= ASYMPTOTIC * before
    return f"{before:.1f} under PGD-500 and {after:.1f} under PGD-2000", held


@register_study(
    "E/fig2",
    locate=locate,
    cells=lambda: [cell(config, *EVALUATION_STEPS) for config in (adversarial(), hybrid(), alp())],
    deviations=DEVIATIONS,
)
def fig2(values: Values) -> Iterator[Clause]:
    """All three curves begin with robustness; only that of 100% adv + 0% clean becomes asymptotic."""
    configs = (adversarial(), hybrid(), alp())
    begin = [robust_accuracy(values, config, EVALUATION_STEPS[0]) for config in configs]
    curves = {name_of(config): _is_asymptotic(values, config) for config in configs}
    yield Clause.robust(f"the three curves begin robust under PGD-{EVALUATION_STEPS[0]}", *begin)
    for name, (text, asymptotic) in curves.items():
        expected = name == name_of(configs[0])
        end = "becomes asymptotic" if expected else "keeps falling, or falls to almost nothing"
        yield Clause(f"the curve of {name} {end}: {text}", asymptotic == expected, ASYMPTOTIC)


# -- section 4.2: Mixture BN -------------------------------------------------------------------------------------------


def _fig3_cells() -> Iterable[Cell]:
    configs = (mbn(hybrid()), mbn(alp()), replace(hybrid(), norm="gn"))
    return [cell(config, *EVALUATION_STEPS) for config in configs]


@register_study("E/fig3", locate=locate, cells=_fig3_cells, deviations=DEVIATIONS)
def fig3(values: Values) -> Iterator[Clause]:
    """With MBN_adv, or with group norm, the curves of training with clean images become asymptotic too."""

    def clauses(one: Cell) -> Iterator[Clause]:
        text, asymptotic = _is_asymptotic(values, one.config)
        yield Clause(f"the curve of {one.name} becomes asymptotic: {text}", asymptotic, ASYMPTOTIC)

    yield from for_each(_fig3_cells(), clauses)


def _small_eps(config: Config) -> Config:
    return replace(config, eps="8/255")


@register_study(
    "E/sec4.2",
    cells=lambda: [cell(_small_eps(hybrid()), *EVALUATION_STEPS)],
    deviations=(*DEVIATIONS, "The paper names no steps for this eps: those of 16/255."),
)
def section42(values: Values) -> Iterator[Clause]:
    """With eps 8 training with clean images and BN "can also ensure their robustness against strong attacks"."""
    text, asymptotic = _is_asymptotic(values, _small_eps(hybrid()))
    yield Clause(f"the curve at 8/255 becomes asymptotic: {text}", asymptotic, ASYMPTOTIC)


def _locate1(label: Mapping[str, Any], column: str) -> tuple[str, str] | None:
    """The left table has clean images, the right one adversarial images; nothing else is printed."""
    left = label["strategy"].startswith("0% adv") or label.get("norm") == "MBN_clean"
    return locate(label, column) if column == ("clean" if left else "pgd2000") else None


def _table1_cells() -> Iterable[Cell]:
    both = [cell(mbn(hybrid())), cell(mbn(alp()))]
    through_clean = accuracies(10, route="clean")
    return [clean_cell(), cell(adversarial()), *(replace(one, measures=one.measures + through_clean) for one in both)]


@register_study("E/table1", locate=_locate1, cells=_table1_cells, deviations=DEVIATIONS)
def table1(values: Values) -> Iterator[Clause]:
    """MBN_clean is nearly as accurate as clean training, MBN_adv nearly as robust as adversarial training.

    More is no contradiction.
    """
    most, best = mean(values, "clean", "shared/clean"), robust_accuracy(values, adversarial())
    yield Clause.robust("adversarial training is robust under PGD-2000", best)

    def clauses(config: Config) -> Iterator[Clause]:
        name, accuracy = name_of(config), mean(values, name_of(config), "clean/clean")
        text = f"MBN_clean of {name} is at most {COMPARABLE:g} points below clean training"
        yield Clause(f"{text}: {join_numbers(accuracy, most)}", accuracy >= most - COMPARABLE, COMPARABLE)
        found = robust_accuracy(values, config)
        yield Clause.robust(f"MBN_adv of {name} is robust under PGD-2000", found)
        text = f"MBN_adv of {name} is at most {COMPARABLE:g} points below adversarial training"
        yield Clause(f"{text}: {join_numbers(found, best)}", found >= best - COMPARABLE, COMPARABLE)

    yield from for_each((mbn(hybrid()), mbn(alp())), clauses)


def _channels(values: Values, config: Config, series: str, number: str) -> list[float]:
    """Return a statistic of all drawn channels of every seed. Channels of different networks are not averaged."""
    prefix = f"statistics/{series}/{number}/"
    places = [key for key in values if key[0] == name_of(config) and key[1].startswith(prefix)]
    found = [number for place in places for number in values[place]]
    if not found:
        raise KeyError(prefix)
    return found


_STORED = Measure(name="stored_channels", options={"layer": RES3, "channels": 20})


# The paper does not say whether with ALP.
@register_study("E/fig5", cells=lambda: [replace(cell(mbn(hybrid())), measures=(_STORED,))], deviations=DEVIATIONS)
def fig5(values: Values) -> Iterator[Clause]:
    """Both kinds of images "induce significantly different running statistics"; those of adversarial images are larger.

    In size, summed over the channels.
    """

    def size(bank: str, number: str) -> float:
        return sum(map(abs, _channels(values, mbn(hybrid()), f"NS^{bank}_running", number)))

    for number, name in (("mean", "means"), ("std", "deviations")):
        adv, clean = size("adv", number), size("clean", number)
        text = f"running {name} of adversarial images are larger than those of clean images"
        yield Clause(f"{text}: {adv:.3f} and {clean:.3f} in sum", adv > clean)
        banks = (_channels(values, mbn(hybrid()), f"NS^{bank}_running", number) for bank in ("adv", "clean"))
        gap = sum(abs(one - other) for one, other in zip(*banks, strict=True)) / ((adv + clean) / 2)
        text = f"running {name} of both kinds differ by more than {DIFFERENT:g} of their size"
        yield Clause(f"{text}: {gap:.2f}", gap > DIFFERENT, DIFFERENT)


# -- section 4.3: running statistics -----------------------------------------------------------------------------------


_BATCHES = Measure(name="batch_channels", options={"images": "adv", "count": 2, "layer": RES3, "channels": 20})


@register_study("E/fig6", cells=lambda: [replace(cell(adversarial()), measures=(_BATCHES,))], deviations=DEVIATIONS)
def fig6(values: Values) -> Iterator[Clause]:
    """The batch mean "is almost equivalent" to the running mean, and variances differ more; the largest count.

    Both relative to the running statistics: |var / running var - 1| and |mean - running mean| / running std.
    """
    config = adversarial()
    middle, std = (_channels(values, config, "running", number) for number in ("mean", "std"))
    by_mean, by_variance = 0.0, 0.0
    for one in ("batch 1", "batch 2"):
        means, stds = (_channels(values, config, one, number) for number in ("mean", "std"))
        by_mean = max(by_mean, *(abs(a - b) / s for a, b, s in zip(means, middle, std)))
        by_variance = max(by_variance, *(abs((a / s) ** 2 - 1) for a, s in zip(stds, std)))
    text = f"batch means are within {ALMOST_EQUAL:g} of a deviation of the running ones"
    yield Clause(f"{text}: {by_mean:.0%} off at most", by_mean < ALMOST_EQUAL, ALMOST_EQUAL)
    text = "batch variances are further from the running ones than batch means are"
    yield Clause(f"{text}: {by_variance:.0%} and {by_mean:.0%} off at most", by_variance > by_mean)


def raised_by_running_statistics(values: Values, config: Config, *, significantly: bool) -> Iterator[Clause]:
    """The training is robust, and running statistics raise its robustness."""
    before, after = robust_accuracy(values, config), robust_accuracy(values, running(config))
    yield Clause.robust(f"{name_of(config)} is robust under PGD-2000", before)
    if significantly:
        text = f"{name_of(config)}: running statistics significantly raise robustness"
        yield Clause.significantly_higher(text, after, before)
    else:
        yield Clause.higher(f"{name_of(config)}: running statistics raise robustness", after, before)


@register_study(
    "E/table2",
    locate=locate,
    cells=lambda: [cell(change) for config in consistent_strategies(30) for change in (config, running(config))],
    deviations=DEVIATIONS,
)
def table2(values: Values) -> Iterator[Clause]:
    """Running statistics in the last epochs significantly raise the robustness of all three strategies."""
    return for_each(consistent_strategies(30), partial(raised_by_running_statistics, values, significantly=True))


# -- section 4.4: fine-tuning of norms ---------------------------------------------------------------------------------


_TUNED = {"BNs tuned on clean images": "adv_to_clean", "BNs tuned on adversarial images": "clean_to_adv"}


def _locate44(label: Mapping[str, Any], column: str) -> tuple[str, str] | None:
    """Before its norms are tuned, the clean network is evaluated on clean images only."""
    if "then" in label:
        return _TUNED[label["then"]], f"shared/{column}"
    return None if label["strategy"].startswith("0% adv") and column != "clean" else locate(label, column)


def _section44_cells() -> Iterable[Cell]:
    start = [cell(adversarial()), clean_cell()]
    tuned = {"adv_to_clean": ("standard", "adv/pgd30"), "clean_to_adv": ("classical", "clean")}
    return start + [
        Cell(name=name, config=norms_tuned(objective), measures=accuracies(2000), after=before)
        for name, (objective, before) in tuned.items()
    ]


@register_study("E/sec4.4", locate=_locate44, cells=_section44_cells, deviations=DEVIATIONS)
def section44(values: Values) -> Iterator[Clause]:
    """Tuned norms make adversarial filters significantly better on clean images, and do not make clean filters robust.

    Not robust: PGD-2000 leaves almost nothing, while adversarial training is robust.
    """
    before, after = mean(values, "adv/pgd30", "shared/clean"), mean(values, "adv_to_clean", "shared/clean")
    left = mean(values, "clean_to_adv", "shared/pgd2000")
    text = f"tuned norms make adversarial filters {SIGNIFICANT:g} point or more better on clean images"
    yield Clause(f"{text}: {before:.1f} to {after:.1f}", after >= before + SIGNIFICANT, SIGNIFICANT)
    yield Clause.almost_no_robustness("tuned norms give clean filters almost no robustness under PGD-2000", left)
    yield Clause.robust("adversarial training is robust under PGD-2000", robust_accuracy(values, adversarial()))


# -- section 5: depth --------------------------------------------------------------------------------------------------


def _printed_depths() -> dict[tuple[str, str], float]:
    """Clean accuracies of table 7."""
    numbers = STUDIES.get("E/table7").numbers
    return {(n.cell, n.value): n.printed for n in numbers if n.column == "clean" and n.printed is not None}


# The text names these depths of the curve of clean training. One curve has clean images, the other adversarial ones.
@register_study(
    "E/fig7",
    printed_elsewhere=_printed_depths,
    locate=_locate1,
    cells=lambda: [*deeper_cells(), *(clean_cell(layers) for layers in (152, 200, 338))],
    deviations=DEVIATIONS,
)
def fig7(values: Values) -> Iterator[Clause]:
    """Robustness grows with every depth, and from ResNet-152 to 338 by more than clean accuracy of clean training.

    That gain is significant, in the paper's words too. "We also observe a consistent performance gain on clean image
    accuracy by increasing network depth."
    """
    found = {layers: robust_accuracy(values, depth(running(adversarial()), layers)) for layers in DEPTHS}
    plain = [mean(values, clean_cell(layers).name, "shared/clean") for layers in (152, 338)]
    yield Clause.robust("ResNet-152 is robust", found[152])
    text = ", ".join(f"ResNet-{layers} {accuracy:.1f}" for layers, accuracy in found.items())
    grows = all(found[less] < found[more] for less, more in pairwise(DEPTHS))
    yield Clause(f"robustness grows with every depth: {text}", grows)
    text, gain = "from ResNet-152 to 338 robustness grows", found[338] - found[152]
    yield Clause(f"{text} by {SIGNIFICANT:g} point or more: {gain:+.1f}", gain >= SIGNIFICANT, SIGNIFICANT)
    text = f"{text} by more than clean accuracy of clean training"
    yield Clause.higher(text, gain, plain[1] - plain[0], form="+.1f")
    clean = [mean(values, name_of(depth(running(adversarial()), layers)), "shared/clean") for layers in DEPTHS]
    grows = [before < after for before, after in pairwise(clean)]
    text = "clean accuracy of adversarial training also grows with every depth"
    yield Clause.in_cases(text, grows, ", ".join(f"{accuracy:.1f}" for accuracy in clean))
