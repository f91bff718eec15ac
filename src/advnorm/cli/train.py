"""The verbs ``train`` and ``show``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from advnorm.engine import PREEMPTED, Config, Run, load_config
from advnorm.engine import train as train_by

#: Exit status of a command that was ended by Ctrl-C: 128 and the number of SIGINT.
INTERRUPTED = 130


def configured(source: str | None, overrides: Sequence[str]) -> Config:
    """The configuration in a file, or the default one, with overrides."""
    return Config().with_overrides(overrides) if source is None else load_config(source, overrides)


def run(console: Console, config: Config, **settings: Any) -> int:
    """Train, say what came out and how to judge it; the exit status."""
    try:
        result = train_by(config, progress=console.is_terminal, **settings)
    except KeyboardInterrupt:
        console.print("interrupted; the same command goes on from the last checkpoint", highlight=False)
        return INTERRUPTED
    if os.environ.get("RANK", "0") != "0":  # one of several processes tells
        return 0 if result.finished else PREEMPTED
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
    console.print(f"judge it: advnorm evaluate {result.folder}{_routes(result)}", highlight=False, soft_wrap=True)
    return 0


def _routes(result: Run) -> str:
    from advnorm.engine.case import branches

    names = branches(result.model())
    return f" --route {' '.join(names)}" if names else ""
