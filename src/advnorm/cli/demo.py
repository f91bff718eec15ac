"""The verb ``demo``: three ways to train on clean and adversarial digits, evaluated by a weak and a strong attack."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from advnorm.cli.command import console, say


def demo(
    out: Annotated[Path, typer.Option(help="Folder for runs, records and report.html.")] = Path("demo"),
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights, batches and noise.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Seconds instead of minutes, without AutoAttack.")] = False,
) -> int:
    """Train on embedded digits with single BN, dual BN and a KL term; measure how much robustness is real.

    Takes a few minutes on two CPU cores. The same command resumes after an interruption. Example:
    `advnorm demo --seed 1`
    """
    from dataclasses import replace

    from advnorm._core.exit_codes import PREEMPTED
    from advnorm._core.records import write_atomic
    from advnorm.cli import demonstration as parts
    from advnorm.config import AttackConfig
    from advnorm.report import ReportPage, render_page, to_rich_table

    attacks = parts.QUICK_ATTACKS if quick else parts.ATTACKS
    runs, rows, seconds = {}, [], 0.0
    for label, config in parts.MODELS.items():
        config = replace(config, seed=seed)
        config = replace(config, attack=AttackConfig(steps=2), epochs=2) if quick else config
        run = parts.train_model(config, out / "runs")
        if not run.finished:
            say("stopped before the end; the same command resumes")
            return PREEMPTED
        limit = parts.QUICK_IMAGES if quick else None
        result = parts.evaluate_run(run, tuple(attacks), out / "records", limit=limit)
        runs[label] = run
        rows += parts.branch_results(label, result)
        seconds += run.record["seconds"] + sum(sum(row.values()) for row in result.seconds.values())
        say(f"✓ {label}", style="green")
    table = parts.accuracy_table(rows, attacks)
    sentences = [parts.QUICK] if quick else parts.findings(rows, attacks)
    page: ReportPage = {
        "title": "How much of the robustness is real?",
        "about": "Three networks learn clean and adversarial digits together (hybrid training). They differ in one "
        "line of their configuration; each is attacked through each of its branches.",
        "lead": sentences,
        "tables": [table],
        "figures": parts.figures(rows, attacks, {label: run.metrics() for label, run in runs.items()}),
        "conditions": parts.conditions(next(iter(runs.values())), rows[0].images, attacks, seconds),
        "commands": parts.commands(runs, attacks, out=out, seed=seed, quick=quick),
    }
    path = out / "report.html"
    write_atomic(path, render_page(page).encode(errors="replace"))
    console.print()
    console.print(to_rich_table(table))
    for sentence in sentences:
        console.print(sentence)
    say(f"\nplots and conditions: {path}")
    return 0
