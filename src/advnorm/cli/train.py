"""The verbs ``train`` and ``show``."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from advnorm._core.errors import ConfigError
from advnorm._core.exit_codes import INTERRUPTED, OK, PREEMPTED
from advnorm.config import Config, load_config
from advnorm.data import DATASETS
from advnorm.models import MODELS
from advnorm.studies import Cell, Study, find, get
from advnorm.studies.registry import names_paper
from advnorm.training import train as train_by

#: What the file of a configuration ends in.
SUFFIXES = (".yaml", ".yml", ".json", ".py")


def named(source: str | None) -> tuple[Study, Cell | None] | None:
    """The study, or one and its cell, that a name means; None where it means a file. A misspelt one is refused."""
    if source is None or Path(source).is_file() or Path(source).suffix in SUFFIXES:
        return None
    return find(source) if names_paper(source) else None


def configured(source: str | None, overrides: Sequence[str]) -> Config:
    """The configuration in a file, of a study's cell such as ``A/table3/dual_bn/eps16``, or the default one."""
    if source is not None and Path(source, "config.yaml").is_file():
        raise ConfigError(f"{source} is a folder; its configuration is {Path(source, 'config.yaml')}")
    if source is not None and named(source) is not None:
        return get(source).with_overrides(overrides)
    return Config().with_overrides(overrides) if source is None else load_config(source, overrides)


def run(
    console: Console, config: Config, *, source: str | None = None, data_dir: Path | None = None, **settings: Any
) -> int:
    """Train, say what came out and how to judge it; the exit status. ``source``: the file of the configuration."""
    try:
        result = train_by(config, data_dir=data_dir, progress=True, **settings)
    except KeyboardInterrupt:
        console.print("interrupted; the same command goes on from the last checkpoint", highlight=False)
        return INTERRUPTED
    if os.environ.get("RANK", "0") != "0":  # one of several processes tells
        return OK if result.finished else PREEMPTED
    if not result.finished:
        console.print(
            f"stopped before its end: {result.folder}; the same command goes on", highlight=False, soft_wrap=True
        )
        return PREEMPTED
    for name, row in (("best", result.record["best"]), ("last", result.record["last"])):
        if row is not None and "held_out" in row:
            accuracy = ", ".join(f"{key} {value:.1%}" for key, value in row["held_out"].items() if key != "score")
            console.print(f"{name}: epoch {row['epoch']}, held-out {accuracy}", highlight=False)
    console.print(f"run: {result.folder}", highlight=False, soft_wrap=True)
    first = ["--import", source] if source is not None and source.endswith(".py") and _own(config) else []
    words = ["advnorm", *first, "evaluate", str(result.folder), *(["--data-dir", str(data_dir)] if data_dir else [])]
    console.print(f"judge it: {shlex.join(words)}", highlight=False, soft_wrap=True)
    return OK


def _own(config: Config) -> bool:
    """Whether the model or the data set is registered by code of the user's."""
    makers = MODELS.get(config.model.name).build, DATASETS.get(config.data.name).read
    names = [getattr(getattr(maker, "func", maker), "__module__", "") for maker in makers]
    return not all(name.startswith("advnorm.") for name in names)
