"""A training run on disk: its configuration, its metrics, its checkpoints, and the models in them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import torch
from torch import Tensor, nn

from advnorm._core.errors import ConfigError
from advnorm._core.locks import exclusive
from advnorm._core.records import parse_json, read_bytes, write_atomic, write_json
from advnorm._core.shapes import check_record, read_record
from advnorm.config import Config
from advnorm.models.weights import fit_weights, load_weights, restore_model
from advnorm.training import checkpoint
from advnorm.training.build import DataProperties, build_model

FORMAT = "advnorm.run/1"
ROWS_CURE = "restore the file, or train the run again in another folder"
#: A checkpoint of a run: ``best``, ``last``, or ``epoch5`` if ``snapshots`` contains that epoch.
CheckpointName = str


class RunDescription(TypedDict):
    """``run.json``."""

    config: dict[str, Any]
    data: DataProperties
    advnorm: NotRequired[str | None]


class EpochMetrics(TypedDict):
    """A line of ``metrics.jsonl``: beside these entries, losses and accuracies by name."""

    epoch: int
    step: int
    held_out: NotRequired[dict[str, float]]


class RunRecord(RunDescription):
    """``record.json``: the description with results and conditions."""

    last: EpochMetrics
    best: EpochMetrics | None
    seconds: float
    device: str
    threads: int
    torch: str
    commit: str | None
    digest: str


@dataclass(frozen=True)
class Run:
    """The folder of a training run.

    ``config.yaml`` and ``run.json`` describe it. ``metrics.jsonl`` has a line per epoch, without times, so that a
    resumed run can write the same bits. ``log.txt`` and ``timing.jsonl`` hold events and times. ``checkpoints`` holds
    the state. A finished run has a ``record.json``. The training process holds ``.lock``.
    """

    folder: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder))

    @classmethod
    def open(cls, folder: Path | str) -> Run:
        """Open an existing run."""
        run = cls(Path(folder))
        if not os.path.isfile(run._description):  # also False for a name that is too long
            message, hint = f"{folder} is not a training run (it has no run.json)", "name a folder that `train` made"
            raise ConfigError("missing_file", message, field="run", hint=hint)
        return run

    @property
    def _description(self) -> Path:
        return self.folder / "run.json"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def description(self) -> dict[str, Any]:
        cure = "use the version of advnorm that wrote it, or choose another folder"
        return read_record(self._description, RunDescription, FORMAT, cure)

    @property
    def config(self) -> Config:
        data = self.description
        try:
            return Config.from_dict(data["config"])
        except ConfigError as error:
            hint = "if it is a relative path: run the command in the working directory of the training; "
            hint += "if your own code registers it: advnorm --import FILE.py, or import it first"
            problems = [
                replace(problem, hint=hint) if problem.code == "unknown_name" else problem for problem in error.problems
            ]
            heading = f"{self.folder} is a run of {_version(data)}, which cannot be read here"
            raise ConfigError.listing(problems, heading) from None

    @property
    def finished(self) -> bool:
        return (self.folder / "record.json").is_file()

    @property
    def record(self) -> dict[str, Any]:
        """Conditions and results of a finished run."""
        if not self.finished:
            message, hint = f"{self.folder} is not finished", "run the same train command to resume it"
            raise ConfigError("not_finished", message, field="run", hint=hint)
        cure = "delete it; the same train command writes it again"
        return read_record(self.folder / "record.json", RunRecord, FORMAT, cure)

    def metrics(self) -> list[dict[str, Any]]:
        """A row per epoch so far."""
        path = self.folder / "metrics.jsonl"
        *whole, _ = read_bytes(path, hint=ROWS_CURE).split(b"\n") if os.path.lexists(path) else [b""]
        return [_read_row(line, f"{path}, line {place}") for place, line in enumerate(whole, 1)]

    def model(self, which: CheckpointName | None = None, device: str | torch.device = "cpu") -> nn.Module:
        """Load the model of the ``best`` checkpoint (by held-out score), the ``last``, or a snapshot (``epoch5``).

        By default the best if there is one, else the last. With an EMA it is the averaged model. It is in eval mode.
        """
        weights = self.weights(which)
        with torch.random.fork_rng([]):  # the weights are drawn, then overwritten; the caller's random state stays
            model = build_model(self.config, self.description["data"])
        restore_model(model, weights, f"the checkpoint {self.checkpoint_name(which)!r} of {self.folder}")
        return model.to(device).eval()

    def weights(self, which: CheckpointName | None = None) -> dict[str, Tensor]:
        """The tensors of :meth:`model`, by their names in its state dict."""
        tensors, _ = checkpoint.load(self.checkpoints, self.checkpoint_name(which))
        return checkpoint.select(tensors, "model.") | checkpoint.select(tensors, "ema.")

    @property
    def snapshots(self) -> dict[int, CheckpointName]:
        """The checkpoints that are kept along training, by their epochs; a finished run has all of them."""
        return {epoch: snapshot(epoch) for epoch in self.config.scaled().snapshots}

    def checkpoint_name(self, which: CheckpointName | None = None) -> CheckpointName:
        """The given checkpoint, else the best if there is one, else the last."""
        return which or ("best" if checkpoint.exists(self.checkpoints, "best") else "last")

    # -- for the process that trains -------------------------------------------------------------------------------

    def check(self, config: Config, data: Mapping[str, Any]) -> None:
        """Reject a folder that holds anything but a run of this configuration on these data; write nothing."""
        found = self._foreign_content(config, data)
        if found:
            hint = "choose another out or name, or delete it"
            raise ConfigError("already_exists", f"{self.folder} {found}", field="out", hint=hint)

    def _foreign_content(self, config: Config, data: Mapping[str, Any]) -> str | None:
        """Describe what the folder holds if it is not this run."""
        if self.folder.exists() and not self.folder.is_dir():
            return "is a file"
        if not self._description.exists():
            found = self.folder.iterdir() if self.folder.exists() else ()
            foreign = sorted(path.name for path in found if path.name[0] != ".")
            return f"is not a training run and holds {', '.join(foreign[:3])}" if foreign else None
        before, known = self.config, self.description["data"]
        differ = [f"data {key}" for key in data if known.get(key) != data[key]]
        if (before.digest, before.seed) != (config.digest, config.seed):
            old, new = before.to_dict(), config.to_dict()
            changed = [key for key in new if key != "name" and old[key] != new[key]]
            differ = [*(f"{key} ({old[key]!r}, now {new[key]!r})" for key in changed), *differ]
        return f"holds another run, which differs in {', '.join(differ)}" if differ else None

    @contextmanager
    def claimed(self, config: Config, data: Mapping[str, Any], **more: Any) -> Iterator[None]:
        """Scope: lock the folder for this process and write the description of the run. A second process raises."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:  # ValueError: a null byte
            message = f"cannot create {self.folder}: {getattr(error, 'strerror', None) or error}"
            raise ConfigError("not_writable", message, field="out", hint="choose another out") from None
        with exclusive(self.folder):
            self.check(config, data)
            started = more.get("weights_fingerprint")
            if not self._description.exists():
                about = {"format": FORMAT, "config": config.to_dict(), "data": dict(data), **more}
                write_json(self._description, about)
            elif started not in (None, self.description.get("weights_fingerprint")):
                message = f"{self.folder} was started from other weights than {config.weights} holds now ({started})"
                raise ConfigError("already_exists", message, "weights", hint="choose another out or name, or delete it")
            write_atomic(self.folder / "config.yaml", self.config.to_yaml().encode())
            yield


def _read_row(line: bytes, source: str) -> dict[str, Any]:
    row = parse_json(line)
    for shape in (EpochMetrics, dict[str, float | dict[str, float]]):
        check_record(row, shape, source, ROWS_CURE)
    return row


def snapshot(epoch: int) -> CheckpointName:
    """The name of the checkpoint that is kept after an epoch."""
    return f"epoch{epoch}"


def load_initial_weights(model: nn.Module, source: str) -> tuple[str, ...]:
    """Fill a model from a file or from the best checkpoint of a run; return notes on what was done to make it fit."""
    if not Path(source).is_dir():
        return load_weights(model, source).notes
    return fit_weights(model, {"": Run.open(source).weights()}, f"the run {source}")


def _version(description: Mapping[str, Any]) -> str:
    return f"advnorm {description['advnorm']}" if "advnorm" in description else "another version of advnorm"
