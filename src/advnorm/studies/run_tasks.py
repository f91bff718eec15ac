"""Running the tasks of a study: one record per task. Finished work is skipped, killed work resumes.

Runs are stored by their configuration and measurements beside them, so that studies share a training.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from advnorm._core.devices import resolve_device
from advnorm._core.errors import AdvnormError, ConfigError, Problem
from advnorm._core.locks import Busy, is_held
from advnorm._core.progress import show_progress
from advnorm._core.provenance import environment
from advnorm._core.records import writable_problems
from advnorm.data import data_problems
from advnorm.evaluation.outcomes import CELL_FORMAT, PackedOutcomes
from advnorm.studies.measurement import describe_measure, measure_run, write_features
from advnorm.studies.record import CellRecord
from advnorm.studies.store import RecordStore
from advnorm.studies.task import Task
from advnorm.training import train

#: Seconds between checks of tasks that another process runs.
BUSY_SECONDS = 2.0


class TrainingStopped(AdvnormError):
    """A training received SIGTERM and stopped at a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """A task that was tried, its error if it failed, and whether to try again."""

    task: Task
    error: str | None = None
    retry: bool = False
    busy: bool = False  # another process is running it


class Pool(AbstractContextManager["Pool"]):
    """Runs tasks, at most ``room`` at a time: here one after the other, in this process."""

    room = 1

    def __init__(self, store: RecordStore, *, progress: bool) -> None:
        self._store, self._progress = store, progress

    def __exit__(self, *error: object) -> None: ...

    def start(self, task: Task) -> None:
        self._outcome = attempt_task(task, self._store, progress=self._progress)

    def wait_for_next(self) -> TaskResult:
        """Wait until a task ends."""
        return self._outcome


def run_tasks(
    tasks: Sequence[Task],
    *,
    pool: Pool | None = None,
    retries: int = 1,
    on_result: Callable[[TaskResult], None] = lambda outcome: None,
    progress: bool = False,
    store: RecordStore | None = None,
) -> list[TaskResult]:
    """Run tasks in a pool, by default in this process; the outcomes have the order of the tasks.

    Tasks that share a training, or depend on each other, run one after another. A task that fails is retried, resumes
    from its checkpoint, and is then reported; the others continue. A wrong configuration is not retried. A task that
    another process is running is postponed, so that two processes can share a study. SIGTERM during a training in this
    process ends the call with :class:`TrainingStopped`.
    """
    store = store or RecordStore(tasks[0].out if tasks else "")
    pool = pool or Pool(store, progress=progress)
    outcomes = {task: TaskResult(task=task) for task in tasks if store.state(task) == "done"}
    for outcome in outcomes.values():
        on_result(outcome)
    waiting = group_into_chains(task for task in tasks if task not in outcomes)
    running: dict[Task, list[Task]] = {}
    retried: Counter[Task] = Counter()
    while waiting or running:
        # No other process may be running the training of a task or of one of its prerequisites.
        free = (chain for chain in waiting if not any(is_held(step.run.folder) for step in chain[0].lineage))
        for chain in list(islice(free, pool.room - len(running))):
            waiting.remove(chain)
            running[chain[0]] = chain
            pool.start(chain[0])
        if not running:
            time.sleep(BUSY_SECONDS)
            continue
        outcome = pool.wait_for_next()
        task, *others = chain = running.pop(outcome.task)
        if outcome.busy:
            waiting.append(chain)
            time.sleep(BUSY_SECONDS)
        elif outcome.retry and retried[task] < retries:
            retried[task] += 1
            waiting.insert(0, chain)
        else:
            outcomes[task] = outcome
            on_result(outcome)
            waiting[:0] = [others] if others else []
    return [outcomes[task] for task in tasks]


def group_into_chains(tasks: Iterable[Task]) -> list[list[Task]]:
    """Group tasks that share a training, their own or a prerequisite's. In a chain, prerequisites come first."""
    chains: list[tuple[set[Path], list[Task]]] = []
    for task in dict.fromkeys(tasks):
        folders, members = {step.run.folder for step in task.lineage}, [task]
        unrelated = []
        for others, chain in chains:
            if others & folders:
                folders, members = others | folders, chain + members
            else:
                unrelated.append((others, chain))
        chains = [*unrelated, (folders, members)]
    return [sorted(chain, key=lambda task: len(task.lineage)) for _, chain in chains]


def attempt_task(task: Task, store: RecordStore, *, progress: bool = False) -> TaskResult:
    """Run a task once, in the current process."""
    try:
        run_task(task, store, progress=progress)
    except Busy:
        return TaskResult(task=task, busy=True)
    except ConfigError as error:
        return TaskResult(task=task, error=str(error))
    except TrainingStopped:
        raise
    except Exception as error:
        return TaskResult(task=task, error=f"{type(error).__name__}: {error}\n{traceback.format_exc()}", retry=True)
    return TaskResult(task=task)


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
    outcomes: list[PackedOutcomes] = []
    for measure in cell.measures:
        with show_progress(progress, stream=sys.stdout) as display:  # closed again: a benchmark opens its own
            display.print(f"{cell.name}: {describe_measure(asdict(measure))}")
        measured = measure_run(run, measure, task, progress=progress)
        values |= measured.values
        outcomes += measured.outcomes
    record = {
        "format": CELL_FORMAT,
        **asdict(task),
        "data_dir": None,
        "out": None,
        "values": values,
        "outcomes": outcomes,
        "measures": [asdict(measure) for measure in cell.measures],
        "run": {key: value for key, value in portable(run.record).items() if key != "format"},
        **environment(resolve_device(task.device)),
    }
    store.write(task, record)
    return record


def portable(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of a run without the folder of the run whose weights it started from, only with its name."""
    weights = record["config"]["weights"]
    return {**record, "config": {**record["config"], "weights": weights and Path(weights).name}}


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
