"""A training run on disk: its configuration, its metrics, its checkpoints, and the models in them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from advnorm._core.errors import ConfigError
from advnorm._core.locks import exclusive
from advnorm._core.records import read_json, write_atomic, write_json
from advnorm.config import Config
from advnorm.training import checkpoint
from advnorm.training.build import build_model

FORMAT = "advnorm.run/1"
#: A checkpoint of a run: ``best``, ``last``, or ``epoch5`` where ``snapshots`` kept it.
Which = str


@dataclass(frozen=True)
class Run:
    """The folder of a training run.

    ``config.yaml`` and ``run.json`` say what it is, ``metrics.jsonl`` has a line per epoch (the same bits whenever the
    run was killed and continued), ``log.txt`` and ``timing.jsonl`` what happened when, ``checkpoints`` the state;
    ``record.json`` is there when it is finished. ``.lock`` is held by the process that trains.
    """

    folder: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder))

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
            raise ConfigError(
                f"{self.folder} is a run of {_version(data)}, in the format {data.get('format')!r}; this version reads "
                f"{FORMAT!r}: use that one, or choose another folder"
            )
        return data

    @property
    def config(self) -> Config:
        data = self.description
        try:
            return Config.from_dict(data["config"])
        except ConfigError as error:
            own = "; where code of your own registers it: advnorm --import FILE.py, or import it first"
            raise ConfigError(
                f"{self.folder} is a run of {_version(data)}, which cannot be read here: {error}"
                + (own if "unknown " in str(error) else "")
            ) from None

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
        *whole, _ = path.read_text(encoding="utf-8").split("\n") if path.exists() else [""]
        return [json.loads(line) for line in whole]  # what follows the last line's end was cut short by a full disk

    def model(self, which: Which | None = None, device: str | torch.device = "cpu") -> nn.Module:
        """The model of the ``best`` checkpoint (by held-out accuracy), the ``last``, or that of a snapshot, ``epoch5``.

        By default the best where there is one. With an EMA it is the averaged one. It comes in eval mode.
        """
        weights = self.weights(which)
        with torch.random.fork_rng([]):  # the weights are drawn, then overwritten; the caller's random state stays
            model = build_model(self.config, self.description["data"])
        checkpoint.restore_model(model, weights, f"the checkpoint {self.judged(which)!r} of {self.folder}")
        return model.to(device).eval()

    def weights(self, which: Which | None = None) -> dict[str, Tensor]:
        """The tensors of :meth:`model`, by their names in its state dict."""
        tensors, _ = checkpoint.load(self.checkpoints, self.judged(which))
        return checkpoint.select(tensors, "model.") | checkpoint.select(tensors, "ema.")

    @property
    def snapshots(self) -> dict[int, Which]:
        """The checkpoints that are kept along training, by their epochs; all of them where the run is finished."""
        return {epoch: snapshot(epoch) for epoch in self.config.scaled().snapshots}

    def judged(self, which: Which | None = None) -> Which:
        """The checkpoint that counts: the given one, else the best where there is one."""
        return which or ("best" if checkpoint.exists(self.checkpoints, "best") else "last")

    # -- taking possession -----------------------------------------------------------------------------------------

    def check(self, config: Config, data: Mapping[str, Any]) -> None:
        """Refuse a folder that holds something else than this configuration on these data; changes nothing."""
        if self.folder.exists() and not self.folder.is_dir():
            raise ConfigError(f"{self.folder} is a file; choose another out or name")
        if not self._description.exists():
            found = self.folder.iterdir() if self.folder.exists() else ()
            foreign = sorted(path.name for path in found if path.name[0] != ".")
            if foreign:
                raise ConfigError(
                    f"{self.folder} holds no training run, but {', '.join(foreign[:3])}; choose another out or "
                    "name, or empty it"
                )
            return
        found = self.description
        before, now = self.config, config
        differ = []
        if (before.digest, before.seed) != (now.digest, now.seed):
            old, new = before.to_dict(), now.to_dict()
            differ = [
                f"{key} ({old[key]!r}, now {new[key]!r})" for key in new if key != "name" and old[key] != new[key]
            ]
        if found["data"] != data:
            differ += [f"data {key}" for key in data if found["data"].get(key) != data[key]]
        if differ:
            raise ConfigError(
                f"{self.folder} holds another run, which differs in {', '.join(differ)}; choose another out or name, "
                "or delete it"
            )

    @contextmanager
    def claimed(self, config: Config, data: Mapping[str, Any], **more: Any) -> Iterator[None]:
        """Scope: the folder is this process's, and says what is in it. A second process is refused."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot make {self.folder}: {error.strerror or error}; choose another out") from None
        with exclusive(self.folder):
            self.check(config, data)
            if not self._description.exists():
                write_json(
                    self._description, {"format": FORMAT, "config": config.to_dict(), "data": dict(data), **more}
                )
            elif (started := more.get("weights_fingerprint")) not in (
                None,
                self.description.get("weights_fingerprint"),
            ):
                raise ConfigError(
                    f"{self.folder} was started from other weights than {config.weights} holds now ({started}); choose "
                    "another out or name, or delete it"
                )
            write_atomic(self.folder / "config.yaml", self.config.to_yaml().encode())
            yield


def snapshot(epoch: int) -> Which:
    """The name of the checkpoint that is kept after an epoch."""
    return f"epoch{epoch}"


def load_initial_weights(model: nn.Module, weights: str) -> None:
    """Fill a model from a safetensors file or from the checkpoint of a run; every tensor must fit."""
    if not Path(weights).exists():
        raise ConfigError("missing_file", f"{{field}} {weights}: no such file or folder", field="weights")
    if Path(weights).is_dir():
        checkpoint.restore_model(model, Run.open(weights).weights(), f"the run {weights}")
    else:
        checkpoint.load_weights(model, weights)


def _version(description: Mapping[str, Any]) -> str:
    return f"advnorm {description['advnorm']}" if "advnorm" in description else "another version of advnorm"
