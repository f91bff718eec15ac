"""The record of a cell on disk: what it must have, and what is wrong with a file that is none."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, get_args

from advnorm._core.errors import AdvnormError, ConfigError, did_you_mean, raise_all
from advnorm._core.records import read_json
from advnorm.config.config import Config
from advnorm.studies.base import Cell, Protocol
from advnorm.studies.protocols import fast_search, under

FORMAT = "advnorm.cell/1"
#: Settings that tell runs apart and not methods.
_RUN_ONLY = ("seed", "name")
Record = dict[str, Any]


def read_record(path: Path, place: str, cells: Mapping[str, Mapping[str, Cell]]) -> Record:
    """The record at ``place`` among all; a damaged or foreign file is refused with all the reasons."""
    try:
        record = read_json(path)
        _check(record, place, cells)
    except (AdvnormError, RecursionError) as error:
        raise ConfigError(str(error).replace(str(path), "the file")) from None
    return record


def _check(record: Record, place: str, cells: Mapping[str, Mapping[str, Cell]]) -> None:
    """Refuse what is no record of a cell of ours."""
    if record.get("format") != FORMAT:
        raise ConfigError(f"its format is {record.get('format')!r}, not {FORMAT!r}")
    study, cell, protocol, seed = (record.get(key) for key in ("study", "cell", "protocol", "seed"))
    wrong = []
    says = f"{study}/{cell}/{protocol}-seed{seed}.json"
    if says != place:
        wrong.append(f"it says that it is {says!r}")
    if not isinstance(study, str) or study not in cells:
        wrong.append(f"no study is called {study!r}{did_you_mean(study, cells)}")
    elif not isinstance(cell, str) or cell not in cells[study]:
        wrong.append(f"{study} has no cell {cell!r}{did_you_mean(cell, cells[study])}")
    if protocol not in get_args(Protocol):
        wrong.append(f"unknown protocol {protocol!r}{did_you_mean(protocol, get_args(Protocol))}")
    if type(seed) is not int:
        wrong.append(f"seed must be an integer, got {seed!r}")
    values, run = record.get("values"), record.get("run")
    if not isinstance(values, dict) or not values or not all(_finite(value) for value in values.values()):
        wrong.append("values must be finite numbers by name")
    else:
        wrong += _judged_problems(record)
    config = run.get("config") if isinstance(run, dict) else None
    if not isinstance(run, dict) or not isinstance(config, dict) or not {"model", "data", "norm"} <= config.keys():
        wrong.append("run must have its config")
    elif not _finite(run.get("seconds")) or not _finite(run.get("processes")):
        wrong.append("run must have its seconds and its processes")
    raise_all(wrong, "no record of a cell")


def _judged_problems(record: Record) -> list[str]:
    """Numbers of the benchmarks among a record's own measurements that are no accuracies."""
    benchmarks = [one["options"] for one in measures_of(record) if one.get("name") == "benchmark"]
    judged = {"clean"}.union(
        *(options["attacks"] for options in benchmarks if isinstance(options.get("attacks"), dict))
    )
    return [
        f"{name} is no accuracy in percent: {value:g}"
        for name, value in record["values"].items()
        if benchmarks and name.rpartition("/")[2] in judged and not 0 <= value <= 100
    ]


def measures_of(record: Record) -> list[Mapping[str, Any]]:
    """What was measured, as far as a record says it."""
    measures = record.get("measures")
    found = [one for one in measures if isinstance(one, Mapping)] if isinstance(measures, list) else []
    return [one for one in found if isinstance(one.get("options"), Mapping)]


def _finite(value: object) -> bool:
    """Whether it is a number that can be counted with: no NaN, no infinity, none near the largest."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e100


def stands(record: Record, cell: Cell) -> bool:
    """Whether a record, of whatever study, has all numbers of a cell as it is now."""
    now, measures = _planned(record["protocol"], cell)
    try:
        config = Config.from_dict(record["run"]["config"])
    except ConfigError:
        return False
    return config.digest == now.digest and _taken(record) == measures and bool(record["values"])


def changed(record: Record, cell: Cell) -> list[str]:
    """Settings of a record's run, and of its measurements, that the study has changed since."""
    config, measures = _planned(record["protocol"], cell)
    now = json.loads(json.dumps(config.to_dict()))
    ignored = {*_RUN_ONLY, *(("weights", "data") if cell.after else ())}  # the runner fills those in
    before, taken = whole(record["run"]["config"]), _taken(record)
    others = [f"{key} {before[key]}, now {now[key]}" for key in now if key not in ignored and before[key] != now[key]]
    if isinstance(taken, list):
        old, new = (
            dict(flat({str(place): one for place, one in enumerate(m)}, "measures.")) for m in (taken, measures)
        )
        for key in old | new:
            if old.get(key) != new.get(key):
                others.append(f"{key} {old.get(key, 'not there')}, now {new.get(key, 'not there')}")
    return others


def whole(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run; those that came later had their defaults."""
    return {**_defaults(), **config}


@cache
def _defaults() -> dict[str, Any]:
    return json.loads(json.dumps(Config().to_dict()))


def _planned(protocol: Protocol, cell: Cell) -> tuple[Config, list[Any]]:
    """The settings of a cell under a protocol, and its measurements as a record has them."""
    planned = under(protocol, cell)
    return planned.config, json.loads(json.dumps([asdict(one) for one in planned.measures]))


def _taken(record: Record) -> Any:
    """The measurements of a record; an AutoAttack in strict float32 stands for the shortened schedule's."""
    taken = record.get("measures")
    if record["protocol"] != "fast" or not isinstance(taken, list):
        return taken
    options = [one.get("options") if isinstance(one, Mapping) else None for one in taken]
    return [
        {**one, "options": fast_search(given)} if isinstance(given, Mapping) else one
        for one, given in zip(taken, options)
    ]


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """``attack.steps`` and the like, as text."""
    for key, value in settings.items():
        if not prefix and key in _RUN_ONLY:
            continue
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value)
            yield (f"{prefix}{key}".removesuffix(".name"), text)
