"""Running a study: a record per cell and seed; what is done is skipped, what was killed goes on.

A training that several studies share is done once: runs are kept by their configuration, measurements beside them.
"""

from __future__ import annotations

import math
import os
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from advnorm._core.devices import resolve_device
from advnorm._core.errors import AdvnormError, ConfigError
from advnorm._core.locks import Busy, is_held
from advnorm._core.provenance import environment
from advnorm._core.records import digest, read_json, writable_problems, write_json
from advnorm.analysis import ANALYSES, extract_features
from advnorm.analysis.moments import named_attack
from advnorm.config.config import Config, Named
from advnorm.data import FolderData, add_split, data_problems, load
from advnorm.data.registry import ENVIRONMENT
from advnorm.evaluation.benchmark import benchmark
from advnorm.evaluation.target import open_run
from advnorm.studies.base import IMAGES, STUDIES, Cell, Measure, Protocol, Study, same_as
from advnorm.studies.protocols import under
from advnorm.studies.record import FORMAT, Record, read_record, stands
from advnorm.studies.summary import in_words
from advnorm.threat import ThreatModel
from advnorm.training import train
from advnorm.training.run import Run

#: Parts of an analysis' record that stay beside the run: settings, and a number for each image.
NOT_VALUES = ("conditions", "per_image", "images", "seed", "severities", "size")
State = Literal["done", "damaged", "started", "to do"]
#: Between looks at what another process works on.
BUSY_SECONDS = 2.0


class Stopped(AdvnormError):
    """A training was told to stop and did, at a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A cell of a study with a seed: all that another process or machine must know."""

    study: str
    cell: str
    seed: int
    protocol: Protocol
    out: str
    data_dir: str | None = None
    device: str | None = None

    @property
    def record(self) -> Path:
        """Where its numbers go."""
        return Path(self.out) / "records" / self.place

    @property
    def place(self) -> str:
        """That of its record among all."""
        return f"{self.study}/{self.cell}/{self.protocol}-seed{self.seed}.json"

    def found(self) -> Cell:
        return _found(self.study, self.cell, self.protocol)

    def of(self, cell: str) -> Task:
        """Another cell of the same study, with all else the same."""
        return replace(self, cell=cell)

    @property
    def lineage(self) -> list[Task]:
        """The task and those that must be done before it, the nearest first."""
        return list(dict.fromkeys([self, *(step for name in self.needs for step in self.of(name).lineage)]))

    @property
    def needs(self) -> list[str]:
        """The cells that must be trained before this one can be done."""
        cell = self.found()
        beside = [name for measure in cell.measures for name in measure.options.get("beside", ())]
        return list(dict.fromkeys(name for name in (cell.after, _images(cell), *beside) if name))

    @property
    def features(self) -> Path | None:
        """Where the features lie that it learns, made by the network of the cell before; the trainings on them too."""
        cell = self.found()
        if cell.features is None or cell.after is None:
            return None
        parts = [self.of(cell.after).run.folder.name, _recipe(cell)]
        if images := _images(cell):
            parts.append(digest(str(self.of(images).features))[:8])
        return Path(self.out) / "features" / "-".join(parts)

    def configured(self) -> tuple[Config, Path | None]:
        """What is trained, and where its data are: with the weights or the features of the cell that comes before."""
        cell = self.found()
        if self.features is not None:
            return replace(cell.config, data=Named("features")), self.features
        data_dir = None if self.data_dir is None else Path(self.data_dir)
        if cell.after is None:
            return cell.config, data_dir
        return replace(cell.config, weights=str(self.of(cell.after).run.folder)), data_dir

    @property
    def runs(self) -> Path:
        """The folder of its run: beside the features it learns, which its settings do not tell apart."""
        return (self.features or Path(self.out)) / "runs"

    @property
    def run(self) -> Run:
        """The training it rests on, which other tasks may share."""
        return Run(self.runs / f"{self.configured()[0].run_name}-seed{self.seed}")

    @property
    def same(self) -> Task | None:
        """A task of another study whose record has this one's numbers, where no cell goes on from this one's run."""
        cells, others = STUDIES.get(self.study).by_name(), same_as(self.study, self.cell)
        if not others or any(self.cell in self.of(name).needs for name in cells):
            return None
        for study, cell in others:
            other = replace(self, study=study, cell=cell)
            with suppress(ConfigError, OSError):
                if other.record.exists() and stands(recorded(other), cells[self.cell]):
                    return other
        return None

    def told(self) -> Record | None:
        """Its record, or one of another study that stands for it where its own is outdated, damaged or not there.

        A file in its place that is no record is refused where none stands for it.
        """
        try:
            own = recorded(self) if self.record.exists() else None
            damage = None
        except ConfigError as error:
            own, damage = None, error
        if own is not None and stands(own, STUDIES.get(self.study).cell(self.cell)):
            return own
        other = self.same
        if other is not None:
            return recorded(other)
        if damage is not None:
            raise damage
        return own

    @property
    def state(self) -> State:
        try:
            if self.told() is not None:
                return "done"
        except ConfigError:
            return "damaged"
        return "started" if self.run.folder.exists() else "to do"


@cache  # asked for at every turn, and a configuration is checked whenever it is made
def _found(study: str, cell: str, protocol: Protocol) -> Cell:
    return under(protocol, STUDIES.get(study).cell(cell))


def tasks(
    study: Study,
    *,
    cell: str | None = None,
    seeds: Iterable[int] = (0,),
    protocol: Protocol = "paper",
    out: Path | str = "results",
    data_dir: Path | str | None = None,
    device: str | None = None,
) -> list[Task]:
    """The tasks of a study, or of one cell and what it needs; each comes after those it starts from."""
    seeds = tuple(dict.fromkeys(seeds))
    for seed in seeds:
        Config(seed=seed)  # refuses what is none
    whole = [
        Task(
            study=study.name,
            cell=name,
            seed=seed,
            protocol=protocol,
            out=str(Path(out).resolve()),  # a run's name depends on where its weights come from
            data_dir=str(data_dir) if data_dir is not None else os.environ.get(ENVIRONMENT) or None,
            device=device,
        )
        for seed in seeds
        for name in study.by_name()
    ]
    if cell is None:
        return whole
    wanted = {step for task in whole if task.cell == cell for step in task.lineage}
    return [task for task in whole if task in wanted]


def blocked(todo: Iterable[Task]) -> list[str]:
    """What keeps every task that is to do from being done; images that some of them lack stop none of the others.

    Features are made of the images of another task.
    """
    waiting = [task for task in todo if task.state in ("to do", "started")]
    problems = [str(problem) for problem in writable_problems(waiting[0].record)] if waiting else []
    lacking = []
    for task in {repr(task.found().config.data): task for task in waiting if task.features is None}.values():
        data = task.found().config.data
        missing = data_problems(data.name, "train", task.data_dir, **data.options)
        if not missing:
            return problems
        lacking += map(str, missing)
    return problems + lacking


def recorded(task: Task) -> Record:
    """The record of a task that is done; a file in its place that is none is refused, and not written over."""
    try:
        return read_record(task.record, task.place, {task.study: STUDIES.get(task.study).by_name()})
    except ConfigError as error:
        raise ConfigError(
            f"{task.record} is skipped: {error}; once it is gone the same command does the cell"
        ) from None


def work(task: Task, *, progress: bool = False) -> Record:
    """Train and measure a cell, or go on with it; writes its record and returns it. ``progress`` shows how far it is.

    A record of another study that has the same numbers stands for it.
    """
    told = task.told()
    if told is not None:
        return told
    cell = task.found()
    config, data_dir = task.configured()
    for name in task.needs:
        before = task.of(name)
        if not before.run.finished:
            gone = f": it has a record, and its run is gone; delete {before.record}" if before.record.exists() else ""
            raise ConfigError(f"{cell.name} needs {name}, which is not finished{gone}")
    if task.features is not None:
        make_features_of(task)
    run = train(config, seed=task.seed, out=task.runs, data_dir=data_dir, device=task.device, progress=progress)
    if not run.finished:
        raise Stopped(f"{cell.name} was stopped before its end; the same command goes on")
    values: dict[str, float] = {}
    for measure in cell.measures:
        if progress:
            with suppress(OSError, ValueError):  # nobody reads any more: no reason to stop
                print(f"{cell.name}: {in_words(asdict(measure))}", flush=True)
        values |= measured(run, measure, task, progress=progress)
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
    write_json(task.record, record)
    return record


def _recipe(cell: Cell) -> str:
    return (cell.features or "").partition(":")[0]


def _images(cell: Cell) -> str:
    """The cell whose features are the images that new features are made from; empty where ordinary ones are."""
    return (cell.features or "").partition(":")[2]


def make_features_of(task: Task) -> None:
    """The features that a task learns (paper D, eq. 2, 3, app. E), with the ordinary test images beside them."""
    cell, folder = task.found(), task.features
    assert cell.after is not None and folder is not None
    source = task.of(cell.after).run
    settings = source.config.data
    data = [load(settings.name, split, task.data_dir, **settings.options) for split in ("train", "test")]
    if images := _images(cell):
        data[0] = load("features", "train", task.of(images).features)
    train_data, test_data = (part.in_memory() if isinstance(part, FolderData) else part for part in data)
    changes: dict[str, Any] = {"steps": 2} if task.protocol == "smoke" else {}
    network = source.model("last", resolve_device(task.device))
    extract_features(network, train_data, _recipe(cell), folder, seed=task.seed, **changes)
    add_split(folder, test_data)  # what is there is not written again


def measured(run: Run, measure: Measure, task: Task, *, progress: bool = False) -> dict[str, float]:
    """The numbers of a measurement by name, accuracies in percent; kept beside the run and not taken twice."""
    if measure.checkpoint == "along":
        return {
            f"{epoch}/{name}": value
            for epoch, which in run.snapshots.items()
            for name, value in measured(run, replace(measure, checkpoint=which), task, progress=progress).items()
        }
    path = run.folder / "measures" / f"{measure.key}.json"
    options = dict(measure.options)
    data_dir = task.configured()[1]
    if measure.name == "metrics":
        rows = run.metrics()
        return {f"{row['epoch']}/{name}": measure.scale * value for row in rows for name, value in _numbers(row)}
    if measure.name == "benchmark":
        whole = open_run(run, checkpoint=measure.checkpoint, data_dir=data_dir, device=task.device)
        target = whole.sample(options.get("limit"))
        threat = ThreatModel(norm=options.get("threat", run.config.threat), eps=options.get("eps", run.config.eps))
        where = resolve_device(task.device)
        attacks = {
            name: named_attack(spec, where, threat=threat, seed=task.seed) for name, spec in options["attacks"].items()
        }
        routes = options.get("route") or None
        data = target.images, target.labels
        result = benchmark(target.model, data, threat, attacks, routes, seed=task.seed, record=path, progress=progress)
        return {
            f"{'shared' if routes is None else branch}/{name}": 100 * value
            for branch, accuracy in result.accuracy.items()
            for name, value in accuracy.items()
            if name != "union"
        }
    if not path.exists():
        how = {"eps": options.pop("eps", None), "device": task.device}
        limit = options.pop("limit", IMAGES)
        beside = {name: task.of(name).run for name in options.pop("beside", ())}
        # Named so that the numbers have the same paths whatever the seed.
        networks = {**beside, task.cell: run} if beside else {"run": run}
        subjects = [
            replace(open_run(one, checkpoint=measure.checkpoint, data_dir=data_dir, **how).sample(limit), name=name)
            for name, one in networks.items()
        ]
        analysis = ANALYSES.get(measure.name)
        finding = analysis.run(subjects if analysis.several else subjects[0], **options)
        finding.save(path.with_suffix(""))
    return {name: measure.scale * value for name, value in _numbers(read_json(path))}


def _numbers(data: Any, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Every number in plain data, by its path."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            if key not in NOT_VALUES:
                yield from _numbers(value, f"{prefix}/{key}" if prefix else str(key))
    elif isinstance(data, list):
        for position, value in enumerate(data):
            yield from _numbers(value, f"{prefix}/{position}")
    elif isinstance(data, int | float) and not isinstance(data, bool) and math.isfinite(data):
        yield prefix, float(data)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a task."""

    task: Task
    error: str | None = None


def run_all(
    todo: Sequence[Task],
    *,
    retries: int = 1,
    on_outcome: Callable[[Outcome], None] | None = None,
    progress: bool = False,
) -> list[Outcome]:
    """Work through tasks in this process; one that fails is tried again and then told, and the others go on.

    One that another process works on comes later, so that two share a study; the last ones are waited for. A training
    that is told to stop (SIGTERM) ends all of it with :class:`Stopped`.
    """
    outcomes: dict[Task, Outcome] = {}
    waiting, passed = deque(todo), 0
    while waiting:
        task = waiting.popleft()
        outcome = attempt(task, retries, progress=progress)
        if outcome is None:
            waiting.append(task)
            passed += 1
            if passed >= len(waiting):
                time.sleep(BUSY_SECONDS)
                passed = 0
            continue
        passed, outcomes[task] = 0, outcome
        if on_outcome is not None:
            on_outcome(outcome)
    return [outcomes[task] for task in todo]


def attempt(task: Task, retries: int, *, progress: bool = False) -> Outcome | None:
    """Work on a task, again where it fails by other than a wrong configuration; None: another process works on it."""
    for turn in range(retries + 1):
        try:
            work(task, progress=progress)
            return Outcome(task=task)
        except Busy:
            return None
        except ConfigError as error:
            if any(is_held(step.run.folder) for step in task.lineage[1:]):
                return None  # it needs what another process works on
            return Outcome(task=task, error=str(error))
        except Stopped:
            raise
        except Exception as error:
            if turn == retries:
                return Outcome(task=task, error=f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    raise AssertionError("a turn returns")
