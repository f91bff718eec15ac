"""The verb ``study``: every cell of a table, and the paper's numbers beside ours."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from advnorm._core.errors import raise_problems, unknown_name
from advnorm._core.exit_codes import FAILED, OK, PREEMPTED
from advnorm.cli import listing
from advnorm.studies.launch import Launcher, launch, launch_problems
from advnorm.studies.registry import find
from advnorm.studies.results import evaluate_study, training_rates
from advnorm.studies.run import Outcome, TrainingStopped, find_blocking_problems, run_tasks
from advnorm.studies.store import RecordStore
from advnorm.studies.study import Protocol
from advnorm.studies.task import Task, list_tasks


def run(
    console: Console,
    name: str,
    *,
    seeds: Sequence[int],
    protocol: Protocol,
    dry_run: bool,
    out: Path,
    data_dir: Path | None,
    device: str | None,
    launcher: Launcher = "local",
    address: str | None = None,
    processes: int = 1,
) -> int:
    """Work through the cells, or the one that is named, and print the table.

    The exit status is 1 where one failed, and 75 where SIGTERM stopped a training.
    """
    study, cell = find(name)
    if protocol not in ("paper", "fast", "smoke"):
        raise_problems([unknown_name("protocol", protocol, ("paper", "fast"))])
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) if protocol == "smoke" else out
        only = None if cell is None else cell.name
        tasks = list_tasks(study, cell=only, seeds=seeds, protocol=protocol, out=out, data_dir=data_dir, device=device)
        problems = launch_problems(tasks, launcher=launcher, address=address, processes=processes)
        raise_problems(problems, "cannot launch")
        store = RecordStore(out)
        if not dry_run:
            problems = find_blocking_problems(tasks, store)
            raise_problems(problems, "no cell can be run (--dry-run shows existing measurements)")
        console.print(listing.tasks(tasks, store, training_rates(study, store)))
        if existing := _describe_existing_records(tasks, store):
            console.print(existing, style="dim", highlight=False, markup=False)
        failed: list[Outcome] = []

        def report(outcome: Outcome) -> None:
            mark = "[red]failed[/]" if outcome.error else "[green]done[/]"
            console.print(f"{mark} {outcome.task.cell} seed {outcome.task.seed}", highlight=False)
            if outcome.error:
                failed.append(outcome)
                console.print(outcome.error, highlight=False, markup=False)

        alone = launcher == "local" and processes == 1 and torch.cuda.device_count() < 2
        if alone and not dry_run:
            try:
                run_tasks(tasks, store=store, on_outcome=report, progress=protocol != "smoke")
            except TrainingStopped as stopped:
                console.print(str(stopped), highlight=False, markup=False)
                return PREEMPTED
        elif not dry_run:
            launch(tasks, store=store, launcher=launcher, address=address, processes=processes, on_outcome=report)
        values, conclusion, problems = evaluate_study(study, store, seeds=seeds, protocol=protocol)
    listing.tell(console, map(str, problems))
    if dry_run and not values:
        return OK
    console.print(listing.study(study, values, protocol, conclusion=conclusion, width=console.width))
    return FAILED if failed else OK


def _describe_existing_records(tasks: Sequence[Task], store: RecordStore) -> str:
    """Say how many cells have records already, and on which devices they were made; empty if none has."""
    found = [record for task in tasks if isinstance(record := store.find(task), dict)]
    if not found:
        return ""
    devices = ", ".join(dict.fromkeys(str(record["run"].get("device")) for record in found))
    return (
        f"{len(found)} of {len(tasks)} cells were measured before, on {devices}: the records in {store.folder} are "
        "used. Another --out measures again"
    )
