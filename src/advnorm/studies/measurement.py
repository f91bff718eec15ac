"""Measurements on a trained network. Each is stored beside its run and taken once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from advnorm._core.devices import resolve_device
from advnorm._core.records import read_json
from advnorm._core.shapes import check_record
from advnorm.analysis import ANALYSES, extract_features
from advnorm.analysis.images import create_attack
from advnorm.data import add_split, load
from advnorm.evaluation.benchmark import benchmark
from advnorm.evaluation.outcomes import PackedOutcomes, encode_rows, pack_bits
from advnorm.evaluation.results import fraction
from advnorm.evaluation.target import EvaluationTarget, open_run
from advnorm.studies.study import Measure
from advnorm.studies.task import Task
from advnorm.studies.uncertainty import ANALYSIS_IMAGES
from advnorm.threat import ThreatModel
from advnorm.training.run_folder import Run

#: Parts of an analysis' record that are not measured values: settings, and one number per image.
NOT_VALUES = ("conditions", "per_image", "images", "seed", "severities", "size")


class Measured(NamedTuple):
    """Values by name, accuracies in percent, and the results per image of those that a benchmark measured."""

    values: dict[str, float]
    outcomes: list[PackedOutcomes]


def measure_run(run: Run, measure: Measure, task: Task, *, progress: bool = False) -> Measured:
    """Take a measurement."""
    if measure.checkpoint == "along":
        found = Measured({}, [])
        for epoch, which in run.snapshots.items():
            values, outcomes = measure_run(run, replace(measure, checkpoint=which), task, progress=progress)
            found.values.update({f"{epoch}/{name}": value for name, value in values.items()})
            for part in outcomes:
                bits = {f"{epoch}/{name}": bits for name, bits in part["bits"].items()}
                found.outcomes.append({"rows": part["rows"], "bits": bits})
        return found
    if measure.name == "metrics":
        rows = run.metrics()
        values = {f"{row['epoch']}/{name}": measure.scale * value for row in rows for name, value in _numbers(row)}
        return Measured(values, [])
    path = run.folder / "measures" / f"{measure.key}.json"
    if measure.name == "benchmark":
        return _run_benchmark(run, measure, task, path, progress=progress)
    return Measured(_analysis_values(run, measure, task, path), [])


def _analysis_values(run: Run, measure: Measure, task: Task, path: Path) -> dict[str, float]:
    if not path.exists():
        _run_analysis(run, measure, task, path)
    record = read_json(path)
    check_record(record, dict, path, "delete it, then the same command measures it again")
    return {name: measure.scale * value for name, value in _numbers(record)}


def _open_target(
    run: Run, measure: Measure, task: Task, *, limit: int | None, eps: float | str | None = None
) -> EvaluationTarget:
    whole = open_run(run, checkpoint=measure.checkpoint, data_dir=task.training[1], eps=eps, device=task.device)
    return whole.sample(limit)


def _run_benchmark(run: Run, measure: Measure, task: Task, path: Path, *, progress: bool) -> Measured:
    options, device = measure.options, resolve_device(task.device)
    target = _open_target(run, measure, task, limit=options.get("limit"))
    threat = ThreatModel(norm=options.get("threat", run.config.threat), eps=options.get("eps", run.config.eps))
    attacks = {
        name: create_attack(spec, device, threat=threat, seed=task.seed) for name, spec in options["attacks"].items()
    }
    routes = options.get("route") or None
    data = target.images, target.labels
    result = benchmark(target.model, data, threat, attacks, routes, seed=task.seed, record=path, progress=progress)
    outcomes = {
        f"{'shared' if routes is None else branch}/{name}": results
        for branch, row in result.outcomes.items()
        for name, results in row.items()
    }
    rows = result.rows if target.rows is None else target.rows[result.rows]
    order = rows.argsort()  # images of a folder are shuffled
    bits = {name: pack_bits(results[order]) for name, results in outcomes.items()}
    values = {name: 100 * fraction(results) for name, results in outcomes.items()}
    return Measured(values, [{"rows": encode_rows(rows[order]), "bits": bits}])


def _run_analysis(run: Run, measure: Measure, task: Task, path: Path) -> None:
    options = dict(measure.options)
    limit, eps = options.pop("limit", ANALYSIS_IMAGES), options.pop("eps", None)
    beside = {name: task.sibling(name).run for name in options.pop("beside", ())}
    # The names make the paths of the values independent of the seed.
    networks = {**beside, task.cell: run} if beside else {"run": run}
    targets = [
        replace(_open_target(one, measure, task, limit=limit, eps=eps), name=name) for name, one in networks.items()
    ]
    analysis = ANALYSES.get(measure.name)
    analysis.run(targets if analysis.several else targets[0], **options).save(path.with_suffix(""))


def _numbers(data: Any, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield every finite number in nested data with its path."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            if key not in NOT_VALUES:
                yield from _numbers(value, f"{prefix}/{key}" if prefix else str(key))
    elif isinstance(data, list):
        for position, value in enumerate(data):
            yield from _numbers(value, f"{prefix}/{position}")
    elif isinstance(data, int | float) and not isinstance(data, bool) and math.isfinite(data):
        yield prefix, float(data)


def write_features(task: Task) -> None:
    """Write the features that a task trains on (paper D, eq. 2, 3, app. E), and the ordinary test images."""
    cell, folder = task.planned_cell, task.features_folder
    assert cell.after is not None and cell.features is not None and folder is not None
    source = task.sibling(cell.after).run
    settings = source.config.data
    data = [load(settings.name, split, task.data_dir, **settings.options) for split in ("train", "test")]
    if cell.feature_images:
        data[0] = load("features", "train", task.sibling(cell.feature_images).features_folder)
    changes: dict[str, Any] = {"steps": 2} if task.protocol == "smoke" else {}
    network = source.model("last", resolve_device(task.device))
    extract_features(network, data[0], cell.features, folder, seed=task.seed, **changes)
    add_split(folder, data[1])  # an existing split is kept


def describe_measure(measure: Mapping[str, Any]) -> str:
    """``benchmark (pgd10-step2, autoattack) on all images``, ``channels on 1000 images``."""
    options = measure["options"]
    attacks = options.get("attacks") or options.get("inputs")
    attacks = attacks if isinstance(attacks, Mapping | list) else ()
    names = ", ".join(map(str, attacks.values() if isinstance(attacks, Mapping) else attacks))
    limit = options.get("limit", None if measure.get("name") == "benchmark" else ANALYSIS_IMAGES)
    images = "" if measure.get("name") == "metrics" else f" on {'all' if limit is None else limit} images"
    return f"{measure.get('name')}{f' ({names})' if names else ''}{images}"
