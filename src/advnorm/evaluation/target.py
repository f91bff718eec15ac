"""Evaluation targets, a model with test data and an attack, and how a training run is opened as one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import advnorm.data as data_sets
from advnorm._core.devices import resolve_device
from advnorm._core.errors import ConfigError, Problem, collect_problems, raise_problems
from advnorm._core.provenance import environment
from advnorm._core.wrappers import device_of
from advnorm.attacks import Attack
from advnorm.attacks.names import get as get_attack
from advnorm.data import FolderData, ImageData
from advnorm.data.arrays import read_arrays
from advnorm.data.gather import gather, spread_rows
from advnorm.threat import Norm, ThreatModel
from advnorm.training.build import describe_images
from advnorm.training.run_folder import CheckpointName, Run

EvaluationData = ImageData | FolderData | tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class EvaluationTarget:
    """A model with the test data and the attack to evaluate it on.

    ``origin``: where model and data come from. If there is no training run, the caller chooses the attack.
    """

    name: str
    model: nn.Module
    data: EvaluationData
    attack: Attack
    batch_size: int = 256
    origin: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None  # of the training run
    rows: Tensor | None = None  # of the images in their data set; None: the first ones

    @property
    def threat(self) -> ThreatModel:
        return self.attack.threat

    @property
    def count(self) -> int:
        """Number of images, without reading those in files."""
        return len(self.data[1] if isinstance(self.data, tuple) else self.data)

    @property
    def images(self) -> Tensor:
        return self._tensors[0]

    @property
    def labels(self) -> Tensor:
        return self._tensors[1]

    @cached_property
    def _tensors(self) -> tuple[Tensor, Tensor]:
        """Images, float32 in [0, 1], and labels."""
        return gather(self.data)

    @property
    def conditions(self) -> dict[str, Any]:
        """Conditions of an analysis of this target, for its record."""
        named = {"config": "training", "trained_on": "trained_on", "checkpoint": "checkpoint"}
        return {
            **{name: self.origin[key] for name, key in named.items() if key in self.origin},
            "attack": repr(self.attack),
            "images": len(self.images),
            **environment(device_of(self.model)),
        }

    def sample(self, limit: int | None) -> EvaluationTarget:
        """Return the target with ``limit`` images, spread evenly over the data.

        An image folder lists its classes one after another. Its images are shuffled, always in the same way, so that
        the batches of an analysis resemble those of training.
        """
        data, rows = self.data, spread_rows(self.count, limit)
        if isinstance(data, FolderData):
            rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
            data = data.take(rows).in_memory()
        elif len(rows) < self.count:
            data = data.take(rows) if isinstance(data, ImageData) else (data[0][rows], data[1][rows])
        return replace(self, data=data, rows=rows)


def open_run(
    run: Run | Path | str,
    *,
    checkpoint: CheckpointName | None = None,
    data: str | None = None,
    data_dir: Path | str | None = None,
    attack: str | None = None,
    threat_norm: Norm | None = None,
    eps: float | str | None = None,
    image_size: int | None = None,
    batch_size: int = 256,
    device: str | torch.device | None = None,
    seed: int = 0,
) -> EvaluationTarget:
    """Open a training run with its own test images and threat model, unless other ones are given.

    ``checkpoint``: ``best``, ``last``, or a snapshot such as ``epoch5``; by default the best if there is one.
    ``data``, ``image_size``: as in :func:`load_test_data`. ``attack``: a name; by default the attack of the training.
    It uses running statistics: with batch statistics it would change what an analysis measures.
    """
    run = run if isinstance(run, Run) else Run.open(run)
    config, name = run.config, run.folder.resolve().name
    problems: list[Problem] = []
    model = images = built = None
    with collect_problems(problems):
        model = run.model(checkpoint, resolve_device(device))
    with collect_problems(problems):
        norm, radius = config.threat if threat_norm is None else threat_norm, config.eps if eps is None else eps
        threat = ThreatModel(norm=norm, eps=radius)
        if attack is not None:
            built = get_attack(attack, threat=threat, seed=seed)
        else:
            built = replace(config.attack, statistics="running").build(threat, seed=seed)
    with collect_problems(problems):
        if data is not None:
            images = load_test_data(data, data_dir, **({} if image_size is None else {"image_size": image_size}))
        else:
            images = data_sets.load(config.data.name, "test", data_dir, **config.data.options)
            _check_test_images(images, run.description["data"])
    raise_problems(problems)
    assert model is not None and built is not None and images is not None
    origin = {
        "run": name,
        "checkpoint": run.checkpoint_name(checkpoint),
        "training": config.to_dict(),
        "trained_on": run.description["data"]["name"],
        "data": describe_data(data or config.data.name),
    }
    if not run.finished:
        origin["unfinished"] = f"{len(run.metrics())} of {config.epochs} epochs"
    return EvaluationTarget(
        name=name,
        model=model,
        data=images,
        attack=built,
        batch_size=batch_size,
        origin=origin,
        folder=run.folder,
    )


def _check_test_images(data: ImageData | FolderData, trained_on: Mapping[str, Any]) -> None:
    """Reject test images of another shape than the training images, and test images that are the training images."""
    shape = list(data.image_shape)
    if shape != trained_on["image_shape"]:
        message = f"the test images have the shape {shape}, the training images had {trained_on['image_shape']}"
        raise ConfigError("wrong_shape", message, field="data", hint="set data.image_size, or name other --data")
    if Path(data.name).suffix and data.fingerprint == trained_on["fingerprint"]:  # a file with x and y alone
        message = f"the test images of {data.name} are the training images"
        raise ConfigError("conflict", message, field="data", hint="name other images: --data")


def describe_data(source: str) -> str:
    """Return the name of data for a record: ``digits, test`` or the name of a folder or file."""
    name = source.partition(":")[0]
    return f"{name}, test" if name in data_sets.DATASETS else Path(source).name


def load_test_data(source: str, data_dir: Path | str | None = None, **options: Any) -> EvaluationData:
    """Load test images: ``digits``, ``cifar10:FOLDER``, a folder of images, a .npz or .safetensors file.

    A file names the images ``x_test``, ``x`` or ``images`` and the labels ``y_test``, ``y`` or ``labels``. Its images
    are validated by the evaluation, whose error for normalized images explains the fix.
    """
    name, root = data_sets.resolve_source(source, data_dir)
    if name == "arrays" and root is not None:
        return read_arrays(root, "test")
    return data_sets.load(name, "test", root, **options)


def classes_and_channels(data: EvaluationData) -> tuple[int, int]:
    """Numbers of classes and of image channels."""
    if isinstance(data, tuple):
        return int(data[1].max()) + 1, data[0].shape[1]
    return data.num_classes, data.image_shape[0]


def describe_test_images(data: EvaluationData) -> str:
    """Describe the number and shape of images and, if known, their preparation and classes."""
    if isinstance(data, tuple):
        return f"{len(data[1]):,} images of {'×'.join(map(str, data[0].shape[1:]))}"
    return describe_images(data)
