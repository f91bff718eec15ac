"""The ways to train that the benchmark of training compares, and the images that they train on."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from advnorm._core.errors import ConfigError
from advnorm.bench.plain_loops import PlainLoop
from advnorm.config import Config, Named
from advnorm.data import ImageData, load, resolve_source
from advnorm.training.compilation import Log
from advnorm.training.journal import Journal
from advnorm.training.loop import TrainingLoop
from advnorm.training.ranks import Ranks
from advnorm.training.run_folder import Run

#: Loops in plain PyTorch, and the steps of ``advnorm train``.
TrainMode = Literal["plain", "careful", "careful_compiled", "eager", "compiled"]
#: The plain loops, see :class:`PlainLoop`; ratios are relative to each of them.
REFERENCES: tuple[TrainMode, ...] = ("plain", "careful", "careful_compiled")
#: Runs a number of training steps.
Steps = Callable[[int], None]


def build_training(mode: TrainMode, config: Config, data: ImageData, ranks: Ranks, log: Log) -> Steps:
    """Build a training; ``log`` gets its fallbacks."""
    if mode in REFERENCES:
        careful, compiled = mode != "plain", mode == "careful_compiled"
        return PlainLoop(config, data, ranks, log, careful=careful, compiled=compiled).run
    config, journal = replace(config, compile=mode == "compiled"), Journal(Path("bench"), active=False)
    loop = TrainingLoop(Run(Path("bench")), config, data, ranks, journal, workers=None, on_fallback=log)
    loop.prepare(0)
    batches = itertools.chain.from_iterable(loop.loader.epoch(epoch, 0) for epoch in itertools.count())

    def run(steps: int) -> None:
        with loop.program.scope():
            for batch in itertools.islice(batches, steps):
                loop.train_step(batch)

    return run


def load_images(config: Config, data_dir: Path | str | None) -> ImageData:
    """Read or generate the training images of a configuration."""
    data = load(config.data.name, "train", data_dir, **config.data.options)
    if not isinstance(data, ImageData):
        message = f"{config.data.name} decodes its images from files, and the plain loops have them in memory"
        hint = "use data=synthetic with data.image_size and data.classes, or an array file"
        raise ConfigError("not_supported", message, field="data", hint=hint)
    return data


def with_enough_images(config: Config) -> Config:
    """Return the configuration with a size of its synthetic images that gives several batches, unless it is set."""
    if resolve_source(config.data.name)[0] != "synthetic" or "size" in config.data.options:
        return config
    side = config.data.options.get("image_size", 32)
    size = max(4 * config.batch_size, 2**21 // side**2)  # 2048 images of 32 pixels, fewer large ones
    return replace(config, data=Named(config.data.name, **config.data.options, size=size))
