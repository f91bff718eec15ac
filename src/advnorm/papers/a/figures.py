"""The figures of paper A, which print no numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from advnorm.papers.a.trainings import ATTACKS, BRANCHES, accuracies, along_training, cross_at, dual, standard
from advnorm.studies.claims import Clause, Values, join_numbers, mean
from advnorm.studies.registry import register_study
from advnorm.studies.study import Cell, Measure

#: The largest factor between two domain gaps without a "significant difference"; the paper names none.
SIMILAR_GAP = 2.0


def _check_fig2(values: Values) -> Iterator[Clause]:
    """Cross-AT ends robust under PGD-10, comparably to classical AT."""

    def at_the_end(cell: str) -> float:
        metric = f"held_out/{ATTACKS['pgd10']}"
        epochs = [int(path.partition("/")[0]) for name, path in values if name == cell and path.endswith(f"/{metric}")]
        return 100 * mean(values, cell, f"{max(epochs, default=0)}/{metric}")

    both = at_the_end("cross_at/eps16"), at_the_end("classical/eps16")
    yield Clause.robust("Cross-AT and classical AT are robust under PGD-10", *both)
    yield Clause.comparable("they are comparable", *both)


@register_study("A/fig2", check=_check_fig2)
def fig2() -> Iterable[Cell]:
    # The figure does not name its eps: here that of table 2. BN_clean of Cross-AT is the branch that it trains.
    curve = Measure(name="metrics")
    return [
        Cell(name="classical/eps16", config=along_training("16/255"), measures=(curve, *accuracies())),
        Cell(name="cross_at/eps16", config=cross_at("16/255"), measures=(curve, *accuracies("adv"))),
    ]


def _sum_of_squares(values: Values, one: str, other: str | None = None) -> float:
    """``Σ (a - b)²`` over the drawn channels of two series, or ``Σ a²`` of one, averaged over seeds."""
    cell = "dual_bn/eps16"
    paths = [path for name, path in values if name == cell and path.startswith(f"{one}/")]
    seeds = len(values[cell, paths[0]])  # IndexError if the analysis was not run
    total = 0.0
    for path in paths:
        others = [0.0] * seeds if other is None else values[cell, path.replace(one, other, 1)]
        total += sum((a - b) ** 2 for a, b in zip(values[cell, path], others))
    return total / seeds


def _check_fig4(values: Values) -> Iterator[Clause]:
    """Statistics under the same AP are closer to each other, whatever the input, than under different APs."""

    def distance(one: str, other: str) -> float:
        return _sum_of_squares(values, f"statistics/NS^{one}", f"statistics/NS^{other}")

    same_ap = max(distance("adv_adv", "adv_clean"), distance("clean_adv", "clean_clean"))
    same_input = min(distance("adv_adv", "clean_adv"), distance("adv_clean", "clean_clean"))
    text = f"{same_ap:.3g} at most, {same_input:.3g} at least"
    yield Clause(f"squared distances under one AP are smaller than between two: {text}", same_ap < same_input)


def _check_fig5(values: Values) -> Iterator[Clause]:
    """AP_clean and AP_adv differ by more than a tenth of their size."""
    gap = _sum_of_squares(values, "affine/AP_clean", "affine/AP_adv")
    sizes = [_sum_of_squares(values, f"affine/AP_{branch}") for branch in BRANCHES]
    share = math.sqrt(gap / (sum(sizes) / 2))
    yield Clause(f"AP_clean and AP_adv differ by more than a tenth of their size: {share:.0%}", share > 0.1)


@register_study("A/fig5", check=_check_fig5)
@register_study("A/fig4", check=_check_fig4)
def fig4() -> Iterable[Cell]:
    # By default 20 channels of the second norm of the first block. The figures do not name their eps.
    return [replace(dual("16/255"), measures=(Measure(name="channels"),))]


def _layer_totals(values: Values, cell: str, first: str, second: str) -> dict[str, tuple[float, float]]:
    """Return two recorded distances of each layer."""
    paths = [path for _, path in values if path.startswith(first) and path.endswith("/total")]
    if not paths:
        raise KeyError(first)
    names = [path.removeprefix(first) for path in paths]
    return {
        name.removesuffix("/total"): (mean(values, cell, first + name), mean(values, cell, second + name))
        for name in names
    }


def _check_fig6(values: Values) -> Iterator[Clause]:
    """In every layer the gap between both inputs' statistics under AP_adv is almost zero.

    That is a tenth of the gap between the APs. The record has squared distances, so the threshold is a hundredth. Each
    is in units of its channel's weight or deviation, because the units of AP and NS differ.
    """
    gaps = _layer_totals(values, "dual_bn/eps16", "relative_layers/AP/", "relative_layers/NS under adv/")
    held = [ns <= ap / 100 and ap > 0 for ap, ns in gaps.values()]
    least = max(gaps, key=lambda layer: gaps[layer][1] / gaps[layer][0] if gaps[layer][0] else math.inf)
    detail = f"least in {least} (squared {join_numbers(*reversed(gaps[least]), form='.3g')})"
    yield Clause.in_cases("in every layer the gap of NS is at most a tenth of the gap of AP", held, detail)


@register_study("A/fig6", check=_check_fig6)
def fig6() -> Iterable[Cell]:
    return [replace(dual("16/255"), measures=(Measure(name="branch_gap"),))]  # the figure does not name its eps


def _check_fig7(values: Values) -> Iterator[Clause]:
    """In every layer the adversarial-clean gap is within a factor of 2 of the noisy-clean gap.

    The paper measures "the Wasserstein distance of NS" "in different layers" (sec. 5.1 and 5.2) without a formula. Here
    it is the square root of the recorded squared distance (paper C's eq. 7). Layers are not summed, as paper C does.
    The paper states "no significant difference" without an exception, so every layer must hold.
    """
    gaps = _layer_totals(values, "standard/eps16", "layers/clean-adv/", "layers/clean-noise/")
    ratios = {layer: math.sqrt(adv / noise) for layer, (adv, noise) in gaps.items()}
    factors = {layer: max(ratio, 1 / ratio) for layer, ratio in ratios.items()}
    worst = max(factors, key=lambda layer: factors[layer])
    held = [factor <= SIMILAR_GAP for factor in factors.values()]
    detail = f"the largest {factors[worst]:.1f} in {worst}"
    yield Clause.in_cases(f"in every layer both gaps are within a factor of {SIMILAR_GAP:g}", held, detail)


@register_study("A/fig7", check=_check_fig7)
def fig7() -> Iterable[Cell]:
    gaps = Measure(name="domain_gap", options={"inputs": ["adv", "noise"]})
    return [replace(standard("16/255"), measures=(gaps,))]
