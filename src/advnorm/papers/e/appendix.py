"""The tables of paper E's appendices: ALP's parameters, attack steps, batch sizes, and all results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

from advnorm.config import Config
from advnorm.papers.e.studies import raised_by_running_statistics
from advnorm.papers.e.trainings import (
    DEVIATIONS,
    EVALUATION_STEPS,
    STEPS,
    adversarial,
    alp,
    batch,
    cell,
    consistent_strategies,
    deeper_cells,
    depth,
    exponential,
    hybrid,
    locate,
    name_of,
    rmsprop,
    robust_accuracy,
    running,
    with_uniform_start,
)
from advnorm.studies.claims import (
    COMPARABLE,
    SIGNIFICANT,
    Clause,
    Values,
    are_robust,
    for_each,
    join_numbers,
    mean,
)
from advnorm.studies.registry import STUDIES, register_study
from advnorm.studies.study import Cell

BATCHES = (512, 1024, 2048, 4096, 8192)

# -- appendix A: ALP's parameters --------------------------------------------------------------------------------------


def _table3_configs() -> list[Config]:
    """Each has one more of the paper's own parameters; 32 images on each GPU."""
    own_start = batch(depth(alp(10), 101), 48 * 32)
    own_optimizer = with_uniform_start(own_start)
    own_decay = rmsprop(own_optimizer, rate=0.045)
    small = [exponential(own_decay), own_decay, rmsprop(own_optimizer), own_optimizer, own_start]
    return [*small, depth(alp(10), 101), alp(10), alp(30)]


def _locate3(label: Mapping[str, Any], column: str) -> tuple[str, str]:
    config = batch(depth(alp(label["pgd_n"]), int(label["network"].removeprefix("ResNet-"))), 32 * label["gpus"])
    if "P(clean)" not in label["pgd_init"]:
        config = with_uniform_start(config)
    if label["optimizer"] == "RMSProp":
        config = rmsprop(config, label["initial_lr"])
    if label["lr_decay"] == "exponential":
        config = exponential(config)
    return name_of(config), f"shared/{column}"


@register_study(
    "E/table3",
    locate=_locate3,
    cells=lambda: [cell(config, 10, 2000) for config in _table3_configs()],
    deviations=DEVIATIONS,
)
def table3(values: Values) -> Iterator[Clause]:
    """More steps in training are "the most important factor"; others "do not lead to significant changes"."""
    found = {name_of(config): robust_accuracy(values, config) for config in _table3_configs()}
    *others, (before, after) = pairwise(found)
    yield Clause.robust(f"{after} is robust under PGD-2000", found[after])
    text = f"PGD-30 in training raises robustness by more than {COMPARABLE:g} points"
    shown = f"{found[before]:.1f} to {found[after]:.1f}"
    yield Clause(f"{text}: {shown}", found[after] - found[before] > COMPARABLE, COMPARABLE)
    most, start, end = max((abs(found[end] - found[start]), start, end) for start, end in others)
    text = f"none of {len(others)} other changes is significant, the largest from {start} to {end}"
    yield Clause(f"{text}: {found[start]:.1f} to {found[end]:.1f}", most < SIGNIFICANT, SIGNIFICANT)


# -- appendix B: steps and batch size ----------------------------------------------------------------------------------


def _strategies(steps: int) -> list[Config]:
    """Strategies with lasting robustness, then the others."""
    return [*consistent_strategies(steps), hybrid(steps), alp(steps)]


def _locate4(label: Mapping[str, Any], column: str) -> tuple[str, str]:
    norm = "MBN_adv" if column.startswith("MBN_adv") else ""
    return locate({"pgd_n": label["pgd_n"], "norm": norm, "strategy": column.removeprefix("MBN_adv, ")}, "pgd2000")


@register_study(
    "E/table4",
    locate=_locate4,
    cells=lambda: [cell(config) for steps in STEPS for config in _strategies(steps)],
    deviations=DEVIATIONS,
)
def table4(values: Values) -> Iterator[Clause]:
    """PGD-5 in training costs every strategy robustness, and those that mix clean images into one BN the most."""
    before, after = ([robust_accuracy(values, config) for config in _strategies(steps)] for steps in (30, 5))
    lost = [many - few for many, few in zip(before, after)]
    names = [name_of(config).partition("/")[0] for config in _strategies(30)]
    yield Clause(f"every strategy is robust with PGD-30 in training: {min(before):.1f} at least", are_robust(*before))
    text = ", ".join(f"{name} {points:.1f}" for name, points in zip(names, lost))
    yield Clause(f"PGD-5 in training costs every strategy robustness: {text}", min(lost) > 0)
    least, most = min(lost[3:]), max(lost[:3])
    text = f"{' and '.join(names[3:])} lose more than the others: {least:.1f} at least and {most:.1f} at most"
    yield Clause(text, most < least)


@register_study(
    "E/table5",
    locate=lambda label, column: locate({**label, "pgd_n": int(column.removeprefix("train pgd"))}, "pgd2000"),
    cells=lambda: [
        cell(change) for n in STEPS for config in consistent_strategies(n) for change in (config, running(config))
    ],
    deviations=DEVIATIONS,
)
def table5(values: Values) -> Iterator[Clause]:
    """Running statistics "can boost robustness on all settings"."""
    configs = [config for steps in STEPS for config in consistent_strategies(steps)]
    return for_each(configs, partial(raised_by_running_statistics, values, significantly=False))


def _locate6(label: Mapping[str, Any], column: str) -> tuple[str, str]:
    return locate({**label, "strategy": "100% adv + 0% clean", "running_statistics": True}, column)


@register_study(
    "E/table6",
    locate=_locate6,
    cells=lambda: [cell(batch(running(adversarial()), size)) for size in BATCHES],
    deviations=DEVIATIONS,
)
def table6(values: Values) -> Iterator[Clause]:
    """A batch of 2048 is the best; 512 and 8192 are below 4096, and comparable to the best."""
    found = {size: robust_accuracy(values, batch(running(adversarial()), size)) for size in BATCHES}
    best, least = max(found, key=lambda size: found[size]), min(found.values())
    yield Clause(f"every batch size gives robustness: {least:.1f} at least", are_robust(*found.values()))
    text = ", ".join(f"{size} {accuracy:.1f}" for size, accuracy in found.items())
    yield Clause(f"a batch of 2048 is the best: {text}", best == 2048)
    for size in (512, 8192):
        yield Clause.lower(f"a batch of {size} is below one of 4096", found[size], found[4096])
        yield Clause.comparable(f"a batch of {size} is comparable to one of 2048", found[size], found[2048])


# -- appendix C: all of them -------------------------------------------------------------------------------------------


def _table7_cells() -> Iterable[Cell]:
    names = ("E/fig1", "E/fig3", "E/table4", "E/table5", "E/table6")
    every = [*(one for name in names for one in STUDIES.get(name).cells()), *deeper_cells()]
    return list({one.name: cell(one.config, *EVALUATION_STEPS) for one in every}.values())


@register_study("E/table7", locate=locate, cells=_table7_cells, deviations=DEVIATIONS, compares_print=True)
def table7(values: Values) -> Iterator[Clause]:
    """Every robustness in the table is comparable to ours: it lists numbers for comparison.

    Clean accuracy is left out, because two of its numbers are doubtful (see the notes of the table).
    """
    listed = [number for number in STUDIES.get("E/table7").numbers if number.column != "clean"]
    pairs = [(mean(values, number.cell, number.value), number.printed or 0.0) for number in listed]
    held = [abs(ours - printed) <= COMPARABLE for ours, printed in pairs]
    farthest = max(range(len(pairs)), key=lambda at: abs(pairs[at][0] - pairs[at][1]))
    detail = f"the farthest {listed[farthest].cell}, {listed[farthest].value}: {join_numbers(*pairs[farthest])}"
    text = "our robustness is comparable to the printed one everywhere"
    yield Clause.in_cases(text, held, detail, margin=COMPARABLE)
