"""Records and states of study tasks. Each function opens a new store, as a new command would."""

import json
from dataclasses import asdict

from advnorm._core.records import write_json
from advnorm.evaluation.outcomes import CELL_FORMAT
from advnorm.studies.results import evaluate_study
from advnorm.studies.store import RecordStore
from advnorm.studies.task import Task

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def state_of(task):
    return RecordStore(task.out).state(task)


def record_of(task):
    return RecordStore(task.out).find(task)


def collect_values(study, *, protocol, out):
    values, _, problems = evaluate_study(study, RecordStore(out), protocol=protocol)
    return values, problems


def make_task(out, cell, *, study="A/table2", seed=0, protocol="fast"):
    return Task(study=study, cell=cell, seed=seed, protocol=protocol, out=str(out))


def write_record(task, values, *, seconds=120.0, **changes):
    """Write a record in the runner's format with chosen numbers."""
    record = {
        "format": CELL_FORMAT,
        "study": task.study,
        "cell": task.cell,
        "seed": task.seed,
        "protocol": task.protocol,
        "out": None,
        "data_dir": None,
        "values": values,
        "measures": json.loads(json.dumps([asdict(measure) for measure in task.planned_cell.measures])),
        "run": {
            "config": json.loads(json.dumps(task.planned_cell.config.to_dict())),
            "seconds": seconds,
            "processes": 1,
            "precision": "bf16",
            "device": "NVIDIA H200",
        },
        "device": "NVIDIA H200",
        "torch": "2.11.0",
        "commit": COMMIT,
        **changes,
    }
    write_json(task.record_path, record)
    return record


def write_table2(out, *, cross=22.0, seeds=(0,), protocol="fast"):
    """Write all records of A/table2. The claim is supported if ``cross`` is close to 22."""
    robust = {"dual_bn/eps16": 22.0, "cross_bn/eps16": cross, "single/eps16": 0.5}
    for cell, value in robust.items():
        for seed in seeds:
            branches = ("shared",) if cell.startswith("single") else ("clean", "adv")
            metrics = ("clean", "pgd10", "autoattack")
            values = {f"{branch}/{name}": value + seed for branch in branches for name in metrics}
            write_record(make_task(out, cell, seed=seed, protocol=protocol), values)


def study_in(summary, name):
    (study,) = (study for study in summary["studies"] if study["name"] == name)
    return study


def entry_in(result, cell, value):
    return next(entry for entry in result["entries"] if (entry["cell"], entry["value"]) == (cell, value))
