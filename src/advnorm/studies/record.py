"""The record of a cell on disk: its format, its validation, and whether it matches the cell as it is now."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, get_args

from advnorm._core.errors import ConfigError, Problem, collect_problems, unknown_name
from advnorm.config import Config
from advnorm.evaluation.outcomes import CELL_FORMAT
from advnorm.studies.protocols import plan_cell, without_search
from advnorm.studies.registry import find
from advnorm.studies.study import Cell, Protocol
from advnorm.studies.uncertainty import kind_of_value

#: Settings that distinguish runs but not methods.
_RUN_ONLY = ("seed", "name")
_DEFAULTS = Config().to_dict()
CellRecord = dict[str, Any]


def record_name(study: str, cell: str, protocol: str, seed: object) -> str:
    """Return the path of a record below the folder of records: ``A/table3/single/eps8/fast-seed0.json``."""
    return f"{study}/{cell}/{protocol}-seed{seed!r}.json"


def record_problems(record: CellRecord, name: str) -> list[Problem]:
    """Validate the record in the file ``name``, which is that of :func:`record_name`."""
    if record.get("format") != CELL_FORMAT:
        return [Problem("wrong_format", f"its format must be {CELL_FORMAT!r}", "format", got=record.get("format"))]
    study, cell, protocol, seed = (record.get(key) for key in ("study", "cell", "protocol", "seed"))
    stated = record_name(f"{study}", f"{cell}", f"{protocol}", seed)
    if stated != name:
        return [Problem(code="conflict", message=f"it claims to be {stated!r}", field="study")]
    found: list[Problem] = []
    with collect_problems(found):
        find(f"{study}/{cell}")
    known = find(f"{study}/{cell}")[0].protocols if not found else get_args(Protocol)
    if protocol not in known:
        found.append(unknown_name("protocol", protocol, known))
    values, run, measures = (record.get(key) for key in ("values", "run", "measures"))
    if not isinstance(values, dict) or not values or not all(_is_finite(value) for value in values.values()):
        found.append(Problem(code="not_finite", message="{field} must be finite numbers by name", field="values"))
    costs: list[object] = [None]
    if isinstance(run, dict):
        optional = (run.get(name) or 0 for name in ("first_step_seconds", "first_step_ended"))
        costs = [run.get("seconds"), run.get("processes"), *optional]
    if not isinstance(run, dict) or not isinstance(run.get("config"), dict) or not all(map(_is_finite, costs)):
        found.append(Problem("wrong_type", "{field} must contain a configuration, seconds and processes", "run"))
    if not isinstance(measures, list) or not all(isinstance(one, dict) and "options" in one for one in measures):
        found.append(Problem(code="wrong_type", message="{field} must be a list of measurements", field="measures"))
    return found or _impossible_accuracies(record)


def _impossible_accuracies(record: CellRecord) -> list[Problem]:
    """Report accuracies outside 0 to 100 %, and measurements whose settings cannot be read."""
    try:
        units = {name: kind_of_value(record, name, value)[0] for name, value in record["values"].items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        return [Problem(code="wrong_type", message="{field} must be a list of measurements", field="measures")]
    outside = [name for name, unit in units.items() if unit is not None and not 0 <= record["values"][name] <= unit]
    message = f"{{field}} has accuracies outside 0 to 100 %: {', '.join(outside)}"
    return [Problem(code="out_of_range", message=message, field="values")] if outside else []


def _is_finite(value: object) -> bool:
    """Whether ``value`` is a number whose sums and squares stay finite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e100


def matches_cell(record: CellRecord, cell: Cell) -> bool:
    """Whether a record, of any study, has all numbers of a cell as it is configured now."""
    planned = plan_cell(cell, record["protocol"])
    try:
        trained = Config.from_dict(record["run"]["config"])
    except ConfigError:
        return False
    measures = _normalized_measures({"measures": json.loads(json.dumps([asdict(one) for one in planned.measures]))})
    return trained.digest == planned.config.digest and _normalized_measures(record) == measures


def outdated_settings(record: CellRecord, cell: Cell) -> list[str]:
    """List the settings of the training and the measurements that differ from the cell's settings now."""
    planned = plan_cell(cell, record["protocol"])
    before = with_defaults(record["run"]["config"]), _normalized_measures(record)
    now = planned.config.to_dict(), _normalized_measures({"measures": [asdict(one) for one in planned.measures]})
    old, new = (
        dict(flatten_settings({**config, "measures": {str(place): one for place, one in enumerate(measures)}}))
        for config, measures in (before, now)
    )
    ignored = ("weights", "data") if cell.after else ()  # the runner sets those
    return [
        f"{key} {old.get(key, 'missing')}, now {new.get(key, 'missing')}"
        for key in old | new
        if old.get(key) != new.get(key) and key.partition(".")[0] not in ignored
    ]


def with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Complete a run's settings: settings that were added later had their defaults."""
    return {**_DEFAULTS, **config, "attack": {**_DEFAULTS["attack"], **config.get("attack", {})}}


def _normalized_measures(record: CellRecord) -> list[Any]:
    """Return a record's measurements; the precision of an attack's search does not distinguish them."""
    return [{**one, "options": without_search(one["options"])} for one in record["measures"]]


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
