"""A training run on disk: its configuration, its metrics, its checkpoints, and the models in them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from advnorm._core.errors import ConfigError
from advnorm._core.records import read_json
from advnorm.data import FolderData, ImageData
from advnorm.engine import checkpoint
from advnorm.engine.config import Config
from advnorm.models import create_model
from advnorm.surgery import convert_head

FORMAT = "advnorm.run/1"
Which = Literal["best", "last"]


@dataclass(frozen=True)
class Run:
    """The folder of a training run.

    ``config.yaml`` and ``run.json`` say what it is, ``metrics.jsonl`` has a line per epoch (the same bits whenever the
    run was killed and continued), ``log.txt`` and ``timing.jsonl`` what happened when, ``checkpoints`` the state;
    ``record.json`` is there when it is finished.
    """

    folder: Path

    @classmethod
    def open(cls, folder: Path | str) -> Run:
        """A run that exists; anything else is refused with the reason."""
        run = cls(Path(folder))
        if not run._description.is_file():
            raise ConfigError(f"{folder} is no training run (no run.json in it); name a folder that `train` made")
        return run

    @property
    def _description(self) -> Path:
        return self.folder / "run.json"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def description(self) -> dict[str, Any]:
        data = read_json(self._description)
        if data.get("format") != FORMAT:
            raise ConfigError(f"{self._description} is not a run of this version of advnorm; choose another folder")
        return data

    @property
    def config(self) -> Config:
        return Config.from_dict(self.description["config"])

    @property
    def finished(self) -> bool:
        return (self.folder / "record.json").is_file()

    @property
    def record(self) -> dict[str, Any]:
        """Conditions and results of a finished run."""
        if not self.finished:
            raise ConfigError(f"{self.folder} is not finished; the same train command goes on from where it is")
        return read_json(self.folder / "record.json")

    def metrics(self) -> list[dict[str, Any]]:
        """A row per epoch so far."""
        path = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []

    def model(self, which: Which | None = None, device: str | torch.device = "cpu") -> nn.Module:
        """The model of the ``best`` checkpoint (by held-out accuracy) or the ``last``; the best where there is one.

        With an EMA it is the averaged one. It comes in eval mode.
        """
        name = which or ("best" if checkpoint.exists(self.checkpoints, "best") else "last")
        tensors, _ = checkpoint.load(self.checkpoints, name)
        description = self.description
        model = build_model(self.config, description["data"])
        state = {key.removeprefix("model."): value for key, value in tensors.items() if key.startswith("model.")}
        state |= {key.removeprefix("ema."): value for key, value in tensors.items() if key.startswith("ema.")}
        checkpoint.restore_model(model, state, f"the checkpoint {name!r} of {self.folder}")
        return model.to(device).eval()


def described(data: ImageData | FolderData) -> dict[str, Any]:
    """What a model must know of its data, and what a record says of it."""
    return {
        "name": data.name,
        "images": len(data),
        "image_shape": list(data.image_shape),
        "num_classes": data.num_classes,
        "fingerprint": data.fingerprint,
    }


def build_model(config: Config, data: Mapping[str, Any]) -> nn.Module:
    """The untrained model of a configuration for data as :func:`described`.

    Other than three channels have no published mean and deviation: such images are not normalized unless the model's
    options say how.
    """
    channels = data["image_shape"][0]
    options = dict(config.model.options)
    if channels != 3 and not {"mean", "std", "normalize"} & set(options):
        options["normalize"] = False
    norm_options = dict(config.norm_options)
    if config.sync_statistics:
        norm_options["sync"] = True
    model = create_model(
        config.model.name,
        data["num_classes"],
        config.norm,
        norm_options=norm_options,
        in_channels=channels,
        **options,
    )
    if config.dual_head:
        convert_head(model)
    return model
