"""The verb ``train``, and how a name on the command line becomes a configuration."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from advnorm.cli.command import INTEGERS, KEY_VALUE, own_code, print_command, run_each, say
from advnorm.cli.options import DataDir, Device, Overrides, Source

if TYPE_CHECKING:
    from advnorm.config import Config
    from advnorm.studies import Cell, Study
    from advnorm.training import Run


def train(
    source: Source = None,
    overrides: Overrides = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of weights, batches and noise. Default: that of the configuration.")
    ] = None,
    seeds: Annotated[list[int] | None, typer.Option(metavar=INTEGERS, help="Train a run for each seed.")] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(metavar=KEY_VALUE, help="Train a run for each value: --sweep norm=bn,dual_bn eps=8/255,16/255."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Parent folder of the run's folder.")] = Path("runs"),
    data_dir: DataDir = None,
    device: Device = None,
    download: Annotated[
        bool, typer.Option("--download", help="Download a missing data set from its official address.")
    ] = False,
    workers: Annotated[int | None, typer.Option(min=0, help="Number of processes that decode image files.")] = None,
    max_minutes: Annotated[
        float | None, typer.Option(help="Stop at a checkpoint after this many minutes (exit status 75).")
    ] = None,
    checkpoint_minutes: Annotated[float, typer.Option(help="Minutes between checkpoints within an epoch.")] = 10,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also write TensorBoard events.")] = False,
) -> int:
    """Train a network, or several: one for each seed and each combination of a sweep. The same command resumes.

    Exit status: 0 finished, 1 one of several runs failed, 2 error, 70 crash, 75 stopped before the end,
    130 Ctrl-C.
    Examples: `advnorm train --set norm=dual_bn eps=0.2`,
    `advnorm train --sweep norm=bn,dual_bn --seeds 0 1 2`,
    `advnorm train recipes/cifar10_eps16.yaml --set norm=dual_bn --data-dir data --seed 0`,
    `torchrun --nproc-per-node 8 -m advnorm train recipes/cifar10_eps16.yaml --data-dir data`
    """
    from advnorm._core.errors import ConfigError
    from advnorm._core.exit_codes import INTERRUPTED, PREEMPTED
    from advnorm._core.user_modules import registers_parts
    from advnorm.config.sweep import sweep_configs
    from advnorm.training import Run
    from advnorm.training import train as train_config

    if seed is not None and seeds:
        raise ConfigError("conflict", "--seed and --seeds exclude each other", field="seeds")
    chosen = [seed] if seed is not None else seeds
    swept = [*(sweep or ()), *([f"seed={','.join(map(str, chosen))}"] if chosen else [])]
    configs = sweep_configs(resolve_config(source, overrides or ()), swept)
    lead = os.environ.get("RANK", "0") == "0"  # one of several processes prints
    began, runs = time.monotonic(), list[Run]()

    def train_one(config: Config) -> int:
        run = train_config(
            config,
            out=out,
            data_dir=data_dir,
            device=device,
            download=download,
            workers=workers,
            max_minutes=max_minutes and max(min(max_minutes, 0), max_minutes - (time.monotonic() - began) / 60),
            checkpoint_minutes=checkpoint_minutes,
            progress=True,
            tensorboard=tensorboard,
        )
        if lead:
            _print_run(run)
        runs.append(run)
        return 0 if run.finished else PREEMPTED

    try:
        status = run_each(
            {f"{config.run_name}-seed{config.seed}": config for config in configs}, train_one, quiet=not lead
        )
    except KeyboardInterrupt:
        say("interrupted; the same command resumes from the last checkpoint")
        return INTERRUPTED
    if lead and runs and status != PREEMPTED:
        imported = [Path(code).resolve() for code in own_code if code.endswith(".py")]
        if source and source.endswith(".py") and registers_parts(source) and Path(source).resolve() not in imported:
            own_code.append(source)
        given = [*(["--device", device] if device else []), *(["--data-dir", data_dir] if data_dir else [])]
        folders = [run.folder for run in runs]
        print_command("evaluate it" if len(runs) == 1 else "evaluate them", "evaluate", *folders, *given)
    return status


def _print_run(run: Run) -> None:
    """Print the results of a run, or that it has stopped."""
    if not run.finished:
        say(f"stopped before the end: {run.folder}; the same command resumes it")
        return
    for name, row in (("best", run.record["best"]), ("last", run.record["last"])):
        if row is not None and "held_out" in row:
            accuracy = ", ".join(f"{key} {value:.1%}" for key, value in row["held_out"].items() if key != "score")
            say(f"{name}: epoch {row['epoch']}, held-out {accuracy}")
    say(f"run: {run.folder}")


def find_study(source: str | None) -> tuple[Study, Cell | None] | None:
    """Return the study, and the cell if one is named; ``None`` if ``source`` is a file."""
    from advnorm.config.files import READERS

    if source is None or Path(source).is_file() or Path(source).suffix in READERS:
        return None
    from advnorm.studies.registry import find, names_paper

    return find(source) if names_paper(source) else None


def resolve_config(source: str | None, overrides: Sequence[str]) -> Config:
    """Return the configuration of a file or of a cell such as ``A/table3/dual_bn/eps16``; by default, ``Config()``."""
    from advnorm._core.errors import ConfigError
    from advnorm.config import Config, load_config
    from advnorm.config.files import READERS

    if source is None:
        return Config().with_overrides(overrides)
    if Path(source, "config.yaml").is_file():
        raise ConfigError("wrong_type", f"{source} is a folder", "source", hint=f"use {Path(source, 'config.yaml')}")
    if find_study(source) is not None:
        from advnorm.studies import get

        return get(source).with_overrides(overrides)
    if Path(source).suffix not in READERS:
        words = f"{source} is neither a file that ends in {', '.join(READERS)} nor a cell of a study"
        hint = "advnorm ls studies lists the studies; a setting is written --set KEY=VALUE"
        raise ConfigError("unknown_name", words, field=source, hint=hint)
    return load_config(source, overrides)
