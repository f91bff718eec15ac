"""Operations of a training, estimated from its settings on the meta device; no data are read."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from advnorm.config import Config
from advnorm.data import DATASETS, resolve_source
from advnorm.models import create_model
from advnorm.models.libraries import split_name
from advnorm.objectives import OBJECTIVES

#: Cost in forwards: an attack's step goes forward and back to the image, a training pass also to the weights.
ATTACK_PASSES, TRAINING_PASSES = 2, 3
#: Cost of LIGS: two gradients of the image, and the gradient of each.
LIGS_PASSES = 2 * (ATTACK_PASSES + TRAINING_PASSES)


def forward_flops(
    model: str, image_shape: tuple[int, ...], num_classes: int, *, norms: bool = True, **options: Any
) -> float:
    """Operations of one image's forward through a named network, without those of its norms."""
    return _forward_flops(json.dumps([model, "bn" if norms else "none", options]), image_shape, num_classes)


@cache
def _forward_flops(spec: str, image_shape: tuple[int, ...], num_classes: int) -> float:
    name, norm, options = json.loads(spec)
    norm = None if split_name(name) else norm  # networks of libraries keep their own norms
    with torch.device("meta"):
        network = create_model(name, num_classes, norm, in_channels=image_shape[0], normalize=False, **options)
        return network_flops(network.eval(), torch.zeros(1, *image_shape))


def network_flops(network: nn.Module, x: Tensor) -> float:
    """Count the operations of a forward, without those of norms."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        network(x)
    return float(counter.get_total_flops())


@cache
def training_flops(config: Config) -> float | None:
    """Operations of a whole training; None if the number of images depends on files."""
    name, _ = resolve_source(config.data.name)
    data = DATASETS.get("cifar10" if name == "features" else name)
    if data.size is None:
        return None
    images, side, classes = data.size
    images = min(images, config.data.options.get("limit") or images)
    options = {key: value for key, value in config.model.options.items() if key not in ("mean", "std", "normalize")}
    side = config.data.options.get("image_size", side)
    forward = forward_flops(config.model.name, (3, side, side), classes, norms=config.norm != "none", **options)
    return forward * images * training_passes(config)


def training_passes(config: Config) -> float:
    """Cost of an image in all epochs in forwards: fewer while the attack's steps warm up."""
    scaled = config.scaled()
    return sum(passes(scaled, epoch) for epoch in range(scaled.epochs))


def passes(config: Config, epoch: int | None = None) -> float:
    """Cost of an image in an epoch in forwards, by default after all warm-ups; backward passes count as forwards."""
    kind = OBJECTIVES.get(config.objective.name)
    share = config.objective.options.get("clean_share", 1.0)
    domains = sum(share if domain == "clean" else 1.0 for domain in kind.domains)
    measured = TRAINING_PASSES * domains + (LIGS_PASSES if config.regularizer is not None else 0)
    if config.second_pass is not None and (epoch is None or epoch >= config.second_pass_warmup_epochs):
        samples = config.second_pass.options.get("samples", 1.0)
        measured *= 1 + (samples if isinstance(samples, float) else min(1.0, samples / config.batch_size))
    if not kind.needs_attack:
        return measured
    attack = kind.adapt_attack(config.build_attack(epoch))
    measured += getattr(attack, "loss", None) == "kl"  # the clean output
    return ATTACK_PASSES * getattr(attack, "steps", 1) * getattr(attack, "restarts", 1) + measured
