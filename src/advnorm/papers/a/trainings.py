"""The trainings of paper A and their cells."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from advnorm.config import AttackConfig, Config, Named
from advnorm.studies.study import Cell, Measure

EPSILONS = ("8/255", "16/255")
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


def accuracies(*routes: str) -> tuple[Measure, ...]:
    """Measure clean, PGD-10 and AutoAttack accuracy of the last checkpoint, through each of several branches."""
    return (Measure(options={"attacks": ATTACKS, "route": list(routes)}),)


def cell(name: str, config: Config) -> Cell:
    """A cell named by its setup and eps; both branches of a norm or head with two are evaluated."""
    routes = BRANCHES if config.norm not in ("bn", "ln", "gn", "in") or config.dual_head else ()
    return Cell(name=f"{name}/{eps_name(str(config.eps))}", config=config, measures=accuracies(*routes))


def eps_name(eps: str) -> str:
    return f"eps{eps.split('/')[0]}"


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


def per_sample(norm: str) -> Cell:
    return cell(norm, replace(hybrid("16/255"), norm=norm))


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
    return replace(
        hybrid(eps),
        objective=Named("classical"),
        held_out=1000,
        validate_every=1,
        validation_attack=ATTACKS["pgd10"],
    )


def cross_at(eps: str) -> Config:
    """Cross-AT (fig. 1): clean images contribute their statistics only; the weights learn from adversarial images."""
    return replace(along_training(eps), objective=Named("cross"), norm="cross_bn")
