"""The tables and figures of paper C. All figures but fig. 5 print no numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from advnorm.papers.c.trainings import LARGE_EPS, SETTINGS, adversarial, cell, dbn, mat, other_norm, trades, with_kl
from advnorm.studies.claims import COMPARABLE, Clause, Values, for_each, mean, means_along_training
from advnorm.studies.registry import register_study
from advnorm.studies.study import Cell, Measure

#: For claims that hold "nearly" always: the share of numbers or cases that must agree.
NEARLY_ALL = 0.75
LAYOUTS = {"seq": "sequential", "cat": "concatenated"}
#: Points of the trade-off curves and of fig. 5, which prints none: those that the text names (γ 0.25, 0.3 and 0.75, β
#: of the KL term from 0.25 to 4, TRADES with 6) and some between.
GAMMAS = (0.1, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75)
KL_BETAS = (0.25, 0.4, 0.5, 1.0, 2.0, 4.0)
TRADES_BETAS = (1.0, 3.0, 6.0, 12.0)
#: Points between PGD-10 and AutoAttack from which robustness is false. Table 2 has 27 to 31 there, elsewhere up to 14.
FALSE_GAP = 20.0
METRICS = ("clean", "pgd10", "autoattack")


def autoattack_gap(values: Values, name: str) -> float:
    """Return the points by which AutoAttack lowers PGD-10's accuracy."""
    return mean(values, name, "shared/pgd10") - mean(values, name, "shared/autoattack")


def is_falsely_robust(name: str, gap: float, *, expected: bool = True) -> Clause:
    """The gap exceeds the threshold of false robustness or, if not ``expected``, stays below it."""
    kind, side = ("falsely", "above") if expected else ("really", "below")
    text = f"{name} is {kind} robust (a gap {side} {FALSE_GAP:g})"
    held = gap > FALSE_GAP if expected else gap < FALSE_GAP
    return Clause(f"{text}: AutoAttack removes {gap:.1f} points of PGD-10's accuracy", held)


def _nearly_always_gains(text: str, gains: Mapping[str, float]) -> Clause:
    """Most of the gains are positive; shows the smallest."""
    least = min(gains, key=lambda case: gains[case])
    held = [gain > 0 for gain in gains.values()]
    return Clause.in_cases(text, held, f"least in {least} ({gains[least]:+.2f})", required=NEARLY_ALL * len(gains))


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


@register_study("C/table1", locate=_locate1, cells=_table1_cells)
def table1(values: Values) -> Iterator[Clause]:
    """Concatenated batches are nearly always better: in three of four numbers, and twice for TRADES at 16/255."""

    def both_layouts(setting: str, name: str, metric: str) -> tuple[float, float]:
        seq, cat = (mean(values, f"{setting}/{name.format(how)}", f"shared/{metric}") for how in LAYOUTS)
        return cat, seq

    for metric in ("clean", "autoattack"):
        text = f"TRADES-Cat beats TRADES-Seq in {LARGE_EPS}, {metric}"
        yield Clause.higher(text, *both_layouts(LARGE_EPS, "trades_{}_6", metric))
    pairs = {
        f"{setting}/{name.format('cat')} {metric}": both_layouts(setting, name, metric)
        for setting in SETTINGS
        for name in ("mat_{}_0.5", "trades_{}_6")
        for metric in METRICS
    }
    gains = {case: cat - seq for case, (cat, seq) in pairs.items()}
    yield _nearly_always_gains("concatenated batches are nearly always better", gains)


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


_FALSE2 = ("mat_cat_0.5", "mat_cat_0.5/in", "mat_cat_0.75/gn", "mat_cat_0.75/none")
_REAL2 = ("adversarial_training", "mat_cat_0.25", "mat_cat_0.5/none", "trades_cat_6", "mat_cat_0.5_kl_0.4")


def _table2_cells() -> Iterable[Cell]:
    # The whole test set; "adv" is the attack of training, PGD-10.
    gaps = Measure(name="domain_gap", options={"inputs": ["adv", "autoattack"], "limit": None})
    norms = [other_norm(gamma, norm) for gamma, norm in ((0.5, "in"), (0.75, "gn"), (0.5, "none"), (0.75, "none"))]
    mixed = [mat(LARGE_EPS, 0.25), mat(LARGE_EPS, 0.5), *norms]
    others = [trades(LARGE_EPS, 6), with_kl(LARGE_EPS, 0.4)]
    return [cell(config, gaps) for config in (adversarial(LARGE_EPS), *mixed, *others)]


@register_study("C/table2", locate=_locate2, cells=_table2_cells)
def table2(values: Values) -> Iterator[Clause]:
    """False robustness also occurs with IN, GN and no norm, and with distances an order of magnitude larger.

    The order of magnitude compares the means of each distance, in logarithms, over the trainings with and without it.
    """

    def clauses(name: str) -> Iterator[Clause]:
        adv, autoattack = (mean(values, f"{LARGE_EPS}/{name}", f"accuracy/{kind}") for kind in ("adv", "autoattack"))
        yield is_falsely_robust(name, 100 * (adv - autoattack), expected=name in _FALSE2)

    def magnitude(names: Sequence[str], distance: str) -> float:
        return fmean(math.log10(max(1e-9, mean(values, f"{LARGE_EPS}/{name}", distance))) for name in names)

    yield from for_each((*_FALSE2, *_REAL2), clauses)
    for name, distance in _DISTANCES.items():
        larger = magnitude(_FALSE2, distance) - magnitude(_REAL2, distance)
        text = f"the distance {name} is an order of magnitude larger with false robustness: {larger:.2f} orders"
        yield Clause(text, larger > 1)


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
)
def table3(values: Values) -> Iterator[Clause]:
    """KL is better than the comparable strategy in three of four numbers, and at β = 4 than Adversarial Training."""
    betas = {"mat_cat_0.5/none": 0.4, "mat_cat_0.25": 0.5, "trades_cat_6": 1, "adversarial_training": 4}

    def with_kl_and_without(other: str, metric: str) -> tuple[float, float]:
        ours = mean(values, f"{LARGE_EPS}/mat_cat_0.5_kl_{betas[other]:g}", f"shared/{metric}")
        return ours, mean(values, f"{LARGE_EPS}/{other}", f"shared/{metric}")

    pairs = {(metric, other): with_kl_and_without(other, metric) for other in betas for metric in METRICS}
    gains = {f"{metric} beside {other}": ours - theirs for (metric, other), (ours, theirs) in pairs.items()}
    yield _nearly_always_gains("KL is nearly always better than the comparable strategy", gains)
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


@register_study("C/table4", locate=_locate4, cells=_table4_cells)
def table4(values: Values) -> Iterator[Clause]:
    """DBN improves clean + AutoAttack accuracy in three of four cases, and no number loses more than comparably.

    "In all cases" is more than the paper prints: 7 of the 9 sums rise, and one number falls by 2.7. KL ends false
    robustness, which occurs at 16/255 on CIFAR-10, and improves the sum on average.
    """

    def gains(pairs: Mapping[str, str]) -> dict[str, list[float]]:
        """The gains in clean and AutoAttack accuracy, in every setting."""
        return {
            f"{setting}/{after}": [
                mean(values, f"{setting}/{after}", value) - mean(values, f"{setting}/{before}", value)
                for value in ("shared/clean", "shared/autoattack")
            ]
            for setting in SETTINGS
            for before, after in pairs.items()
        }

    for suffix, false in {"": True, "_kl_1": False, "_dbn_kl_1": False}.items():
        name = f"{LARGE_EPS}/mat_cat_0.5{suffix}"
        yield is_falsely_robust(name, autoattack_gap(values, name), expected=false)
    by_dbn, by_kl = gains(_WITH_DBN), gains(_WITH_KL)
    sums = {case: sum(both) for case, both in by_dbn.items()}
    yield _nearly_always_gains("DBN nearly always improves the sum of clean and AutoAttack accuracy", sums)
    gain = fmean(sums.values())
    yield Clause(f"DBN improves the sum of clean and AutoAttack accuracy on average: {gain:+.2f}", gain > 0)
    least = min(by_dbn, key=lambda case: min(by_dbn[case]))
    lost = min(by_dbn[least])
    text = f"DBN leaves clean and AutoAttack accuracy comparable or better: {lost:+.2f} at worst, in {least}"
    yield Clause(text, lost >= -COMPARABLE)
    gain = fmean(map(sum, by_kl.values()))
    yield Clause(f"KL improves the sum of clean and AutoAttack accuracy on average: {gain:+.2f}", gain > 0)


#: A distance that is this many times the previous one has "shot up".
SHOT_UP = 2.0
Point = tuple[float, float]


def _centres(values: Values, cell: str) -> dict[str, tuple[dict[str, Point], float]]:
    """Return, for each layer, the mean point of each kind of images and the root mean square distance to it.

    The record's paths are ``layers/<layer>/points/<kind>/<image>/<component>``.
    """
    points: dict[str, dict[str, dict[str, list[float]]]] = {}
    for (owner, path), over_seeds in values.items():
        if owner == cell and path.startswith("layers/") and "/points/" in path:
            layer, _, rest = path.removeprefix("layers/").partition("/points/")
            kind, _, component = rest.split("/")
            points.setdefault(layer, {}).setdefault(kind, {}).setdefault(component, []).append(over_seeds[0])
    if not points:
        raise KeyError(cell)
    found = {}
    for layer, kinds in points.items():
        centres = {kind: (fmean(both["0"]), fmean(both["1"])) for kind, both in kinds.items()}
        spreads = [fmean(math.dist(p, centres[kind]) ** 2 for p in zip(*both.values())) for kind, both in kinds.items()]
        found[layer] = centres, math.sqrt(fmean(spreads))
    return found


def _fig1_cells() -> Iterable[Cell]:
    # The paper does not name the three layers: here the first, the middle and the last.
    plane = Measure(name="projection", options={"inputs": ["clean", "adv", "autoattack"], "samples": 500})
    return [cell(config, plane) for config in (mat(LARGE_EPS, 0.5), with_kl(LARGE_EPS, 0.4))]


@register_study("C/fig1", cells=_fig1_cells)
def fig1(values: Values) -> Iterator[Clause]:
    """Without KL, clean and adversarial images are further apart and AutoAttack's lie between; mean over the layers.

    Only the first seed counts: components of different networks do not share axes.
    """

    def distance_in_spreads(name: str) -> float:
        return fmean(
            math.dist(centres["clean"], centres["adv"]) / spread
            for centres, spread in _centres(values, f"{LARGE_EPS}/{name}").values()
        )

    def lies_between(centres: Mapping[str, Point]) -> bool:
        clean, adv, autoattack = (centres[kind] for kind in ("clean", "adv", "autoattack"))
        return max(math.dist(autoattack, clean), math.dist(autoattack, adv)) < math.dist(clean, adv)

    layers = [lies_between(centres) for centres, _ in _centres(values, f"{LARGE_EPS}/mat_cat_0.5").values()]
    without, with_kl = distance_in_spreads("mat_cat_0.5"), distance_in_spreads("mat_cat_0.5_kl_0.4")
    text = f"{without:.2f} and {with_kl:.2f} times their spread"
    yield Clause(f"clean and adversarial images are further apart without KL: {text}", without > with_kl)
    text = f"without KL AutoAttack's images lie between the two in most layers: {sum(layers)} of {len(layers)}"
    yield Clause(text, sum(layers) > len(layers) / 2)


# -- trade-offs between clean and robust accuracy: fig. 2, 3 and 6 -----------------------------------------------------


def _points(values: Values, names: Iterable[str]) -> list[Point]:
    """Return clean and AutoAttack accuracy of each cell."""
    return [(mean(values, name, "shared/clean"), mean(values, name, "shared/autoattack")) for name in names]


def _show_points(points: Iterable[Point]) -> str:
    """``70.1/24.0, 68.2/25.1``."""
    return ", ".join(f"{clean:.1f}/{robust:.1f}" for clean, robust in points)


def _is_dominated(point: Point, curve: Iterable[Point]) -> bool:
    """Whether a point of the curve has both more clean and more robust accuracy."""
    return any(clean > point[0] and robust > point[1] for clean, robust in curve)


def _mat_names(setting: str) -> list[str]:
    return [f"{setting}/mat_cat_{gamma:g}" for gamma in GAMMAS]


def _dominates(values: Values, method: str, ours: Sequence[str], others: Sequence[str]) -> Iterator[Clause]:
    """A better trade-off: our curve dominates more than half of the others' points, and they dominate none of ours.

    Falsely robust points, dashed in the figures, are left out.
    """
    curve, theirs = (
        _points(values, [name for name in names if autoattack_gap(values, name) < FALSE_GAP])
        for names in (ours, others)
    )
    dominated = sum(_is_dominated(point, curve) for point in theirs)
    kept = sum(not _is_dominated(point, theirs) for point in curve)
    text = f"{method} dominates most of the others' really robust points: {dominated} of {len(theirs)}"
    yield Clause(text, dominated > len(theirs) / 2)
    text = f"{method} has only points that the others do not dominate: {kept} of {len(curve)}"
    yield Clause(text, kept == len(curve))


def _fig2_cells() -> Iterable[Cell]:
    yield from (cell(with_kl(LARGE_EPS, beta)) for beta in KL_BETAS)
    yield from (cell(trades(LARGE_EPS, beta)) for beta in TRADES_BETAS)
    yield from (cell(mat(LARGE_EPS, gamma)) for gamma in GAMMAS)


@register_study("C/fig2", cells=_fig2_cells)
def fig2(values: Values) -> Iterator[Clause]:
    """MAT-Cat-0.5 + KL has a better trade-off than TRADES-Cat and MAT-Cat."""
    ours = [f"{LARGE_EPS}/mat_cat_0.5_kl_{beta:g}" for beta in KL_BETAS]
    others = [*_mat_names(LARGE_EPS), *(f"{LARGE_EPS}/trades_cat_{beta:g}" for beta in TRADES_BETAS)]
    yield from _dominates(values, "MAT-Cat-0.5 + KL", ours, others)


def _trade_off_cells(setting: str) -> Iterator[Cell]:
    """Points of MAT-Cat + DBN + KL and of the baselines."""
    yield from (cell(dbn(with_kl(setting, beta))) for beta in KL_BETAS)
    yield from (cell(mat(setting, gamma)) for gamma in GAMMAS)
    yield from (cell(trades(setting, beta, "sequential")) for beta in TRADES_BETAS)
    yield cell(adversarial(setting))


def _best_trade_off(values: Values, setting: str) -> Iterator[Clause]:
    """MAT-Cat + DBN + KL has a better trade-off than MAT-Cat and TRADES-Seq."""
    ours = [f"{setting}/mat_cat_0.5_dbn_kl_{beta:g}" for beta in KL_BETAS]
    others = [*_mat_names(setting), *(f"{setting}/trades_seq_{beta:g}" for beta in TRADES_BETAS)]
    yield from _dominates(values, f"MAT-Cat + DBN + KL in {setting}", ours, others)


@register_study("C/fig3", cells=lambda: [cell for setting in SETTINGS[1:] for cell in _trade_off_cells(setting)])
def fig3(values: Values) -> Iterator[Clause]:
    """MAT-Cat + DBN + KL has the best trade-off; MAT-Cat with small γ can beat Adversarial Training and TRADES-Seq."""
    for setting in SETTINGS[1:]:
        yield from _best_trade_off(values, setting)
    held, shown = False, []
    for setting in SETTINGS[1:]:
        mine = _points(values, (f"{setting}/mat_cat_{gamma:g}" for gamma in GAMMAS if gamma <= 0.25))
        rivals = _points(values, [f"{setting}/adversarial_training", f"{setting}/trades_seq_6"])
        held = all(_is_dominated(rival, mine) for rival in rivals)
        shown.append(f"{_show_points(mine)} beside {_show_points(rivals)} in {setting}")
        if held:  # one setting is enough, even if the other was not measured
            break
    text = "MAT-Cat with γ up to 0.25 can beat Adversarial Training and TRADES-Seq-6, clean/AutoAttack"
    yield Clause(f"{text}: {'; '.join(shown)}", held)


register_study("C/fig6", cells=lambda: _trade_off_cells("cifar10/eps8"), each=["cifar10/eps8"])(_best_trade_off)


_SHIFT = Measure(name="statistics_shift", options={"inputs": ["clean", "adv"]}, checkpoint="along")


@register_study("C/fig4", cells=lambda: [cell(mat(LARGE_EPS, 0.25, layout), _SHIFT) for layout in LAYOUTS.values()])
def fig4(values: Values) -> Iterator[Clause]:
    """The distances shoot up at least twice in MAT-Seq, and never in MAT-Cat, where they converge to zero.

    To zero: they end at no more than half of their start, because the first moment comes after an eighth of the
    training, and at no more than a tenth of MAT-Seq's highest. They are larger in MAT-Seq overall (sec. 3.1).
    """

    def rises(curve: Sequence[float]) -> int:
        return sum(after >= SHOT_UP * before for before, after in pairwise(curve))

    curves = {
        kind: [means_along_training(values, f"{LARGE_EPS}/mat_{how}_0.25", f"sums/{kind}") for how in LAYOUTS]
        for kind in ("clean", "adv")
    }
    for kind, (seq, cat) in curves.items():
        text = f"{kind} distances are larger in MAT-Seq than in MAT-Cat overall"
        yield Clause.higher(text, fmean(seq), fmean(cat), form=".3g")
        yield Clause(f"{kind} distances shoot up at least twice in MAT-Seq: {rises(seq)} times", rises(seq) >= 2)
        yield Clause(f"{kind} distances are steady in MAT-Cat: they shoot up {rises(cat)} times", rises(cat) == 0)
        text = f"{kind} distances of MAT-Cat end at no more than half of their start: {cat[-1]:.3g} and {cat[0]:.3g}"
        yield Clause(text, cat[-1] <= cat[0] / 2)
        text = f"{kind} distances of MAT-Cat end at no more than a tenth of MAT-Seq's highest"
        yield Clause(f"{text}: {cat[-1]:.3g} and {max(seq):.3g}", cat[-1] <= max(seq) / 10)


@register_study(
    "C/fig5",
    locate=lambda label, column: (f"{LARGE_EPS}/mat_cat_{label['gamma']}", f"shared/{column}"),
    cells=lambda: [cell(mat(LARGE_EPS, gamma)) for gamma in GAMMAS],
)
def fig5(values: Values) -> Iterator[Clause]:
    """From γ = 0.3 on robustness is false: PGD-10's and clean accuracy jump up there, and AutoAttack's down."""
    names = dict(zip(GAMMAS, _mat_names(LARGE_EPS)))

    def clauses(gamma: float) -> Iterator[Clause]:
        yield is_falsely_robust(names[gamma], autoattack_gap(values, names[gamma]), expected=gamma >= 0.3)

    yield from for_each(GAMMAS, clauses)
    for text, metric in zip(("clean", "PGD-10's", "AutoAttack's"), METRICS):
        before, after = (mean(values, names[gamma], f"shared/{metric}") for gamma in (0.25, 0.3))
        direction, compare = ("falls", Clause.higher) if metric == "autoattack" else ("rises", Clause.lower)
        yield compare(f"{text} accuracy {direction} from γ = 0.25 to 0.3", before, after)
