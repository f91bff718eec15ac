"""The plan of the benchmark of training: configurations, groups that take turns, and checks before any timing."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from advnorm._core.errors import Problem, collect_problems, first_line, unknown_name
from advnorm.bench.plain_loops import has_plain_loop
from advnorm.bench.timing import minimum_problems
from advnorm.bench.training_modes import REFERENCES, TrainMode, load_images
from advnorm.config import Config, Named
from advnorm.config.rows import flat_settings
from advnorm.data import DATASETS, ImageData, resolve_source
from advnorm.training.build import build_model, data_properties
from advnorm.training.cost import forward_flops
from advnorm.training.ranks import Ranks

#: Settings in which the cases of a group may differ. They change the method, not the amount of data or steps.
ALTERNATIVES = ("norm", "norm_options", "dual_head", "objective", "regularizer", "second_pass")


@dataclass(frozen=True)
class TrainPlan:
    """Groups of configurations that take turns, the settings in which they differ, and how each process times them."""

    groups: Sequence[Sequence[Config]]
    settings: Mapping[Config, dict[str, Any]]
    modes: Sequence[TrainMode]
    steps: int
    parts: bool
    start_up: bool
    data_dir: Path | str | None

    def load(self) -> dict[Named, ImageData]:
        """Load the images of all configurations."""
        configs = {config.data: config for group in self.groups for config in group}
        return {data: load_images(config, self.data_dir) for data, config in configs.items()}


def setting_problems(
    configs: Sequence[Config],
    modes: Sequence[str],
    counts: Sequence[int],
    steps: int,
    ranks: Ranks,
    data_dir: Path | str | None,
) -> list[Problem]:
    known = get_args(TrainMode)
    problems = [unknown_name("mode", mode, known) for mode in modes if mode not in known]
    problems += minimum_problems(1, steps=steps, processes=min(counts))

    def conflict(field: str, message: str, hint: str = "") -> None:
        problems.append(Problem(code="conflict", message=message, field=field, hint=hint))

    for count, size in itertools.product(counts, dict.fromkeys(config.batch_size for config in configs)):
        if count > 0 and size % count:
            conflict("processes", f"{count} processes cannot divide a batch of {size}")
    gpus = torch.cuda.device_count()
    if ranks.world > 1 and counts != (ranks.world,):
        conflict("processes", f"torchrun started {ranks.world} processes; leave processes out")
    elif ranks.device.type == "cuda" and max(counts) > gpus:
        conflict("processes", f"{max(counts)} processes need {max(counts)} GPUs, found {gpus}")
    sources = [DATASETS.get(resolve_source(config.data.name)[0]) for config in configs]
    if data_dir is not None and not any(source.needs_root for source in sources):
        conflict("data_dir", f"{configs[0].data.name} images have no folder", "use --set data=cifar10, or leave it out")
    if any(config.compile != "auto" for config in configs):
        conflict("compile", "{field} must be 'auto' in this benchmark", "omit it, and use --mode eager or compiled")
    if set(modes) & set(REFERENCES) and not all(any(map(has_plain_loop, group)) for group in group_configs(configs)):
        own = " ".join(mode for mode in modes if mode in known and mode not in REFERENCES) or "eager"
        message = (
            "the plain loops train hybrid PGD with SGD and default settings, and a group of cases has no such case"
        )
        conflict("mode", message, f"use --mode {own}, or let only {', '.join(ALTERNATIVES)} differ from a default case")
    return problems


def size_problems(config: Config, data: ImageData) -> list[Problem]:
    """Problems of the network, its norm and the images, found without memory."""
    if config.batch_size > len(data):
        message, hint = f"{{field}} is above the {len(data)} images", "use a smaller batch_size, or set data.size"
        return [Problem(code="conflict", message=message, field="batch_size", got=config.batch_size, hint=hint)]
    problems: list[Problem] = []
    try:
        with collect_problems(problems), torch.device("meta"):
            build_model(config, data_properties(data))
            count_flops(config, data)
    except Exception as error:  # a network may raise anything for a shape that it cannot take
        size = "×".join(map(str, data.image_shape))
        message = f"{config.model.name} cannot take images of {size}: {first_line(error)}"
        hint = "change data.image_size; networks of a fixed size have the option model.img_size"
        problems.append(Problem(code="wrong_shape", message=message, field="model", hint=hint))
    return problems


def group_configs(configs: Sequence[Config]) -> list[list[Config]]:
    """Configurations that differ only in ``ALTERNATIVES`` are one group."""
    groups: dict[str, list[Config]] = {}
    for config in configs:
        others = {name: value for name, value in config.to_dict().items() if name not in ALTERNATIVES}
        groups.setdefault(json.dumps(others, sort_keys=True), []).append(config)
    return list(groups.values())


def differences(configs: Sequence[Config]) -> dict[Config, dict[str, Any]]:
    """The settings in which configurations differ, except for those that have a field of their own in a row."""
    settings = {config: flat_settings(config) for config in configs}
    names = dict.fromkeys(name for each in settings.values() for name in each)
    own = ("model", "batch_size", "attack.steps", "data.image_size", "data.size")
    names = [name for name in names if name not in own and len({str(each.get(name)) for each in settings.values()}) > 1]
    return {config: {name: each.get(name) for name in names} for config, each in settings.items()}


def count_flops(config: Config, data: ImageData) -> float:
    """Count the operations of an image's forward."""
    options = {key: value for key, value in config.model.options.items() if key not in ("mean", "std", "normalize")}
    shape = tuple(data.image_shape)
    return forward_flops(config.model.name, shape, data.num_classes, norms=config.norm != "none", **options)
