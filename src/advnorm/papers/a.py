"""A: Towards Understanding Dual BN in Hybrid Adversarial Training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from advnorm.config.config import AttackConfig, Config, Named
from advnorm.studies.base import Cell, Clause, Measure, Values, each, mean, study
from advnorm.studies.claims import ALMOST_NONE, COMPARABLE, beside, comparable, robust

BOTH = ("8/255", "16/255")
#: PGD-10 with steps of 2/255 (sec. 2), and AutoAttack.
ATTACKS = {"pgd10": "pgd10-step2", "autoattack": "autoattack"}
BRANCHES = ("clean", "adv")
#: Points that noise may cost where the paper says "a small margin": it prints up to 7.4 (table 6).
SMALL_MARGIN = 10.0
#: A factor between two domain gaps that is no "significant difference"; the paper names none.
SIMILAR_GAP = 2.0


def hybrid(eps: str) -> Config:
    """Hybrid-AT with a single BN (eq. 2, sec. 2): 110 epochs, lr 0.1 decayed at 100 and 105."""
    return Config(
        model=Named("resnet18"),
        norm="bn",
        data=Named("cifar10"),
        augment="crop_flip",
        held_out=0,
        validate_every=0,
        objective=Named("hybrid", clean_weight=0.5),
        eps=eps,
        attack=AttackConfig(steps=10, step_size="2/255"),
        epochs=110,
        batch_size=128,
        lr=0.1,
        momentum=0.9,
        weight_decay=5e-4,
        schedule="step",
        milestones=(100.0, 105.0),
    )


def judged(*routes: str) -> tuple[Measure, ...]:
    """Clean, PGD-10 and AutoAttack accuracy of the last checkpoint, through each branch where there are several."""
    return (Measure(options={"attacks": ATTACKS, "route": list(routes)}),)


def cell(name: str, config: Config) -> Cell:
    """A cell named by its setup and eps; norms with two branches are judged through both."""
    routes = BRANCHES if config.norm not in ("bn", "ln", "gn", "in") or config.dual_head else ()
    return Cell(name=f"{name}/eps{config.eps.split('/')[0]}", config=config, measures=judged(*routes))  # pyright: ignore


def single(eps: str) -> Cell:
    return cell("single", hybrid(eps))


def dual(eps: str) -> Cell:
    return cell("dual_bn", replace(hybrid(eps), norm="dual_bn"))


def setup1(eps: str) -> Cell:
    return cell("setup1", replace(hybrid(eps), norm="dual_affine_bn"))


def setup2(eps: str) -> Cell:
    return cell("setup2", replace(hybrid(eps), norm="dual_stats_bn"))


def cross(eps: str) -> Cell:
    return cell("cross_bn", replace(hybrid(eps), norm="cross_bn"))


def with_kl(eps: str) -> Cell:
    return cell("single_kl", replace(hybrid(eps), objective=Named("kl", clean_weight=0.5, kl_weight=1.0)))


def dual_linear(eps: str) -> Cell:
    return cell("dual_linear", replace(hybrid(eps), dual_head=True))


def per_sample(norm: str, dual: bool) -> Cell:
    name = f"dual_affine_{norm}" if dual else norm
    return cell(name, replace(hybrid("16/255"), norm=name))


def standard(eps: str) -> Cell:
    """Clean images alone (sec. 5.2), judged at an eps, which plays no part in training: one run serves all.

    The paper names neither the noise nor the attack: uniform noise in the same ball, and PGD-10 as everywhere.
    """
    config = replace(hybrid("16/255"), objective=Named("standard"))
    options: dict[str, Any] = {"attacks": {"noise": "noise-uniform", "pgd10": ATTACKS["pgd10"]}}
    if eps != config.eps:
        options["eps"] = eps
    name = f"standard/eps{eps.split('/')[0]}"
    return Cell(name=name, config=config, measures=(Measure(options=options),))


def along_training(eps: str) -> Config:
    """Classical AT (eq. 1), judged after every epoch; the paper does not say on which images: here on held-out ones."""
    return replace(
        hybrid(eps),
        objective=Named("classical"),
        held_out=1000,
        validate_every=1,
        validation_attack=ATTACKS["pgd10"],
    )


def cross_at(eps: str) -> Config:
    """Cross-AT (fig. 1): clean images are forwarded for their statistics, and the weights learn from the others."""
    return replace(along_training(eps), objective=Named("cross"), norm="cross_bn")


_CELLS = {"Single BN": "single", "Dual BN": "dual_bn", "Setup1": "setup1", "Setup2": "setup2"}
_CELLS |= {"Dual Linear": "dual_linear", "Single BN (with KL loss)": "single_kl"}


def _place(label: Mapping[str, Any], column: str) -> tuple[str, str] | None:
    """``8/255 pgd10`` of Setup1's AP_adv is ``adv/pgd10`` of the cell ``setup1/eps8``."""
    eps, _, metric = column.rpartition(" ")
    eps = eps or label.get("eps", "16/255")
    branch = str(label.get("branch", "")).rpartition("_")[2]
    return f"{_CELLS[label['setup']]}/eps{eps.split('/')[0]}", f"{branch or 'shared'}/{metric}"


def _false_share(values: Values, cell: str, branch: str) -> float:
    """How much of PGD-10's accuracy AutoAttack takes away."""
    pgd = mean(values, cell, f"{branch}/pgd10")
    return (pgd - mean(values, cell, f"{branch}/autoattack")) / max(pgd, 1e-9)


def _clean_and_robust(values: Values, cell: str) -> Iterator[Clause]:
    """The trend of Dual BN: one branch for clean images with almost no robustness, the other really robust."""
    clean, adv = (mean(values, cell, f"{branch}/clean") for branch in BRANCHES)
    yield Clause(f"{cell}: the clean branch is the more accurate one: {beside(clean, adv)}", clean > adv)
    accuracy = mean(values, cell, "adv/autoattack")
    yield Clause(f"{cell}: the adversarial branch is robust under AutoAttack: {accuracy:.1f}", robust(accuracy))
    left = [mean(values, cell, f"clean/{attack}") for attack in ATTACKS]
    yield Clause(f"{cell}: the clean branch has almost no robustness: {beside(*left)}", max(left) <= ALMOST_NONE)


def _check1(values: Values) -> Iterator[Clause]:
    """BN_clean is the more accurate branch and has almost no robustness under either attack; BN_adv has some."""

    def part(eps: int) -> Iterator[Clause]:
        yield from _clean_and_robust(values, f"dual_bn/eps{eps}")

    yield from each(part, (8, 16))


@study("A/table1", place=_place, check=_check1)
def table1() -> Iterable[Cell]:
    return [dual(eps) for eps in BOTH]


def _place2(label: Mapping[str, Any], column: str) -> tuple[str, str]:
    if label["method"] == "Cross-Hybrid-AT":  # BN_clean is what its adversarial branch trains
        return "cross_bn/eps16", f"adv/{column}"
    return ("single/eps16", f"shared/{column}") if label["test"] == "Single BN" else ("dual_bn/eps16", f"adv/{column}")


def _check2(values: Values) -> Iterator[Clause]:
    """Cross-Hybrid-AT is comparable to Hybrid-AT with Dual BN in all three numbers, and both are robust.

    A single BN has almost no robustness under AutoAttack.
    """
    cross, dual = (
        [mean(values, f"{name}/eps16", f"adv/{metric}") for metric in ("clean", *ATTACKS)]
        for name in ("cross_bn", "dual_bn")
    )
    for metric, one, other in zip(("clean", *ATTACKS), cross, dual):
        yield Clause(
            f"Cross-Hybrid-AT is comparable to Dual BN, {metric}: {beside(one, other)}", comparable(one, other)
        )
    yield Clause(f"both are robust under AutoAttack: {beside(cross[-1], dual[-1])}", robust(*cross, *dual))
    alone = mean(values, "single/eps16", "shared/autoattack")
    yield Clause(f"a single BN has almost no robustness under AutoAttack: {alone:.1f}", alone <= ALMOST_NONE)


@study("A/table2", place=_place2, check=_check2)
def table2() -> Iterable[Cell]:
    return [dual("16/255"), cross("16/255"), single("16/255")]


def _check3(values: Values) -> Iterator[Clause]:
    """Two sets of affine parameters do it: Setup1 is comparable to Dual BN and far above a single BN (AutoAttack).

    Two sets of statistics (Setup2) win some of what Dual BN wins over a single BN at 8/255, and less at 16/255; where
    that is no more than a comparable amount, there is nothing to have a share of.
    """

    def accuracy(setup: str, eps: int) -> float:
        return mean(values, f"{setup}/eps{eps}", "shared/autoattack" if setup == "single" else "adv/autoattack")

    def won(setup: str, eps: int) -> float:
        alone = accuracy("single", eps)
        return (accuracy(setup, eps) - alone) / (accuracy("dual_bn", eps) - alone)

    def far(eps: int) -> bool:
        return accuracy("dual_bn", eps) > accuracy("single", eps) + COMPARABLE

    def part(eps: int) -> Iterator[Clause]:
        one, dual, alone = (accuracy(setup, eps) for setup in ("setup1", "dual_bn", "single"))
        yield Clause(f"Setup1 is comparable to Dual BN at {eps}/255: {beside(one, dual)}", comparable(one, dual))
        yield Clause(f"Setup1 is far above a single BN at {eps}/255: {beside(one, alone)}", one > alone + COMPARABLE)
        yield Clause(f"Dual BN is far above a single BN at {eps}/255: {beside(dual, alone)}", far(eps))
        if eps == 16 and far(eps):
            shares = won("setup2", eps), won("setup1", eps)
            told = f"of what Dual BN wins at {eps}/255 Setup2 wins less than Setup1"
            yield Clause(f"{told}: {beside(*shares, form='.0%')}", shares[0] < shares[1])

    yield from each(part, (16, 8))
    if far(16) and far(8):
        small, large = won("setup2", 8), won("setup2", 16)
        told = f"Setup2 wins more of it at 8/255 than at 16/255: {beside(small, large, form='.0%')}"
        yield Clause(told, small > max(0.0, large))


@study("A/table3", place=_place, check=_check3)
def table3() -> Iterable[Cell]:
    return [make(eps) for make in (single, dual, setup1, setup2) for eps in BOTH]


def _place4(label: Mapping[str, Any], column: str) -> tuple[str, str]:
    norm = label["norm"].lower()
    if label["setup"] == "Single AP":
        return f"{norm}/eps16", f"shared/{column}"
    return f"dual_affine_{norm}/eps16", f"{label['branch'].rpartition('_')[2]}/{column}"


def _check4(values: Values) -> Iterator[Clause]:
    """Two sets of affine parameters do for layer, group and instance norm what they do for BN.

    One branch is clean with almost no robustness, the other really robust, and that by more than a comparable amount
    above a single set. (How similar LN is to BN is not asked: in print 16.9 % under AutoAttack stand beside 23.4 %.)
    """

    def part(norm: str) -> Iterator[Clause]:
        two = f"dual_affine_{norm}/eps16"
        yield from _clean_and_robust(values, two)
        both = mean(values, two, "adv/autoattack"), mean(values, f"{norm}/eps16", "shared/autoattack")
        yield Clause(f"{two} is far above {norm}: {beside(*both)}", both[0] > both[1] + COMPARABLE)

    yield from each(part, ("ln", "gn", "in"))


@study("A/table4", place=_place4, check=_check4)
def table4() -> Iterable[Cell]:
    return [per_sample(norm, dual) for norm in ("ln", "gn", "in") for dual in (False, True)]


#: The rows of the analysis ``swap_table``.
_SWAPS = [(setup, ap) for setup in ("Default", "Swap", "Re-calibration") for ap in ("AP_adv", "AP_clean")]


def _place5(label: Mapping[str, Any], column: str) -> tuple[str, str]:
    eps, _, attack = column.rpartition(" ")
    row = _SWAPS.index((label["setup"], label["ap"]))
    return f"dual_bn/eps{eps.split('/')[0]}", f"rows/{row}/{ATTACKS[attack]}"


def _check5(values: Values) -> Iterator[Clause]:
    """The affine parameters make the gap, not the statistics.

    With AP_adv there is robustness, and the re-calibrated statistics are comparable to the default; with AP_clean
    either leaves almost none.
    """

    def accuracies(cell: str, attack: str, ap: str) -> list[float]:
        rows = [_SWAPS.index((setup, ap)) for setup in ("Default", "Re-calibration")]
        return [mean(values, cell, f"rows/{row}/{attack}") for row in rows]

    def part(measured: tuple[str, str]) -> Iterator[Clause]:
        cell, attack = measured
        told, both = f"{cell}, {attack}, default and re-calibrated statistics", accuracies(cell, attack, "AP_adv")
        yield Clause(f"{told}: AP_adv is robust: {beside(*both)}", robust(both[0]))
        yield Clause(f"{told}: AP_adv is comparable: {beside(*both)}", comparable(*both))
        clean = accuracies(cell, attack, "AP_clean")
        yield Clause(f"{told}: AP_clean has almost no robustness: {beside(*clean)}", max(clean) <= ALMOST_NONE)

    yield from each(part, product(("dual_bn/eps8", "dual_bn/eps16"), ATTACKS.values()))


@study("A/table5", place=_place5, check=_check5)
def table5() -> Iterable[Cell]:
    # All test images, which the paper's numbers are of; they re-calibrate too, where the paper does not say which do.
    swaps = Measure(name="swap_table", options={"attacks": list(ATTACKS.values()), "limit": None}, scale=100)
    return [replace(dual(eps), measures=(swaps,)) for eps in BOTH]


def _place6(label: Mapping[str, Any], column: str) -> tuple[str, str]:
    if column == "0":  # the same network and images in either cell
        return "standard/eps8", "shared/clean"
    attack = {"Random noise": "noise", "Adversarial perturbation": "pgd10"}[label["perturbation"]]
    return f"standard/eps{column.split('/')[0]}", f"shared/{attack}"


def _check6(values: Values) -> Iterator[Clause]:
    """An adversarial perturbation leaves almost nothing, noise of the same size costs a small margin: 10 points."""
    clean = mean(values, "standard/eps8", "shared/clean")

    def part(eps: int) -> Iterator[Clause]:
        attacked, noisy = (mean(values, f"standard/eps{eps}", f"shared/{kind}") for kind in ("pgd10", "noise"))
        yield Clause(f"PGD-10 at {eps}/255 leaves almost nothing: {attacked:.1f}", attacked <= ALMOST_NONE)
        small = noisy >= clean - SMALL_MARGIN
        told = f"noise at {eps}/255 costs a small margin, up to {SMALL_MARGIN:g} points"
        yield Clause(f"{told}: {beside(noisy, clean)}", small)

    yield from each(part, (8, 16))


@study("A/table6", place=_place6, check=_check6)
def table6() -> Iterable[Cell]:
    return [standard(eps) for eps in BOTH]


def _check7(values: Values) -> Iterator[Clause]:
    """Dual Linear shows the trend of Dual BN: one head is robust, the other clean, with almost no real robustness.

    The clean head is far below under PGD-10 too, which leaves it 2.2 % in print. "Comparable" is two thirds of Dual
    BN's robustness here: the paper says it of 16.5 % beside 22.5 %.
    """

    def linear(path: str) -> float:
        return mean(values, "dual_linear/eps16", path)

    both = linear("clean/clean"), linear("adv/clean")
    yield Clause(f"the clean head is the more accurate one: {beside(*both)}", both[0] > both[1])
    left = linear("clean/autoattack")
    yield Clause(f"the clean head has almost no robustness under AutoAttack: {left:.1f}", left <= ALMOST_NONE)
    for attack in ATTACKS:
        adv, clean = linear(f"adv/{attack}"), linear(f"clean/{attack}")
        yield Clause(f"the other head is far more robust, {attack}: {beside(adv, clean)}", adv > clean + COMPARABLE)
    one, dual = linear("adv/autoattack"), mean(values, "dual_bn/eps16", "adv/autoattack")
    near = robust(one) and one > dual * 2 / 3
    yield Clause(f"it has two thirds of the robustness of Dual BN: {beside(one, dual)}", near)


@study("A/table7", place=_place, check=_check7)
def table7() -> Iterable[Cell]:
    return [dual("16/255"), dual_linear("16/255")]


def _check8(values: Values) -> Iterator[Clause]:
    """The KL term turns the false robustness of a single BN into a real one, and beats Dual BN (BN_adv).

    Real: less of PGD-10's accuracy is lost under AutoAttack, where more than a comparable amount is won.
    """
    lost = [_false_share(values, f"{name}/eps16", "shared") for name in ("single_kl", "single")]
    told = beside(*lost, form=".0%")
    yield Clause(
        f"with KL AutoAttack takes a smaller share of PGD-10's accuracy than without: {told}", lost[0] < lost[1]
    )
    with_kl, alone = (mean(values, f"{name}/eps16", "shared/autoattack") for name in ("single_kl", "single"))
    far = with_kl > alone + COMPARABLE
    yield Clause(f"under AutoAttack it is far above a single BN without: {beside(with_kl, alone)}", far)
    for metric in ("clean", "autoattack"):
        one, dual = mean(values, "single_kl/eps16", f"shared/{metric}"), mean(values, "dual_bn/eps16", f"adv/{metric}")
        yield Clause(f"a single BN with KL beats Dual BN, {metric}: {beside(one, dual)}", one > dual)


@study("A/table8", place=_place, check=_check8)
def table8() -> Iterable[Cell]:
    return [single("16/255"), with_kl("16/255"), dual("16/255")]


# -- figures: the paper prints no numbers ------------------------------------------------------------------------------


def _unprinted(label: Mapping[str, Any], column: str) -> None:
    return None


def _last(values: Values, cell: str, metric: str) -> float:
    """A metric of training at the last epoch that has it, in the mean over seeds."""
    epochs = [int(path.partition("/")[0]) for name, path in values if name == cell and path.endswith(f"/{metric}")]
    return mean(values, cell, f"{max(epochs, default=0)}/{metric}")


def _check_fig2(values: Values) -> Iterator[Clause]:
    """Cross-AT ends robust under PGD-10, comparably to classical AT."""
    cross, own = (
        100 * _last(values, f"{name}/eps16", f"held_out/{ATTACKS['pgd10']}") for name in ("cross_at", "classical")
    )
    yield Clause(f"Cross-AT and classical AT are robust under PGD-10: {beside(cross, own)}", robust(cross, own))
    yield Clause(f"they are comparable: {beside(cross, own)}", comparable(cross, own))


@study("A/fig2", place=_unprinted, check=_check_fig2)
def fig2() -> Iterable[Cell]:
    # The figure does not name its eps: here that of table 2. BN_clean of Cross-AT is the branch that it trains.
    curve = Measure(name="metrics")
    return [
        Cell(name="classical/eps16", config=along_training("16/255"), measures=(curve, *judged())),
        Cell(name="cross_at/eps16", config=cross_at("16/255"), measures=(curve, *judged("adv"))),
    ]


def _squares(values: Values, cell: str, one: str, other: str | None = None) -> float:
    """``Σ (a - b)²`` over the shown channels of two series, or ``Σ a²`` of one, in the mean over seeds."""
    paths = [path for name, path in values if name == cell and path.startswith(f"{one}/")]
    seeds = len(values[cell, paths[0]])  # an IndexError where the analysis was not run
    total = 0.0
    for path in paths:
        others = [0.0] * seeds if other is None else values[cell, path.replace(one, other, 1)]
        total += sum((a - b) ** 2 for a, b in zip(values[cell, path], others))
    return total / seeds


def _check_fig4(values: Values) -> Iterator[Clause]:
    """Statistics under the same AP are nearer to each other, whatever the input, than those under another AP."""

    def apart(one: str, other: str) -> float:
        return _squares(values, "dual_bn/eps16", f"statistics/NS^{one}", f"statistics/NS^{other}")

    same_ap = apart("adv_adv", "adv_clean"), apart("clean_adv", "clean_clean")
    same_input = apart("adv_adv", "clean_adv"), apart("adv_clean", "clean_clean")
    told = f"{max(same_ap):.3g} at most, {min(same_input):.3g} at least"
    yield Clause(f"squared distances under one AP are smaller than between two: {told}", max(same_ap) < min(same_input))


def _check_fig5(values: Values) -> Iterator[Clause]:
    """AP_clean and AP_adv differ by more than a tenth of their size."""
    gap = _squares(values, "dual_bn/eps16", "affine/AP_clean", "affine/AP_adv")
    sizes = [_squares(values, "dual_bn/eps16", f"affine/AP_{branch}") for branch in BRANCHES]
    share = math.sqrt(gap / (sum(sizes) / 2))
    yield Clause(f"AP_clean and AP_adv differ by more than a tenth of their size: {share:.0%}", share > 0.1)


@study("A/fig5", place=_unprinted, check=_check_fig5)
@study("A/fig4", place=_unprinted, check=_check_fig4)
def fig4() -> Iterable[Cell]:
    # 20 channels of the second norm of the first block, by default. The figures do not name their eps.
    return [replace(dual("16/255"), measures=(Measure(name="channels"),))]


def _check_fig6(values: Values) -> Iterator[Clause]:
    """In every layer the gap of both inputs' statistics under AP_adv is almost zero beside that of AP_clean and AP_adv.

    That is a tenth of it (a hundredth of the squared distances, which are recorded). Each in units of its channel's
    weight or deviation: the units of AP and NS differ.
    """
    cell, ap, ns = "dual_bn/eps16", "relative_layers/AP/", "relative_layers/NS under adv/"
    layers = [path.removeprefix(ap) for _, path in values if path.startswith(ap) and path.endswith("/total")]
    if not layers:
        raise KeyError(ap)
    both = {layer: (mean(values, cell, ap + layer), mean(values, cell, ns + layer)) for layer in layers}
    held = [near <= far / 100 and far > 0 for far, near in both.values()]
    least = max(both, key=lambda layer: both[layer][1] / both[layer][0] if both[layer][0] else math.inf)
    told = f"in {sum(held)} of {len(held)}, least in {least.removesuffix('/total')}"
    squared = beside(*reversed(both[least]), form=".3g")
    yield Clause(f"in every layer NS are apart by a tenth of AP at most: {told} (squared {squared})", all(held))


@study("A/fig6", place=_unprinted, check=_check_fig6)
def fig6() -> Iterable[Cell]:
    return [replace(dual("16/255"), measures=(Measure(name="branch_gap"),))]  # the figure does not name its eps


def _check_fig7(values: Values) -> Iterator[Clause]:
    """In every layer the adversarial-clean gap is within a factor of 2 of the noisy-clean gap.

    The paper's measure is "the Wasserstein distance of NS", which it takes "in different layers" (sec. 5.1 and 5.2). It
    gives no formula: here it is the distance itself, the root of the squared one (paper C's eq. 7) that is recorded.
    Layers are not summed, as paper C does. That there is "no significant difference" is said without an exception, so
    none is made for single layers.
    """
    cell, adv, noise = "standard/eps16", "layers/clean-adv/", "layers/clean-noise/"
    layers = [path.removeprefix(adv) for _, path in values if path.startswith(adv) and path.endswith("/total")]
    if not layers:
        raise KeyError(adv)
    factors = {}
    for layer in layers:
        ratio = math.sqrt(mean(values, cell, adv + layer) / mean(values, cell, noise + layer))
        factors[layer.removesuffix("/total")] = max(ratio, 1 / ratio)
    near = [factor <= SIMILAR_GAP for factor in factors.values()]
    worst = max(factors, key=lambda layer: factors[layer])
    told = f"in {sum(near)} of {len(near)}, the largest {factors[worst]:.1f} in {worst}"
    yield Clause(f"in every layer both gaps are within a factor of {SIMILAR_GAP:g}: {told}", all(near))


@study("A/fig7", place=_unprinted, check=_check_fig7)
def fig7() -> Iterable[Cell]:
    gaps = Measure(name="domain_gap", options={"inputs": ["adv", "noise"]})
    return [replace(standard("16/255"), measures=(gaps,))]
