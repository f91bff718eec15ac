"""The verb ``train``, and how a name on the command line becomes a configuration."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from advnorm.cli.command import console
from advnorm.cli.options import DataDir, Device, Overrides, Source

if TYPE_CHECKING:
    from advnorm.config import Config
    from advnorm.studies import Cell, Study

#: Suffixes of configuration files.
SUFFIXES = (".yaml", ".yml", ".json", ".py")


def train(
    source: Source = None,
    overrides: Overrides = None,
    seed: Annotated[int | None, typer.Option(help="Seed of weights, batches and noise. Default: the file's.")] = None,
    out: Annotated[Path, typer.Option(help="Parent folder of the run's folder.")] = Path("runs"),
    data_dir: DataDir = None,
    device: Device = None,
    download: Annotated[bool, typer.Option(help="Download a missing data set from its official address.")] = False,
    workers: Annotated[int | None, typer.Option(min=0, help="Number of processes that decode image files.")] = None,
    max_minutes: Annotated[
        float | None, typer.Option(help="Stop at a checkpoint after this many minutes (exit status 75).")
    ] = None,
    checkpoint_minutes: Annotated[float, typer.Option(help="Minutes between checkpoints within an epoch.")] = 10,
    tensorboard: Annotated[bool, typer.Option(help="Also write TensorBoard events.")] = False,
) -> int:
    """Train a network. The same command resumes an interrupted run.

    Exit status: 0 finished, 2 error, 75 stopped before the end, 130 Ctrl-C.
    Examples: `advnorm train --set norm=dual_bn eps=0.2`,
    `advnorm train recipes/cifar10_eps16.yaml --set norm=dual_bn --data-dir data --seed 0`,
    `torchrun --nproc-per-node 8 -m advnorm train recipes/cifar10_eps16.yaml --data-dir data`
    """
    from advnorm._core.exit_codes import INTERRUPTED, PREEMPTED
    from advnorm.training import train as train_config

    config = resolve_config(source, overrides or ())
    try:
        run = train_config(
            config,
            seed=seed,
            out=out,
            data_dir=data_dir,
            device=device,
            download=download,
            workers=workers,
            max_minutes=max_minutes,
            checkpoint_minutes=checkpoint_minutes,
            progress=True,
            tensorboard=tensorboard,
        )
    except KeyboardInterrupt:
        console.print("interrupted; the same command resumes from the last checkpoint", highlight=False)
        return INTERRUPTED
    if os.environ.get("RANK", "0") != "0":  # one of several processes prints
        return 0 if run.finished else PREEMPTED
    if not run.finished:
        console.print(f"stopped before the end: {run.folder}; the same command resumes it", highlight=False)
        return PREEMPTED
    for name, row in (("best", run.record["best"]), ("last", run.record["last"])):
        if row is not None and "held_out" in row:
            accuracy = ", ".join(f"{key} {value:.1%}" for key, value in row["held_out"].items() if key != "score")
            console.print(f"{name}: epoch {row['epoch']}, held-out {accuracy}", highlight=False)
    console.print(f"run: {run.folder}", highlight=False, markup=False, soft_wrap=True)
    own_code = ["--import", source] if source and source.endswith(".py") and _uses_own_code(config) else []
    words = ["advnorm", *own_code, "evaluate", str(run.folder), *(["--data-dir", str(data_dir)] if data_dir else [])]
    console.print(f"evaluate it: {shlex.join(words)}", highlight=False, markup=False, soft_wrap=True)
    return 0


def find_study(source: str | None) -> tuple[Study, Cell | None] | None:
    """Return the study, and the cell if one is named; ``None`` if ``source`` is a file."""
    if source is None or Path(source).is_file() or Path(source).suffix in SUFFIXES:
        return None
    from advnorm.studies.registry import find, names_paper

    return find(source) if names_paper(source) else None


def resolve_config(source: str | None, overrides: Sequence[str]) -> Config:
    """Return the configuration of a file or of a cell such as ``A/table3/dual_bn/eps16``; by default, ``Config()``."""
    from advnorm._core.errors import ConfigError
    from advnorm.config import Config, load_config

    if source is None:
        return Config().with_overrides(overrides)
    if Path(source, "config.yaml").is_file():
        file = Path(source, "config.yaml")
        raise ConfigError("wrong_type", f"{source} is a folder", field="source", hint=f"use {file}")
    if find_study(source) is not None:
        from advnorm.studies import get

        return get(source).with_overrides(overrides)
    return load_config(source, overrides)


def _uses_own_code(config: Config) -> bool:
    """Whether the model or the data set is registered outside this package."""
    from advnorm.data import DATASETS
    from advnorm.models import MODELS

    makers = MODELS.get(config.model.name).build, DATASETS.get(config.data.name).read
    names = [getattr(getattr(maker, "func", maker), "__module__", "") for maker in makers]
    return not all(name.startswith("advnorm.") for name in names)
