"""Values that the records hold for a study, and the verdict on its claim."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from advnorm._core.errors import ConfigError, Problem
from advnorm.config import Config
from advnorm.studies.record import CellRecord, outdated_settings
from advnorm.studies.registry import STUDIES
from advnorm.studies.store import RecordStore
from advnorm.studies.study import Cell, Conclusion, Protocol, Study, Values
from advnorm.training.cost import training_flops


def evaluate_study(
    study: Study, store: RecordStore, *, protocol: Protocol, seeds: Iterable[int] | None = None
) -> tuple[Values, Conclusion, list[Problem]]:
    """Return the measured values of a study, the conclusion on its claim, and the problems with its records.

    A cell without any current record contributes its outdated ones, which never decide the claim.
    """
    records, problems = store.read_study(study, protocol, seeds)
    conclusion = study.evaluate_claim(values_by_cell(current_records(records, study.by_name)))
    problems += [conclusion.problem] if conclusion.problem else []
    return values_by_cell(shown_records(records, study.by_name)), conclusion, problems


def current_records(records: Sequence[CellRecord], cells: Mapping[str, Cell]) -> list[CellRecord]:
    """Keep the records that were made with the settings that the study has now."""
    return [record for record in records if not outdated_settings(record, cells[record["cell"]])]


def shown_records(records: Sequence[CellRecord], cells: Mapping[str, Cell]) -> list[CellRecord]:
    """Keep current records, and all records of cells that have no current one."""
    current = current_records(records, cells)
    known = {record["cell"] for record in current}
    return [record for record in records if record["cell"] not in known] + current


def values_by_cell(records: Iterable[CellRecord]) -> dict[tuple[str, str], list[float]]:
    """Return numbers by cell and name, each a list over seeds."""
    values: dict[tuple[str, str], list[float]] = {}
    for record in records:
        for name, value in record["values"].items():
            values.setdefault((record["cell"], name), []).append(float(value))
    return values


class _ReadLog(dict[tuple[str, str], Sequence[float]]):
    """Values that log which of them were read."""

    def __init__(self, values: Values) -> None:
        super().__init__(values)
        self.read: set[tuple[str, str]] = set()

    def __getitem__(self, key: tuple[str, str]) -> Sequence[float]:
        self.read.add(key)
        return super().__getitem__(key)


def values_read_by_check(study: Study, values: Values) -> set[tuple[str, str]]:
    """Return the keys that the check of the claim reads."""
    log = _ReadLog(values)
    study.evaluate_claim(log)
    return log.read


def training_rates(study: Study, store: RecordStore) -> dict[str, float]:
    """Estimate the operations per second of the trainings of a study's paper: the median by device."""
    found: dict[str, list[float]] = {}
    for record in store.read_all(STUDIES.names(f"{study.name.split('/')[0]}/*"))[0]:
        run = record["run"]
        with suppress(ConfigError):  # settings of another version
            flops = training_flops(Config.from_dict(run["config"]))
            if flops is not None and run["seconds"] > 0 and record["protocol"] != "smoke":
                found.setdefault(str(run.get("device")), []).append(flops / run["seconds"])
    return {device: statistics.median(rates) for device, rates in found.items()}
