"""What a killed evaluation continues from: verdicts so far, tied to the data and the model by a fingerprint."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from advnorm._core.errors import ConfigError
from advnorm._core.provenance import own_version
from advnorm._core.records import digest, read_json, write_json, writing

if TYPE_CHECKING:
    from advnorm.evaluation.runner import First


def partial_path(record: Path | str) -> Path:
    """Where a run that is not finished keeps its verdicts."""
    return Path(record).with_name(Path(record).name + ".partial")


class Partial:
    """Verdicts so far, by job, in a file that is written whole after each batch; without a path in memory only."""

    FORMAT = "advnorm.partial/1"

    def __init__(
        self, path: Path | None, fingerprint: str, known_by: Mapping[str, First] = MappingProxyType({})
    ) -> None:
        self.path, self.fingerprint, self._commit = path, fingerprint, own_version()["commit"]
        self._logits = {name: first.written() for name, first in known_by.items()}
        self._jobs: dict[str, dict[str, Any]] = {}
        if path is None or not path.exists():
            return
        data = read_json(path)
        jobs = data.get("jobs")
        if data.get("format") != self.FORMAT or not isinstance(jobs, dict):
            raise ConfigError(f"{path} is not a partial evaluation; delete it, or choose another record")
        if data.get("fingerprint") != fingerprint or _other_model(data, known_by):
            raise ConfigError(
                f"{path} belongs to another evaluation (other images, labels, model or statistics mode); "
                "delete it to start afresh, or choose another record"
            )
        self._jobs, self._logits = jobs, {**data.get("logits", {}), **self._logits}
        before, now = (str(commit).rstrip("+") for commit in (data.get("commit"), self._commit))
        if before != now:
            self.warn("commit", f"continued from a run of another version of advnorm, commit {before}")

    def verdicts(self, key: str, count: int) -> Tensor:
        """1 robust, 0 fooled, -1 not known yet."""
        letters = self._jobs.get(key, {}).get("verdicts")
        if letters is None:
            return torch.full((count,), -1, dtype=torch.int8)
        if not isinstance(letters, str) or len(letters) != count or set(letters) - set("01?"):
            raise ConfigError(f"{self.path} is damaged at {key!r}; delete it to start afresh")
        return torch.tensor([{"?": -1, "0": 0, "1": 1}[letter] for letter in letters], dtype=torch.int8)

    def save(self, key: str, verdicts: Tensor, seconds: float) -> None:
        job = self._jobs.setdefault(key, {"warnings": []})
        job["verdicts"] = "".join("01?"[value] for value in verdicts.tolist())
        job["seconds"] = job.get("seconds", 0.0) + seconds
        self._write()

    def begin(self, key: str) -> None:
        """Say whose a job is before it keeps something of its own."""
        self._jobs.setdefault(key, {"warnings": []})
        self._write()

    def warn(self, key: str, warning: str) -> None:
        warnings = self._jobs.setdefault(key, {}).setdefault("warnings", [])
        if warning not in warnings:
            warnings.append(warning)
            self._write()

    def detail(self, key: str, accuracy: Mapping[str, float]) -> None:
        self._jobs.setdefault(key, {"warnings": []})["stages"] = dict(accuracy)

    def stages(self, key: str) -> dict[str, float] | None:
        return self._jobs.get(key, {}).get("stages")

    def folder(self, key: str) -> Path | None:
        """Where an attack that keeps a record of its own may do so until it is done."""
        return None if self.path is None else self.path.with_name(f"{self.path.name}.{digest(key)[:8]}")

    def seconds(self, key: str) -> float:
        return float(self._jobs.get(key, {}).get("seconds", 0.0))

    def warnings(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(warning for job in self._jobs.values() for warning in job.get("warnings", [])))

    def remove(self) -> None:
        for key in self._jobs:
            folder = self.folder(key)
            if folder is not None and folder.is_dir():
                shutil.rmtree(folder)
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _write(self) -> None:
        if self.path is not None:
            data = {"format": self.FORMAT, "fingerprint": self.fingerprint, "commit": self._commit}
            with writing(self.path):
                write_json(self.path, {**data, "logits": self._logits, "jobs": self._jobs})


def _other_model(data: Mapping[str, Any], known_by: Mapping[str, First]) -> bool:
    """Whether a model computes something else than the one that left ``data``, though structure and tensors agree.

    Its attributes and its code show in its logits alone. What was written without logits is taken as it is.
    """
    written = data.get("logits", {})
    return not isinstance(written, dict) or not all(first.fits(written.get(name)) for name, first in known_by.items())


def finished(record: Path | str | None, fingerprint: str, known_by: Mapping[str, First]) -> dict[str, Any] | None:
    """The record of an evaluation that is done already, read back; None where there is none yet."""
    if record is None or not Path(record).exists():
        return None
    data = read_json(Path(record))
    if "fingerprint" not in data:
        raise ConfigError(f"{record} is no record of an evaluation; choose another file")
    if data.get("fingerprint") != fingerprint or _other_model(data, known_by):
        raise ConfigError(
            f"{record} holds the record of another evaluation (other data, model, threat, attacks, routes or seed); "
            "delete it, or choose another record"
        )
    return data
