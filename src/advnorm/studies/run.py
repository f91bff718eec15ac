"""Running the tasks of a study in this process: one record per task. Finished work is skipped, killed work resumes.

Runs are stored by their configuration and measurements beside them, so that studies share a training.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

from advnorm._core.devices import resolve_device
from advnorm._core.errors import AdvnormError, ConfigError, Problem
from advnorm._core.locks import Busy, is_held
from advnorm._core.progress import show_progress
from advnorm._core.provenance import environment
from advnorm._core.records import writable_problems
from advnorm.data import data_problems
from advnorm.studies.measurement import describe_measure, take_measurement, write_features
from advnorm.studies.record import FORMAT, CellRecord
from advnorm.studies.store import RecordStore
from advnorm.studies.task import Task
from advnorm.training import train

#: Between checks of tasks that another process is running.
BUSY_SECONDS = 2.0


class TrainingStopped(AdvnormError):
    """A training received SIGTERM and stopped at a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A task that ended, and its error if it failed."""

    task: Task
    error: str | None = None


def run_tasks(
    tasks: Sequence[Task],
    *,
    retries: int = 1,
    on_outcome: Callable[[Outcome], None] | None = None,
    progress: bool = False,
    store: RecordStore | None = None,
) -> list[Outcome]:
    """Run tasks in this process. A task that fails is retried and then reported; the others continue.

    A task that another process is running is postponed, so that two processes can share a study. SIGTERM during a
    training ends the call with :class:`TrainingStopped`.
    """
    store = store or RecordStore(tasks[0].out if tasks else "")
    outcomes: dict[Task, Outcome] = {}
    waiting, postponed = deque(tasks), 0
    while waiting:
        task = waiting.popleft()
        outcome = attempt_task(task, store, retries=retries, progress=progress)
        if outcome is None:
            waiting.append(task)
            postponed += 1
            if postponed >= len(waiting):
                time.sleep(BUSY_SECONDS)
                postponed = 0
            continue
        postponed, outcomes[task] = 0, outcome
        if on_outcome is not None:
            on_outcome(outcome)
    return [outcomes[task] for task in tasks]


def attempt_task(task: Task, store: RecordStore, *, retries: int = 0, progress: bool = False) -> Outcome | None:
    """Run a task, with retries except for a wrong configuration. Return None if another process is running it."""
    for turn in range(retries + 1):
        try:
            run_task(task, store, progress=progress)
            return Outcome(task=task)
        except Busy:
            return None
        except ConfigError as error:
            if any(is_held(step.run.folder) for step in task.lineage[1:]):
                return None  # another process is running a prerequisite
            return Outcome(task=task, error=str(error))
        except TrainingStopped:
            raise
        except Exception as error:
            if turn == retries:
                return Outcome(task=task, error=f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    raise AssertionError("every turn returns")


def run_task(task: Task, store: RecordStore | None = None, *, progress: bool = False) -> CellRecord:
    """Train and measure a cell, or resume it, and write its record. Return the existing record if there is one."""
    store = store or RecordStore(task.out)
    existing = store.load(task)
    if existing is not None:
        return existing
    cell = task.planned_cell
    config, data_dir = task.training
    for name in task.prerequisites:
        before = task.sibling(name)
        if not before.run.finished:
            recorded = store.read(before.record_name) is not None
            hint = f"its record exists but its run is gone; delete {before.record_path}" if recorded else ""
            raise ConfigError("missing_run", f"{cell.name} needs {name}, which is not finished", field=name, hint=hint)
    if task.features_folder is not None:
        write_features(task)
    run = train(config, seed=task.seed, out=task.runs_folder, data_dir=data_dir, device=task.device, progress=progress)
    if not run.finished:
        hint = "run the same command to resume"
        raise TrainingStopped("stopped", f"{cell.name} was stopped before its end", field=cell.name, hint=hint)
    values: dict[str, float] = {}
    for measure in cell.measures:
        with show_progress(progress, stream=sys.stdout) as display:  # closed again: a benchmark opens its own
            display.print(f"{cell.name}: {describe_measure(asdict(measure))}")
        values |= take_measurement(run, measure, task, progress=progress)
    record = {
        "format": FORMAT,
        **asdict(task),
        "data_dir": None,
        "out": None,
        "values": values,
        "measures": [asdict(measure) for measure in cell.measures],
        "run": {key: value for key, value in run.record.items() if key != "format"},
        **environment(resolve_device(task.device)),
    }
    store.write(task, record)
    return record


def find_blocking_problems(tasks: Iterable[Task], store: RecordStore) -> list[Problem]:
    """Find what prevents every pending task from running. Data that only some tasks lack block nothing."""
    pending = [task for task in tasks if store.state(task) in ("pending", "started")]
    problems = writable_problems(pending[0].record_path) if pending else []
    missing: list[Problem] = []
    own_data = [task for task in pending if task.features_folder is None]  # features are made by another task
    for task in {repr(task.planned_cell.config.data): task for task in own_data}.values():
        data = task.planned_cell.config.data
        found = data_problems(data.name, "train", task.data_dir, **data.options)
        if not found:
            return problems
        missing += found
    return problems + missing
