"""What the records below a folder say of every study: plain data, for a page that is made without torch."""

from __future__ import annotations

import json
import os
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypedDict, get_args

from advnorm._core.errors import ConfigError
from advnorm.config.config import Config
from advnorm.studies.base import IMAGES, STUDIES, Answer, Cell, Conclusion, Protocol, Study, Values, same_as
from advnorm.studies.claims import WORDS
from advnorm.studies.protocols import under
from advnorm.studies.record import Record, changed, flat, measures_of, read_record, stands, whole
from advnorm.training.cost import training_flops

PAPERS = {
    "A": "Towards Understanding Dual BN in Hybrid Adversarial Training",
    "B": "Adversarially Perturbed Batch Normalization: A Simple Way to Improve Image Recognition",
    "C": "Improving the Accuracy-Robustness Trade-Off for Dual-Domain Adversarial Training",
    "D": "Batch Normalization Increases Adversarial Vulnerability: Disentangling Usefulness and Robustness of Model "
    "Features",
    "E": "Intriguing Properties of Adversarial Training",
}
#: What the runner keeps beside the records.
WORKING = ("runs", "features")


class Entry(TypedDict):
    """A number: what the paper prints and what was measured, None where there is none.

    ``spread`` is the standard deviation over seeds (n - 1 in the denominator), of two and more.
    """

    row: str
    column: str
    cell: str
    value: str
    paper: float | None
    ours: float | None
    spread: float | None
    n: int
    difference: float | None


class Series(TypedDict):
    """Numbers in a row, by their place: along training, over radii, over channels. The mean over seeds.

    ``over``: what the places are, for an axis.
    """

    cell: str
    value: str
    over: str
    x: list[int]
    ours: list[float]


class CellState(TypedDict):
    """A cell: which seeds are done (none: it is missing), where, at what cost, and the settings that are its own.

    ``measured_for``: other studies whose records stand for it.
    """

    name: str
    seeds: list[int]
    measured_for: list[str]
    devices: list[str]
    minutes: float | None
    settings: dict[str, str]


class Result(TypedDict):
    """A study under one protocol; ``protocol`` is None where nothing was run. ``settings``: those of every cell.

    ``outdated``: the cells and seeds whose records were made with other settings than the study has now.
    """

    protocol: Protocol | None
    answer: Answer
    clauses: list[tuple[str, bool]]  # the parts of the claim that could be judged, and whether each holds
    entries: list[Entry]
    series: list[Series]
    cells: list[CellState]
    settings: dict[str, str]
    outdated: list[str]
    minutes: dict[str, float]
    measures: list[str]
    torch: list[str]
    precision: list[str]
    commits: list[str]


class StudySummary(TypedDict):
    """A table or figure; ``said`` are numbers that the paper gives in its text. At least one result, maybe an empty."""

    name: str
    caption: str
    where: str
    claim: str
    notes: str
    said: list[tuple[str, float]]
    results: list[Result]


class Summary(TypedDict):
    """All studies; minutes by device, a training that studies share once; why files among the records are skipped.

    ``others`` counts the JSON files of other folders, which are not read; ``words`` says what those of claims mean.
    """

    papers: dict[str, str]
    words: dict[str, str]
    studies: list[StudySummary]
    minutes: dict[str, float]
    problems: list[str]
    others: dict[str, int]


def summary(out: Path | str) -> Summary:
    """Every study with the paper's numbers beside ours, from the records below ``out``."""
    out = Path(out)
    if not out.is_dir():
        raise ConfigError(f"{out} is no folder; name the one that `advnorm study` wrote its records to")
    names = sorted(STUDIES.names(), key=_order)
    cells = {name: STUDIES.get(name).by_name() for name in names}
    records, problems = read_records(out, cells)
    studies = []
    for name in cells:
        study = STUDIES.get(name)
        found = _of(study, records)
        entry = study.printed
        protocols = [protocol for protocol in get_args(Protocol) if any(r["protocol"] == protocol for r in found)]
        results = []
        for protocol in protocols or (None,):
            result, problem = _result(study, cells[name], protocol, [r for r in found if r["protocol"] == protocol])
            results.append(result)
            problems += [problem] if problem else []
        studies.append(
            StudySummary(
                name=name,
                caption=entry["caption"],
                where=entry["where"],
                claim=entry["claim"],
                notes=entry["notes"],
                said=[(item["what"], item["value"]) for item in entry.get("printed", ())],
                results=results,
            )
        )
    return Summary(
        papers=PAPERS,
        words=WORDS,
        studies=studies,
        minutes=_minutes(records),
        problems=problems,
        others=_others(out),
    )


def _order(name: str) -> tuple[str, str, list[int]]:
    """Tables before figures before sections of the text, ``fig2`` before ``fig10``."""
    paper, _, what = name.partition("/")
    kind = what.rstrip(".0123456789")
    rank = {"table": "0", "fig": "1"}.get(kind, f"2{kind}")
    return paper, rank, [int(part) for part in re.findall(r"\d+", what)]


def _others(out: Path) -> dict[str, int]:
    folders = [path for path in sorted(out.iterdir()) if path.is_dir() and path.name not in ("records", *WORKING)]
    counts = {out.resolve().name: sum(1 for _ in out.glob("*.json"))}
    counts |= {folder.name: sum(1 for _ in folder.rglob("*.json")) for folder in folders}
    return {name: count for name, count in counts.items() if count}


# -- reading -----------------------------------------------------------------------------------------------------------


def collected(
    study: Study,
    *,
    seeds: Iterable[int] | None = None,
    protocol: Protocol,
    out: Path | str,
    outdated: bool = True,
) -> tuple[Values, list[str]]:
    """The measured values of a study over seeds, and what is wrong with its records that cannot be read.

    ``outdated``: where a cell has none of the settings that the study has now, those of others; no verdict is by them.
    """
    records, problems = _records_of(study, seeds, protocol, Path(out))
    return _values(_counted(records, study.by_name(), outdated=outdated)), problems


def concluded(
    study: Study, *, seeds: Iterable[int], protocol: Protocol, out: Path | str
) -> tuple[Values, Conclusion, list[str]]:
    """What is :func:`collected`, the verdict by it, and all that is wrong; the records are read once."""
    records, problems = _records_of(study, seeds, protocol, Path(out))
    shown, now = (_values(_counted(records, study.by_name(), outdated=outdated)) for outdated in (True, False))
    conclusion = study.concluded(now)
    return shown, conclusion, [*problems, *([conclusion.problem] if conclusion.problem else [])]


def _records_of(
    study: Study, seeds: Iterable[int] | None, protocol: Protocol, out: Path
) -> tuple[list[Record], list[str]]:
    """The records that serve a study under a protocol, and what is wrong with those that cannot be read."""
    names = [study.name, *(other for cell in study.by_name() for other, _ in same_as(study.name, cell))]
    cells = {name: STUDIES.get(name).by_name() for name in dict.fromkeys(names)}
    records, problems = read_records(out, cells, within=cells)
    problems = [problem for problem in problems if re.match(rf"records/{re.escape(study.name)}[/ ]", problem)]
    wanted = None if seeds is None else set(seeds)
    chosen = [r for r in _of(study, records) if r["protocol"] == protocol and (wanted is None or r["seed"] in wanted)]
    return chosen, problems


def _counted(records: Sequence[Record], cells: Mapping[str, Cell], *, outdated: bool) -> list[Record]:
    """Those of the settings that the study has now; others, if at all, of cells that have none of them."""
    now = [record for record in records if not changed(record, cells[record["cell"]])]
    known = {record["cell"] for record in now}
    return [record for record in records if record["cell"] not in known] + now if outdated else now


def rates(study: Study, out: Path | str) -> dict[str, float]:
    """Operations a second of the trainings of a study's paper by its records, by device: the median, estimated."""
    cells = {name: STUDIES.get(name).by_name() for name in STUDIES.names(f"{study.name.split('/')[0]}/*")}
    found: dict[str, list[float]] = {}
    for record in read_records(Path(out), cells, within=cells)[0]:
        run = record["run"]
        with suppress(ConfigError):  # settings of another version
            flops = training_flops(Config.from_dict(run["config"]))
            if flops is not None and run["seconds"] > 0 and record["protocol"] != "smoke":
                found.setdefault(str(run.get("device")), []).append(flops / run["seconds"])
    return {device: statistics.median(each) for device, each in found.items()}


def _of(study: Study, records: Sequence[Record]) -> list[Record]:
    """A study's records by cell and seed; where one is missing or outdated, another study's that stands for it."""
    cells, chosen = study.by_name(), {}
    served = {place: cell for cell in cells for place in [(study.name, cell), *same_as(study.name, cell)]}
    for record in records:  # in the order of their places
        own, cell = record["study"] == study.name, served.get((record["study"], record["cell"]))
        if cell is None:
            continue
        key = cell, record["protocol"], record["seed"]
        rank = (2 if own else 1) if stands(record, cells[cell]) else 0
        if (own or rank) and rank > chosen.get(key, (-1, None))[0]:
            chosen[key] = rank, {**record, "study": study.name, "cell": cell, "measured_for": record["study"]}
    return [chosen[key][1] for key in sorted(chosen, key=lambda key: (key[0], key[2]))]


def read_records(
    out: Path, cells: Mapping[str, Mapping[str, Cell]], within: Iterable[str] = ("",)
) -> tuple[list[Record], list[str]]:
    """The records of cells below ``out/records``, or of some studies, and what is wrong with the files that are none.

    In the order of their places.
    """
    folder = out / "records"
    problems: list[str] = []
    records = []

    def closed(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # nothing was run yet
            problems.append(f"{Path(error.filename).relative_to(out)} cannot be read: {error.strerror}")

    walk = chain.from_iterable(os.walk(folder / name, onerror=closed, followlinks=True) for name in within)
    # Hidden files are what a killed writer leaves (see write_atomic); its cell counts as missing.
    paths = [Path(parent) / name for parent, _, names in walk for name in names if not name.startswith(".")]
    for path in sorted(paths):
        shown = path.relative_to(out).as_posix()
        try:
            record = read_record(path, path.relative_to(folder).as_posix(), cells)
        except ConfigError as error:
            problems.append(f"{shown} is skipped: {error}")
            continue
        records.append(record)
        others = changed(record, cells[record["study"]][record["cell"]])
        if others:
            problems.append(f"{shown} was made with other settings than the study has now: {', '.join(others)}")
    return records, [problem.encode(errors="replace").decode() for problem in problems]  # names may be no UTF-8


# -- what they say -----------------------------------------------------------------------------------------------------


def _result(
    study: Study, cells: Mapping[str, Cell], protocol: Protocol | None, records: Sequence[Record]
) -> tuple[Result, str | None]:
    """A study under a protocol, and what is wrong with values that its check cannot read."""
    values = _values(_counted(records, cells, outdated=True))
    states, settings = cell_states(cells.values(), protocol, records)
    answer, clauses, problem = study.concluded(_values(_counted(records, cells, outdated=False)))
    if protocol == "smoke":  # two steps on synthetic images say nothing of a claim, whatever their numbers are
        answer, clauses = "not run", ()
    entries, series = _placed(study, values), []
    if not entries:  # a figure: the paper prints no numbers
        entries, series = _unplaced(values, decisive(study, values))
    result = Result(
        protocol=protocol,
        answer=answer,
        clauses=[(clause.text, clause.held) for clause in clauses],
        entries=entries,
        series=series,
        cells=states,
        settings=settings,
        outdated=[f"{r['cell']} seed {r['seed']}" for r in records if changed(r, cells[r["cell"]])],
        minutes=_minutes(records),
        measures=_distinct(in_words(one) for record in records for one in measures_of(record)),
        torch=_distinct(part.get("torch") for record in records for part in (record["run"], record)),
        precision=_distinct(record["run"].get("precision") for record in records),
        commits=_distinct(part.get("commit") for record in records for part in (record["run"], record)),
    )
    return result, problem


def in_words(measure: Mapping[str, Any]) -> str:
    """``benchmark (pgd10-step2, autoattack) on all images``, ``channels on 1000 images``."""
    options = measure["options"]
    attacks = options.get("attacks") or options.get("inputs")
    attacks = attacks if isinstance(attacks, Mapping | list) else ()
    names = ", ".join(map(str, attacks.values() if isinstance(attacks, Mapping) else attacks))
    limit = options.get("limit", None if measure.get("name") == "benchmark" else IMAGES)
    images = "" if measure.get("name") == "metrics" else f" on {'all' if limit is None else limit} images"
    return f"{measure.get('name')}{f' ({names})' if names else ''}{images}"


def _values(records: Iterable[Record]) -> dict[tuple[str, str], list[float]]:
    """Numbers by cell and name, each a list over seeds."""
    values: dict[tuple[str, str], list[float]] = {}
    for record in records:
        for name, value in record["values"].items():
            values.setdefault((record["cell"], name), []).append(float(value))
    return values


def _placed(study: Study, values: Mapping[tuple[str, str], Sequence[float]]) -> list[Entry]:
    measured = partial(_entry, values)
    return [
        measured(number.row, number.column, number.cell, number.value, number.printed) for number in study.numbers()
    ]


class _Read(dict[tuple[str, str], Sequence[float]]):
    """Values that remember which of them were looked at."""

    def __init__(self, values: Mapping[tuple[str, str], Sequence[float]]) -> None:
        super().__init__(values)
        self.seen: set[tuple[str, str]] = set()

    def __getitem__(self, key: tuple[str, str]) -> Sequence[float]:
        self.seen.add(key)
        return super().__getitem__(key)


def decisive(study: Study, values: Mapping[tuple[str, str], Sequence[float]]) -> set[tuple[str, str]]:
    """The values that the check of the claim reads."""
    read = _Read(values)
    study.answer(read)
    return read.seen


def _unplaced(
    values: Mapping[tuple[str, str], Sequence[float]], first: Set[tuple[str, str]]
) -> tuple[list[Entry], list[Series]]:
    """Numbers that stand alone, and those in a row: ``accuracy/0``, ``accuracy/1`` or ``1/loss``, ``2/loss``.

    Layers are a row too: ``layers/AP/bn1/total``, ``layers/AP/layer1.0.bn1/total``. Those in ``first`` come first; of
    the others those that are the same everywhere tell nothing and are left out.
    """
    rows: dict[tuple[str, str, str], dict[int, str]] = {}
    for cell, name in sorted(values, key=lambda key: key not in first):
        parts = name.split("/")
        if len(parts) > 1 and parts[0].isdecimal() and parts[1].endswith("layers"):
            continue  # along training: their sums say it
        if len(parts) == 4 and parts[0].endswith("layers"):
            layers = rows.setdefault((cell, "/".join([*parts[:2], parts[3]]), "layer, from input to output"), {})
            layers[len(layers) + 1] = name
            continue
        places = [index for index, part in enumerate(parts) if part.isascii() and part.isdecimal()]
        at = (0 if places[0] == 0 else places[-1]) if places else len(parts)  # an epoch goes before the rest
        family = "/".join([*parts[:at], *parts[at + 1 :]])
        if "conditions" not in parts and parts[0] != "channels" and parts[-1] not in ("epoch", "step"):
            over = _axis(values, cell, along=at == 0) if places else ""
            rows.setdefault((cell, family, over), {})[int(parts[at]) if places else 0] = name
    entries, series = [], []
    for (cell, family, over), names in rows.items():
        if len(names) < 3:
            entries += [_entry(values, cell, shown(name), cell, name, None) for name in names.values()]
            continue
        ours = [statistics.fmean(values[cell, names[x]]) for x in sorted(names)]
        if len(set(ours)) > 1 or any((cell, name) in first for name in names.values()):
            series.append(Series(cell=cell, value=shown(family), over=over, x=sorted(names), ours=ours))
    return entries, series


def shown(name: str) -> str:
    """Without what every number of a cell's only network has in front (see :class:`Measure`)."""
    return name.replace("networks/run/", "")


def _axis(values: Mapping[tuple[str, str], Sequence[float]], cell: str, *, along: bool) -> str:
    """What numbers in a row are numbered by."""
    if along:
        return "epoch"
    return "channels that were drawn, in order" if (cell, "channels/0") in values else "place in the list"


def _entry(
    values: Mapping[tuple[str, str], Sequence[float]], row: str, column: str, cell: str, value: str, paper: float | None
) -> Entry:
    sample = values.get((cell, value), ())
    ours = statistics.fmean(sample) if sample else None
    return Entry(
        row=row,
        column=column,
        cell=cell,
        value=value,
        paper=paper,
        ours=ours,
        spread=statistics.stdev(sample) if len(sample) > 1 else None,
        n=len(sample),
        difference=None if ours is None or paper is None else ours - paper,
    )


def cell_states(
    cells: Iterable[Cell], protocol: Protocol | None, records: Sequence[Record]
) -> tuple[list[CellState], dict[str, str]]:
    """How far each cell is; settings that all share, and apart from them each cell's own."""
    states, settings = [], []
    for cell in cells:
        done = sorted((record for record in records if record["cell"] == cell.name), key=lambda record: record["seed"])
        planned = cell if protocol is None else under(protocol, cell)
        settings.append(dict(flat(whole(done[0]["run"]["config"]) if done else planned.config.to_dict())))
        minutes = _minutes(done)
        states.append(
            CellState(
                name=cell.name,
                seeds=[record["seed"] for record in done],
                measured_for=[name for name in _distinct(r["measured_for"] for r in done) if name != done[0]["study"]],
                devices=list(minutes),
                minutes=sum(minutes.values()) if done else None,
                settings={},
            )
        )
    common = {k: v for k, v in settings[0].items() if all(other.get(k) == v for other in settings)} if settings else {}
    for state, own in zip(states, settings):
        state["settings"] = {key: value for key, value in own.items() if key not in common}
    return states, common


def _minutes(records: Iterable[Record]) -> dict[str, float]:
    """Minutes of training by device, over all processes; a run that several records rest on counts once."""
    minutes: dict[str, float] = {}
    seen = set()
    for record in records:
        run = record["run"]
        key = json.dumps([run["config"], record["seed"], run["seconds"]], sort_keys=True)
        if key not in seen:
            seen.add(key)
            device = str(run.get("device"))
            minutes[device] = minutes.get(device, 0.0) + run["seconds"] * run["processes"] / 60
    return minutes


def _distinct(items: Iterable[object]) -> list[str]:
    return list(dict.fromkeys(str(item) for item in items if item is not None))
