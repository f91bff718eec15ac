"""The verb ``study``: every cell of a table, and the paper's numbers beside ours."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from rich.console import Console

from advnorm._core.errors import ConfigError, did_you_mean, raise_all
from advnorm._core.exit_codes import FAILED, OK, PREEMPTED
from advnorm.cli import listing
from advnorm.studies.base import Protocol, find
from advnorm.studies.launch import Launcher, check, launch
from advnorm.studies.run import Outcome, Stopped, Task, blocked, run_all, tasks
from advnorm.studies.summary import concluded, rates


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
        raise ConfigError(f"unknown protocol {protocol!r}{did_you_mean(protocol, ('paper', 'fast'))}")
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) if protocol == "smoke" else out
        only = None if cell is None else cell.name
        todo = tasks(study, cell=only, seeds=seeds, protocol=protocol, out=out, data_dir=data_dir, device=device)
        check(todo, launcher=launcher, address=address, processes=processes)
        if not dry_run:
            raise_all(blocked(todo), "no cell can be run (--dry-run shows what was measured before)")
        console.print(listing.tasks(todo, rates(study, out)))
        if there := _already_there(todo, out):
            console.print(there, style="dim", highlight=False, markup=False)
        failed: list[Outcome] = []

        def told(outcome: Outcome) -> None:
            mark = "[red]failed[/]" if outcome.error else "[green]done[/]"
            console.print(f"{mark} {outcome.task.cell} seed {outcome.task.seed}", highlight=False)
            if outcome.error:
                failed.append(outcome)
                console.print(outcome.error, highlight=False, markup=False)

        alone = launcher == "local" and processes == 1 and torch.cuda.device_count() < 2
        if alone and not dry_run:
            try:
                run_all(todo, on_outcome=told, progress=protocol != "smoke")
            except Stopped as stopped:
                console.print(str(stopped), highlight=False, markup=False)
                return PREEMPTED
        elif not dry_run:
            launch(todo, launcher=launcher, address=address, processes=processes, on_outcome=told)
        values, conclusion, problems = concluded(study, seeds=seeds, protocol=protocol, out=out)
    listing.tell(console, problems)
    if dry_run and not values:
        return OK
    console.print(listing.study(study, values, protocol, conclusion=conclusion, width=console.width))
    return FAILED if failed else OK


def _already_there(todo: Sequence[Task], out: Path) -> str:
    """Which cells' numbers are records from before, and from where; empty for none."""
    found = []
    for task in todo:
        with suppress(ConfigError):  # told where the records are read
            found += [record] if (record := task.told()) else []
    if not found:
        return ""
    devices = ", ".join(dict.fromkeys(str(record["run"].get("device")) for record in found))
    return (
        f"{len(found)} of {len(todo)} cells were measured before, on {devices}: their records in {out / 'records'} "
        "stand. Another --out measures anew"
    )
