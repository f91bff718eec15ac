"""A: Towards Understanding Dual BN in Hybrid Adversarial Training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from advnorm.config import AttackConfig, Config, Named
from advnorm.papers.recipe import sgd
from advnorm.studies.claims import COMPARABLE, Clause, Values, are_robust, for_each, join_numbers, mean
from advnorm.studies.registry import register_study
from advnorm.studies.study import Cell, Measure

EPSILONS = ("8/255", "16/255")
#: PGD-10 with steps of 2/255 (sec. 2), and AutoAttack.
ATTACKS = {"pgd10": "pgd10-step2", "autoattack": "autoattack"}
BRANCHES = ("clean", "adv")
PER_SAMPLE_NORMS = ("ln", "gn", "in")


def hybrid(eps: str) -> Config:
    """Hybrid-AT with a single BN (eq. 2, sec. 2): 110 epochs, lr 0.1 decayed at 100 and 105."""
    return sgd(
        Named("resnet18"),
        Named("cifar10"),
        objective=Named("hybrid", clean_weight=0.5),
        eps=eps,
        attack=AttackConfig(steps=10, step_size="2/255"),
        epochs=110,
        milestones=(100.0, 105.0),
    )


def accuracies(*routes: str) -> tuple[Measure, ...]:
    """Measure clean, PGD-10 and AutoAttack accuracy of the last checkpoint, through each of several branches."""
    return (Measure(options={"attacks": ATTACKS, "route": list(routes)}),)


def eps_name(eps: str) -> str:
    return f"eps{eps.split('/')[0]}"


#: What each setup changes in Hybrid-AT with a single BN.
SETUPS: dict[str, dict[str, Any]] = {
    "single": {},
    "dual_bn": {"norm": "dual_bn"},
    "setup1": {"norm": "dual_affine_bn"},
    "setup2": {"norm": "dual_stats_bn"},
    "cross_bn": {"norm": "cross_bn"},
    "single_kl": {"objective": Named("kl", clean_weight=0.5, kl_weight=1.0)},
    "dual_linear": {"dual_head": True},
    **{name: {"norm": name} for norm in PER_SAMPLE_NORMS for name in (norm, f"dual_affine_{norm}")},
}


def setup(name: str, eps: str = "16/255", measures: tuple[Measure, ...] = ()) -> Cell:
    """A setup at an eps, by default with all accuracies; both branches of a norm or head with two are evaluated."""
    config = replace(hybrid(eps), **SETUPS[name])
    routes = BRANCHES if config.norm not in ("bn", *PER_SAMPLE_NORMS) or config.dual_head else ()
    return Cell(name=f"{name}/{eps_name(eps)}", config=config, measures=measures or accuracies(*routes))


def standard(eps: str) -> Cell:
    """Training on clean images only (sec. 5.2), evaluated at ``eps``; one run serves every eps.

    The paper names neither the noise nor the attack: here uniform noise in the same ball, and PGD-10 as everywhere.
    """
    config = replace(hybrid("16/255"), objective=Named("standard"))
    options: dict[str, Any] = {"attacks": {"noise": "noise-uniform", "pgd10": ATTACKS["pgd10"]}}
    if eps != config.eps:
        options["eps"] = eps
    return Cell(name=f"standard/{eps_name(eps)}", config=config, measures=(Measure(options=options),))


def along_training(eps: str) -> Config:
    """Classical AT (eq. 1), evaluated after every epoch. The paper does not name the images: here held-out ones."""
    validation = {"held_out": 1000, "validate_every": 1, "validation_attack": ATTACKS["pgd10"]}
    return replace(hybrid(eps), objective=Named("classical"), **validation)


#: Points that noise may cost where the paper says "a small margin": it prints up to 7.4 (table 6).
SMALL_MARGIN = 10.0

_SETUP_CELLS = {
    "Single BN": "single",
    "Dual BN": "dual_bn",
    "Setup1": "setup1",
    "Setup2": "setup2",
    "Dual Linear": "dual_linear",
    "Single BN (with KL loss)": "single_kl",
}


def _locate(label: Mapping[str, Any], column: str) -> tuple[str, str]:
    """``8/255 pgd10`` of Setup1's AP_adv is ``adv/pgd10`` of the cell ``setup1/eps8``."""
    eps, _, metric = column.rpartition(" ")
    eps = eps or label.get("eps", "16/255")
    branch = str(label.get("branch", "")).rpartition("_")[2]
    return f"{_SETUP_CELLS[label['setup']]}/{eps_name(eps)}", f"{branch or 'shared'}/{metric}"


def _clean_and_robust_branch(values: Values, cell: str) -> Iterator[Clause]:
    """The trend of Dual BN: an accurate clean branch with almost no robustness, and a robust adversarial branch."""
    clean, adv = (mean(values, cell, f"{branch}/clean") for branch in BRANCHES)
    yield Clause.higher(f"{cell}: the clean branch is more accurate than the adversarial one", clean, adv)
    robust = mean(values, cell, "adv/autoattack")
    yield Clause.robust(f"{cell}: the adversarial branch is robust under AutoAttack", robust)
    left = [mean(values, cell, f"clean/{attack}") for attack in ATTACKS]
    yield Clause.almost_no_robustness(f"{cell}: the clean branch has almost no robustness", *left)


@register_study("A/table1", locate=_locate, cells=lambda: [setup("dual_bn", eps) for eps in EPSILONS], each=(8, 16))
def table1(values: Values, eps: int) -> Iterator[Clause]:
    """BN_clean is more accurate with almost no robustness under either attack; BN_adv is robust."""
    return _clean_and_robust_branch(values, f"dual_bn/eps{eps}")


def _locate2(label: Mapping[str, Any], column: str) -> tuple[str, str]:
    if label["method"] == "Cross-Hybrid-AT":  # its adversarial branch trains BN_clean
        return "cross_bn/eps16", f"adv/{column}"
    return ("single/eps16", f"shared/{column}") if label["test"] == "Single BN" else ("dual_bn/eps16", f"adv/{column}")


@register_study("A/table2", locate=_locate2, cells=lambda: map(setup, ("dual_bn", "cross_bn", "single")))
def table2(values: Values) -> Iterator[Clause]:
    """Cross-Hybrid-AT is comparable to Hybrid-AT with Dual BN in all three numbers, and both are robust.

    A single BN has almost no robustness under AutoAttack.
    """
    metrics = ("clean", *ATTACKS)
    cross, dual = (
        [mean(values, f"{name}/eps16", f"adv/{metric}") for metric in metrics] for name in ("cross_bn", "dual_bn")
    )
    for metric, one, other in zip(metrics, cross, dual):
        yield Clause.comparable(f"Cross-Hybrid-AT is comparable to Dual BN, {metric}", one, other)
    yield Clause(f"both are robust under AutoAttack: {join_numbers(cross[-1], dual[-1])}", are_robust(*cross, *dual))
    alone = mean(values, "single/eps16", "shared/autoattack")
    yield Clause.almost_no_robustness("a single BN has almost no robustness under AutoAttack", alone)


@register_study(
    "A/table3",
    locate=_locate,
    cells=lambda: [setup(name, eps) for name in ("single", "dual_bn", "setup1", "setup2") for eps in EPSILONS],
)
def table3(values: Values) -> Iterator[Clause]:
    """Two sets of affine parameters suffice: Setup1 is comparable to Dual BN and far above a single BN (AutoAttack).

    Two sets of statistics (Setup2) reach a share of the gain of Dual BN over a single BN at 8/255, and a smaller share
    at 16/255. Shares are evaluated only if that gain is more than a comparable amount.
    """

    def accuracy(setup: str, eps: int) -> float:
        return mean(values, f"{setup}/eps{eps}", "shared/autoattack" if setup == "single" else "adv/autoattack")

    def share_of_gain(setup: str, eps: int) -> float:
        alone = accuracy("single", eps)
        return (accuracy(setup, eps) - alone) / (accuracy("dual_bn", eps) - alone)

    def has_gain(eps: int) -> bool:
        return accuracy("dual_bn", eps) > accuracy("single", eps) + COMPARABLE

    def clauses(eps: int) -> Iterator[Clause]:
        one, dual, alone = (accuracy(setup, eps) for setup in ("setup1", "dual_bn", "single"))
        yield Clause.comparable(f"Setup1 is comparable to Dual BN at {eps}/255", one, dual)
        yield Clause.far_higher(f"Setup1 is far above a single BN at {eps}/255", one, alone)
        yield Clause.far_higher(f"Dual BN is far above a single BN at {eps}/255", dual, alone)
        if eps == 16 and has_gain(eps):
            text = f"at {eps}/255 Setup2 reaches a smaller share of Dual BN's gain than Setup1"
            yield Clause.lower(text, share_of_gain("setup2", eps), share_of_gain("setup1", eps), form=".0%")

    yield from for_each((16, 8), clauses)
    if has_gain(16) and has_gain(8):
        small, large = share_of_gain("setup2", 8), share_of_gain("setup2", 16)
        text = f"Setup2 reaches a larger share at 8/255 than at 16/255: {join_numbers(small, large, form='.0%')}"
        yield Clause(text, small > max(0.0, large))


def _locate4(label: Mapping[str, Any], column: str) -> tuple[str, str]:
    norm = label["norm"].lower()
    if label["setup"] == "Single AP":
        return f"{norm}/eps16", f"shared/{column}"
    return f"dual_affine_{norm}/eps16", f"{label['branch'].rpartition('_')[2]}/{column}"


@register_study(
    "A/table4",
    locate=_locate4,
    cells=lambda: [setup(name) for norm in PER_SAMPLE_NORMS for name in (norm, f"dual_affine_{norm}")],
    each=PER_SAMPLE_NORMS,
)
def table4(values: Values, norm: str) -> Iterator[Clause]:
    """Two sets of affine parameters have the same effect in layer, group and instance norm as in BN.

    The clean branch has almost no robustness. The other is robust, far more than with a single set. Similarity of LN
    and BN is not required: the paper prints 16.9 % beside 23.4 % under AutoAttack.
    """
    two = f"dual_affine_{norm}/eps16"
    yield from _clean_and_robust_branch(values, two)
    one = mean(values, f"{norm}/eps16", "shared/autoattack")
    yield Clause.far_higher(f"{two} is far above {norm}", mean(values, two, "adv/autoattack"), one)


#: The rows of the analysis ``swap_table``.
_SWAPS = [(setup, ap) for setup in ("Default", "Swap", "Re-calibration") for ap in ("AP_adv", "AP_clean")]


def _locate5(label: Mapping[str, Any], column: str) -> tuple[str, str]:
    eps, _, attack = column.rpartition(" ")
    row = _SWAPS.index((label["setup"], label["ap"]))
    return f"dual_bn/{eps_name(eps)}", f"rows/{row}/{ATTACKS[attack]}"


#: All test images, as in the paper. They also re-calibrate: the paper does not say which images do.
_SWAP = Measure(name="swap_table", options={"attacks": list(ATTACKS.values()), "limit": None}, scale=100)


@register_study(
    "A/table5",
    locate=_locate5,
    cells=lambda: [setup("dual_bn", eps, (_SWAP,)) for eps in EPSILONS],
    each=[*product(("dual_bn/eps8", "dual_bn/eps16"), ATTACKS.values())],
)
def table5(values: Values, case: tuple[str, str]) -> Iterator[Clause]:
    """The affine parameters cause the gap, not the statistics.

    With AP_adv the network is robust, comparably with default and re-calibrated statistics. With AP_clean it has almost
    no robustness with either.
    """

    def both_statistics(ap: str) -> list[float]:
        rows = [_SWAPS.index((setup, ap)) for setup in ("Default", "Re-calibration")]
        return [mean(values, cell, f"rows/{row}/{attack}") for row in rows]

    cell, attack = case
    text, adv = f"{cell}, {attack}, default and re-calibrated statistics", both_statistics("AP_adv")
    yield Clause(f"{text}: AP_adv is robust: {join_numbers(*adv)}", are_robust(adv[0]))
    yield Clause.comparable(f"{text}: AP_adv is comparable", *adv)
    yield Clause.almost_no_robustness(f"{text}: AP_clean has almost no robustness", *both_statistics("AP_clean"))


def _locate6(label: Mapping[str, Any], column: str) -> tuple[str, str]:
    if column == "0":  # the same network and images in both cells
        return "standard/eps8", "shared/clean"
    attack = {"Random noise": "noise", "Adversarial perturbation": "pgd10"}[label["perturbation"]]
    return f"standard/{eps_name(column)}", f"shared/{attack}"


@register_study("A/table6", locate=_locate6, cells=lambda: [standard(eps) for eps in EPSILONS], each=(8, 16))
def table6(values: Values, eps: int) -> Iterator[Clause]:
    """An adversarial perturbation leaves almost no accuracy; noise of the same size costs a small margin: 10 points."""
    clean = mean(values, "standard/eps8", "shared/clean")
    attacked, noisy = (mean(values, f"standard/eps{eps}", f"shared/{kind}") for kind in ("pgd10", "noise"))
    yield Clause.almost_no_robustness(f"PGD-10 at {eps}/255 leaves almost no accuracy", attacked)
    text = f"noise at {eps}/255 costs a small margin, up to {SMALL_MARGIN:g} points"
    yield Clause(f"{text}: {join_numbers(noisy, clean)}", noisy >= clean - SMALL_MARGIN)


@register_study("A/table7", locate=_locate, cells=lambda: map(setup, ("dual_bn", "dual_linear")))
def table7(values: Values) -> Iterator[Clause]:
    """Dual Linear shows the trend of Dual BN: a robust head, and a clean head with almost no real robustness.

    The clean head is also far below under PGD-10, which leaves 2.2 % in print. "Comparable" means two thirds of Dual
    BN's robustness here: the paper uses the word for 16.5 % beside 22.5 %.
    """

    def linear(path: str) -> float:
        return mean(values, "dual_linear/eps16", path)

    yield Clause.higher(
        "the clean head is more accurate than the adversarial one", linear("clean/clean"), linear("adv/clean")
    )
    left = linear("clean/autoattack")
    yield Clause.almost_no_robustness("the clean head has almost no robustness under AutoAttack", left)
    for attack in ATTACKS:
        adv, clean = linear(f"adv/{attack}"), linear(f"clean/{attack}")
        yield Clause.far_higher(f"the adversarial head is far more robust, {attack}", adv, clean)
    one, dual = linear("adv/autoattack"), mean(values, "dual_bn/eps16", "adv/autoattack")
    text = f"it has two thirds of the robustness of Dual BN: {join_numbers(one, dual)}"
    yield Clause(text, are_robust(one) and one > dual * 2 / 3)


@register_study("A/table8", locate=_locate, cells=lambda: map(setup, ("single", "single_kl", "dual_bn")))
def table8(values: Values) -> Iterator[Clause]:
    """The KL term turns the false robustness of a single BN into a real one, and beats Dual BN (BN_adv).

    Real: AutoAttack removes a smaller share of PGD-10's accuracy, and leaves far more.
    """

    def removed_share(cell: str) -> float:
        pgd = mean(values, cell, "shared/pgd10")
        return (pgd - mean(values, cell, "shared/autoattack")) / max(pgd, 1e-9)

    text = "AutoAttack removes a smaller share of PGD-10's accuracy with KL than without"
    yield Clause.lower(text, removed_share("single_kl/eps16"), removed_share("single/eps16"), form=".0%")
    with_kl, alone = (mean(values, f"{name}/eps16", "shared/autoattack") for name in ("single_kl", "single"))
    yield Clause.far_higher("under AutoAttack a single BN is far more accurate with KL than without", with_kl, alone)
    for metric in ("clean", "autoattack"):
        one, dual = mean(values, "single_kl/eps16", f"shared/{metric}"), mean(values, "dual_bn/eps16", f"adv/{metric}")
        yield Clause.higher(f"a single BN with KL beats Dual BN, {metric}", one, dual)


# -- figures: the paper prints no numbers ------------------------------------------------------------------------------


#: The largest factor between two domain gaps without a "significant difference"; the paper names none.
SIMILAR_GAP = 2.0


def _fig2_cells() -> Iterable[Cell]:
    # The figure does not name its eps: here that of table 2. In Cross-AT (fig. 1) clean images contribute their
    # statistics only, and the weights learn from adversarial images: BN_clean is the branch that it trains.
    curve, classical = Measure(name="metrics"), along_training("16/255")
    cross = replace(classical, objective=Named("cross"), norm="cross_bn")
    yield Cell(name="classical/eps16", config=classical, measures=(curve, *accuracies()))
    yield Cell(name="cross_at/eps16", config=cross, measures=(curve, *accuracies("adv")))


@register_study("A/fig2", cells=_fig2_cells)
def fig2(values: Values) -> Iterator[Clause]:
    """Cross-AT ends robust under PGD-10, comparably to classical AT."""

    def at_the_end(cell: str) -> float:
        metric = f"held_out/{ATTACKS['pgd10']}"
        epochs = [int(path.partition("/")[0]) for name, path in values if name == cell and path.endswith(f"/{metric}")]
        return 100 * mean(values, cell, f"{max(epochs, default=0)}/{metric}")

    both = at_the_end("cross_at/eps16"), at_the_end("classical/eps16")
    yield Clause.robust("Cross-AT and classical AT are robust under PGD-10", *both)
    yield Clause.comparable("they are comparable", *both)


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


@register_study("A/fig4", cells=lambda: _dual_bn_with("channels"))
def fig4(values: Values) -> Iterator[Clause]:
    """Statistics under the same AP are closer to each other, whatever the input, than under different APs."""

    def distance(one: str, other: str) -> float:
        return _sum_of_squares(values, f"statistics/NS^{one}", f"statistics/NS^{other}")

    same_ap = max(distance("adv_adv", "adv_clean"), distance("clean_adv", "clean_clean"))
    same_input = min(distance("adv_adv", "clean_adv"), distance("adv_clean", "clean_clean"))
    text = f"{same_ap:.3g} at most, {same_input:.3g} at least"
    yield Clause(f"squared distances under one AP are smaller than between two: {text}", same_ap < same_input)


@register_study("A/fig5", cells=lambda: _dual_bn_with("channels"))
def fig5(values: Values) -> Iterator[Clause]:
    """AP_clean and AP_adv differ by more than a tenth of their size."""
    gap = _sum_of_squares(values, "affine/AP_clean", "affine/AP_adv")
    sizes = [_sum_of_squares(values, f"affine/AP_{branch}") for branch in BRANCHES]
    share = math.sqrt(gap / (sum(sizes) / 2))
    yield Clause(f"AP_clean and AP_adv differ by more than a tenth of their size: {share:.0%}", share > 0.1)


def _layer_totals(values: Values, cell: str, first: str, second: str) -> dict[str, tuple[float, float]]:
    """Return two recorded distances of each layer."""
    paths = [path for _, path in values if path.startswith(first) and path.endswith("/total")]
    layers = [path.removeprefix(first).removesuffix("/total") for path in paths]
    if not layers:
        raise KeyError(first)
    return {
        one: (mean(values, cell, f"{first}{one}/total"), mean(values, cell, f"{second}{one}/total")) for one in layers
    }


@register_study("A/fig6", cells=lambda: _dual_bn_with("branch_gap"))
def fig6(values: Values) -> Iterator[Clause]:
    """In every layer the gap between both inputs' statistics under AP_adv is almost zero.

    That is a tenth of the gap between the APs. The record has squared distances, so the threshold is a hundredth. Each
    is in units of its channel's weight or deviation, because the units of AP and NS differ.
    """
    gaps = _layer_totals(values, "dual_bn/eps16", "relative_layers/AP/", "relative_layers/NS under adv/")
    held = [ns <= ap / 100 and ap > 0 for ap, ns in gaps.values()]
    least = max(gaps, key=lambda layer: gaps[layer][1] / gaps[layer][0] if gaps[layer][0] else math.inf)
    detail = f"least in {least} (squared {join_numbers(*reversed(gaps[least]), form='.3g')})"
    yield Clause.in_cases("in every layer the gap of NS is at most a tenth of the gap of AP", held, detail)


_GAPS = Measure(name="domain_gap", options={"inputs": ["adv", "noise"]})


@register_study("A/fig7", cells=lambda: [replace(standard("16/255"), measures=(_GAPS,))])
def fig7(values: Values) -> Iterator[Clause]:
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
