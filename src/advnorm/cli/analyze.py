"""The verb ``analyze``: an analysis by name of one or several training runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from advnorm.cli.command import KEY_VALUE, console, say
from advnorm.cli.options import Checkpoint, DataDir, Device, Eps, Limit, Seed

if TYPE_CHECKING:
    from advnorm.evaluation.target import EvaluationTarget

#: Defaults that leave no mark in the file name.
LIMIT, BATCH_SIZE = 1000, 256


def analyze(
    name: Annotated[str, typer.Argument(help="Name of the analysis; see `advnorm ls analyses`.")],
    runs: Annotated[list[Path], typer.Argument(help="Folder of a training run. Some analyses take several.")],
    out: Annotated[Path, typer.Option(help="Folder for the figure (SVG, PNG) and its data (JSON).")] = Path("analysis"),
    options: Annotated[
        list[str] | None, typer.Option("--set", metavar=KEY_VALUE, help="Options of the analysis.")
    ] = None,
    checkpoint: Checkpoint = None,
    data_dir: DataDir = None,
    attack: Annotated[str | None, typer.Option(help="Name of an attack. Default: the attack of training.")] = None,
    eps: Eps = None,
    limit: Limit = LIMIT,
    batch_size: Annotated[int, typer.Option(min=1, help="Images per batch.")] = BATCH_SIZE,
    device: Device = None,
    seed: Seed = 0,
) -> None:
    """Analyze a trained network: print the numbers, write a figure and its data.

    Example: `advnorm analyze domain_gap runs/NAME --data-dir data --out figures`
    """
    from advnorm._core.errors import Problem, raise_problems
    from advnorm._core.progress import show_progress
    from advnorm._core.records import digest, writable_problems
    from advnorm._core.settings import convert_options
    from advnorm.analysis import ANALYSES
    from advnorm.cli.listing import finding_table
    from advnorm.config.text import apply_overrides
    from advnorm.evaluation.target import open_run

    analysis = ANALYSES.get(name)
    parameters = analysis.options()
    given, problems = apply_overrides({}, options or (), {})
    settings, found = convert_options("", parameters, given)
    problems += found + writable_problems(out / f"{name}.json")
    if not analysis.several and len(runs) != 1:
        problems.append(Problem("wrong_number", f"{name} takes one run", "runs", got=len(runs)))
    raise_problems(problems, "bad analysis")
    how: dict[str, Any] = {"checkpoint": checkpoint, "data_dir": data_dir, "attack": attack, "eps": eps}
    how |= {"batch_size": batch_size, "device": device, "seed": seed}
    targets = [open_run(run, **how).sample(limit) for run in runs]
    chosen = (options or [], attack, eps, limit, batch_size, seed)
    marks = [checkpoint] if checkpoint else []
    marks += [digest(repr(chosen))[:8]] if chosen != ([], None, None, LIMIT, BATCH_SIZE, 0) else []
    if "seed" in parameters:
        settings.setdefault("seed", seed)
    with show_progress() as display:
        task = display.task(f"{name} (%)", 100)
        settings["progress"] = lambda done, total: task.update(100 * done / total)
        finding = analysis.run(targets if analysis.several else targets[0], **settings)
    if (table := finding.table()) is not None:
        console.print(finding_table(name, *table))
    for path in finding.save(out / _file_name(name, targets, marks)):
        say(path)


def _file_name(analysis: str, targets: Sequence[EvaluationTarget], marks: Sequence[str]) -> str:
    """Name a file by the first run and a digest of all networks, so that no network's file replaces another's.

    ``marks``: the checkpoint, and a digest of settings that are not the defaults.
    """
    from advnorm._core.records import digest, model_fingerprint

    networks = digest(*((target.name, model_fingerprint(target.model)) for target in targets))[:8]
    others = [f"and-{len(targets) - 1}-more"] if len(targets) > 1 else []
    return "-".join([analysis, targets[0].name[:100], *others, networks, *marks])
