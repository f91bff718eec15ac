"""The trainings of paper A and their cells."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from advnorm.config import AttackConfig, Config, Named
from advnorm.papers.recipe import sgd
from advnorm.studies.claims import Margin
from advnorm.studies.study import Cell, Measure

EPSILONS = ("8/255", "16/255")
#: PGD-10 with steps of 2/255 (sec. 2), and AutoAttack.
ATTACKS = {"pgd10": "pgd10-step2", "autoattack": "autoattack"}
BRANCHES = ("clean", "adv")
PER_SAMPLE_NORMS = ("ln", "gn", "in")
VERY_LOW = Margin(
    10.0,
    "very low robustness: up to {0} %; robust: more than {0} %",
    "our margin: the paper writes very low for 7.03 and 0.48 %, and names no limit of robust",
)
SIGNIFICANT = Margin(
    3.0, "significant: more than {} points", "our margin: the paper calls 1.6 and 1.8 points not significant"
)


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


#: Settings that the paper does not print; its cited recipe (Pang et al. 2020) fills the others.
DEVIATIONS = (
    "The paper names its network, ResNet18, in section 5.2 only: it is the network of all trainings here.",
    "PGD-10 and the training attack start uniformly in the ball and use running statistics: the paper names neither.",
)
