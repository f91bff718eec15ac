"""Runs, evaluations and audits as flat rows: one row per run, branch and attack."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from advnorm._core.errors import ConfigError

if TYPE_CHECKING:
    import pandas

    from advnorm.evaluation.report_data import EvaluationFile, FolderResults, RunSummary

Row = dict[str, Any]
#: Columns that every table has, in this order. Others follow: ``config.*``, ``last.*`` and ``best.*``.
COLUMNS = (
    *("run", "error", "finished", "group", "model", "data", "norm", "objective", "threat", "eps", "epochs", "seed"),
    *("branch", "attack", "accuracy", "low", "high", "verdict", "claimed"),
    *("images", "checkpoint", "eval_data", "eval_threat", "eval_eps", "record"),
    *("minutes", "device", "torch", "advnorm", "commit"),
)
#: Errors of a record with missing or foreign entries.
DAMAGED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)


def runs(folder: Path | str = "runs") -> pandas.DataFrame:
    """Return the runs below a folder as a data frame: configuration, metrics, evaluations and audits.

    One row per run, branch and attack; a run without an evaluation has one row. ``clean``, ``union`` (all attacks) and
    ``audit`` count as attacks. A damaged file is a row with an ``error``. docs/guides/sweeps.md explains the columns.
    """
    try:
        import pandas
    except ImportError:
        hint = "pip install pandas, or write a file: advnorm report FOLDER --format csv"
        raise ConfigError("missing_package", "pandas is not installed", field="pandas", hint=hint) from None
    from advnorm.evaluation.report_data import collect_results

    if not Path(folder).is_dir():
        raise ConfigError("missing_file", f"no folder {folder}", field="folder", hint="name the --out folder of train")
    rows = result_rows(collect_results(folder))
    return pandas.DataFrame(rows, columns=pandas.Index(column_names(rows)))


def column_names(rows: Sequence[Row]) -> list[str]:
    """The fixed columns, then the others in the order of their first use, by their kind."""
    others = dict.fromkeys(name for row in rows for name in row if name not in COLUMNS)
    return [*COLUMNS, *sorted(others, key=lambda name: ("config", "last", "best").index(name.partition(".")[0]))]


def result_rows(found: FolderResults) -> list[Row]:
    """Return the rows of all runs in the order of their names, then records of other models, then unreadable files."""
    damaged: list[Row] = []
    for one in found["problems"]:  # a run.json stands for its folder
        folder, _, name = one["file"].rpartition("/")
        owner = (
            folder
            if name == "run.json"
            else next((run["name"] for run in found["runs"] if run["folder"] == folder), None)
        )
        damaged.append({"run": owner, "record": one["file"], "error": one["error"]})
    by_run: dict[str, list[Row]] = {run["name"]: [] for run in found["runs"]}
    for one in found["benchmarks"] + found["audits"]:
        run = _owner(one, found["runs"])
        try:
            about = one["record"].get("about") or {}
            rows = [row | {"record": one["file"]} for row in record_rows(one["record"])]
            by_run.setdefault(run or about.get("run") or about.get("model") or one["file"], []).extend(rows)
        except DAMAGED as error:
            damaged.append({"run": run, "record": one["file"], "error": f"{type(error).__name__}: {error}"})
    settings: dict[str, Row] = {}
    for run in found["runs"]:
        try:
            settings[run["name"]] = run_columns(run)
        except DAMAGED as error:
            settings[run["name"]] = {"error": f"{type(error).__name__}: {error}"}
    rows = [{"run": name, **row, **settings.get(name, {})} for name in by_run for row in by_run[name] or [{}]]
    return rows + damaged


def _owner(file: EvaluationFile, runs: Sequence[RunSummary]) -> str | None:
    """The run whose folder holds a record, or whose name the record gives."""
    about = file["record"].get("about")
    name = about.get("run") if isinstance(about, Mapping) else None
    inside = [run["name"] for run in runs if run["folder"] == "." or file["file"].startswith(f"{run['folder']}/")]
    return next(iter(inside), None) or next((r["name"] for r in runs if r["name"].rpartition("/")[2] == name), None)


# -- one run, one record -----------------------------------------------------------------------------------------------


def run_columns(run: RunSummary) -> Row:
    """The columns of a training run: its settings, its last and best epoch, and its conditions."""
    record, metrics = run["record"] or {}, run["metrics"]
    best = record.get("best") or {}
    for epoch in [*metrics, *([best] if best else [])]:
        values = [epoch["epoch"], *(value for _, value in _flat(epoch))]
        if not all(isinstance(value, int | float) for value in values):
            raise TypeError("an epoch has an entry that is not a number")
    row = {"finished": run["record"] is not None, **config_columns(run["config"])}
    for which, epoch in (("last", metrics[-1] if metrics else {}), ("best", best)):
        row |= {f"{which}.{name}": value for name, value in _flat(epoch)}
    conditions = {name: record.get(name) for name in ("device", "torch", "advnorm", "commit")}
    return row | conditions | {"minutes": record["seconds"] / 60 if record else None}


def config_columns(config: Mapping[str, Any]) -> Row:
    """The columns of a configuration: the main settings, and all of them as ``config.*``."""
    method = {key: value for key, value in config.items() if key not in ("name", "seed")}
    norm = config["norm"]
    return {
        "group": hashlib.sha256(json.dumps(method, sort_keys=True).encode()).hexdigest()[:8],
        "model": config["model"]["name"],
        "data": config["data"]["name"],
        "norm": norm if isinstance(norm, str) else ", ".join(f"{pattern}: {name}" for pattern, name in norm),
        "objective": method_name(config),
        "threat": config["threat"],
        "eps": float(Fraction(str(config["eps"]))),
        "epochs": config["epochs"] * config["budget"],
        "seed": config["seed"],
        **{f"config.{name}": value for name, value in _flat(config)},
    }


def method_name(config: Mapping[str, Any]) -> str:
    """The objective with its regularizer, second pass and image mixing."""
    extras = [config[key]["name"] for key in ("regularizer", "second_pass") if config.get(key)]
    extras += [config["mix"]] if config.get("mix", "none") != "none" else []
    return " + ".join([config["objective"]["name"], *extras])


def record_rows(record: Mapping[str, Any]) -> list[Row]:
    """A row per branch and attack of an evaluation, or the row of an audit; with Wilson's 95 % interval."""
    from advnorm.evaluation.intervals import wilson_interval

    about, images = record.get("about") or {}, record["images"]
    conditions = {
        **(config_columns(about["training"]) if about.get("training") else {}),
        "images": images,
        "checkpoint": about.get("checkpoint"),
        "eval_data": about.get("data"),
        "eval_threat": record["threat"]["norm"],
        "eval_eps": record["threat"]["eps"],
    }
    audit: Row = {}
    if "verdict" in record:
        audit = {"verdict": record["verdict"], "claimed": record["pgd10"]}
        accuracies = {record["route"]: {"audit": record["worst_case"]}}
    else:
        accuracies = record["accuracy"]
    rows: list[Row] = []
    for branch, values in accuracies.items():
        for attack, accuracy in values.items():
            low, high = wilson_interval(round(accuracy * images), images)
            number = {"branch": branch, "attack": attack, "accuracy": accuracy, "low": low, "high": high}
            rows.append({**conditions, **number, **audit})
    return rows


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings and numbers by dotted names; lists as text."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", json.dumps(value) if isinstance(value, list) else value
