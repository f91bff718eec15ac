"""The figures of paper C. All but fig. 5 print no numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from advnorm.papers.c.trainings import (
    FALSE_GAP,
    GAMMAS,
    KL_BETAS,
    LARGE_EPS,
    LAYOUTS,
    METRICS,
    TRADES_BETAS,
    adversarial_cell,
    autoattack_gap,
    cell,
    dbn_kl_cell,
    is_falsely_robust,
    kl_cell,
    mat,
    mat_cell,
    trades_cell,
)
from advnorm.studies.claims import Clause, Values, for_each, mean, means_along_training
from advnorm.studies.registry import register_study
from advnorm.studies.study import Cell, Measure

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


def _check_fig1(values: Values) -> Iterator[Clause]:
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


@register_study("C/fig1", check=_check_fig1)
def fig1() -> Iterable[Cell]:
    # The paper does not name the three layers: here the first, the middle and the last.
    plane = Measure(name="projection", options={"inputs": ["clean", "adv", "autoattack"], "samples": 500})
    return [mat_cell(LARGE_EPS, 0.5, plane), kl_cell(LARGE_EPS, 0.4, plane)]


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


def _check_fig2(values: Values) -> Iterator[Clause]:
    """MAT-Cat-0.5 + KL has a better trade-off than TRADES-Cat and MAT-Cat."""
    ours = [f"{LARGE_EPS}/mat_cat_0.5_kl_{beta:g}" for beta in KL_BETAS]
    others = [*_mat_names(LARGE_EPS), *(f"{LARGE_EPS}/trades_cat_{beta:g}" for beta in TRADES_BETAS)]
    yield from _dominates(values, "MAT-Cat-0.5 + KL", ours, others)


@register_study("C/fig2", check=_check_fig2)
def fig2() -> Iterator[Cell]:
    yield from (kl_cell(LARGE_EPS, beta) for beta in KL_BETAS)
    yield from (trades_cell(LARGE_EPS, beta, "cat") for beta in TRADES_BETAS)
    yield from (mat_cell(LARGE_EPS, gamma) for gamma in GAMMAS)


def _trade_off_cells(setting: str) -> Iterator[Cell]:
    """Points of MAT-Cat + DBN + KL and of the baselines."""
    yield from (dbn_kl_cell(setting, beta) for beta in KL_BETAS)
    yield from (mat_cell(setting, gamma) for gamma in GAMMAS)
    yield from (trades_cell(setting, beta, "seq") for beta in TRADES_BETAS)
    yield adversarial_cell(setting)


def _best_trade_off(values: Values, setting: str) -> Iterator[Clause]:
    """MAT-Cat + DBN + KL has a better trade-off than MAT-Cat and TRADES-Seq."""
    ours = [f"{setting}/mat_cat_0.5_dbn_kl_{beta:g}" for beta in KL_BETAS]
    others = [*_mat_names(setting), *(f"{setting}/trades_seq_{beta:g}" for beta in TRADES_BETAS)]
    yield from _dominates(values, f"MAT-Cat + DBN + KL in {setting}", ours, others)


def _check_fig3(values: Values) -> Iterator[Clause]:
    """MAT-Cat + DBN + KL has the best trade-off; MAT-Cat with small γ can beat Adversarial Training and TRADES-Seq."""
    settings = (LARGE_EPS, "imagenette/eps16")
    for setting in settings:
        yield from _best_trade_off(values, setting)
    held, shown = False, []
    for setting in settings:
        mine = _points(values, (f"{setting}/mat_cat_{gamma:g}" for gamma in GAMMAS if gamma <= 0.25))
        rivals = _points(values, [f"{setting}/adversarial_training", f"{setting}/trades_seq_6"])
        held = all(_is_dominated(rival, mine) for rival in rivals)
        shown.append(f"{_show_points(mine)} beside {_show_points(rivals)} in {setting}")
        if held:  # one setting is enough, even if the other was not measured
            break
    text = "MAT-Cat with γ up to 0.25 can beat Adversarial Training and TRADES-Seq-6, clean/AutoAttack"
    yield Clause(f"{text}: {'; '.join(shown)}", held)


@register_study("C/fig3", check=_check_fig3)
def fig3() -> Iterator[Cell]:
    yield from _trade_off_cells(LARGE_EPS)
    yield from _trade_off_cells("imagenette/eps16")


@register_study("C/fig6", check=lambda values: _best_trade_off(values, "cifar10/eps8"))
def fig6() -> Iterator[Cell]:
    yield from _trade_off_cells("cifar10/eps8")


# -- fig. 4 and 5 ------------------------------------------------------------------------------------------------------


def _check_fig4(values: Values) -> Iterator[Clause]:
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


@register_study("C/fig4", check=_check_fig4)
def fig4() -> Iterable[Cell]:
    shift = Measure(name="statistics_shift", options={"inputs": ["clean", "adv"]}, checkpoint="along")
    sequential = cell(LARGE_EPS, "mat_seq_0.25", mat(LARGE_EPS, 0.25, "sequential"), shift)
    return [sequential, mat_cell(LARGE_EPS, 0.25, shift)]


def _locate_fig5(label: Mapping[str, Any], column: str) -> tuple[str, str]:
    return f"{LARGE_EPS}/mat_cat_{label['gamma']}", f"shared/{column}"


def _check_fig5(values: Values) -> Iterator[Clause]:
    """From γ = 0.3 on robustness is false: PGD-10's and clean accuracy jump up there, and AutoAttack's down."""
    names = dict(zip(GAMMAS, _mat_names(LARGE_EPS)))

    def clauses(gamma: float) -> Iterator[Clause]:
        yield is_falsely_robust(names[gamma], autoattack_gap(values, names[gamma]), expected=gamma >= 0.3)

    yield from for_each(GAMMAS, clauses)
    for text, metric in zip(("clean", "PGD-10's", "AutoAttack's"), METRICS):
        before, after = (mean(values, names[gamma], f"shared/{metric}") for gamma in (0.25, 0.3))
        direction, compare = ("falls", Clause.higher) if metric == "autoattack" else ("rises", Clause.lower)
        yield compare(f"{text} accuracy {direction} from γ = 0.25 to 0.3", before, after)


@register_study("C/fig5", locate=_locate_fig5, check=_check_fig5)
def fig5() -> Iterable[Cell]:
    return [mat_cell(LARGE_EPS, gamma) for gamma in GAMMAS]
