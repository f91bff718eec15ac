"""The studies and the records below a folder as plain data, for a page that is made without torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, TypedDict, get_args

from advnorm._core.errors import ConfigError, Problem
from advnorm.studies.claims import DEFINITIONS
from advnorm.studies.decision import ClaimVerdict, ClauseResult
from advnorm.studies.measurement import describe_measure
from advnorm.studies.protocols import plan_cell
from advnorm.studies.record import CellRecord, flatten_settings, outdated_settings, with_defaults
from advnorm.studies.registry import PAPERS, STUDIES
from advnorm.studies.results import (
    conclude,
    count_networks,
    current_records,
    shown_records,
    training_key,
    values_read_by_check,
)
from advnorm.studies.store import RecordStore, select_for_study
from advnorm.studies.study import Cell, PrintedNumber, Protocol, Study
from advnorm.studies.uncertainty import Key, MeasuredValues, collect_samples

#: Folders that the runner keeps beside the records.
WORKING_FOLDERS = ("runs", "features")


class ComparedNumber(TypedDict):
    """A printed number and its measured mean over seeds; None if one of them is missing.

    ``interval`` is the 95 % interval of an accuracy for other images. ``spread`` is the standard deviation over at
    least two seeds, with n - 1 in the denominator. ``images`` is the number of images, None if it is unknown.
    """

    row: str
    column: str
    cell: str
    value: str
    paper: float | None
    ours: float | None
    interval: tuple[float, float] | None
    images: int | None
    spread: float | None
    n: int
    difference: float | None


class NumberSeries(TypedDict):
    """Means over seeds along training, over radii or over channels. ``over`` names the axis."""

    cell: str
    value: str
    over: str
    x: list[int]
    ours: list[float]


class CellStatus(TypedDict):
    """A cell: its finished seeds, devices, cost, and the settings that differ between cells.

    ``measured_for`` names other studies whose records serve this cell.
    """

    name: str
    seeds: list[int]
    measured_for: list[str]
    devices: list[str]
    minutes: float | None
    settings: dict[str, str]


class ProtocolResult(TypedDict):
    """A study under one protocol; ``protocol`` is None if nothing was run. ``settings`` are common to all cells.

    ``outdated`` lists cells and seeds whose records were made with other settings than the study has now.
    """

    protocol: Protocol | None
    verdict: ClaimVerdict
    needs: str  # what would decide an undecided claim
    networks: int  # independent trainings that the verdict rests on
    clauses: list[ClauseResult]  # the clauses that could be evaluated
    without_outcomes: int  # records without results per image
    entries: list[ComparedNumber]
    series: list[NumberSeries]
    cells: list[CellStatus]
    settings: dict[str, str]
    outdated: list[str]
    minutes: dict[str, float]
    measures: list[str]
    torch: list[str]
    precision: list[str]
    commits: list[str]


class StudySummary(TypedDict):
    """A table or figure with the paper's entry: caption, claim, notes. ``results`` has at least one entry.

    ``deviations`` lists what differs from the paper. ``print_fails`` lists clauses that the paper's own numbers fail.
    """

    name: str
    printed: Mapping[str, Any]
    deviations: list[str]
    print_fails: list[str]
    results: list[ProtocolResult]


class StudiesSummary(TypedDict):
    """All studies. ``minutes`` of training by device count a shared training once.

    ``definitions`` explains words of the claims. ``problems`` lists skipped files, and ``others`` counts the JSON files
    of other folders, which are not read.
    """

    papers: dict[str, str]
    definitions: dict[str, str]
    studies: list[StudySummary]
    minutes: dict[str, float]
    networks: int
    problems: list[str]
    others: dict[str, int]


def summarize_studies(out: Path | str) -> StudiesSummary:
    """Summarize every study, with the paper's numbers beside the measured ones."""
    out = Path(out)
    if not out.is_dir():
        hint = "name the --out folder of advnorm train or study"
        raise ConfigError("missing_file", f"{out} is not a folder", field="out", hint=hint)
    records, problems = RecordStore(out).read_all()
    studies = [_summarize_study(STUDIES.get(name), records, problems) for name in STUDIES.names()]
    return StudiesSummary(
        papers=PAPERS,
        definitions=DEFINITIONS,
        studies=studies,
        minutes=_minutes_by_device(records),
        networks=len({training_key(record) for record in records if record["protocol"] != "smoke"}),
        problems=list(map(str, problems)),
        others=_count_other_files(out),
    )


def _count_other_files(out: Path) -> dict[str, int]:
    ignored = ("records", *WORKING_FOLDERS)
    folders = [path for path in sorted(out.iterdir()) if path.is_dir() and path.name not in ignored]
    counts = {out.resolve().name: sum(1 for _ in out.glob("*.json"))}
    counts |= {folder.name: sum(1 for _ in folder.rglob("*.json")) for folder in folders}
    return {name: count for name, count in counts.items() if count}


def _summarize_study(study: Study, records: Sequence[CellRecord], problems: list[Problem]) -> StudySummary:
    """Summarize one study; append the problems of its check to ``problems``."""
    found = select_for_study(study, records)
    protocols = [protocol for protocol in get_args(Protocol) if any(r["protocol"] == protocol for r in found)]
    return StudySummary(
        name=study.name,
        printed=study.printed,
        deviations=list(study.deviations),
        print_fails=[clause.text for clause in study.printed_conclusion.clauses if not clause.held],
        results=[
            _summarize_protocol(study, protocol, [r for r in found if r["protocol"] == protocol], problems)
            for protocol in protocols or (None,)
        ],
    )


def _summarize_protocol(
    study: Study, protocol: Protocol | None, records: Sequence[CellRecord], problems: list[Problem]
) -> ProtocolResult:
    cells = study.by_name
    values, current = collect_samples(shown_records(records, cells)), current_records(records, cells)
    statuses, settings = list_cell_statuses(cells.values(), protocol, records)
    conclusion, found = conclude(study, protocol, current)
    problems += found
    entries, series = [compare_number(values, number) for number in study.numbers], []
    if not entries:  # a figure without printed numbers
        entries, series = arrange_numbers(values, values_read_by_check(study, values))
    return ProtocolResult(
        protocol=protocol,
        verdict=conclusion.verdict,
        needs=conclusion.needs,
        networks=count_networks(study, current) if conclusion.clauses else 0,
        clauses=list(conclusion.clauses),
        without_outcomes=sum(not r.get("outcomes") and _is_benchmark(r) for r in records),
        entries=entries,
        series=series,
        cells=statuses,
        settings=settings,
        outdated=[f"{r['cell']} seed {r['seed']}" for r in records if outdated_settings(r, cells[r["cell"]])],
        minutes=_minutes_by_device(records),
        measures=_distinct(describe_measure(one) for record in records for one in record["measures"]),
        torch=_distinct(part.get("torch") for record in records for part in (record["run"], record)),
        precision=_distinct(record["run"].get("precision") for record in records),
        commits=_distinct(part.get("commit") for record in records for part in (record["run"], record)),
    )


def list_cell_statuses(
    cells: Iterable[Cell], protocol: Protocol | None, records: Sequence[CellRecord]
) -> tuple[list[CellStatus], dict[str, str]]:
    """Return the status of each cell with its own settings, and the settings that all cells share."""
    statuses: list[CellStatus] = []
    for cell in cells:
        done = sorted((record for record in records if record["cell"] == cell.name), key=lambda record: record["seed"])
        planned = cell if protocol is None else plan_cell(cell, protocol)
        trained = with_defaults(done[0]["run"]["config"]) if done else planned.config.to_dict()
        minutes = _minutes_by_device(done)
        statuses.append(
            CellStatus(
                name=cell.name,
                seeds=[record["seed"] for record in done],
                measured_for=[name for name in _distinct(r["measured_for"] for r in done) if name != done[0]["study"]],
                devices=list(minutes),
                minutes=sum(minutes.values()) if done else None,
                settings=dict(flatten_settings(trained)),
            )
        )
    first = statuses[0]["settings"] if statuses else {}
    common = {k: v for k, v in first.items() if all(status["settings"].get(k) == v for status in statuses)}
    for status in statuses:
        status["settings"] = {key: value for key, value in status["settings"].items() if key not in common}
    return statuses, common


def compare_number(values: MeasuredValues, number: PrintedNumber) -> ComparedNumber:
    """Return a printed number with the measured one."""
    sample, paper = values.samples.get((number.cell, number.value)), number.printed
    ours = sample.mean if sample else None
    return ComparedNumber(
        row=number.row,
        column=number.column,
        cell=number.cell,
        value=number.value,
        paper=paper,
        ours=ours,
        interval=sample.interval if sample else None,
        images=sample.images if sample else None,
        spread=sample.spread if sample else None,
        n=len(sample.values) if sample else 0,
        difference=None if ours is None or paper is None else ours - paper,
    )


def arrange_numbers(values: MeasuredValues, first: Set[Key]) -> tuple[list[ComparedNumber], list[NumberSeries]]:
    """Separate single numbers from series: ``accuracy/0``, ``accuracy/1`` or ``1/loss``, ``2/loss``.

    Layers form a series too: ``layers/AP/bn1/total``, ``layers/AP/layer1.0.bn1/total``. The numbers in ``first`` come
    first. Other series that are constant are left out.
    """
    families: dict[tuple[str, str, str], dict[int, str]] = {}
    for cell, name in sorted(values, key=lambda key: key not in first):
        parts = name.split("/")
        if len(parts) > 1 and parts[0].isdecimal() and parts[1].endswith("layers"):
            continue  # layers along training: their sums are shown
        if len(parts) == 4 and parts[0].endswith("layers"):
            family = cell, "/".join([*parts[:2], parts[3]]), "layer, from input to output"
            layers = families.setdefault(family, {})
            layers[len(layers) + 1] = name
            continue
        places = [index for index, part in enumerate(parts) if part.isascii() and part.isdecimal()]
        at = (0 if places[0] == 0 else places[-1]) if places else len(parts)  # a leading number is an epoch
        family = "/".join([*parts[:at], *parts[at + 1 :]])
        if "conditions" not in parts and parts[0] != "channels" and parts[-1] not in ("epoch", "step"):
            drawn = "channels that were drawn, in order" if (cell, "channels/0") in values else "place in the list"
            over = ("epoch" if at == 0 else drawn) if places else ""
            families.setdefault((cell, family, over), {})[int(parts[at]) if places else 0] = name
    singles, series = [], []
    for (cell, family, over), names in families.items():
        if len(names) < 3:
            for name in names.values():
                number = PrintedNumber(row=cell, column=short_name(name), cell=cell, value=name, printed=None)
                singles.append(compare_number(values, number))
            continue
        ours = [statistics.fmean(values[cell, names[x]]) for x in sorted(names)]
        if len(set(ours)) > 1 or any((cell, name) in first for name in names.values()):
            series.append(NumberSeries(cell=cell, value=short_name(family), over=over, x=sorted(names), ours=ours))
    return singles, series


def short_name(name: str) -> str:
    """Drop the prefix that every value of a cell's only network has (see :class:`Measure`)."""
    return name.replace("networks/run/", "")


def _is_benchmark(record: CellRecord) -> bool:
    return any(measure.get("name", "benchmark") == "benchmark" for measure in record["measures"])


def _minutes_by_device(records: Iterable[CellRecord]) -> dict[str, float]:
    """Sum the minutes of training over all processes. A run that several records share counts once.

    Time that several runs spent on one GPU counts once too, if their records identify the GPU.
    """
    minutes: dict[str, float] = {}
    spans: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for record in {training_key(record): record for record in records}.values():
        run = record["run"]
        device, seconds = str(run.get("device")), run["seconds"] * run["processes"]
        if run.get("device_id") and run.get("first_step_ended"):
            start = run["first_step_ended"] - run["first_step_seconds"]
            spans.setdefault((device, str(run["device_id"])), []).append((start, start + run["seconds"]))
            seconds -= run["seconds"]  # of the other processes
        minutes[device] = minutes.get(device, 0.0) + seconds / 60
    for (device, _), intervals in spans.items():
        minutes[device] += _length_of_union(intervals) / 60
    return minutes


def _length_of_union(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the time that at least one of the intervals covers."""
    length, covered = 0.0, -math.inf
    for start, end in sorted(intervals):
        length += max(0.0, end - max(start, covered))
        covered = max(covered, end)
    return length


def _distinct(items: Iterable[object]) -> list[str]:
    return list(dict.fromkeys(str(item) for item in items if item is not None))
