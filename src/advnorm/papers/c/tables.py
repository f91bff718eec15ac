"""The tables of paper C."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from advnorm.papers.c.false_robustness import (
    LAYOUTS,
    METRICS,
    NEARLY_ALL,
    false_or_real,
    has_real_robustness,
    improves_in_cases,
    is_falsely_robust,
)
from advnorm.papers.c.trainings import (
    DEVIATIONS,
    LARGE_EPS,
    SETTINGS,
    adversarial,
    cell,
    dbn,
    mat,
    other_norm,
    trades,
    with_kl,
)
from advnorm.studies.claims import Clause, Values, for_each, in_parts, mean
from advnorm.studies.registry import STUDIES, register_study
from advnorm.studies.study import Cell, Measure, printed_entry


def _locate_column(column: str) -> tuple[str, str]:
    """``cifar10 16/255 pgd10`` is ``shared/pgd10`` in the setting ``cifar10/eps16``."""
    data, eps, metric = column.split(" ")
    return f"{data}/eps{eps.split('/')[0]}", f"shared/{metric}"


def _locate1(label: Mapping[str, Any], column: str) -> tuple[str, str]:
    setting, value = _locate_column(column)
    method = label["method"].lower().replace("-", "_")
    return f"{setting}/{method}_{label.get('gamma', label.get('beta'))}", value


def _table1_cells() -> Iterable[Cell]:
    for setting in SETTINGS:
        yield from (cell(mat(setting, 0.5, layout)) for layout in LAYOUTS.values())
        yield from (cell(trades(setting, 6, layout)) for layout in LAYOUTS.values())


@register_study("C/table1", locate=_locate1, cells=_table1_cells, deviations=DEVIATIONS)
def table1(values: Values) -> Iterator[Clause]:
    """ "Concatenated batching achieves nearly universal improvement over sequential", in all numbers together.

    It "significantly boosts" (sec. 3.1) clean and robust accuracy of TRADES on CIFAR-10 at 16/255 and of MAT on
    Imagenette.
    """

    def both_layouts(setting: str, name: str, metric: str) -> tuple[float, float]:
        seq, cat = (mean(values, f"{setting}/{name.format(how)}", f"shared/{metric}") for how in LAYOUTS)
        return cat, seq

    def boosts(case: tuple[str, str, str]) -> Iterator[Clause]:
        setting, name, metric = case
        text = f"{setting}: {name.format('cat')} is significantly above {name.format('seq')}, {metric}"
        yield Clause.significantly_higher(text, *both_layouts(*case))

    named = ((LARGE_EPS, "trades_{}_6"), ("imagenette/eps16", "mat_{}_0.5"))

    def nearly_universal() -> Iterator[Clause]:
        pairs = {
            f"{setting}/{name.format('cat')} {metric}": both_layouts(setting, name, metric)
            for setting in SETTINGS
            for name in ("mat_{}_0.5", "trades_{}_6")
            for metric in METRICS
        }
        gains = {case: cat - seq for case, (cat, seq) in pairs.items()}
        yield improves_in_cases("concatenated batches are nearly always better", gains, NEARLY_ALL)

    cases = [(*where, metric) for where in named for metric in ("clean", "autoattack")]
    return in_parts(for_each(cases, boosts), nearly_universal())


# -- tables 2 and 3: CIFAR-10 at 16/255 --------------------------------------------------------------------------------


def _cell_name(label: Mapping[str, Any]) -> str:
    """``MAT-Cat-0.5 + KL-0.4`` is ``mat_cat_0.5_kl_0.4``; a norm other than BN follows."""
    name = label["method"].lower().replace(" + ", "_").replace("-", "_").replace(" ", "_")
    norm = "" if label["norm"] == "BN" else f"/{label['norm'].lower()}"
    return f"{LARGE_EPS}/{name}{norm}"


_DISTANCES = {"clean_pgd": "sums/clean-adv", "clean_aa": "sums/clean-autoattack", "pgd_aa": "sums/adv-autoattack"}


def _locate2(label: Mapping[str, Any], column: str) -> tuple[str, str] | None:
    # acc_diff is a difference of two measured values, accuracy/adv and accuracy/autoattack. The check computes it, and
    # the page lists the paper's.
    return (_cell_name(label), _DISTANCES[column]) if column in _DISTANCES else None


UNCLIPPED = (*DEVIATIONS, "Under `fast` the gradients of networks without a norm are clipped, and no others.")
_FALSE2 = ("mat_cat_0.5", "mat_cat_0.5/in", "mat_cat_0.75/gn", "mat_cat_0.75/none")
_REAL2 = ("adversarial_training", "mat_cat_0.25", "mat_cat_0.5/none", "trades_cat_6", "mat_cat_0.5_kl_0.4")
#: The name of a printed number that is measured as two.
_GAP = "acc_diff"


def _printed_gaps() -> dict[tuple[str, str], float]:
    """The printed difference of each training, and the AutoAttack accuracy that table 3 prints for it."""
    rows = printed_entry("C/table2")["rows"]
    found = {(_cell_name(row["label"]), _GAP): row["values"][0] for row in rows}
    others = {number.cell: number for number in STUDIES.get("C/table3").numbers if number.value == "shared/autoattack"}
    robust = {(cell, "accuracy/autoattack"): (others[cell].printed or 0) / 100 for cell, _ in found if cell in others}
    return found | robust


def _table2_cells() -> Iterable[Cell]:
    # The whole test set; "adv" is the attack of training, PGD-10.
    gaps = Measure(name="domain_gap", options={"inputs": ["adv", "autoattack"], "limit": None})
    norms = [other_norm(gamma, norm) for gamma, norm in ((0.5, "in"), (0.75, "gn"), (0.5, "none"), (0.75, "none"))]
    mixed = [mat(LARGE_EPS, 0.25), mat(LARGE_EPS, 0.5), *norms]
    others = [trades(LARGE_EPS, 6), with_kl(LARGE_EPS, 0.4)]
    return [cell(config, gaps) for config in (adversarial(LARGE_EPS), *mixed, *others)]


@register_study("C/table2", locate=_locate2, cells=_table2_cells, deviations=UNCLIPPED, printed_elsewhere=_printed_gaps)
def table2(values: Values) -> Iterator[Clause]:
    """False robustness also happens with IN, GN and no norm. "All these cases" share larger distances.

    "About an order of magnitude" compares the means of each distance, in logarithms, over the trainings with and
    without it; every falsely robust training has larger distances than every other.
    """

    def gap(cell: str) -> float:
        if (cell, _GAP) in values:  # the paper prints the difference only
            return mean(values, cell, _GAP)
        return 100 * (mean(values, cell, "accuracy/adv") - mean(values, cell, "accuracy/autoattack"))

    def clauses(name: str) -> Iterator[Clause]:
        cell = f"{LARGE_EPS}/{name}"
        if name in _FALSE2:
            yield is_falsely_robust(name, gap(cell))
        else:
            yield has_real_robustness(name, gap(cell), 100 * mean(values, cell, "accuracy/autoattack"))

    def magnitudes(names: Sequence[str], distance: str) -> list[float]:
        return [math.log10(max(1e-9, mean(values, f"{LARGE_EPS}/{name}", distance))) for name in names]

    def distances(name: str) -> Iterator[Clause]:
        false, real = (magnitudes(names, _DISTANCES[name]) for names in (_FALSE2, _REAL2))
        larger = fmean(false) - fmean(real)
        text = f"the distance {name} is an order of magnitude larger with false robustness: {larger:.2f} orders"
        yield Clause(text, larger > 1)
        text = f"the distance {name} is larger in every falsely robust training than in every other"
        yield Clause(f"{text}: {min(false) - max(real):+.2f} orders at least", min(false) > max(real))

    return in_parts(for_each((*_FALSE2, *_REAL2), clauses), for_each(_DISTANCES, distances))


@register_study(
    "C/table3",
    locate=lambda label, column: (_cell_name(label), f"shared/{column}"),
    cells=lambda: [
        cell(other_norm(0.5, "none")),
        cell(with_kl(LARGE_EPS, 0.4)),
        cell(mat(LARGE_EPS, 0.25)),
        cell(with_kl(LARGE_EPS, 0.5)),
        cell(trades(LARGE_EPS, 6)),
        cell(with_kl(LARGE_EPS, 1)),
        cell(adversarial(LARGE_EPS)),
        cell(with_kl(LARGE_EPS, 4)),
    ],
    deviations=UNCLIPPED,
)
def table3(values: Values) -> Iterator[Clause]:
    """KL outperforms the comparable strategy "in nearly all cases", and at β = 4 also Adversarial Training."""
    betas = {"mat_cat_0.5/none": 0.4, "mat_cat_0.25": 0.5, "trades_cat_6": 1, "adversarial_training": 4}

    def with_kl_and_without(other: str, metric: str) -> tuple[float, float]:
        ours = mean(values, f"{LARGE_EPS}/mat_cat_0.5_kl_{betas[other]:g}", f"shared/{metric}")
        return ours, mean(values, f"{LARGE_EPS}/{other}", f"shared/{metric}")

    pairs = {(metric, other): with_kl_and_without(other, metric) for other in betas for metric in METRICS}
    gains = {f"{metric} beside {other}": ours - theirs for (metric, other), (ours, theirs) in pairs.items()}
    yield improves_in_cases("KL is nearly always better than the comparable strategy", gains, NEARLY_ALL)
    for metric in ("clean", "autoattack"):
        text = f"KL with β = 4 beats Adversarial Training, {metric}"
        yield Clause.higher(text, *pairs[metric, "adversarial_training"])


_NAMES4 = {"TRADES-Cat": "trades_cat_6", "MAT-Cat": "mat_cat_0.5", "DBN": "dbn", "KL": "kl_1"}
_WITH_DBN = {
    "trades_cat_6": "trades_cat_6_dbn",
    "mat_cat_0.5": "mat_cat_0.5_dbn",
    "mat_cat_0.5_kl_1": "mat_cat_0.5_dbn_kl_1",
}
_WITH_KL = {"mat_cat_0.5": "mat_cat_0.5_kl_1", "mat_cat_0.5_dbn": "mat_cat_0.5_dbn_kl_1"}


def _locate4(label: Mapping[str, Any], column: str) -> tuple[str, str]:
    setting, value = _locate_column(column)
    return f"{setting}/{'_'.join(_NAMES4[part] for part in label['method'].split(' + '))}", value


def _table4_cells() -> Iterable[Cell]:
    for setting in SETTINGS:
        for config in (trades(setting, 6), mat(setting, 0.5), with_kl(setting, 1)):
            yield cell(config)
            yield cell(dbn(config))


@register_study("C/table4", locate=_locate4, cells=_table4_cells, deviations=DEVIATIONS)
def table4(values: Values) -> Iterator[Clause]:
    """ "DBN improves the accuracy slightly in all cases", that is, in every number.

    KL "eliminates the false robustness problem", which DBN alone does not (app. F.1), and "slightly improves the
    trade-off": on average the sum of clean and AutoAttack accuracy, because the paper defines no trade-off.
    """

    def gains(pairs: Mapping[str, str], metrics: Sequence[str]) -> dict[str, float]:
        return {
            f"{setting}/{after} {metric}": mean(values, f"{setting}/{after}", f"shared/{metric}")
            - mean(values, f"{setting}/{before}", f"shared/{metric}")
            for setting in SETTINGS
            for before, after in pairs.items()
            for metric in metrics
        }

    def ends_false_robustness(case: tuple[str, bool]) -> Iterator[Clause]:
        suffix, false = case
        yield false_or_real(values, f"{LARGE_EPS}/mat_cat_0.5{suffix}", false=false)

    def better_with_dbn() -> Iterator[Clause]:
        yield improves_in_cases("DBN improves the accuracy in all cases", gains(_WITH_DBN, METRICS))

    def better_trade_off() -> Iterator[Clause]:
        gain = 2 * fmean(gains(_WITH_KL, ("clean", "autoattack")).values())
        yield Clause(f"KL improves the sum of clean and AutoAttack accuracy on average: {gain:+.2f}", gain > 0)

    cases = (("", True), ("_dbn", True), ("_kl_1", False), ("_dbn_kl_1", False))
    return in_parts(for_each(cases, ends_false_robustness), better_with_dbn(), better_trade_off())
