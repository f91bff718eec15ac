"""A training run as the subject of an analysis: its model, its test images, and an attack on it."""

from __future__ import annotations

from pathlib import Path

import torch

import advnorm.attacks as attack_names
import advnorm.data as data_sets
from advnorm.analysis.base import Subject
from advnorm.engine.run import Run, Which
from advnorm.threat import ThreatModel


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
    """A run's model with its test images and, unless another is named, its training's attack.

    ``limit``: so many images, spread evenly: folders of images have their classes one after another.
    """
    config = run.config
    data = data_sets.load(config.data.name, "test", data_dir, **config.data.options)
    if limit is not None and limit < len(data):
        data = data.take(torch.arange(limit) * len(data) // limit)
    if isinstance(data, data_sets.FolderData):
        data = data.in_memory()
    threat = ThreatModel(norm=config.threat, eps=eps or config.eps)
    chosen = attack_names.get(attack, threat=threat, seed=seed) if attack else config.attack.build(threat, seed=seed)
    return Subject(
        name=run.folder.name,
        model=run.model(checkpoint, default_device(device)),
        images=data.pixels(),
        labels=data.labels,
        attack=chosen,
        batch_size=batch_size,
        conditions={"config": config.to_dict(), "attack": repr(chosen), "images": len(data)},
        folder=run.folder,
    )
