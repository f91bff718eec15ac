"""The trainings and cells of paper E, and the training that a printed row names.

A cell is named by its strategy, the steps of its training attack and whatever differs from the paper's default:
``mbn_hybrid/pgd5/running``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from advnorm.config import AttackConfig, Config, Named
from advnorm.papers.recipe import sgd
from advnorm.studies.claims import Values, mean
from advnorm.studies.protocols import on_imagenette, with_search
from advnorm.studies.registry import register_protocol
from advnorm.studies.study import Cell, Measure

STEPS = (5, 10, 20, 30)
#: Step sizes of the training attack in 255ths, if not 1 (footnote 6).
STEP_SIZES = {5: 4, 10: 2}
DEPTHS = (152, 200, 338, 518, 638)
#: Steps of the attacks of evaluation (table 7, fig. 2 and 3).
EVALUATION_STEPS = (10, 20, 100, 500, 2000)
DEVIATIONS = (
    "Batch statistics are those of the images on one device: 32 with the paper's 128 GPUs, the whole batch on one.",
    "Where the paper is silent, settings are those of the pipeline that it names, without its colour jitter; ALP's "
    "weight is that of Kannan et al. 2018.",
)
#: A placeholder in a configuration for the run of the cell before.
RUN_BEFORE = "the run of the cell before"


def adversarial(steps: int = 30) -> Config:
    """100% adv + 0% clean (sec. 3): targeted PGD-30, 110 epochs, decays at 35, 70 and 95.

    Where the paper is silent, the settings are those of the pipeline that it names,
    facebookresearch/ImageNet-Adversarial-Training: a learning rate of 0.1 per 256 images after a warm-up of 5 epochs,
    Nesterov, decay of the weights only, label smoothing, and batch statistics over the 32 images of each of 128 GPUs,
    that is, not synchronized. Its colour jitter is left out.
    """
    return sgd(
        Named("imagenet_resnet152"),
        Named("imagenet", image_size=224),
        objective=Named("classical"),
        eps="16/255",
        attack=AttackConfig(steps=steps, step_size=f"{STEP_SIZES.get(steps, 1)}/255", start=0.2, target="random"),
        epochs=110,
        batch_size=4096,
        lr=1.6,
        nesterov=True,
        weight_decay=1e-4,
        norm_weight_decay=False,
        label_smoothing=0.1,
        milestones=(35.0, 70.0, 95.0),
        warmup_epochs=5.0,
    )


def hybrid(steps: int = 30, share: float = 1.0) -> Config:
    """100% adv + a share of clean images (eq. 1); the batch size counts the adversarial ones."""
    return replace(adversarial(steps), objective=Named("hybrid", clean_weight=0.5, clean_share=share))


def alp(steps: int = 30) -> Config:
    """100% adv + 100% clean, ALP. Its weight is not printed: here that of Kannan et al. 2018."""
    return replace(adversarial(steps), objective=Named("alp", clean_weight=0.5, pairing_weight=0.5))


def clean() -> Config:
    """0% adv + 100% clean."""
    return replace(adversarial(), objective=Named("standard"))


def mbn(config: Config) -> Config:
    """Mixture BN: one set for clean images, one for adversarial images (sec. 4.2)."""
    return replace(config, norm="dual_bn")


def running(config: Config) -> Config:
    """Running statistics in the last 10 epochs (sec. 4.3), a star in the tables."""
    return replace(config, running_epochs=10)


def batch(config: Config, size: int) -> Config:
    return replace(config, batch_size=size, lr=0.1 * size / 256)


def depth(config: Config, layers: int) -> Config:
    return replace(config, model=Named(f"imagenet_resnet{layers}"))


def with_uniform_start(config: Config) -> Config:
    """Training attacks that always start anywhere in the cube (appendix A)."""
    return replace(config, attack=replace(config.attack, start="uniform"))


def rmsprop(config: Config, rate: float = 0.1) -> Config:
    """The optimizer of the original ALP (appendix A); like the pipeline's 0.1, its rate is per 256 images."""
    return replace(config, optimizer="rmsprop", nesterov=False, lr=rate * config.batch_size / 256)


def exponential(config: Config) -> Config:
    """The decay of the original ALP (appendix A): ×0.94 every two epochs, 220 epochs."""
    return replace(config, epochs=220, gamma=0.94, milestones=tuple(float(epoch) for epoch in range(2, 220, 2)))


def norms_tuned(objective: str) -> Config:
    """The norms only, from another training's weights (sec. 4.4): "a few epochs" are 5 here, at a rate of 0.01."""
    return replace(
        adversarial(),
        objective=Named(objective),
        weights=RUN_BEFORE,
        train_only="norms",
        epochs=5,
        lr=0.01,
        schedule="constant",
        milestones=(),
        warmup_epochs=0.0,
    )


def consistent_strategies(steps: int) -> list[Config]:
    """The strategies that the paper trains with running statistics."""
    return [adversarial(steps), mbn(hybrid(steps)), mbn(alp(steps))]


# -- cells -------------------------------------------------------------------------------------------------------------


def name_of(config: Config) -> str:
    """``adv/pgd30/running/batch512``: the strategy, the steps of the attack, and what differs from the default."""
    strategy = {"standard": "clean", "classical": "adv"}.get(config.objective.name, config.objective.name)
    share = config.objective.options.get("clean_share", 1)
    prefix = {"dual_bn": "mbn_", "gn": "gn_"}.get(str(config.norm), "")
    rate = f"{config.lr * 256 / config.batch_size:g}"
    network = config.model.name.removeprefix("imagenet_")
    parts = {
        f"{prefix}{strategy}{f'{share:.0%}'[:-1] if share < 1 else ''}": True,
        f"pgd{config.attack.steps}": strategy != "clean",
        "running": config.running_epochs > 0,
        "uniform": config.attack.start == "uniform",
        f"batch{config.batch_size}": config.batch_size != 4096,
        f"eps{str(config.eps).split('/')[0]}": config.eps != "16/255",
        config.optimizer: config.optimizer != "sgd",
        f"lr{rate}": rate != "0.1",
        "exponential": config.gamma != 0.1,
        network: network != "resnet152",
    }
    return "/".join(part for part, differs in parts.items() if differs)


def accuracies(*steps: int, route: str | None = None) -> tuple[Measure, ...]:
    """Measure accuracy on clean images and under targeted PGD with steps of 1/255 from a uniform start (sec. 3).

    Each number of steps is a measurement of its own, so that studies share them. (The named pipeline uses 1.6/255 for
    PGD-10, the text 1/255.)
    """
    return tuple(
        Measure(options={"attacks": {f"pgd{n}": f"pgd{n}-step1-targeted"}, "route": [route] if route else []})
        for n in steps
    )


def cell(config: Config, *steps: int) -> Cell:
    """A training evaluated by PGD with these numbers of steps, by default 2000; Mixture BN through MBN_adv."""
    route = "adv" if config.norm == "dual_bn" else None
    return Cell(name=name_of(config), config=config, measures=accuracies(*(steps or (2000,)), route=route))


def clean_cell(layers: int = 152) -> Cell:
    """A training on clean images, evaluated on them. PGD-10 is measured too: a benchmark needs an attack."""
    return cell(depth(clean(), layers), 10)


def deeper_cells() -> list[Cell]:
    return [cell(depth(running(adversarial()), layers)) for layers in DEPTHS]


def robust_accuracy(values: Values, config: Config, steps: int = 2000) -> float:
    branch = "adv" if config.norm == "dual_bn" else "shared"
    return mean(values, name_of(config), f"{branch}/pgd{steps}")


# -- printed rows ------------------------------------------------------------------------------------------------------


def config_of_row(label: Mapping[str, Any]) -> Config:
    """Return the training that a row's label names."""
    strategy, norm, steps = label["strategy"], label.get("norm", ""), label.get("pgd_n", 30)
    share = int(re.findall(r"(\d+)% clean", strategy)[0])
    if strategy.startswith("0% adv"):
        config = clean()
    elif "ALP" in strategy:
        config = alp(steps)
    elif norm.startswith("MBN"):
        config = hybrid(steps)  # table 5 prints 0% clean, a misprint
    else:
        config = hybrid(steps, share / 100) if share else adversarial(steps)
    if norm:
        config = replace(config, norm="gn") if norm == "GN" else mbn(config)
    if label.get("running_statistics"):
        config = running(config)
    size = label.get("batch_size", 4096)
    config = batch(config, 8192 if size == 8196 else size)  # table 7 prints 8196, table 6 and the text 8192
    return depth(config, int(label.get("network", "ResNet-152").removeprefix("ResNet-")))


def locate(label: Mapping[str, Any], column: str) -> tuple[str, str]:
    """A row is a training, a column a measurement: ``pgd2000`` of MBN_adv is ``adv/pgd2000``."""
    branch = {"MBN_clean": "clean", "MBN_adv": "adv", "MBN": "adv"}.get(label.get("norm", ""), "shared")
    return name_of(config_of_row(label)), f"{branch}/{column}"


# -- the stand-in for ImageNet -----------------------------------------------------------------------------------------

#: Networks of the stand-in: depths grow in the same order. The network below the default one is narrower instead.
STAND_IN_NETWORKS = {
    "imagenet_resnet101": Named("imagenet_resnet18", width=0.75),
    "imagenet_resnet152": Named("imagenet_resnet18"),
    "imagenet_resnet200": Named("imagenet_resnet34"),
    "imagenet_resnet338": Named("imagenet_resnet50"),
    "imagenet_resnet518": Named("imagenet_resnet101"),
    "imagenet_resnet638": Named("imagenet_resnet152"),
}
#: The default batch of 4096 images becomes 256, of 9,469 training images.
SMALLER_BATCH = 16


@register_protocol("E", "imagenette")
def on_stand_in(cell: Cell) -> Cell:
    """Smaller networks and batches. PGD searches in bf16, because PGD-2000 is long."""
    planned = on_imagenette(cell, networks=STAND_IN_NETWORKS, smaller=SMALLER_BATCH)
    measures = (replace(one, options=with_search(one.options, "bf16", "pgd")) for one in planned.measures)
    return replace(planned, measures=tuple(measures))
