"""What lies below a folder: training runs, evaluations and audits, as plain data for a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypedDict

from advnorm._core.errors import AdvnormError, first_line
from advnorm.threat import ThreatModel
from advnorm.training.run import Run

#: A file that is larger is no record of ours.
LARGEST = 1 << 26
BENCHMARK, AUDIT = "advnorm.benchmark/1", "advnorm.audit/1"


class Trained(TypedDict):
    """A run: its settings, the rows of its epochs, and the record of a finished one."""

    name: str
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    record: dict[str, Any] | None


class Judged(TypedDict):
    """An evaluation or an audit: where it lies, the threat as text, and its record."""

    file: str
    threat: str
    record: dict[str, Any]


class Overview(TypedDict):
    """All of them, in the order of their places; ``problems`` say what could not be read."""

    folder: str
    runs: list[Trained]
    benchmarks: list[Judged]
    audits: list[Judged]
    problems: list[str]


def overview(folder: Path | str) -> Overview:
    """Runs, evaluations and audits below ``folder``; a damaged one is told and left out."""
    folder = Path(folder)
    found = Overview(folder=folder.resolve().name, runs=[], benchmarks=[], audits=[], problems=[])
    for path in sorted(folder.rglob("*.json")):
        place = path.relative_to(folder).as_posix()
        if any(part.startswith(".") for part in Path(place).parts):
            continue
        try:
            if path.name == "run.json":
                found["runs"].append(_trained(Run.open(path.parent), path.parent.relative_to(folder).as_posix()))
            elif path.stat().st_size <= LARGEST:
                data = json.loads(path.read_text(encoding="utf-8"))
                form = data.get("format") if isinstance(data, dict) else None
                if form in (BENCHMARK, AUDIT):
                    judged = Judged(file=place, threat=str(ThreatModel(**data["threat"])), record=data)
                    found["benchmarks" if form == BENCHMARK else "audits"].append(judged)
        except (AdvnormError, OSError, LookupError, TypeError, ValueError, RecursionError) as error:
            found["problems"].append(f"{place} is skipped: {type(error).__name__}: {first_line(error)}")
    return found


def _trained(run: Run, name: str) -> Trained:
    record = run.record if run.finished else None
    name = run.folder.resolve().name if name == "." else name
    return Trained(name=name, config=run.config.to_dict(), metrics=run.metrics(), record=record)
