"""The figures of paper A. The paper prints no numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from advnorm.config import Named
from advnorm.papers.a.trainings import (
    ATTACKS,
    BRANCHES,
    DEVIATIONS,
    VERY_LOW,
    accuracies,
    along_training,
    setup,
    standard,
)
from advnorm.studies.claims import Clause, Margin, Values, for_each, join_numbers, mean
from advnorm.studies.registry import register_study
from advnorm.studies.study import Cell, Measure

SIMILAR_GAP = Margin(
    2.0, "no significant difference between two gaps: a factor of up to {}", "our margin: the paper names none"
)
GAP_OF_AP = Margin(
    0.1,
    "a significant gap between two sets of parameters: more than {} of their size",
    "our margin: the paper names none",
)
VERY_CLOSE = Margin(
    0.1,
    "very close, almost zero: at most {} of the large gap beside it",
    "our margin: the paper names none",
)


def _fig2_cells() -> Iterable[Cell]:
    # The figure does not name its eps: here that of table 2. In Cross-AT (fig. 1) clean images contribute their
    # statistics only, and the weights learn from adversarial images: BN_clean is the branch that it trains.
    curve, classical = Measure(name="metrics"), along_training("16/255")
    cross = replace(classical, objective=Named("cross"), norm="cross_bn")
    yield Cell(name="classical/eps16", config=classical, measures=(curve, *accuracies()))
    yield Cell(name="cross_at/eps16", config=cross, measures=(curve, *accuracies("adv")))


@register_study(
    "A/fig2",
    cells=_fig2_cells,
    deviations=(*DEVIATIONS, "The figure names neither eps nor images: here 16/255 and 1,000 held-out images."),
)
def fig2(values: Values) -> Iterator[Clause]:
    """ "Cross-AT achieves comparable performance": clean and PGD-10 accuracy at the end, and both are robust."""

    def at_the_end(cell: str, metric: str) -> float:
        epochs = [int(path.partition("/")[0]) for name, path in values if name == cell and path.endswith(f"/{metric}")]
        return 100 * mean(values, cell, f"{max(epochs, default=0)}/{metric}")

    def comparable(name: str) -> Iterator[Clause]:
        metric = f"held_out/{ATTACKS.get(name, name)}"
        both = at_the_end("cross_at/eps16", metric), at_the_end("classical/eps16", metric)
        if name == "pgd10":
            yield Clause.robust("Cross-AT and classical AT are robust under PGD-10", *both, above=VERY_LOW)
        yield Clause.comparable(f"Cross-AT and classical AT are comparable, {name}", *both)

    yield from for_each(("pgd10", "clean"), comparable)


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


def _dual_bn_with(analysis: str) -> list[Cell]:
    """Figures 4 to 6 do not name their eps. By default 20 channels of the second norm of the first block."""
    return [setup("dual_bn", measures=(Measure(name=analysis),))]


_CHANNELS = (*DEVIATIONS, "The figure does not name its eps: 16/255 here.")


@register_study("A/fig4", cells=lambda: _dual_bn_with("channels"), deviations=_CHANNELS)
def fig4(values: Values) -> Iterator[Clause]:
    """Statistics "with the same APs are very close", whatever the input; between APs "there exists a large gap"."""

    def distance(one: str, other: str) -> float:
        return math.sqrt(_sum_of_squares(values, f"statistics/NS^{one}", f"statistics/NS^{other}"))

    apart = min(distance("adv_adv", "clean_adv"), distance("adv_clean", "clean_clean"))
    for ap in ("adv", "clean"):
        close = distance(f"{ap}_adv", f"{ap}_clean")
        text = f"under AP_{ap} statistics are at most {VERY_CLOSE:g} times as far apart as between the APs"
        yield Clause(f"{text}: {join_numbers(close, apart, form='.3g')}", close <= VERY_CLOSE * apart, VERY_CLOSE)


@register_study("A/fig5", cells=lambda: _dual_bn_with("channels"), deviations=_CHANNELS)
def fig5(values: Values) -> Iterator[Clause]:
    """Figure 5 "shows a significant gap between AP_clean and AP_adv"."""
    gap = _sum_of_squares(values, "affine/AP_clean", "affine/AP_adv")
    sizes = [_sum_of_squares(values, f"affine/AP_{branch}") for branch in BRANCHES]
    share = math.sqrt(gap / (sum(sizes) / 2))
    text = f"AP_clean and AP_adv differ by more than {GAP_OF_AP:g} of their size"
    yield Clause(f"{text}: {share:.2f}", share > GAP_OF_AP, GAP_OF_AP)


def _layer_totals(values: Values, cell: str, first: str, second: str) -> dict[str, tuple[float, float]]:
    """Return two recorded distances of each layer."""
    paths = [path for _, path in values if path.startswith(first) and path.endswith("/total")]
    layers = [path.removeprefix(first).removesuffix("/total") for path in paths]
    if not layers:
        raise KeyError(first)
    return {
        one: (mean(values, cell, f"{first}{one}/total"), mean(values, cell, f"{second}{one}/total")) for one in layers
    }


_DISTANCE = (
    "The paper gives no formula of its Wasserstein distance: here that of Gaussians, channel by channel (paper C's eq. "
    "7). `set_distances` beside it compares the sets of channel values, as the authors' code does.",
)


@register_study("A/fig6", cells=lambda: _dual_bn_with("branch_gap"), deviations=(*_CHANNELS, *_DISTANCE))
def fig6(values: Values) -> Iterator[Clause]:
    """ "In all layers" the gap between both inputs' statistics under AP_adv is "almost zero", that of the APs large.

    The record has squared distances, so the margin is squared. Each is in units of its channel's weight or deviation,
    because the units of AP and NS differ.
    """
    gaps = _layer_totals(values, "dual_bn/eps16", "relative_layers/AP/", "relative_layers/NS under adv/")
    held = [ns <= ap * VERY_CLOSE**2 and ap > 0 for ap, ns in gaps.values()]
    least = max(gaps, key=lambda layer: gaps[layer][1] / gaps[layer][0] if gaps[layer][0] else math.inf)
    detail = f"least in {least} (squared {join_numbers(*reversed(gaps[least]), form='.3g')})"
    text = f"in every layer the gap of NS is at most {VERY_CLOSE:g} of the gap of AP"
    yield Clause.in_cases(text, held, detail, margin=VERY_CLOSE)


_GAPS = Measure(name="domain_gap", options={"inputs": ["adv", "noise"]})


@register_study(
    "A/fig7",
    cells=lambda: [replace(standard("16/255"), measures=(_GAPS,))],
    deviations=(*_DISTANCE, "The paper does not name the noise: uniform noise in the same ball here."),
)
def fig7(values: Values) -> Iterator[Clause]:
    """ "No significant difference" between the adversarial-clean and the noisy-clean gap, without an exception.

    The distance is the square root of the recorded squared one. Layers are not summed.
    """
    gaps = _layer_totals(values, "standard/eps16", "layers/clean-adv/", "layers/clean-noise/")
    ratios = {layer: math.sqrt(adv / noise) for layer, (adv, noise) in gaps.items()}
    factors = {layer: max(ratio, 1 / ratio) for layer, ratio in ratios.items()}
    worst = max(factors, key=lambda layer: factors[layer])
    held = [factor <= SIMILAR_GAP for factor in factors.values()]
    detail = f"the largest {factors[worst]:.1f} in {worst}"
    text = f"in every layer both gaps are within a factor of {SIMILAR_GAP:g}"
    yield Clause.in_cases(text, held, detail, margin=SIMILAR_GAP)
