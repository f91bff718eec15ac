"""A: Towards Understanding Dual BN in Hybrid Adversarial Training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from advnorm.engine.config import AttackConfig, Config, Named
from advnorm.studies.base import Cell, Measure, Values, mean, study

BOTH = ("8/255", "16/255")
#: PGD-10 with steps of 2/255 (sec. 2), and AutoAttack.
ATTACKS = {"pgd10": "pgd10-step2", "autoattack": "autoattack"}
BRANCHES = ("clean", "adv")


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


def _check1(values: Values) -> bool:
    return all(
        mean(values, f"dual_bn/eps{eps}", "clean/clean") > mean(values, f"dual_bn/eps{eps}", "adv/clean")
        and mean(values, f"dual_bn/eps{eps}", "adv/autoattack") > mean(values, f"dual_bn/eps{eps}", "clean/autoattack")
        for eps in (8, 16)
    )


@study("A/table1", place=_place, check=_check1)
def table1() -> Iterable[Cell]:
    return [dual(eps) for eps in BOTH]


def _place2(label: Mapping[str, Any], column: str) -> tuple[str, str]:
    if label["method"] == "Cross-Hybrid-AT":  # its adversarial branch, which the clean statistics normalize
        return "cross_bn/eps16", f"adv/{column}"
    return ("single/eps16", f"shared/{column}") if label["test"] == "Single BN" else ("dual_bn/eps16", f"adv/{column}")


def _check2(values: Values) -> bool:
    """Cross-Hybrid-AT is comparable to Hybrid-AT with Dual BN: within 3 points under AutoAttack."""
    gap = mean(values, "cross_bn/eps16", "adv/autoattack") - mean(values, "dual_bn/eps16", "adv/autoattack")
    return abs(gap) <= 3


@study("A/table2", place=_place2, check=_check2)
def table2() -> Iterable[Cell]:
    return [dual("16/255"), cross("16/255"), single("16/255")]


def _check3(values: Values) -> bool:
    """Two sets of affine parameters do it: Setup1 is near Dual BN, Setup2 is well below it at 16/255."""
    best, one, two = (mean(values, f"{name}/eps16", "adv/autoattack") for name in ("dual_bn", "setup1", "setup2"))
    return abs(best - one) < abs(best - two) and best - two > 3


@study("A/table3", place=_place, check=_check3)
def table3() -> Iterable[Cell]:
    return [make(eps) for make in (single, dual, setup1, setup2) for eps in BOTH]


def _place4(label: Mapping[str, Any], column: str) -> tuple[str, str]:
    norm = label["norm"].lower()
    if label["setup"] == "Single AP":
        return f"{norm}/eps16", f"shared/{column}"
    return f"dual_affine_{norm}/eps16", f"{label['branch'].rpartition('_')[2]}/{column}"


def _check4(values: Values) -> bool:
    return all(
        mean(values, f"dual_affine_{norm}/eps16", "adv/autoattack") > mean(values, f"{norm}/eps16", "shared/autoattack")
        for norm in ("ln", "gn", "in")
    )


@study("A/table4", place=_place4, check=_check4)
def table4() -> Iterable[Cell]:
    return [per_sample(norm, dual) for norm in ("ln", "gn", "in") for dual in (False, True)]


def _check7(values: Values) -> bool:
    """Dual Linear shows the trend of Dual BN: one head robust, the other clean."""
    adv, clean = (mean(values, "dual_linear/eps16", f"{head}/autoattack") for head in ("adv", "clean"))
    return adv > clean and mean(values, "dual_linear/eps16", "clean/clean") > mean(
        values, "dual_linear/eps16", "adv/clean"
    )


@study("A/table7", place=_place, check=_check7)
def table7() -> Iterable[Cell]:
    return [dual("16/255"), dual_linear("16/255")]


def _check8(values: Values) -> bool:
    """The KL term turns the false robustness of a single BN into a real one."""
    return _false_share(values, "single_kl/eps16", "shared") < _false_share(values, "single/eps16", "shared")


@study("A/table8", place=_place, check=_check8)
def table8() -> Iterable[Cell]:
    return [single("16/255"), with_kl("16/255"), dual("16/255")]
