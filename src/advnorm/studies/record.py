"""The record of a cell on disk: its format, its validation, and whether it matches the cell as it is now."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import cache
from typing import Any, get_args

from advnorm._core.errors import ConfigError, Problem, unknown_name
from advnorm.config import Config
from advnorm.studies.protocols import plan_cell, with_fast_autoattack
from advnorm.studies.registry import STUDIES
from advnorm.studies.study import Cell, Protocol

FORMAT = "advnorm.cell/1"
#: Settings that distinguish runs but not methods.
_RUN_ONLY = ("seed", "name")
CellRecord = dict[str, Any]


def record_problems(record: CellRecord, name: str) -> list[Problem]:
    """Validate the record in the file ``name``, such as ``A/table3/single/eps8/fast-seed0.json``."""
    if record.get("format") != FORMAT:
        message = f"its format must be {FORMAT!r}"
        return [Problem(code="wrong_format", message=message, field="format", got=record.get("format"))]
    study, cell, protocol, seed = (record.get(key) for key in ("study", "cell", "protocol", "seed"))
    found = []
    stated = f"{study}/{cell}/{protocol}-seed{seed}.json"
    if stated != name:
        found.append(Problem(code="conflict", message=f"it claims to be {stated!r}", field="study"))
    if not isinstance(study, str) or study not in STUDIES:
        found.append(unknown_name("study", study, STUDIES))
    elif not isinstance(cell, str) or cell not in STUDIES.get(study).by_name():
        found.append(unknown_name(f"cell of {study}", cell, STUDIES.get(study).by_name(), "cell"))
    if protocol not in get_args(Protocol):
        found.append(unknown_name("protocol", protocol, get_args(Protocol)))
    if type(seed) is not int:
        found.append(Problem(code="wrong_type", message="{field} must be an integer", field="seed", got=seed))
    values, run = record.get("values"), record.get("run")
    if not isinstance(values, dict) or not values or not all(_is_finite(value) for value in values.values()):
        found.append(Problem(code="not_finite", message="{field} must be finite numbers by name", field="values"))
    else:
        found += _accuracy_problems(record)
    config = run.get("config") if isinstance(run, dict) else None
    if not isinstance(run, dict) or not isinstance(config, dict) or not {"model", "data", "norm"} <= config.keys():
        found.append(Problem(code="wrong_type", message="{field} must contain a configuration", field="run"))
    elif not _is_finite(run.get("seconds")) or not _is_finite(run.get("processes")):
        found.append(Problem(code="wrong_type", message="{field} must contain seconds and processes", field="run"))
    return found


def _accuracy_problems(record: CellRecord) -> list[Problem]:
    """Find benchmark results outside 0 to 100 percent."""
    benchmarks = [one["options"] for one in recorded_measures(record) if one.get("name") == "benchmark"]
    attacks = [options["attacks"] for options in benchmarks if isinstance(options.get("attacks"), dict)]
    accuracies = {"clean"}.union(*attacks)
    return [
        Problem(code="out_of_range", message="{field} must be an accuracy in percent", field=name, got=value)
        for name, value in record["values"].items()
        if benchmarks and name.rpartition("/")[2] in accuracies and not 0 <= value <= 100
    ]


def _is_finite(value: object) -> bool:
    """Whether ``value`` is a number whose sums and squares stay finite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e100


def recorded_measures(record: CellRecord) -> list[Mapping[str, Any]]:
    """Return the well-formed measurements of a record."""
    measures = record.get("measures")
    found = [one for one in measures if isinstance(one, Mapping)] if isinstance(measures, list) else []
    return [one for one in found if isinstance(one.get("options"), Mapping)]


def matches_cell(record: CellRecord, cell: Cell) -> bool:
    """Whether a record, of any study, has all numbers of a cell as it is configured now."""
    config, measures = _planned(record["protocol"], cell)
    try:
        trained = Config.from_dict(record["run"]["config"])
    except ConfigError:
        return False
    return trained.digest == config.digest and _normalized_measures(record) == measures and bool(record["values"])


def outdated_settings(record: CellRecord, cell: Cell) -> list[str]:
    """List the settings of the training and the measurements that differ from the cell's settings now."""
    config, measures = _planned(record["protocol"], cell)
    now = json.loads(json.dumps(config.to_dict()))
    ignored = {*_RUN_ONLY, *(("weights", "data") if cell.after else ())}  # the runner sets those
    before, taken = with_defaults(record["run"]["config"]), _normalized_measures(record)
    found = [f"{key} {before[key]}, now {now[key]}" for key in now if key not in ignored and before[key] != now[key]]
    if isinstance(taken, list):
        old, new = (
            dict(flatten_settings({str(place): one for place, one in enumerate(m)}, "measures."))
            for m in (taken, measures)
        )
        for key in old | new:
            if old.get(key) != new.get(key):
                found.append(f"{key} {old.get(key, 'missing')}, now {new.get(key, 'missing')}")
    return found


def with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Complete a run's settings: settings that were added later had their defaults."""
    return {**_default_settings(), **config}


@cache
def _default_settings() -> dict[str, Any]:
    return json.loads(json.dumps(Config().to_dict()))


def _planned(protocol: Protocol, cell: Cell) -> tuple[Config, list[Any]]:
    """Return a cell's settings under a protocol, and its measurements in the form of a record."""
    planned = plan_cell(cell, protocol)
    return planned.config, json.loads(json.dumps([asdict(one) for one in planned.measures]))


def _normalized_measures(record: CellRecord) -> Any:
    """Return a record's measurements; under ``fast``, a strict float32 AutoAttack replaces the bf16 search."""
    taken = record.get("measures")
    if record["protocol"] != "fast" or not isinstance(taken, list):
        return taken
    return [
        {**one, "options": with_fast_autoattack(one["options"])}
        if isinstance(one, Mapping) and isinstance(one.get("options"), Mapping)
        else one
        for one in taken
    ]


def flatten_settings(settings: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """Yield nested settings as dotted keys, such as ``attack.steps``, and text."""
    for key, value in settings.items():
        if not prefix and key in _RUN_ONLY:
            continue
        if isinstance(value, Mapping) and value:
            yield from flatten_settings(value, f"{prefix}{key}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value)
            yield (f"{prefix}{key}".removesuffix(".name"), text)
