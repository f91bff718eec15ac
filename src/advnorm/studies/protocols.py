"""The protocols of a study: as printed, shortened, on a stand-in for ImageNet, or a check that everything works.

A protocol replaces settings of a cell. Those of a paper, such as what its authors' code does, are functions beside its
studies (:data:`advnorm.studies.registry.PAPER_PROTOCOLS`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, get_args

from advnorm._core.errors import ConfigError, unknown_name
from advnorm.attacks.surrogate import Precision
from advnorm.config import Config, Named
from advnorm.studies.study import Cell, Measure, Protocol
from advnorm.studies.uncertainty import ANALYSIS_IMAGES

#: The shortened schedule: epochs, batch size, norm at which the whole gradient is clipped.
FAST_EPOCHS, FAST_BATCH, FAST_CLIP = 30, 512, 1.0
#: Precisions of a search that serve the same measurement: a float32 forward decides what counts.
EQUIVALENT_SEARCHES = ("float32", "bf16")
#: The stand-in for ImageNet: pixels, epochs and images of an evaluation.
STAND_IN_PIXELS, STAND_IN_EPOCHS, STAND_IN_IMAGES = 128, 15, 200
_NO_STEPS: dict[str, Any] = {"milestones": (), "gamma": Config.gamma, "warmup_epochs": 0.0}


def plan_cell(cell: Cell, protocol: Protocol) -> Cell:
    """Return a cell as a protocol runs it."""
    known = {"paper": lambda cell: cell, "fast": fast, "smoke": smoke, **cell.protocols}
    if protocol not in known:
        raise ConfigError.listing([unknown_name("protocol", protocol, known)])
    return known[protocol](cell)


def fast(cell: Cell) -> Cell:
    """One cycle of 30 epochs at batch 512, and analyses on 1,000 images: a recipe of its own, named with its results.

    - AutoAttack searches in bf16; strict float32 decides.
    - The learning rate of SGD grows with the batch size, that of adaptive optimizers with its square root.
    - The groups of a second pass keep their size.
    - Gradients are clipped if the network does not end with a norm: at this learning rate it diverges otherwise.
    - Cells that differ only in the schedule (B/table3's 1.20x, E/table3's decay) become the same training.
    """
    return shorten(cell, epochs=FAST_EPOCHS, batch_size=max(FAST_BATCH, cell.config.batch_size))


def on_imagenette(cell: Cell, *, networks: Mapping[str, Named] | None = None, smaller: int = 1) -> Cell:
    """A cell on ImageNet becomes one on Imagenette at 128 pixels with one cycle of 15 epochs; others are ``fast``.

    ``networks`` replaces networks by smaller ones. The batch is ``smaller`` times smaller; evaluations use 200 images.
    """
    config = cell.config
    if config.data.name not in ("imagenet", "imagenette"):
        return fast(cell)
    model = (networks or {}).get(config.model.name, config.model)
    data = Named("imagenette", image_size=STAND_IN_PIXELS, resize=STAND_IN_PIXELS)
    planned = shorten(
        replace(cell, config=replace(config, model=model, data=data)),
        epochs=STAND_IN_EPOCHS,
        batch_size=config.batch_size // smaller,
    )
    measures = (
        replace(one, options={**one.options, "limit": STAND_IN_IMAGES}) if one.name == "benchmark" else one
        for one in planned.measures
    )
    return replace(planned, measures=tuple(measures))


def shorten(cell: Cell, *, epochs: int, batch_size: int) -> Cell:
    """The same training with one cycle of fewer epochs and another batch size; see :func:`fast`."""
    config = cell.config
    larger = batch_size / config.batch_size
    epochs = min(epochs, config.epochs)
    share = epochs / config.epochs
    return replace(
        cell,
        measures=tuple(_shorten_measure(measure) for measure in cell.measures),
        config=replace(
            config,
            epochs=epochs,
            batch_size=batch_size,
            lr=config.lr * (larger if config.optimizer == "sgd" else larger**0.5),
            second_pass=_with_groups(config.second_pass, lambda groups: round(groups * larger)),
            schedule="one_cycle",
            **_NO_STEPS,
            nesterov=config.optimizer == "sgd",
            grad_clip=config.grad_clip or (FAST_CLIP if cell.clip or _ends_without_norm(config) else None),
            running_epochs=min(config.running_epochs, epochs // 10),
            snapshots=tuple(dict.fromkeys(max(1, round(share * epoch)) for epoch in config.snapshots)),
            validate_every=5 if config.validate_every else 0,
        ),
    )


def _ends_without_norm(config: Config) -> bool:
    model = config.model
    bare = model.name.startswith("preact_resnet") and not model.options.get("final_norm", False)
    return bare or config.norm == "none" or model.name.startswith("fixup")


def _shorten_measure(measure: Measure) -> Measure:
    options = with_search(measure.options, "bf16", "autoattack")
    if measure.name not in ("benchmark", "metrics") and options.get("limit", ANALYSIS_IMAGES) is None:
        options["limit"] = ANALYSIS_IMAGES
    return replace(measure, options=options)


def without_search(options: Mapping[str, Any]) -> dict[str, Any]:
    """Remove an equivalent precision of the search from a benchmark's attacks. AutoAttack then uses bf16 on a GPU."""
    return _map_attacks(options, partial(_without, EQUIVALENT_SEARCHES))


def with_search(options: Mapping[str, Any], precision: Precision, family: str) -> dict[str, Any]:
    """Set the precision in which a benchmark's attacks of a family search, such as ``"autoattack"`` or ``"pgd"``.

    Attacks of other families lose theirs.
    """
    name = re.compile(rf"{family}\d*(-.*)?")

    def change(spec: str) -> str:
        plain = _without(get_args(Precision), spec)
        return f"{plain}-{precision}" if name.fullmatch(plain) else plain

    return _map_attacks(options, change)


def _without(precisions: Iterable[str], spec: str) -> str:
    return re.sub(rf"-({'|'.join(precisions)})(?=-|$)", "", spec)


def _map_attacks(options: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    attacks = options.get("attacks")
    if not isinstance(attacks, Mapping):
        return dict(options)
    return {**options, "attacks": {name: change(spec) for name, spec in attacks.items()}}


def smoke(cell: Cell) -> Cell:
    """Two steps of a narrow network on synthetic images, and attacks of two steps: do all parts work together?"""
    config = cell.config
    small = {"width": 0.125} if not config.model.name.startswith("small") else {}
    name = "imagenet_resnet18" if config.model.name.startswith("imagenet_resnet") else config.model.name
    held_out = 4 if config.held_out else 0
    epochs = 2 if config.running_epochs else 1  # one estimates the running statistics, one trains with them
    smaller = replace(
        config,
        model=Named(name, **{**config.model.options, **small}),
        # Instance norm needs more than one position at the end of an ImageNet network.
        data=Named("synthetic", size=16 // epochs + held_out, image_size=64 if name.startswith("imagenet_") else 32),
        augment="none",
        held_out=held_out,
        validation_images=None,
        epochs=epochs,
        batch_size=8,
        lr=1e-3,  # batches of 8 diverge at the papers' learning rates
        schedule="constant",
        **_NO_STEPS,
        eps_warmup_epochs=0,
        steps_warmup_epochs=0,
        second_pass_warmup_epochs=0,
        running_epochs=epochs - 1,
        snapshots=(1,) if config.snapshots else (),
        budget=1,
        attack=replace(config.attack, steps=2, restarts=1),
        second_pass=_with_groups(config.second_pass, lambda groups: min(2, groups)),  # in a batch of 8
    )
    return replace(cell, config=smaller, measures=tuple(_shrink_measure(measure) for measure in cell.measures))


def _with_groups(second_pass: Named | None, change: Callable[[int], int]) -> Named | None:
    if second_pass is None or "groups" not in second_pass.options:
        return second_pass
    return Named(second_pass.name, **{**second_pass.options, "groups": change(second_pass.options["groups"])})


def _shrink_measure(measure: Measure) -> Measure:
    options = dict(measure.options)
    if measure.name == "benchmark":
        attacks = options["attacks"]
        options["limit"] = 4
        options["attacks"] = {name: spec if spec.startswith("noise") else "pgd2" for name, spec in attacks.items()}
    elif measure.name != "metrics":
        options["limit"] = 8
    if "groups" in options:
        options["groups"] = [1, 2]
    if measure.name == "transfer":
        options["steps"] = 2
    if measure.name == "corruptions":
        options |= {"corruptions": ["gaussian_noise", "fog"], "severities": [1]}
    return replace(measure, options=options)
