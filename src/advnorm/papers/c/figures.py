"""The figures of paper C and a claim of its text. All figures but fig. 5 print no numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import fmean

from advnorm.papers.c.false_robustness import (
    FALSE_GAP,
    LAYOUTS,
    METRICS,
    NEARLY_ALL,
    false_or_real,
    is_really_robust,
    robustness,
)
from advnorm.papers.c.trainings import (
    DEVIATIONS,
    LARGE_EPS,
    SETTINGS,
    adversarial,
    cell,
    clean,
    dbn,
    mat,
    trades,
    with_kl,
)
from advnorm.studies.claims import Clause, Margin, Values, for_each, in_parts, mean, means_along_training
from advnorm.studies.registry import register_study
from advnorm.studies.study import Cell, Measure

#: Weights of section 3.2, "β ≤ 0.5".
SMALL_BETAS = (0.25, 0.5)
#: Points of the trade-off curves and of fig. 5, which prints none: those that the text names (γ 0.25, 0.3 and 0.75, β
#: of the KL term from 0.25 to 4, TRADES with 6) and some between.
GAMMAS = (0.1, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75)
KL_BETAS = (0.25, 0.4, 0.5, 1.0, 2.0, 4.0)
TRADES_BETAS = (1.0, 3.0, 6.0, 12.0)
TO_ZERO = Margin(0.1, "converge to zero: end at no more than {} of the highest", "our margin: the paper names none")
SHOT_UP = Margin(2.0, "a distance shoots up: {} times the one before", "our margin: the paper names none")
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


def _dominates(
    values: Values, method: str, ours: Sequence[str], rivals: Mapping[str, Sequence[str]], share: Margin | None = None
) -> Iterator[Clause]:
    """A better trade-off than each rival: our curve dominates all of its points, or a share, and it none of ours.

    Points without real robustness, dashed in the figures, are left out on both sides.
    """

    def real_points(names: Iterable[str]) -> list[Point]:
        return _points(values, [name for name in names if is_really_robust(*robustness(values, name))])

    curve = real_points(ours)
    yield Clause(f"{method} has really robust points: {len(curve)} of {len(ours)}", bool(curve), FALSE_GAP)

    def clauses(rival: str) -> Iterator[Clause]:
        theirs = real_points(rivals[rival])
        dominated = [_is_dominated(point, curve) for point in theirs]
        kept = [not _is_dominated(point, theirs) for point in curve]
        how = "all" if share is None else "nearly all"
        text = f"{method} dominates {how} really robust points of {rival}"
        yield Clause.in_cases(text, dominated, _show_points(theirs) or "none", share=share)
        yield Clause.in_cases(f"{method} has only points that {rival} does not dominate", kept, _show_points(curve))

    yield from for_each(rivals, clauses)


def _fig2_cells() -> Iterable[Cell]:
    yield from (cell(with_kl(LARGE_EPS, beta)) for beta in KL_BETAS)
    yield from (cell(trades(LARGE_EPS, beta)) for beta in TRADES_BETAS)
    yield from (cell(mat(LARGE_EPS, gamma)) for gamma in GAMMAS)


def _trades_names(setting: str, layout: str) -> list[str]:
    return [f"{setting}/trades_{layout}_{beta:g}" for beta in TRADES_BETAS]


_POINTS = (
    *DEVIATIONS,
    "The figure prints neither its points nor their γ and β: those that the text names, and some between.",
)


@register_study("C/fig2", cells=_fig2_cells, deviations=_POINTS)
def fig2(values: Values) -> Iterator[Clause]:
    """MAT-Cat-0.5 + KL is "superior compared to all other methods", higher "in nearly all cases": than each of two."""
    ours = [f"{LARGE_EPS}/mat_cat_0.5_kl_{beta:g}" for beta in KL_BETAS]
    rivals = {"MAT-Cat": _mat_names(LARGE_EPS), "TRADES-Cat": _trades_names(LARGE_EPS, "cat")}
    yield from _dominates(values, "MAT-Cat-0.5 + KL", ours, rivals, NEARLY_ALL)


def _trade_off_cells(setting: str) -> Iterator[Cell]:
    """Points of MAT-Cat + DBN + KL and of the baselines."""
    yield from (cell(dbn(with_kl(setting, beta))) for beta in KL_BETAS)
    yield from (cell(mat(setting, gamma)) for gamma in GAMMAS)
    yield from (cell(trades(setting, beta, "sequential")) for beta in TRADES_BETAS)
    yield cell(adversarial(setting))


def _best_trade_off(values: Values, setting: str) -> Iterator[Clause]:
    """MAT-Cat + DBN + KL is "more optimal than the baselines across the board": than all points of each."""
    ours = [f"{setting}/mat_cat_0.5_dbn_kl_{beta:g}" for beta in KL_BETAS]
    rivals = {"MAT-Cat": _mat_names(setting), "TRADES-Seq": _trades_names(setting, "seq")}
    yield from _dominates(values, f"MAT-Cat + DBN + KL in {setting}", ours, rivals)


@register_study(
    "C/fig3",
    cells=lambda: [cell for setting in SETTINGS[1:] for cell in _trade_off_cells(setting)],
    deviations=_POINTS,
)
def fig3(values: Values) -> Iterator[Clause]:
    """MAT-Cat + DBN + KL has the best trade-off; MAT-Cat with small γ can beat Adversarial Training and TRADES-Seq."""
    yield from for_each(SETTINGS[1:], partial(_best_trade_off, values))
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


register_study("C/fig6", cells=lambda: _trade_off_cells("cifar10/eps8"), each=["cifar10/eps8"], deviations=_POINTS)(
    _best_trade_off
)


#: Clean and adversarial images are measured apart, also where a concatenated batch normalizes them together.
_SHIFT = Measure(name="statistics_shift", options={"inputs": ["clean", "adv"], "moments": "own"}, checkpoint="along")


def _fig4_cells() -> Iterable[Cell]:
    for layout in LAYOUTS.values():
        config = mat(LARGE_EPS, 0.25, layout)
        dense = replace(config, snapshots=tuple(range(2, config.epochs + 1, 2)))
        yield replace(cell(dense, _SHIFT), name=f"{cell(config).name}/along")


@register_study(
    "C/fig4",
    cells=_fig4_cells,
    deviations=(*DEVIATIONS, "The figure is drawn over iterations; here after every second epoch, on test images."),
)
def fig4(values: Values) -> Iterator[Clause]:
    """In MAT-Seq "both distances are unstable and shoot up multiple times"; in MAT-Cat they steadily converge to zero.

    To zero: they end at no more than a tenth of their highest, and of MAT-Seq's. They are larger in MAT-Seq (sec. 3.1).
    """

    def rises(curve: Sequence[float]) -> int:
        return sum(after >= SHOT_UP * before for before, after in pairwise(curve))

    def clauses(kind: str) -> Iterator[Clause]:
        seq, cat = (
            means_along_training(values, f"{LARGE_EPS}/mat_{how}_0.25/along", f"sums/{kind}") for how in LAYOUTS
        )
        text = f"{kind} distances are larger in MAT-Seq than in MAT-Cat overall"
        yield Clause.higher(text, fmean(seq), fmean(cat), form=".3g")
        text = f"{kind} distances shoot up at least twice in MAT-Seq"
        yield Clause(f"{text}: {rises(seq)} times", rises(seq) >= 2, SHOT_UP)
        text = f"{kind} distances are steady in MAT-Cat"
        yield Clause(f"{text}: they shoot up {rises(cat)} times", rises(cat) == 0, SHOT_UP)
        for whose, curve in (("their own", cat), ("MAT-Seq's", seq)):
            text = f"{kind} distances of MAT-Cat end at no more than {TO_ZERO:g} of {whose} highest"
            yield Clause(f"{text}: {cat[-1]:.3g} and {max(curve):.3g}", cat[-1] <= TO_ZERO * max(curve), TO_ZERO)

    yield from for_each(("clean", "adv"), clauses)


@register_study(
    "C/fig5",
    locate=lambda label, column: (f"{LARGE_EPS}/mat_cat_{label['gamma']}", f"shared/{column}"),
    cells=lambda: [cell(mat(LARGE_EPS, gamma)) for gamma in GAMMAS],
    deviations=_POINTS,
)
def fig5(values: Values) -> Iterator[Clause]:
    """MAT-Cat "exhibits the false robustness issue when γ ≥ 0.3" (caption and app. D).

    "With γ increasing, clean accuracy increases and AA decreases"; PGD-10's accuracy rises from γ = 0.25 to 0.3 and
    stays near there until 0.75.
    """
    names = dict(zip(GAMMAS, _mat_names(LARGE_EPS)))

    def clauses(gamma: float) -> Iterator[Clause]:
        yield false_or_real(values, names[gamma], false=gamma >= 0.3)

    def accuracies(metric: str, gammas: Iterable[float]) -> list[float]:
        return [mean(values, names[gamma], f"shared/{metric}") for gamma in gammas]

    def along_gamma(metric: str) -> Iterator[Clause]:
        if metric == "pgd10":
            yield Clause.lower("PGD-10's accuracy rises from γ = 0.25 to 0.3", *accuracies(metric, (0.25, 0.3)))
            flat = accuracies(metric, [gamma for gamma in GAMMAS if gamma >= 0.3])
            text = "PGD-10's accuracy stays near its value at γ = 0.3 until 0.75"
            yield Clause.comparable(text, flat[0], max(flat[1:], key=lambda accuracy: abs(accuracy - flat[0])))
            return
        steps = [*pairwise(accuracies(metric, GAMMAS))]
        held = [after > before if metric == "clean" else after < before for before, after in steps]
        detail = ", ".join(f"{after - before:+.1f}" for before, after in steps)
        how = "clean accuracy increases" if metric == "clean" else "AutoAttack's accuracy decreases"
        yield Clause.in_cases(f"{how} with every larger γ", held, detail)

    return in_parts(for_each(GAMMAS, clauses), for_each(METRICS, along_gamma))


# -- section 3.2 -------------------------------------------------------------------------------------------------------


@register_study(
    "C/sec3.2",
    cells=lambda: [
        *(cell(trades(LARGE_EPS, beta)) for beta in SMALL_BETAS),
        cell(clean(LARGE_EPS)),
    ],
    deviations=DEVIATIONS,
)
def section32(values: Values) -> Iterator[Clause]:
    """TRADES-Cat with β ≤ 0.5 fails under AutoAttack, "still exhibits good robustness" under PGD-10.

    It "achieves very high clean accuracy (similar to that of normal training)".
    """

    def clauses(beta: float) -> Iterator[Clause]:
        name = f"{LARGE_EPS}/trades_cat_{beta:g}"
        yield false_or_real(values, name, false=True)
        both = [mean(values, one, "shared/clean") for one in (name, f"{LARGE_EPS}/normal")]
        yield Clause.comparable(f"{name} is as accurate on clean images as normal training", *both)

    yield from for_each(SMALL_BETAS, clauses)
