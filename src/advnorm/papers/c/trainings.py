"""The trainings of paper C and their cells."""

from __future__ import annotations

from dataclasses import replace

from advnorm.config import AttackConfig, Config, Named
from advnorm.papers.recipe import sgd
from advnorm.studies.protocols import on_imagenette
from advnorm.studies.registry import register_protocol
from advnorm.studies.study import Cell, Measure

#: Data and eps of a training.
SETTINGS = ("cifar10/eps8", "cifar10/eps16", "imagenette/eps16")
LARGE_EPS = "cifar10/eps16"
DEVIATIONS = (
    "Images are cropped and flipped; the paper also scales them and jitters their brightness, without sizes.",
    "The network is a pre-activation ResNet-18 (app. B) with a norm at its end; table 1's caption names ResNet-20.",
    "The paper does not print the size of Imagenette's images (224 here), the number of groups of GN, and a weight of "
    "eq. 21 (1e-4 here).",
)
#: Weight of eq. 21, a sum over thousands of positions. The paper adds it without a weight; 1 would dominate the loss.
LIKELIHOOD_WEIGHT = 1e-4

_STEP_SIZES = {"8": "2/255", "16": "4/255"}


def mat(setting: str, gamma: float, layout: str = "concatenated") -> Config:
    """Mixed adversarial training (eq. 1, app. B): 80 epochs, decayed at 40, 55, 70; the best checkpoint is evaluated.

    The paper also scales images and jitters their brightness. It does not print the size of Imagenette's images.
    """
    data, eps = setting.split("/eps")
    cifar = sgd(
        Named("preact_resnet18", final_norm=True),  # app. B: He et al.; the caption of table 1 says ResNet-20
        Named("cifar10"),
        held_out=0.1,
        validate_every=1,
        validation_attack="training",
        objective=Named("hybrid", clean_weight=gamma, layout=layout),
        eps=f"{eps}/255",
        attack=AttackConfig(steps=10, step_size=_STEP_SIZES[eps]),
        epochs=80,
        lr=0.05,
        milestones=(40.0, 55.0, 70.0),
        snapshots=tuple(range(10, 81, 10)),
    )
    if data == "cifar10":
        return cifar
    images = Named("imagenette", image_size=224)
    return replace(cifar, model=Named("imagenet_resnet34"), data=images, batch_size=64, lr=0.1)


def trades(setting: str, beta: float, layout: str = "concatenated") -> Config:
    """TRADES (eq. 2)."""
    return replace(mat(setting, 0.5), objective=Named("trades", beta=beta, layout=layout))


def with_kl(setting: str, beta: float) -> Config:
    """MAT-Cat-0.5 + KL (eq. 3)."""
    return replace(mat(setting, 0.5), objective=Named("kl", clean_weight=0.5, kl_weight=beta))


def adversarial(setting: str) -> Config:
    """Adversarial Training (eq. 5)."""
    return replace(mat(setting, 0.5), objective=Named("classical"))


def clean(setting: str) -> Config:
    """Normal training, on clean images only."""
    return replace(mat(setting, 0.5), objective=Named("standard"))


def dbn(config: Config) -> Config:
    """The same with Dual Batch Normalization and its likelihood loss (eq. 20, 21)."""
    objective = Named(config.objective.name, **config.objective.options, likelihood_weight=LIKELIHOOD_WEIGHT)
    return replace(config, norm="gmm_bn", objective=objective)


def other_norm(gamma: float, norm: str) -> Config:
    """MAT-Cat with another norm. The paper does not print the number of groups of GN."""
    return replace(mat(LARGE_EPS, gamma), norm=norm)


def name_of(config: Config) -> str:
    """``cifar10/eps16/mat_cat_0.5_dbn_kl_1``: the setting, the objective with its weight, and what is added to it."""
    objective, options = config.objective.name, config.objective.options
    layout = "seq" if options.get("layout") == "sequential" else "cat"
    parts = {
        "adversarial_training": objective == "classical",
        "normal": objective == "standard",
        f"trades_{layout}_{options.get('beta', 0):g}": objective == "trades",
        f"mat_{layout}_{options.get('clean_weight', 0):g}": objective in ("hybrid", "kl"),
        "dbn": config.norm == "gmm_bn",
        f"kl_{options.get('kl_weight', 0):g}": objective == "kl",
    }
    name = "_".join(part for part, present in parts.items() if present)
    norm = "" if config.norm in ("bn", "gmm_bn") else f"/{config.norm}"
    return f"{config.data.name}/eps{str(config.eps).split('/')[0]}/{name}{norm}"


def cell(config: Config, *measures: Measure) -> Cell:
    """By default with clean, PGD-10 (with the step size of training) and AutoAttack accuracy on the test set."""
    pgd10 = f"pgd10-step{str(config.attack.step_size).split('/')[0]}"
    accuracies = Measure(options={"attacks": {"pgd10": pgd10, "autoattack": "autoattack"}})
    return Cell(name=name_of(config), config=config, measures=measures or (accuracies,))


# Its cells on Imagenette keep their network and batch size; those on CIFAR-10 are shortened as usual.
register_protocol("C", "imagenette")(on_imagenette)
