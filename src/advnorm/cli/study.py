"""The verb ``study``: run every cell of tables and figures and print the paper's numbers beside ours."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from advnorm.cli.command import INTEGERS, console, say
from advnorm.cli.options import DataDir, Device

if TYPE_CHECKING:
    from advnorm.studies.run_tasks import TaskResult
    from advnorm.studies.store import RecordStore
    from advnorm.studies.study import Cell, Protocol, Study
    from advnorm.studies.task import Task


def study(
    names: Annotated[
        list[str],
        typer.Argument(help="Tables and figures, patterns such as 'E/*', or cells; see `advnorm ls studies`."),
    ],
    seeds: Annotated[list[int] | None, typer.Option(metavar=INTEGERS, help="Seeds. Default: 0.")] = None,
    protocol: Annotated[
        str | None,
        typer.Option(
            help="paper: as in the paper (default). authors: as in the authors' code (A, C). "
            "fast: 30 epochs, batch size 512, one_cycle."
        ),
    ] = None,
    stand_in: Annotated[
        str | None, typer.Option(help="imagenette: at 128 pixels instead of ImageNet, 15 epochs (C, D, E).")
    ] = None,
    strict_search: Annotated[
        bool,
        typer.Option(
            "--strict-search", help="Attacks search in float32. Default: AutoAttack, and PGD of E's stand-in, in bf16."
        ),
    ] = False,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Run two steps on synthetic images, to check that every part works.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the cells, existing records and the estimated cost.")
    ] = False,
    out: Annotated[
        Path, typer.Option(help="Folder for runs and records. The same command resumes an interrupted study.")
    ] = Path("results"),
    data_dir: DataDir = None,
    device: Device = None,
    launcher: Annotated[str, typer.Option(help="local: processes on this computer. ray: a cluster.")] = "local",
    address: Annotated[
        str | None, typer.Option(help="Address of a Ray cluster. Default: a running one, else a new one.")
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="Number of processes per device.")] = 1,
    max_minutes: Annotated[
        float | None,
        typer.Option(min=0, help="Stop after this time, list pending cells, exit with 75. The same command resumes."),
    ] = None,
) -> int:
    """Run every cell of tables or figures and print our numbers beside the paper's.

    Exit status: 0 done, 1 a cell failed, 2 error, 70 crash, 75 stopped before the end,
    130 Ctrl-C. Examples:
    `advnorm study A/table3 --protocol fast --seeds 0 1 2 --data-dir data`, `advnorm study A/table3 --smoke`,
    `advnorm study A/table3/dual_bn/eps16 --protocol fast --data-dir data`,
    `advnorm study 'E/*' --stand-in imagenette --data-dir data --max-minutes 23`
    """
    from advnorm._core.errors import raise_problems
    from advnorm._core.exit_codes import FAILED, PREEMPTED, Terminated
    from advnorm.cli.study_tables import describe_cost, task_table
    from advnorm.studies.launch import launch_problems
    from advnorm.studies.registry import find_all
    from advnorm.studies.results import training_rates
    from advnorm.studies.run_tasks import TrainingStopped, find_blocking_problems
    from advnorm.studies.store import RecordStore

    chosen = [found for name in dict.fromkeys(names) for found in find_all(name)]
    studies = list({found.name: found for found, _ in chosen}.values())
    protocol = _choose_protocol(studies, protocol, stand_in, smoke=smoke)
    seeds = seeds or [0]
    failed: list[TaskResult] = []

    def print_result(outcome: TaskResult) -> None:
        mark, style = ("failed", "red") if outcome.error else ("done", "green")
        say(f"{mark} {_describe_task(outcome.task, studies)}", style=style)
        if outcome.error:
            failed.append(outcome)
            say(outcome.error)

    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) if protocol == "smoke" else out  # a smoke test keeps no files
        where: dict[str, Any] = {"out": out, "data_dir": data_dir, "device": device}
        tasks_by_study = _list_tasks(chosen, seeds=seeds, protocol=protocol, strict_search=strict_search, **where)
        tasks = [task for several in tasks_by_study.values() for task in several]
        pool: dict[str, Any] = {"launcher": launcher, "address": address, "processes": processes}
        raise_problems(launch_problems(tasks, **pool), "cannot launch")
        store = RecordStore(out)
        if not dry_run:
            problems = find_blocking_problems(tasks, store)
            raise_problems(problems, "no cell can be run (--dry-run shows existing records)")
        for found in studies:
            console.print(task_table(tasks_by_study[found.name], store, training_rates(found, store)))
        if len(studies) > 1 and (cost := describe_cost(tasks, store)):
            say(f"{len(studies)} studies together: {cost}", style="dim")
        if existing := _describe_existing(tasks, store):
            say(existing, style="dim")
        try:
            with _terminated_after(max_minutes):
                if not dry_run:
                    _run(tasks, store, pool, on_result=print_result, progress=protocol != "smoke")
        except (TrainingStopped, Terminated) as stopped:
            say(stopped if isinstance(stopped, TrainingStopped) else "stopped; run the same command to resume")
            left = [task for task in tasks if store.state(task) != "done"]
            say(f"pending: {len(left)} of {len(tasks)} cells: " + ", ".join(_describe_task(t, studies) for t in left))
            return PREEMPTED
        for found in studies:
            _print_results(found, store, seeds=seeds, protocol=protocol, even_if_empty=not dry_run)
    return FAILED if failed else 0


def _print_results(
    study: Study, store: RecordStore, *, seeds: Sequence[int], protocol: Protocol, even_if_empty: bool
) -> None:
    """Print the problems with the records of a study, its numbers beside the paper's, and the verdict on its claim."""
    from advnorm.cli.study_tables import study_table
    from advnorm.studies.results import evaluate_study

    values, conclusion, problems = evaluate_study(study, store, seeds=seeds, protocol=protocol)
    for problem in problems:
        say(problem, style="yellow")
    if values or even_if_empty:
        console.print(study_table(study, values, protocol, conclusion=conclusion, width=console.width))


def _list_tasks(chosen: Sequence[tuple[Study, Cell | None]], **settings: Any) -> dict[str, list[Task]]:
    """Return the tasks by study, without duplicates: the user may name a study and also one of its cells."""
    from advnorm.studies.task import list_tasks

    found: dict[str, dict[Task, None]] = {}
    for study, cell in chosen:
        tasks = list_tasks(study, cell=cell and cell.name, **settings)
        found.setdefault(study.name, {}).update(dict.fromkeys(tasks))
    return {name: list(tasks) for name, tasks in found.items()}


def _run(
    tasks: Sequence[Task],
    store: RecordStore,
    pool: Mapping[str, Any],
    *,
    on_result: Callable[[TaskResult], None],
    progress: bool,
) -> None:
    """Run tasks in this process, which shows their progress, or in several."""
    import torch

    from advnorm.studies.launch import launch
    from advnorm.studies.run_tasks import run_tasks

    if pool["launcher"] == "local" and pool["processes"] == 1 and torch.cuda.device_count() < 2:
        run_tasks(tasks, store=store, on_result=on_result, progress=progress)
    else:
        launch(tasks, store=store, on_result=on_result, **pool)


@contextmanager
def _terminated_after(minutes: float | None) -> Iterator[None]:
    """Scope: send SIGTERM to this process after a time, so that it stops where it can resume."""
    if minutes is None:
        yield
        return
    timer = threading.Timer(60 * minutes, os.kill, (os.getpid(), signal.SIGTERM))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _describe_task(task: Task, studies: Sequence[Study]) -> str:
    """The cell and seed of a task, with its study if there are several."""
    return f"{task.study + '/' if len(studies) > 1 else ''}{task.cell} seed {task.seed}"


def _choose_protocol(studies: Sequence[Study], protocol: str | None, stand_in: str | None, *, smoke: bool) -> Protocol:
    """Return the protocol that the options ask for. Every study must have it."""
    from advnorm._core.errors import ConfigError, raise_problems, unknown_name

    if smoke and protocol not in (None, "smoke"):
        raise ConfigError("conflict", "--smoke and --protocol exclude each other", field="protocol", got=protocol)
    if stand_in is not None and (smoke or protocol is not None):
        message = "--stand-in has its own schedule; --protocol and --smoke exclude it"
        raise ConfigError("conflict", message, field="stand_in", got=stand_in)
    chosen: Any = "smoke" if smoke else stand_in or protocol or "paper"
    kind = "protocol" if stand_in is None else "stand-in"
    common = [name for name in studies[0].protocols if all(name in study.protocols for study in studies)]
    allowed = [name for name in common if stand_in is None or name == "imagenette"]
    if stand_in is not None and not allowed:
        message = f"the stand-in needs cells on ImageNet in {', '.join(study.name for study in studies)}"
        raise ConfigError("not_supported", message, field="stand_in", got=stand_in, hint="omit --stand-in")
    raise_problems([] if chosen in allowed else [unknown_name(kind, chosen, allowed)])
    return chosen


def _describe_existing(tasks: Sequence[Task], store: RecordStore) -> str:
    """Describe the number of cells with records and their devices; empty if no cell has one."""
    found = [record for task in tasks if isinstance(record := store.find(task), dict)]
    if not found:
        return ""
    devices = ", ".join(dict.fromkeys(str(record["run"].get("device")) for record in found))
    return (
        f"{len(found)} of {len(tasks)} cells have records in {store.folder}, measured on {devices}; they are not "
        "measured again. Choose another --out to repeat them"
    )
