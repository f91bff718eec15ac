"""Tables of the benchmarks for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from rich.box import SIMPLE
from rich.console import Group
from rich.table import Table
from rich.text import Text

from advnorm.bench.audit import AuditBenchmark, score
from advnorm.bench.autoattack import AutoAttackBenchmark
from advnorm.bench.norms import LIMITS, NormBenchmark
from advnorm.bench.passes import StagePasses, mean_passes
from advnorm.bench.quick import QuickBenchmark
from advnorm.bench.recipe import ATTACKS, RECIPE, RecipeBenchmark
from advnorm.bench.surgery import OUTCOMES, SurgeryBenchmark
from advnorm.evaluation.gallery import Part
from advnorm.evaluation.intervals import format_accuracy
from advnorm.evaluation.results import label_of

#: Style of a narrow table.
_LEFT: dict[str, Any] = {"title_justify": "left", "box": SIMPLE, "collapse_padding": True, "pad_edge": False}


def norm_table(result: NormBenchmark) -> Table:
    """Return milliseconds and ratios to the plain network."""
    where = f"{result.device}, {result.threads} thread(s)" if result.device == "cpu" else result.device
    table = Table(title=f"{result.model}, batch {result.batch_size}, {where}", title_justify="left")
    table.add_column("norm")
    for phase in ("eval", "train"):
        table.add_column(f"{phase} ms", justify="right")
        table.add_column("ratio", justify="right")
    for norm, phases in result.rows.items():
        cells = []
        for phase, timing in phases.items():
            missed = norm == "dual_bn" and timing.ratio > LIMITS[phase]
            ratio = f"{timing.ratio:.3f} ± {timing.spread / 2:.3f}"
            cells += [f"{1000 * timing.seconds:.1f}", Text(f"{ratio} over", "red") if missed else ratio]
        table.add_row(norm, *cells)
    table.caption = (
        f"{result.precision}{', compiled' if result.compiled else ''}; median of {result.rounds} rounds; ± half the "
        f"interquartile range; limits for dual_bn: eval {LIMITS['eval']:.2f}, train {LIMITS['train']:.2f}"
    )
    table.caption_justify = "left"
    return table


def autoattack_tables(result: AutoAttackBenchmark) -> Group:
    """Return seconds, speed-up and robust accuracy of each implementation, and cost and speed of its stages."""
    title = f"AutoAttack standard, {result.threat}, {result.images} images, {result.model}, {result.device}"
    table = Table("", title=title, title_justify="left")
    for column in ("seconds", "speed-up", "robust", "agreement"):
        table.add_column(column, justify="right")
    for label, row in result.rows.items():
        table.add_row(label, f"{row.seconds:.1f}", f"{row.speedup:.1f}×", f"{row.robust:.2%}", f"{row.agreement:.2%}")
    clean = next(iter(result.rows.values())).clean
    table.caption = " ".join([f"clean accuracy {clean:.2%}; compared with {result.reference}.", *result.notes])
    table.caption_justify = "left"
    flops = result.images * result.forward_flops
    parts: list[Table] = [table]
    for label, row in result.rows.items():
        if row.passes:  # the official code does not count them
            # A stage without images takes no time.
            speeds = {name: flops * stage.total / (row.stages[name] or 1.0) for name, stage in row.passes.items()}
            seconds = [f"{row.stages[name]:.1f}" for name in speeds]
            rates = [f"{speed / 1e12:.3g}" for speed in speeds.values()]
            shares = [f"{speed / result.peak_flops:.0%}" for speed in speeds.values()]
            parts.append(_stages(label, row.passes, {"seconds": seconds, "TFLOP/s": rates, "of peak": shares}))
    return Group(*parts)


def _stages(label: str, passes: Mapping[str, StagePasses], more: Mapping[str, Sequence[str]] | None = None) -> Table:
    """Return forwards and backwards per image by stage, and more columns."""
    columns = {
        "forwards per image": [f"{stage.forwards:,.1f}" for stage in passes.values()],
        "backwards per image": [f"{stage.backwards:,.1f}" for stage in passes.values()],
        **(more or {}),
    }
    table = Table(f"stages of {label}", box=SIMPLE, collapse_padding=True, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for name, *cells in zip(passes, *columns.values()):
        table.add_row(name, *cells)
    return table


def audit_tables(result: AuditBenchmark) -> Group:
    """Return the verdict on each specimen and the score of each part."""
    title = f"audit of known classifiers: {result.data}, {result.images} images, budget {result.budget}"
    table = Table("specimen", "truth", "verdict", title=title, title_justify="left", box=SIMPLE, pad_edge=False)
    for column in ("clean", "PGD-10", "worst", "known", "s"):
        table.add_column(column, justify="right")
    expected = {"sound": "real", "false": "false", "undefended": "none"}
    for name, row in result.rows.items():
        colour = "green" if row.verdict == expected[row.truth] else "red"
        accuracies = (f"{100 * value:.1f}" for value in (row.clean, row.pgd10, row.worst_case, row.known))
        table.add_row(name, row.truth, Text(row.verdict, colour), *accuracies, f"{row.seconds:.1f}")
    parts: list[Table | str] = [table]
    names = {"fitted": "fitted half", "held_out": "held-out half", "blind": "blind part"}
    for part in get_args(Part):
        name, found = names[part], score(result.part(part))
        if not found["matrix"]:
            continue
        matrix = Table(name, title_justify="left", box=SIMPLE, pad_edge=False)
        verdicts = list(next(iter(found["matrix"].values())))
        for verdict in verdicts:
            matrix.add_column(verdict, justify="right")
        for truth, counts in found["matrix"].items():
            matrix.add_row(truth, *(str(counts[verdict]) for verdict in verdicts))
        shares = {"precision of false": found["precision"], "recall of false": found["recall"]}
        text = ", ".join(f"{key} {'–' if value is None else f'{value:.0%}'}" for key, value in shares.items())
        parts += [matrix, f"{text}, {found['seconds']:.1f} s per audit"]
    return Group(*parts)


def quick_tables(result: QuickBenchmark) -> Group:
    """Return accuracy and passes of the quick estimate and of AutoAttack for each network, and passes by stage."""
    title = f"quick estimate and AutoAttack standard, {result.networks}, {result.precision}, {result.device}"
    table = Table("network", title=title, title_justify="left", box=SIMPLE, collapse_padding=True, pad_edge=False)
    cost = ("passes\nratio", "s", "s of\nAA")
    for column in ("images", "clean", "quick", "Auto-\nAttack", "points", "differ", *cost):
        table.add_column(column, justify="right", no_wrap=True)
    for row in result.rows:
        table.add_row(
            row.network,
            f"{row.images:,}",
            *(f"{value:.1%}" for value in (row.clean, row.quick, row.autoattack)),
            f"{row.points:+.2f}",
            str(row.differing),
            f"{row.ratio:.3f}",
            *(f"{seconds:.1f}" for seconds in (row.quick_seconds, row.autoattack_seconds)),
        )
    table.caption = (
        "points: quick minus AutoAttack; differ: images with other results; passes: forwards and backwards of quick "
        "relative to AutoAttack; s: seconds of quick"
    )
    table.caption_justify = "left"
    attacks = {"quick": [row.quick_passes for row in result.rows]}
    attacks["AutoAttack"] = [row.autoattack_passes for row in result.rows]
    label = "{}, mean over the networks"
    return Group(table, *(_stages(label.format(name), mean_passes(passes)) for name, passes in attacks.items()))


def recipe_tables(result: RecipeBenchmark) -> Group:
    """Return accuracies and times of each training, and the effect of each changed setting: tables 80 columns wide."""
    summary, tables = result.summary(), list[Table | Text]()
    for name in summary:
        label = result.recipe if name == RECIPE else name
        title = f"{label}: {result.passes[name]['all']:,.0f} forwards per image in all, a backward counted as one"
        table = Table("seed", "checkpoint (epoch)", title=title, **_LEFT)
        for column in ("clean", "PGD-10", "quick", "Auto-\nAttack", "s", "first\nstep", "train-\ning", "vali-\ndation"):
            table.add_column(column, justify="right", no_wrap=True)
        for row in (row for row in result.rows if row.variant == name):
            times = [_seconds(value) for value in (row.seconds, row.first_step, row.training, row.validation)]
            for checkpoint, routes in row.accuracies.items():
                for route, accuracies in routes.items():
                    shown = [
                        f"{100 * accuracies[name]:.2f}" if name in accuracies else "–" for name in ("clean", *ATTACKS)
                    ]
                    which = f"{checkpoint} ({row.epochs[checkpoint]})" + (f", {route}" if len(routes) > 1 else "")
                    table.add_row(str(row.seed), which, *shown, *times)
                    times = [""] * len(times)
        tables.append(table)
    medians = Table(title="medians over seeds", **_LEFT)
    medians.add_column("training", min_width=12)
    for column in ("clean", "quick", "AutoAttack", "points", "s", "− s"):
        medians.add_column(column, justify="right", no_wrap=True)
    for name, row in summary.items():
        difference, own = result.differences.get(name), summary[RECIPE]["seconds"]
        points = seconds = ""
        if difference is not None:
            whole, low, high = (100 * value for value in (difference.difference, difference.low, difference.high))
            points = f"{whole:+.1f} ({low:+.1f} to {high:+.1f})".replace("-", "−")
            seconds = "–" if None in (own, row["seconds"]) else f"{own - row['seconds']:+,.0f}".replace("-", "−")
        medians.add_row(
            result.recipe if name == RECIPE else name,
            *(f"{100 * row[name]['median']:.1f}" for name in ("clean", "quick")),
            format_accuracy(row["autoattack"]["median"], result.images) if "autoattack" in row else "–",
            points,
            _seconds(row["seconds"]),
            seconds,
        )
    chosen = " or ".join(sorted({label_of(route) for route in result.branch.values()}))
    notes = [
        f"{result.threat}, {result.data}, {result.images:,} test images, {result.device}; percent with 95 % intervals",
        "s: from the start of the process to its end; training: without validation and checkpoints",
        f"points, − s: {result.recipe} minus variant, in points under {result.compared} (paired by image), in seconds",
        f"medians: {next(iter(result.rows[0].accuracies))} checkpoint; branch: {chosen}",
        "evaluation: " + ", ".join(f"{name} {_seconds(summary[RECIPE][name]['seconds'])} s" for name in ATTACKS),
        *(f"interrupted, so without a wall-clock time: {row.run}" for row in result.rows if row.seconds is None),
        *(f"{row.alarms} warnings of the monitor: {row.run}" for row in result.rows if row.alarms),
    ]
    return Group(*tables, medians, *(Text(note, style="dim") for note in notes))


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f}"


def surgery_tables(result: SurgeryBenchmark) -> Group:
    """Return the outcomes by library, the failures with their reasons, and the checks that did not pass."""
    table = Table("library", title="architectures", title_justify="left", box=SIMPLE)
    for outcome in OUTCOMES:
        table.add_column(outcome, justify="right")
    for library, counts in result.counts.items():
        row = [str(counts.get(outcome, 0)) for outcome in OUTCOMES]
        table.add_row(f"{library} {result.versions[library]}", *row)
    lines = [f"{name}: {reason}" for name, reason in result.failures.items()]
    failed = {family: check for family, check in result.families.items() if not check.passed}
    lines += [f"{family}: {check.model}: {check.error or 'the outputs differ'}" for family, check in failed.items()]
    checked = f"{len(result.families) - len(failed)} of {len(result.families)} families checked bit for bit"
    return Group(table, Text("\n".join([*lines, checked] if result.families else lines)))
