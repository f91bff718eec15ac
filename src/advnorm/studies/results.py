"""Values that the records hold for a study, and the verdict on its claim."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

from advnorm._core.errors import ConfigError, Problem
from advnorm.config import Config
from advnorm.studies.record import CellRecord, outdated_settings, record_name
from advnorm.studies.registry import STUDIES
from advnorm.studies.store import RecordStore
from advnorm.studies.study import Cell, Conclusion, Protocol, Study, Values
from advnorm.studies.uncertainty import MeasuredValues, collect_samples
from advnorm.training.cost import training_flops


def evaluate_study(
    study: Study, store: RecordStore, *, protocol: Protocol, seeds: Iterable[int] | None = None
) -> tuple[MeasuredValues, Conclusion, list[Problem]]:
    """Return the measured values of a study, the conclusion on its claim, and the problems with its records.

    A cell without any current record contributes its outdated ones, which never decide the claim.
    """
    records, problems = store.read_study(study, protocol, seeds)
    conclusion, found = conclude(study, protocol, current_records(records, study.by_name))
    return collect_samples(shown_records(records, study.by_name)), conclusion, problems + found


def conclude(
    study: Study, protocol: Protocol | None, records: Sequence[CellRecord]
) -> tuple[Conclusion, list[Problem]]:
    """Return the conclusion on a study's claim from its current records, and the problems with them.

    Two steps on synthetic images give no evidence for a claim, and images of a stand-in none for printed numbers.
    """
    if protocol in (None, "smoke") or not records:
        return Conclusion("not run"), []
    if protocol == "imagenette" and study.compares_print:
        return Conclusion("undecided", needs="the paper's data set"), []
    conclusion = study.evaluate_claim(collect_samples(records))
    found = [conclusion.problem] if conclusion.problem else []
    return conclusion, found + missing_numbers(study, records, conclusion)


def current_records(records: Sequence[CellRecord], cells: Mapping[str, Cell]) -> list[CellRecord]:
    """Keep the records that were made with the settings that the study has now."""
    return [record for record in records if not outdated_settings(record, cells[record["cell"]])]


def shown_records(records: Sequence[CellRecord], cells: Mapping[str, Cell]) -> list[CellRecord]:
    """Keep current records, and all records of cells that have no current one."""
    current = current_records(records, cells)
    known = {record["cell"] for record in current}
    return [record for record in records if record["cell"] not in known] + current


def missing_numbers(study: Study, records: Sequence[CellRecord], conclusion: Conclusion) -> list[Problem]:
    """Report the study's own records without a number that its table prints or that the check of its claim reads."""
    wanted = {(number.cell, number.value) for number in study.numbers}
    wanted |= {conclusion.missing} if conclusion.missing else set()
    return [
        Problem(
            code="missing_value",
            message=f"{{field}} lacks {', '.join(lacking)}",
            field=f"records/{record_name(study.name, record['cell'], record['protocol'], record['seed'])}",
            hint="delete the file, then the same command measures the cell again",
        )
        for record in records
        if record["measured_for"] == study.name
        and (
            lacking := sorted(name for cell, name in wanted if cell == record["cell"] and name not in record["values"])
        )
    ]


class _ReadLog(Mapping[tuple[str, str], Sequence[float]]):
    """Values that log which of them were read."""

    def __init__(self, values: Values) -> None:
        self._values = values
        self.read: set[tuple[str, str]] = set()

    def __getitem__(self, key: tuple[str, str]) -> Sequence[float]:
        self.read.add(key)
        return self._values[key]

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def values_read_by_check(study: Study, values: Values) -> set[tuple[str, str]]:
    """Return the keys that the check of the claim reads."""
    log = _ReadLog(values)
    study.evaluate_claim(log)
    return log.read


def count_networks(study: Study, records: Sequence[CellRecord]) -> int:
    """Count the independent trainings, by settings and seed, whose numbers the check of the claim reads."""
    cells = {cell for cell, _ in values_read_by_check(study, collect_samples(records))}
    return len({training_key(record) for record in records if record["cell"] in cells})


def training_key(record: CellRecord) -> str:
    """Identify the training of a record, which several records may share."""
    return json.dumps([record["run"]["config"], record["seed"], record["run"]["seconds"]], sort_keys=True)


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
