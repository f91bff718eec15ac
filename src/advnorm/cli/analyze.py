"""The verb ``analyze``: an analysis by name of one or several training runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from advnorm._core.errors import ConfigError, raise_all
from advnorm._core.records import digest, model_fingerprint, writable_problems
from advnorm._core.settings import convert_options
from advnorm.analysis import ANALYSES
from advnorm.cli import listing
from advnorm.config.text import parse_yaml
from advnorm.evaluation.target import EvaluationTarget, open_run
from advnorm.training.run import Which


def analyze(
    console: Console,
    name: str,
    runs: Sequence[Path],
    *,
    out: Path,
    options: Sequence[str] = (),
    checkpoint: Which | None = None,
    data_dir: Path | None = None,
    attack: str | None = None,
    eps: str | None = None,
    limit: int | None = 1000,
    batch_size: int = 256,
    device: str | None = None,
    seed: int = 0,
) -> int:
    """Run the analysis, write its data and figures, and say where they are."""
    analysis = ANALYSES.get(name)
    settings = parsed(options)
    taken = analysis.options()
    known = {key: parameter for key, parameter in taken.items() if key != "progress"}
    settings, found = convert_options("", known, settings)
    problems: list[Any] = [*found]
    if not analysis.several and len(runs) != 1:
        problems.append(f"{name} takes one run, got {len(runs)}")
    problems += writable_problems(out / f"{name}.json")
    raise_all(problems, "bad analysis")
    subjects = [
        open_run(
            run,
            checkpoint=checkpoint,
            data_dir=data_dir,
            attack=attack,
            eps=eps,
            batch_size=batch_size,
            device=device,
            seed=seed,
        ).sample(limit)
        for run in runs
    ]
    asked = {
        "options": list(options),
        "attack": attack,
        "eps": eps,
        "limit": limit,
        "batch_size": batch_size,
        "seed": seed,
    }
    usual = {"options": [], "attack": None, "eps": None, "limit": 1000, "batch_size": 256, "seed": 0}
    marks = [checkpoint] if checkpoint else []
    marks += [digest(repr(asked))[:8]] if asked != usual else []
    stem = out / _file_name(name, subjects, marks)
    if "seed" in known:  # of its own noise
        settings.setdefault("seed", seed)
    with console.status(f"{name}") as status:
        if "progress" in taken:
            settings["progress"] = lambda done, total: status.update(f"{name}: {done} of {total}")
        finding = analysis.run(subjects if analysis.several else subjects[0], **settings)
    if (shown := finding.table()) is not None:
        console.print(listing.findings(name, *shown))
    for path in finding.save(stem):
        console.print(str(path), highlight=False, soft_wrap=True)
    return 0


def _file_name(analysis: str, subjects: Sequence[EvaluationTarget], marks: Sequence[str]) -> str:
    """By the first run's name, and by a digest of what the runs are, so that no network's file replaces another's.

    ``marks``: the checkpoint, and a digest of settings, where they are not the usual ones.
    """
    runs = digest(*((subject.name, model_fingerprint(subject.model)) for subject in subjects))[:8]
    others = [f"and-{len(subjects) - 1}-more"] if len(subjects) > 1 else []
    return "-".join([analysis, subjects[0].name, *others, runs, *marks])


def parsed(options: Sequence[str]) -> dict[str, Any]:
    """``key=value`` texts as keyword options."""
    settings = {}
    for text in options:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"cannot read {text!r}; write key=value")
        settings[key] = parse_yaml(value)
    return settings
