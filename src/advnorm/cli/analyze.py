"""The verb ``analyze``: an analysis by name of one or several training runs."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console

import advnorm.attacks as attack_names
import advnorm.data as data_sets
from advnorm._core.errors import ConfigError, did_you_mean, raise_all
from advnorm.analysis import ANALYSES, Subject
from advnorm.engine.run import Run, Which
from advnorm.threat import ThreatModel


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
    known = {key for key, p in inspect.signature(analysis.run).parameters.items() if p.kind is p.KEYWORD_ONLY} - {
        "progress"
    }
    problems = [f"unknown option {key!r} of {name}{did_you_mean(key, known)}" for key in settings if key not in known]
    if not analysis.several and len(runs) != 1:
        problems.append(f"{name} takes one run, got {len(runs)}")
    raise_all(problems, "bad analysis")
    subjects = [
        subject(
            Run.open(run),
            checkpoint=checkpoint,
            data_dir=data_dir,
            attack=attack,
            eps=eps,
            limit=limit,
            batch_size=batch_size,
            device=device,
            seed=seed,
        )
        for run in runs
    ]
    with console.status(f"{name}") as status:
        if "progress" in inspect.signature(analysis.run).parameters:
            settings["progress"] = lambda done, total: status.update(f"{name}: {done} of {total}")
        finding = analysis.run(subjects if analysis.several else subjects[0], **settings)
    for path in finding.save(out / "-".join([name, *(s.name for s in subjects[:1])])):
        console.print(str(path), highlight=False, soft_wrap=True)
    return 0


def subject(
    run: Run,
    *,
    checkpoint: Which | None,
    data_dir: Path | None,
    attack: str | None,
    eps: str | None,
    limit: int | None,
    batch_size: int,
    device: str | None,
    seed: int,
) -> Subject:
    """A run's model with its test images and, unless another is named, its training's attack."""
    config = run.config
    data = data_sets.load(config.data.name, "test", data_dir, **config.data.options)
    if isinstance(data, data_sets.FolderData):
        data = data.in_memory()
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    threat = ThreatModel(norm=config.threat, eps=eps or config.eps)
    chosen = attack_names.get(attack, threat=threat, seed=seed) if attack else config.attack.build(threat, seed=seed)
    return Subject(
        name=run.folder.name,
        model=run.model(checkpoint, where),
        images=data.pixels(slice(0, limit)),
        labels=data.labels[:limit],
        attack=chosen,
        batch_size=batch_size,
        conditions={"config": config.to_dict(), "attack": repr(chosen), "images": min(len(data), limit or len(data))},
        folder=run.folder,
    )


def parsed(options: Sequence[str]) -> dict[str, Any]:
    """``key=value`` texts as keyword options."""
    settings = {}
    for text in options:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"cannot read {text!r}; write key=value")
        settings[key] = yaml.safe_load(value)
    return settings
