"""The verb ``study``: run every cell of a table and print the paper's numbers beside ours."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from advnorm.cli.command import INTEGERS, console, say
from advnorm.cli.options import DataDir, Device

if TYPE_CHECKING:
    from advnorm.studies.store import RecordStore
    from advnorm.studies.study import Protocol, Study
    from advnorm.studies.task import Task


def study(
    name: Annotated[str, typer.Argument(help="A table or figure, or one cell of it; see `advnorm ls studies`.")],
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
        bool, typer.Option(help="AutoAttack also searches in float32. Default: in bf16 on a GPU; float32 decides.")
    ] = False,
    smoke: Annotated[
        bool, typer.Option(help="Run two steps on synthetic images, to check that every part works.")
    ] = False,
    dry_run: Annotated[bool, typer.Option(help="Show the cells, existing records and the estimated cost.")] = False,
    out: Annotated[
        Path, typer.Option(help="Folder for runs and records. The same command resumes an interrupted study.")
    ] = Path("results"),
    data_dir: DataDir = None,
    device: Device = None,
    launcher: Annotated[str, typer.Option(help="local: processes on this computer. ray: a cluster.")] = "local",
    address: Annotated[str | None, typer.Option(help="Address of a Ray cluster. Default: the running one.")] = None,
    processes: Annotated[int, typer.Option(min=1, help="Number of workers per device.")] = 1,
) -> int:
    """Run every cell of a table or figure and print our numbers beside the paper's.

    Exit status: 0 done, 1 a cell failed, 75 stopped before the end. Examples:
    `advnorm study A/table3 --protocol fast --seeds 0 1 2 --data-dir data`, `advnorm study A/table3 --smoke`,
    `advnorm study A/table3/dual_bn/eps16 --protocol fast --data-dir data`
    """
    import torch

    from advnorm._core.errors import raise_problems
    from advnorm._core.exit_codes import FAILED, PREEMPTED
    from advnorm.cli.study_tables import study_table, task_table
    from advnorm.studies.launch import launch, launch_problems
    from advnorm.studies.registry import find
    from advnorm.studies.results import evaluate_study, training_rates
    from advnorm.studies.run import Outcome, TrainingStopped, find_blocking_problems, run_tasks
    from advnorm.studies.store import RecordStore
    from advnorm.studies.task import list_tasks

    found, cell = find(name)
    protocol = _choose_protocol(found, protocol, stand_in, smoke=smoke)
    seeds = seeds or [0]
    failed: list[Outcome] = []

    def print_outcome(outcome: Outcome) -> None:
        mark, style = ("failed", "red") if outcome.error else ("done", "green")
        say(f"{mark} {outcome.task.cell} seed {outcome.task.seed}", style=style)
        if outcome.error:
            failed.append(outcome)
            say(outcome.error)

    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) if protocol == "smoke" else out
        tasks = list_tasks(
            found,
            cell=cell and cell.name,
            seeds=seeds,
            protocol=protocol,
            out=out,
            data_dir=data_dir,
            device=device,
            strict_search=strict_search,
        )
        problems = launch_problems(tasks, launcher=launcher, address=address, processes=processes)
        raise_problems(problems, "cannot launch")
        store = RecordStore(out)
        if not dry_run:
            problems = find_blocking_problems(tasks, store)
            raise_problems(problems, "no cell can be run (--dry-run shows existing records)")
        console.print(task_table(tasks, store, training_rates(found, store)))
        if existing := _describe_existing(tasks, store):
            say(existing, style="dim")
        one_process = launcher == "local" and processes == 1 and torch.cuda.device_count() < 2
        if one_process and not dry_run:
            try:
                run_tasks(tasks, store=store, on_outcome=print_outcome, progress=protocol != "smoke")
            except TrainingStopped as stopped:
                say(stopped)
                return PREEMPTED
        elif not dry_run:
            launch(
                tasks,
                store=store,
                launcher=launcher,  # pyright: ignore[reportArgumentType]  # validated above
                address=address,
                processes=processes,
                on_outcome=print_outcome,
            )
        values, conclusion, problems = evaluate_study(found, store, seeds=seeds, protocol=protocol)
    for problem in problems:
        say(problem, style="yellow")
    if not dry_run or values:
        console.print(study_table(found, values, protocol, conclusion=conclusion, width=console.width))
    return FAILED if failed else 0


def _choose_protocol(study: Study, protocol: str | None, stand_in: str | None, *, smoke: bool) -> Protocol:
    """Return the protocol of the study that the options ask for."""
    from advnorm._core.errors import ConfigError, raise_problems, unknown_name

    if smoke and protocol not in (None, "smoke"):
        raise ConfigError("conflict", "--smoke and --protocol exclude each other", field="protocol", got=protocol)
    if stand_in is not None and (smoke or protocol is not None):
        message = "--stand-in has its own schedule; --protocol and --smoke exclude it"
        raise ConfigError("conflict", message, field="stand_in", got=stand_in)
    chosen: Any = "smoke" if smoke else stand_in or protocol or "paper"
    kind = "protocol" if stand_in is None else "stand-in"
    allowed = [name for name in study.protocols if stand_in is None or name == "imagenette"]
    raise_problems([] if chosen in allowed else [unknown_name(kind, chosen, allowed)])
    return chosen


def _describe_existing(tasks: Sequence[Task], store: RecordStore) -> str:
    """Describe how many cells have records, and on which devices they were measured; empty if there are none."""
    found = [record for task in tasks if isinstance(record := store.find(task), dict)]
    if not found:
        return ""
    devices = ", ".join(dict.fromkeys(str(record["run"].get("device")) for record in found))
    return (
        f"{len(found)} of {len(tasks)} cells have records in {store.folder}, measured on {devices}; they are not "
        "measured again. Choose another --out to repeat them"
    )
