"""The tables of paper A."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from advnorm.papers.a.trainings import (
    ATTACKS,
    BRANCHES,
    DEVIATIONS,
    EPSILONS,
    PER_SAMPLE_NORMS,
    SIGNIFICANT,
    VERY_LOW,
    eps_name,
    setup,
    standard,
)
from advnorm.studies.claims import (
    Clause,
    Margin,
    Values,
    for_each,
    in_parts,
    join_numbers,
    mean,
)
from advnorm.studies.registry import STUDIES, register_study
from advnorm.studies.study import Measure

SMALL_MARGIN = Margin(
    10.0, "a small margin: up to {} points", "our margin: the paper writes this for losses of 1.3 and 7.4 points"
)
METRICS = ("clean", *ATTACKS)

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


def _printed_in(study: str, *cells: str) -> dict[tuple[str, str], float]:
    """Numbers of these cells that another table prints."""
    numbers = STUDIES.get(study).numbers
    return {(n.cell, n.value): n.printed for n in numbers if n.cell in cells and n.printed is not None}


def _clean_and_robust_branch(values: Values, cell: str) -> Iterator[Clause]:
    """The trend of Dual BN: an accurate clean branch with almost no robustness, and a robust adversarial branch."""
    clean, adv = (mean(values, cell, f"{branch}/clean") for branch in BRANCHES)
    text = f"{cell}: the clean branch is significantly more accurate than the adversarial one"
    yield Clause.higher(text, clean, adv, by=SIGNIFICANT)
    robust = mean(values, cell, "adv/autoattack")
    yield Clause.robust(f"{cell}: the adversarial branch is robust under AutoAttack", robust, above=VERY_LOW)
    left = [mean(values, cell, f"clean/{attack}") for attack in ATTACKS]
    yield Clause.almost_no_robustness(f"{cell}: the clean branch has almost no robustness", *left)


@register_study(
    "A/table1",
    locate=_locate,
    cells=lambda: [setup("dual_bn", eps) for eps in EPSILONS],
    each=(8, 16),
    deviations=DEVIATIONS,
)
def table1(values: Values, eps: int) -> Iterator[Clause]:
    """ "BN_clean leads to almost zero robustness" under either attack; swapping is "a significant performance drop".

    So BN_adv is robust, and significantly less accurate on clean images.
    """
    return _clean_and_robust_branch(values, f"dual_bn/eps{eps}")


def _locate2(label: Mapping[str, Any], column: str) -> tuple[str, str]:
    if label["method"] == "Cross-Hybrid-AT":  # its adversarial branch trains BN_clean
        return "cross_bn/eps16", f"adv/{column}"
    return ("single/eps16", f"shared/{column}") if label["test"] == "Single BN" else ("dual_bn/eps16", f"adv/{column}")


@register_study(
    "A/table2",
    locate=_locate2,
    cells=lambda: map(setup, ("dual_bn", "cross_bn", "single")),
    deviations=DEVIATIONS,
)
def table2(values: Values) -> Iterator[Clause]:
    """Cross-Hybrid-AT is comparable to Hybrid-AT with Dual BN in all three numbers, and both are robust.

    A single BN has almost no robustness under AutoAttack.
    """
    cross, dual = (
        [mean(values, f"{name}/eps16", f"adv/{metric}") for metric in METRICS] for name in ("cross_bn", "dual_bn")
    )
    for metric, one, other in zip(METRICS, cross, dual):
        yield Clause.comparable(f"Cross-Hybrid-AT is comparable to Dual BN, {metric}", one, other)
    yield Clause.robust("both are robust under AutoAttack", cross[-1], dual[-1], above=VERY_LOW)
    alone = mean(values, "single/eps16", "shared/autoattack")
    yield Clause.almost_no_robustness("a single BN has almost no robustness under AutoAttack", alone)


@register_study(
    "A/table3",
    locate=_locate,
    cells=lambda: [setup(name, eps) for name in ("single", "dual_bn", "setup1", "setup2") for eps in EPSILONS],
    deviations=DEVIATIONS,
)
def table3(values: Values) -> Iterator[Clause]:
    """Section 4.2, sentence by sentence.

    - Dual BN "brings significant robustness improvement over the Single BN"; under PGD-10 "their robustness gap is not
      significant", under AutoAttack a single BN has "very low robustness".
    - Setup1 "achieves comparable results with Dual BN" (caption): clean, PGD-10 and AutoAttack accuracy.
    - Setup2 at 8/255 "is beneficial for boosting the robustness under strong AA", both branches comparably; at 16/255
      "this benefit is less significant", and both branches "fail to achieve high robustness", "especially the AA
      results": under either attack.

    Significant is more than the gap under PGD-10 that the paper calls not significant.
    """

    def accuracy(setup: str, eps: int, metric: str = "autoattack", branch: str = "adv") -> float:
        return mean(values, f"{setup}/eps{eps}", f"{'shared' if setup == 'single' else branch}/{metric}")

    def gain_of_setup2(eps: int) -> float:
        return accuracy("setup2", eps) - accuracy("single", eps)

    def two_sets_of_affine_parameters(eps: int) -> Iterator[Clause]:
        for metric in METRICS:
            text = f"at {eps}/255 Setup1 is comparable to Dual BN, {metric}"
            yield Clause.comparable(text, accuracy("setup1", eps, metric), accuracy("dual_bn", eps, metric))

    def a_single_bn(eps: int) -> Iterator[Clause]:
        alone = accuracy("single", eps)
        text = f"at {eps}/255 a single BN has very low robustness under AutoAttack"
        yield Clause(f"{text}: {alone:.1f}", alone <= VERY_LOW, VERY_LOW)
        for name, other in (("Dual BN", "dual_bn"), ("Setup1", "setup1")):
            text = f"at {eps}/255 {name} is significantly above a single BN under AutoAttack"
            yield Clause.higher(text, accuracy(other, eps), alone, by=SIGNIFICANT)
        both = accuracy("dual_bn", eps, "pgd10"), accuracy("single", eps, "pgd10")
        text = f"at {eps}/255 the gap between Dual BN and a single BN under PGD-10 is not significant"
        yield Clause(f"{text}: {join_numbers(*both)}", abs(both[0] - both[1]) <= SIGNIFICANT, SIGNIFICANT)

    def two_sets_of_statistics(eps: int) -> Iterator[Clause]:
        if eps == 8:
            text = "at 8/255 Setup2 is significantly above a single BN under AutoAttack"
            yield Clause.higher(text, accuracy("setup2", 8), accuracy("single", 8), by=SIGNIFICANT)
            for attack in ATTACKS:
                both = [accuracy("setup2", 8, attack, branch) for branch in BRANCHES]
                yield Clause.comparable(f"at 8/255 both branches of Setup2 are comparably robust, {attack}", *both)
        for branch, attack in product(BRANCHES, ATTACKS) if eps == 16 else ():
            text = f"at 16/255 Dual BN is far above Setup2 ({branch}), {attack}"
            yield Clause.far_higher(text, accuracy("dual_bn", 16, attack), accuracy("setup2", 16, attack, branch))

    def less_significant() -> Iterator[Clause]:
        text = "Setup2's gain over a single BN under AutoAttack is significantly larger at 8/255 than at 16/255"
        yield Clause.higher(text, gain_of_setup2(8), gain_of_setup2(16), by=SIGNIFICANT)

    parts = (two_sets_of_affine_parameters, a_single_bn, two_sets_of_statistics)
    return in_parts(*(for_each((16, 8), part) for part in parts), less_significant())


def _locate4(label: Mapping[str, Any], column: str) -> tuple[str, str]:
    norm = label["norm"].lower()
    if label["setup"] == "Single AP":
        return f"{norm}/eps16", f"shared/{column}"
    return f"dual_affine_{norm}/eps16", f"{label['branch'].rpartition('_')[2]}/{column}"


#: The setups of table 3 that the text of table 4 names for comparison.
_WITH_BN = {"Dual BN": "dual_bn/eps16", "Setup1": "setup1/eps16"}


@register_study(
    "A/table4",
    locate=_locate4,
    cells=lambda: map(
        setup, (*(n for norm in PER_SAMPLE_NORMS for n in (norm, f"dual_affine_{norm}")), "dual_bn", "setup1")
    ),
    deviations=DEVIATIONS,
    printed_elsewhere=lambda: _printed_in("A/table3", *_WITH_BN.values()),
)
def table4(values: Values) -> Iterator[Clause]:
    """With Dual AP "LN performs similarly with BN in either setup (b) and (c)", Dual BN and Setup1, in both branches.

    GN and IN "show the same trend with LN and BN": the clean branch has almost no robustness, the other is robust, and
    far more than with a single set.
    """

    def trend(norm: str) -> Iterator[Clause]:
        two = f"dual_affine_{norm}/eps16"
        yield from _clean_and_robust_branch(values, two)
        one = mean(values, f"{norm}/eps16", "shared/autoattack")
        yield Clause.far_higher(f"{two} is far above {norm}", mean(values, two, "adv/autoattack"), one)

    def similar(case: tuple[str, str, str]) -> Iterator[Clause]:
        name, branch, metric = case
        both = [mean(values, cell, f"{branch}/{metric}") for cell in ("dual_affine_ln/eps16", _WITH_BN[name])]
        yield Clause.comparable(f"LN with two sets is similar to BN in {name}, {branch} branch, {metric}", *both)

    return in_parts(for_each(PER_SAMPLE_NORMS, trend), for_each(product(_WITH_BN, BRANCHES, METRICS), similar))


#: The rows of the analysis ``swap_table``. The last two are a control that the paper does not have.
_SWAPS = [(setup, ap) for setup in ("Default", "Swap", "Re-calibration", "Control") for ap in ("AP_adv", "AP_clean")]


def _locate5(label: Mapping[str, Any], column: str) -> tuple[str, str]:
    eps, _, attack = column.rpartition(" ")
    row = _SWAPS.index((label["setup"], label["ap"]))
    return f"dual_bn/{eps_name(eps)}", f"rows/{row}/{ATTACKS[attack]}"


_SWAP = Measure(name="swap_table", options={"attacks": list(ATTACKS.values()), "limit": None}, scale=100)


@register_study(
    "A/table5",
    locate=_locate5,
    cells=lambda: [setup("dual_bn", eps, (_SWAP,)) for eps in EPSILONS],
    deviations=(
        *DEVIATIONS,
        "Statistics are re-calibrated on the test images: the paper does not say which images.",
        "Default statistics are running averages over training. The control re-estimates NS^adv_adv in the same way as "
        "NS^adv_clean; the paper has no such row.",
    ),
)
def table5(values: Values) -> Iterator[Clause]:
    """The affine parameters cause the gap, not the statistics.

    With AP_adv the network is robust, comparably with default and re-calibrated statistics. With AP_clean it has almost
    no robustness with either. The control compares statistics of clean and adversarial images that were estimated in
    the same way: "the only difference" that the paper means.
    """

    def accuracy(case: tuple[str, str], setup: str, ap: str) -> float:
        cell, attack = case
        return mean(values, cell, f"rows/{_SWAPS.index((setup, ap))}/{attack}")

    def as_printed(case: tuple[str, str]) -> Iterator[Clause]:
        text = f"{', '.join(case)}, default and re-calibrated statistics"
        adv, clean = (
            [accuracy(case, how, ap) for how in ("Default", "Re-calibration")] for ap in ("AP_adv", "AP_clean")
        )
        yield Clause.robust(f"{text}: AP_adv is robust with default statistics", adv[0], above=VERY_LOW)
        yield Clause.comparable(f"{text}: AP_adv is comparable", *adv)
        yield Clause.almost_no_robustness(f"{text}: AP_clean has almost no robustness", *clean)

    def control(case: tuple[str, str]) -> Iterator[Clause]:
        both = [accuracy(case, how, "AP_adv") for how in ("Re-calibration", "Control")]
        text = f"{', '.join(case)}, statistics of clean and of adversarial images, both re-estimated"
        yield Clause.comparable(f"{text}: AP_adv is comparable", *both)

    cases = [*product(("dual_bn/eps8", "dual_bn/eps16"), ATTACKS.values())]
    return in_parts(for_each(cases, as_printed), for_each(cases, control))


def _locate6(label: Mapping[str, Any], column: str) -> tuple[str, str]:
    if column == "0":  # the same network and images in both cells
        return "standard/eps8", "shared/clean"
    attack = {"Random noise": "noise", "Adversarial perturbation": "pgd10"}[label["perturbation"]]
    return f"standard/{eps_name(column)}", f"shared/{attack}"


@register_study(
    "A/table6",
    locate=_locate6,
    cells=lambda: [standard(eps) for eps in EPSILONS],
    each=(8, 16),
    deviations=("The paper names neither noise nor attack: here uniform noise in the same ball, and PGD-10.",),
)
def table6(values: Values, eps: int) -> Iterator[Clause]:
    """ "The model accuracy drops to zero with adversarial perturbation"; by noise it "only drops by a small margin"."""
    clean = mean(values, "standard/eps8", "shared/clean")
    attacked, noisy = (mean(values, f"standard/eps{eps}", f"shared/{kind}") for kind in ("pgd10", "noise"))
    yield Clause.almost_no_robustness(f"PGD-10 at {eps}/255 leaves almost no accuracy", attacked)
    text = f"noise at {eps}/255 costs a small margin, up to {SMALL_MARGIN:g} points"
    yield Clause(f"{text}: {join_numbers(noisy, clean)}", noisy >= clean - SMALL_MARGIN, SMALL_MARGIN)


@register_study(
    "A/table7",
    locate=_locate,
    cells=lambda: map(setup, ("dual_bn", "dual_linear")),
    deviations=DEVIATIONS,
    printed_elsewhere=lambda: _printed_in("A/table2", "dual_bn/eps16"),
)
def table7(values: Values) -> Iterator[Clause]:
    """Dual Linear "achieves a similar trend and comparable results with Dual BN": every number of both heads.

    The trend: a robust head, and a more accurate clean head with almost no robustness under AutoAttack, far below under
    PGD-10.
    """

    def linear(path: str) -> float:
        return mean(values, "dual_linear/eps16", path)

    def comparable(path: str) -> Iterator[Clause]:
        text = f"Dual Linear is comparable to Dual BN, {path.replace('/', ' head, ')}"
        yield Clause.comparable(text, linear(path), mean(values, "dual_bn/eps16", path))

    yield Clause.higher(
        "the clean head is more accurate than the adversarial one", linear("clean/clean"), linear("adv/clean")
    )
    left = linear("clean/autoattack")
    yield Clause.almost_no_robustness("the clean head has almost no robustness under AutoAttack", left)
    yield Clause.robust("the adversarial head is robust under AutoAttack", linear("adv/autoattack"), above=VERY_LOW)
    for attack in ATTACKS:
        adv, clean = linear(f"adv/{attack}"), linear(f"clean/{attack}")
        yield Clause.far_higher(f"the adversarial head is far more robust, {attack}", adv, clean)
    yield from for_each([f"{branch}/{metric}" for branch in BRANCHES for metric in METRICS], comparable)


@register_study(
    "A/table8",
    locate=_locate,
    cells=lambda: map(setup, ("single", "single_kl", "dual_bn")),
    deviations=(*DEVIATIONS, "The weight of the KL term is not printed: 1 here."),
)
def table8(values: Values) -> Iterator[Clause]:
    """KL "improves the AA result of Single BN significantly"; "clean accuracy and robustness" are above BN_adv's."""
    with_kl, alone = (mean(values, f"{name}/eps16", "shared/autoattack") for name in ("single_kl", "single"))
    text = "under AutoAttack a single BN is significantly more accurate with KL than without"
    yield Clause.higher(text, with_kl, alone, by=SIGNIFICANT)
    yield Clause.robust("a single BN with KL is robust under AutoAttack", with_kl, above=VERY_LOW)
    for metric in METRICS:
        one, dual = mean(values, "single_kl/eps16", f"shared/{metric}"), mean(values, "dual_bn/eps16", f"adv/{metric}")
        yield Clause.higher(f"a single BN with KL beats Dual BN, {metric}", one, dual)
