"""A training run as the subject of an analysis: its model, its test images, and an attack on it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

import advnorm.attacks as attack_names
import advnorm.data as data_sets
from advnorm._core.provenance import environment
from advnorm.analysis.base import Subject
from advnorm.threat import ThreatModel
from advnorm.training.run import Run, Which


def default_device(device: str | torch.device | None) -> torch.device:
    """The device that is asked for; else CUDA where there is one."""
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def subject_of(
    run: Run,
    *,
    checkpoint: Which | None = None,
    data_dir: Path | None = None,
    attack: str | None = None,
    eps: float | str | None = None,
    limit: int | None = None,
    batch_size: int = 256,
    device: str | torch.device | None = None,
    seed: int = 0,
) -> Subject:
    """A run's model with its test images and, unless another is named, its training's attack on stored statistics.

    ``limit``: so many images, spread evenly. Folders of images have their classes one after another: theirs are
    shuffled, always alike, so that a batch looks like one of the training.
    """
    config = run.config
    data = data_sets.load(config.data.name, "test", data_dir, **config.data.options)
    count = len(data) if limit is None else min(limit, len(data))
    rows = torch.arange(count) * len(data) // count
    if isinstance(data, data_sets.FolderData):
        rows = rows[torch.randperm(count, generator=torch.Generator().manual_seed(0))]
        data = data.take(rows).in_memory()
    elif count < len(data):
        data = data.take(rows)
    threat = ThreatModel(norm=config.threat, eps=eps or config.eps)
    if attack:
        chosen = attack_names.get(attack, threat=threat, seed=seed)
    else:  # with statistics of the batch it would move those that are looked at
        chosen = replace(config.attack, statistics="running").build(threat, seed=seed)
    return Subject(
        name=run.folder.name,
        model=run.model(checkpoint, default_device(device)),
        images=data.pixels(),
        labels=data.labels,
        attack=chosen,
        batch_size=batch_size,
        conditions={
            "config": config.to_dict(),
            "trained_on": run.description["data"]["name"],
            "checkpoint": run.judged(checkpoint),
            "attack": repr(chosen),
            "images": len(data),
            **environment(default_device(device)),
        },
        folder=run.folder,
        rows=rows,
    )
