"""Training runs, evaluations and audits below a folder, as plain data for a report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypedDict

from advnorm._core.errors import AdvnormError, first_line
from advnorm._core.records import read_bytes
from advnorm.evaluation.results import BenchmarkResult, read_from
from advnorm.evaluation.verdict import Verdict
from advnorm.training.run_folder import Run

#: Larger files, in bytes, are not records.
LARGEST_RECORD = 1 << 26


class RunSummary(TypedDict):
    """A training run: its folder, its settings, a row per epoch, and the record of a finished run."""

    name: str
    folder: str
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    record: dict[str, Any] | None


class EvaluationFile(TypedDict):
    """The record of an evaluation or an audit, its file, and its threat model as text."""

    file: str
    threat: str
    record: dict[str, Any]


class SkippedFile(TypedDict):
    """A file that could not be read, and why."""

    file: str
    error: str


class FolderResults(TypedDict):
    """The contents of a folder in the order of paths, and the files that could not be read."""

    folder: str
    runs: list[RunSummary]
    benchmarks: list[EvaluationFile]
    audits: list[EvaluationFile]
    problems: list[SkippedFile]


def collect_results(folder: Path | str) -> FolderResults:
    """Collect runs, evaluations and audits below ``folder``; damaged files are reported and left out."""
    folder = Path(folder)
    found = FolderResults(folder=folder.resolve().name, runs=[], benchmarks=[], audits=[], problems=[])
    kinds = (BenchmarkResult, found["benchmarks"]), (Verdict, found["audits"])
    for path in sorted(folder.rglob("*.json")):
        file = path.relative_to(folder).as_posix()
        if any(part.startswith(".") for part in Path(file).parts):
            continue
        try:
            if path.name == "run.json":
                found["runs"].append(_summarize(Run.open(path.parent), path.parent.relative_to(folder).as_posix()))
            elif path.stat().st_size <= LARGEST_RECORD:
                data = json.loads(read_bytes(path))
                form = data.get("format") if isinstance(data, dict) else None
                for kind, files in kinds:
                    if form in kind.FORMATS:
                        result = kind.from_record(data, file)
                        record = result.record() | read_from(data)
                        files.append(EvaluationFile(file=file, threat=str(result.threat), record=record))
        except (AdvnormError, OSError, ValueError, RecursionError) as error:  # the last two: not JSON
            found["problems"].append(SkippedFile(file=file, error=f"{type(error).__name__}: {first_line(error)}"))
    return found


def _summarize(run: Run, folder: str) -> RunSummary:
    return RunSummary(
        name=run.folder.resolve().name if folder == "." else folder,
        folder=folder,
        config=run.description["config"],  # as it is: the code that registers its model may be elsewhere
        metrics=run.metrics(),
        record=run.record if run.finished else None,
    )
