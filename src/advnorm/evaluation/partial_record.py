"""Records of finished evaluations, and partial records from which an interrupted evaluation resumes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import torch
from torch import Tensor

from advnorm._core.errors import ConfigError
from advnorm._core.provenance import own_version
from advnorm._core.records import digest, write_json, writing
from advnorm._core.shapes import Fraction, read_record, with_digest
from advnorm.evaluation.reference_logits import ReferenceLogits, matches_record
from advnorm.evaluation.results import CURE


def load_matching(
    path: Path | str | None, kind: Any, fingerprint: str, references: Mapping[str, ReferenceLogits]
) -> dict[str, Any] | None:
    """Read a record of this evaluation; None if there is no file yet. Another file is rejected.

    ``kind`` has the ``FORMAT`` and the ``SHAPE`` of the record.
    """
    if path is None or not os.path.lexists(path):
        return None
    data, hint = read_record(Path(path), kind.SHAPE, kind.FORMAT, CURE), CURE
    if not matches_record(data, fingerprint, references):
        message = f"{path} belongs to another evaluation (other data, model, threat, attacks, routes or seed)"
        raise ConfigError("other_evaluation", message, field="record", hint=hint)
    return data


class JobEntries(TypedDict):
    """A job in a partial record."""

    warnings: list[str]
    verdicts: NotRequired[str]
    seconds: NotRequired[float]
    distances: NotRequired[list[float]]
    stages: NotRequired[dict[str, Fraction]]


class PartialFile(TypedDict):
    """The content of a partial record."""

    fingerprint: str
    commit: str | None
    logits: dict[str, Any]
    jobs: dict[str, JobEntries]
    digest: str


class PartialRecord:
    """Results so far by job, in ``<record>.partial``, which is rewritten after each batch.

    Without a record the results stay in memory. A file that belongs to other data or to another model is rejected.
    """

    FORMAT, SHAPE = "advnorm.partial/1", PartialFile

    def __init__(self, record: Path | str | None, fingerprint: str, references: Mapping[str, ReferenceLogits]) -> None:
        self.path = None if record is None else Path(record).with_name(Path(record).name + ".partial")
        self.fingerprint, self._commit = fingerprint, own_version()["commit"]
        self._logits = {name: reference.to_record() for name, reference in references.items()}
        self._jobs: dict[str, dict[str, Any]] = {}
        data = load_matching(self.path, self, fingerprint, references)
        if data is None:
            return
        self._jobs, self._logits = data["jobs"], {**data["logits"], **self._logits}
        before, now = (str(commit).rstrip("+") for commit in (data.get("commit"), self._commit))
        if before != now:
            self.warn("commit", f"resumed from a run of another version of advnorm, commit {before}")

    def job(self, key: str) -> dict[str, Any]:
        """A job's entries: ``warnings``, ``verdicts``, ``seconds``, ``distances`` of its perturbations if they are
        measured, and ``stages``, the accuracies along a cascade.
        """
        return self._jobs.setdefault(key, {"warnings": []})

    def results(self, key: str, count: int) -> Tensor:
        """Return the results of a job: 1 robust, 0 fooled, -1 pending."""
        letters = self._jobs.get(key, {}).get("verdicts", "?" * count)
        if len(letters) != count or set(letters) - set("01?"):
            hint = "delete it to start again"
            raise ConfigError("damaged_file", f"{self.path} is damaged at {key!r}", field="record", hint=hint)
        return _from_letters(letters)

    def distances(self, key: str, count: int) -> Tensor:
        """Return the sizes of a job's perturbations, 0 for images without one."""
        values = self._jobs.get(key, {}).get("distances", [0.0] * count)
        if len(values) != count:
            hint = "delete it to start again"
            raise ConfigError("damaged_file", f"{self.path} is damaged at {key!r}", field="record", hint=hint)
        return torch.tensor(values, dtype=torch.float64)

    def save(self, key: str, results: Tensor, seconds: float, distances: Tensor | None = None) -> None:
        """Store the results of a job, and sizes of its perturbations if they count, and add to its seconds."""
        job = self.job(key)
        job["verdicts"] = _to_letters(results)
        job["seconds"] = job.get("seconds", 0.0) + seconds
        if distances is not None:
            job["distances"] = distances.tolist()
        self._write()

    def begin(self, key: str) -> None:
        """Register a job before it writes to its own folder, so that the folder's owner is known."""
        self.job(key)
        self._write()

    def warn(self, key: str, warning: str) -> None:
        """Store a warning once."""
        if warning not in self.job(key)["warnings"]:
            self.job(key)["warnings"].append(warning)
            self._write()

    def folder(self, key: str) -> Path | None:
        """The folder for an attack that keeps a record of its own until it is finished."""
        return None if self.path is None else self.path.with_name(f"{self.path.name}.{digest(key)[:8]}")

    def warnings(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(warning for job in self._jobs.values() for warning in job["warnings"]))

    def remove(self) -> None:
        """Delete the file and the folders of its jobs."""
        for folder in map(self.folder, self._jobs):
            if folder is not None and folder.is_dir():
                shutil.rmtree(folder)
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _write(self) -> None:
        if self.path is not None:
            data = {"format": self.FORMAT, "fingerprint": self.fingerprint, "commit": self._commit}
            with writing(self.path):
                write_json(self.path, with_digest({**data, "logits": self._logits, "jobs": self._jobs}))


def _to_letters(values: Tensor) -> str:
    """Return a letter per image: 1 for true, 0 for false, ? for -1."""
    return "".join("?01"[value + 1] for value in values.tolist())


def _from_letters(letters: str) -> Tensor:
    """Return the int8 values of :func:`_to_letters`."""
    return torch.tensor(["?01".index(letter) - 1 for letter in letters], dtype=torch.int8)
