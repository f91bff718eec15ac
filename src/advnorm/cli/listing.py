"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from statistics import fmean, stdev

import torch
from rich.box import SIMPLE
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from advnorm._core.errors import ConfigError
from advnorm.analysis import ANALYSES
from advnorm.attacks import ATTACKS, list_attacks
from advnorm.bench.autoattack import AutoAttackBenchmark
from advnorm.bench.norms import LIMITS, NormBenchmark
from advnorm.bench.train import Row, TrainBenchmark
from advnorm.config import Config, explain
from advnorm.data import DATASETS
from advnorm.models import create_model, list_models
from advnorm.norms import NORMS
from advnorm.objectives import OBJECTIVES, REGULARIZERS, SECOND_PASSES, Objective
from advnorm.report.studies import printed_decimals
from advnorm.studies import STUDIES, Study, find
from advnorm.studies.claims import Values
from advnorm.studies.compared_numbers import short_name
from advnorm.studies.results import values_read_by_check
from advnorm.studies.store import RecordStore
from advnorm.studies.study import Conclusion
from advnorm.studies.summary import list_cell_statuses
from advnorm.studies.task import Task
from advnorm.training.cost import training_flops

#: Numbers of a figure that a terminal shows.
MOST = 12
#: The fewest characters that a study's table leaves for its labels.
LABEL = 20


def norms(pattern: str) -> Table:
    """Every norm with its banks and where it comes from."""
    table = Table("norm", "what it is", "domains", "paper", title="norms", title_justify="left")
    for name in _matching(NORMS.names(pattern), pattern, "norm"):
        recipe = NORMS.get(name)
        table.add_row(name, recipe.summary, ", ".join(recipe.domains), recipe.paper)
    return table


def models(pattern: str) -> Table:
    """Every model with its number of parameters."""
    table = Table("model", title="models", title_justify="left")
    table.add_column("parameters", justify="right")
    for name in _matching(list_models(pattern), pattern, "model"):
        classes = 1000 if name.startswith("imagenet_") else 10
        with torch.device("meta"):
            model = create_model(name, num_classes=classes)
        table.add_row(name, f"{sum(p.numel() for p in model.parameters()):,}")
    table.caption = "10 classes; imagenet_*: 1000"
    return table


def attacks(pattern: str) -> Table:
    """Every attack with its options and where it is used; a name takes options: ``pgd20-restarts5``."""
    table = Table("attack", "what it is", "options", "paper", title="attacks", title_justify="left")
    for name in _matching(ATTACKS.names(pattern), pattern, "attack"):
        family = ATTACKS.get(name)
        options = ", ".join(
            f"{word}{option.number or 'N'}" if option.parse else word for word, option in family.options.items()
        )
        table.add_row(list_attacks(name)[0], family.summary, options, family.paper)
    table.caption = "a number after the name sets the steps; options follow with '-', for example pgd20-restarts5-cw"
    table.caption_justify = "left"
    return table


def findings(name: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """What an analysis found, where that is a table."""
    table = Table(title=name, title_justify="left")
    for column in head:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def objectives(pattern: str) -> Table:
    """Every training objective with its options and where it comes from, and what can be put around each of them."""
    table = Table(title="objectives", title_justify="left")
    for column in ("objective", "what it is", "options", "paper"):
        table.add_column(column, overflow="fold")  # a name is never cut
    common = Objective.options()
    registries = {"": OBJECTIVES, "second_pass=": SECOND_PASSES, "regularizer=": REGULARIZERS}
    _matching([name for registry in registries.values() for name in registry.names(pattern)], pattern, "objective")
    for setting, registry in registries.items():
        for name in registry.names(pattern):
            kind = registry.get(name)
            options = (f"{option}={p.default}" for option, p in kind.options().items() if option not in common)
            table.add_row(f"{setting}{name}", kind.summary, "\n".join(options), kind.paper)
        table.add_section()
    table.caption = "label_smoothing, running_epochs and mix (mixup, cutmix) are settings of a configuration's own"
    table.caption_justify = "left"
    return table


def datasets(pattern: str) -> Table:
    """Every data set with its splits and options."""
    table = Table("data set", "what it is", "splits", "options", title="data sets", title_justify="left")
    for name in _matching(DATASETS.names(pattern), pattern, "data set"):
        source = DATASETS.get(name)
        table.add_row(name, source.summary, ", ".join(source.splits), ", ".join(source.options))
    return table


def analyses(pattern: str) -> Table:
    """Every analysis with what it shows and where it comes from."""
    table = Table(title="analyses", title_justify="left")
    for column in ("analysis", "what it shows", "runs", "--set", "paper"):
        table.add_column(column, overflow="fold", no_wrap=column == "analysis")
    for name in _matching(ANALYSES.names(pattern), pattern, "analysis"):
        analysis = ANALYSES.get(name)
        several = "several" if analysis.several else "one"
        table.add_row(
            name, analysis.summary, several, ", ".join(sorted(analysis.options().keys() - {"progress"})), analysis.paper
        )
    table.caption = "NS: normalization statistics, AP: affine parameters; the papers A to E are named in the README"
    table.caption_justify = "left"
    return table


def studies(pattern: str) -> Table:
    """Every study with its cells and the claim it checks; of a study's name or a pattern of cells, the cells."""
    names = STUDIES.names(pattern)
    if pattern in STUDIES or not names:
        return cells(pattern)
    table = Table("study", "cells", "claim", title="studies", title_justify="left")
    for name in names:
        found = STUDIES.get(name)
        table.add_row(name, str(len(found.by_name())), found.printed["claim"])
    table.caption = f"the cells of one: advnorm ls studies {names[0]}"
    table.caption_justify = "left"
    return table


def cells(pattern: str) -> Table:
    """The cells of a study, or those that match ``A/table3/dual_*``, with the settings in which they differ."""
    if not set(pattern) & set("*?["):
        found, one = find(pattern)
        pattern = pattern if one is not None else f"{found.name}/*"
    table = Table(title="cells", title_justify="left")
    table.add_column("cell", overflow="fold")
    table.add_column("settings of its own")
    for name in STUDIES.names("/".join(pattern.split("/")[:2])):
        for state in list_cell_statuses(STUDIES.get(name).by_name().values(), None, ())[0]:
            if fnmatchcase(full := f"{name}/{state['name']}", pattern):
                table.add_row(full, ", ".join(f"{key} {value}" for key, value in state["settings"].items()))
    _matching([str(name) for name in table.columns[0].cells], pattern, "study")
    return table


def tell(console: Console, problems: Iterable[str]) -> None:
    """What is wrong with records, a line each."""
    for problem in problems:
        console.print(problem, style="yellow", highlight=False, markup=False, soft_wrap=True)


def tasks(todo: Sequence[Task], store: RecordStore, rates: Mapping[str, float] | None = None) -> Group:
    """The cells of a study, how far each is, and what the trainings that are to do will cost.

    ``rates``: operations a second of trainings that were done, by device.
    """
    table = Table("cell", "seed", "protocol", "state", title=todo[0].study if todo else "", title_justify="left")
    table.add_column("training, PFLOP", justify="right")
    left: dict[str, float | None] = {}  # by run, which tasks may share
    for task in todo:
        record, state = store.find(task), store.state(task)
        other = record["study"] if isinstance(record, dict) and record["study"] != task.study else None
        config = task.planned_cell.config
        flops = training_flops(config)
        if state != "done":
            left[f"{config.digest} {task.seed}"] = flops
        pflop = "–" if flops is None else f"{flops / 1e15:.3g}"
        table.add_row(task.cell, str(task.seed), task.protocol, state if other is None else f"done, for {other}", pflop)
    return Group(table, Text(_cost(list(left.values()), rates or {}), style="dim"))


def _cost(left: Sequence[float | None], rates: Mapping[str, float]) -> str:
    known = sum(flops for flops in left if flops is not None)
    if not left:
        return "nothing is pending"
    text = f"pending: {len(left)} training(s), an estimated {known / 1e15:.3g} PFLOP"
    if unknown := sum(flops is None for flops in left):
        text += f" and {unknown} on images that are not counted here"
    for device, rate in rates.items() if known else ():
        minutes, speed = known / rate / 60, rate / 1e12
        text += f"; about {minutes:.3g} minutes at the {speed:.3g} TFLOP/s of the paper's trainings on {device}"
    return f"{text}; measuring comes on top"


def study(
    found: Study,
    values: Values | None = None,
    protocol: str = "",
    *,
    conclusion: Conclusion | None = None,
    cell: str | None = None,
    width: int = 80,
) -> Group | Text:
    """The printed table, or what of it is a cell's, with what was measured beside it: mean and spread over seeds.

    ``conclusion``: the verdict, by default that of the values, with the parts of the claim in lines of their own.

    Of a figure, which prints no numbers, its claim and the verdict.
    """
    said = f"claim: {found.printed['claim']}"
    if protocol == "smoke":
        said = "A smoke test shows that it runs; its numbers mean nothing and are not kept."
    elif values is not None:
        verdict, clauses, _ = conclusion or found.evaluate_claim(values)
        parts = [f"✓ {clause.text}" if clause.held else f"✗ fails: {clause.text}" for clause in clauses]
        said = "\n".join([f"{said} {verdict.capitalize()}.", *parts])
    title = f"{found.name}{'' if cell is None else f'/{cell}'} {protocol}".rstrip()
    rows: dict[str, dict[str, str]] = {}
    numbers = [number for number in found.numbers() if cell in (None, number.cell)]
    decimals = printed_decimals(number.printed for number in numbers) or 1
    for number in numbers:
        text = "–" if number.printed is None else f"{number.printed:g}"
        ours = (values or {}).get((number.cell, number.value))
        if ours:
            spread = f" ± {stdev(ours):.{decimals}f} (n={len(ours)})" if len(ours) > 1 else ""  # as the report has it
            text += f" | {fmean(ours):.{decimals}f}{spread}"
        elif values is not None:
            text += " | not run"
        rows.setdefault(number.row, {})[number.column] = text
    if not rows:
        where, read = "" if cell is None else " of this cell", []
        if values is not None and protocol != "smoke":
            where = "; `advnorm report` shows ours"
            keys = sorted(values_read_by_check(found, values) & values.keys())
            read = [f"{cell} {short_name(name)}: {fmean(values[cell, name]):.4g}" for cell, name in keys]
        more = [f"and {len(read) - MOST} more that the check reads"] if len(read) > MOST else []
        return Text("\n".join([title, said, f"The paper prints no numbers{where}.", *read[:MOST], *more]))
    columns = [column for column in found.printed["columns"] if any(column in row for row in rows.values())]
    tables = _fitted(rows, columns, width, tight=values is None)
    tables[0].title = title if cell is None else f"{title}: what the paper prints"
    return Group(*tables, Text(said if values is None else f"paper | ours. {said}", style="dim"))


def _fitted(rows: Mapping[str, Mapping[str, str]], columns: Sequence[str], width: int, *, tight: bool) -> list[Table]:
    """Rows by label and column in as few tables as fit into the width, one below another.

    No word of a column is broken; its spreads over seeds go below where there is no room. Labels have what is left, and
    where that makes them fit, ``tight`` columns stand close to each other.
    """
    longest = max(map(len, rows))
    least, whole = {}, {}
    for column in columns:
        texts = [row.get(column, "") for row in rows.values()]
        least[column] = max(map(len, [*column.split(), *(text.partition(" ±")[0] for text in texts)]))
        whole[column] = max(map(len, [column, *texts]))

    def room(blocks: Sequence[Sequence[str]], gap: int) -> int:
        return width - max(sum(least[column] + gap for column in block) for block in blocks)

    gap = 1 if tight and room([columns], 2) < longest <= room([columns], 1) else 2
    sizes = [-(-len(columns) // count) for count in range(1, len(columns) + 1)]
    cuts = [[columns[start : start + size] for start in range(0, len(columns), size)] for size in sizes]
    blocks = next((blocks for blocks in cuts if room(blocks, gap) >= min(longest, LABEL)), cuts[-1])
    label = min(longest, max(room(blocks, gap), LABEL))
    tables = []
    for block in blocks:
        spare = max(0, room([block], gap) - label) // len(block)
        table = Table(box=SIMPLE, title_justify="left", padding=(0, gap - 1, 0, 0), pad_edge=False, show_edge=False)
        table.add_column("", width=label, overflow="fold")
        for column in block:
            table.add_column(column, width=min(whole[column], least[column] + spare))
        for name, row in rows.items():
            table.add_row(name, *(row.get(column, "") for column in block))
        if block is not blocks[-1]:
            table.add_row()
        tables.append(table)
    return tables


def configuration(config: Config) -> Table:
    """Every setting of a training, those that are not the default in bold."""
    title = config.run_name
    table = Table("setting", "value", title=title, title_justify="left", min_width=len(title))
    for key, value, default in explain(config):
        table.add_row(key, str(value), style="dim" if default else "bold")
    table.caption = "bold: set here; the others are defaults"
    table.caption_justify = "left"
    return table


def norm_benchmark(result: NormBenchmark) -> Table:
    """Milliseconds and ratios to the plain network."""
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
            cells += [f"{1000 * timing.seconds:.1f}", f"[red]{ratio} over[/]" if missed else ratio]
        table.add_row(norm, *cells)
    table.caption = (
        f"{result.precision}{', compiled' if result.compiled else ''}; median of {result.rounds} rounds; ± half the "
        f"interquartile range; promised of dual_bn: eval {LIMITS['eval']:.2f}, train {LIMITS['train']:.2f}"
    )
    table.caption_justify = "left"
    return table


def train_benchmark(result: TrainBenchmark) -> Group:
    """Speed of each mode, what it makes of the hardware, and what it needs: a table per network, 80 columns wide."""
    tables = []
    for model in dict.fromkeys(row.model for row in result.rows):
        title = f"{model}, {result.norm}, hybrid training, eps {result.eps}, {result.data}, {result.device}"
        table = Table("mode", title=title, title_justify="left", box=SIMPLE, collapse_padding=True, pad_edge=False)
        for column in (
            "batch", "attack\nsteps", "proc-\nesses", "images\nper s", "epoch\ns", "of\npeak", "memory\nGiB",
            "start\ns", "times\nplain",
        ):  # fmt: skip
            table.add_column(column, justify="right", no_wrap=True)
        for row in (row for row in result.rows if row.model == model):
            table.add_row(
                row.mode,
                str(row.batch_size),
                str(row.attack_steps),
                str(row.processes),
                f"{row.images_per_second:,.0f}",
                f"{row.epoch_seconds:,.2f}" if row.epoch_seconds < 1000 else f"{row.epoch_seconds:,.0f}",
                f"{row.share_of_peak:.0%}",
                "–" if row.memory is None else f"{row.memory / 2**30:.1f}",
                f"{row.start_up_seconds:.1f}",
                "–" if row.speedup is None else f"{row.speedup:.2f}",
            )
        tables.append(table)
    tables += [_parts(row) for row in result.rows if row.parts is not None]
    peak_of = {row.processes: row.peak_tflops for row in result.rows}
    peaks = ", ".join(f"{peak:.3g} in each of {count} process(es)" for count, peak in peak_of.items())
    caption = (
        f"median over {result.steps} steps; batch: of all processes; epoch: of 50,000 images; peak: "
        f"{peaks} TFLOP/s, of a large matrix product in this run; memory: per process; "
        "start: making, compiling and capturing everything, with the first steps"
    )
    return Group(*tables, *(Text(line, style="dim") for line in (caption, *(f"note: {told}" for told in result.notes))))


def _parts(row: Row) -> Table:
    """Where the time of a step goes."""
    title = (
        f"a step of {row.model}, {row.mode}, batch {row.batch_size}, {row.attack_steps} attack steps, {row.processes} "
        "process(es)"
    )
    table = Table("", title=title, title_justify="left", box=SIMPLE, collapse_padding=True, pad_edge=False)
    for column in ("ms", "share"):
        table.add_column(column, justify="right", no_wrap=True)
    assert row.parts is not None
    whole = sum(row.parts.values())
    for kind, milliseconds in row.parts.items():
        table.add_row(kind, f"{milliseconds:,.2f}", f"{milliseconds / whole:.0%}")
    return table


def autoattack_benchmark(result: AutoAttackBenchmark) -> Table:
    """Seconds, speed-up and robust accuracy of each implementation."""
    title = f"AutoAttack standard, {result.threat}, {result.images} images, {result.model}, {result.device}"
    table = Table("", title=title, title_justify="left")
    for column in ("seconds", "speed-up", "robust", "same verdict"):
        table.add_column(column, justify="right")
    for label, row in result.rows.items():
        table.add_row(label, f"{row.seconds:.1f}", f"{row.speedup:.1f}×", f"{row.robust:.2%}", f"{row.agreement:.2%}")
    clean = next(iter(result.rows.values())).clean
    table.caption = " ".join([f"clean accuracy {clean:.2%}; compared with {result.reference}.", *result.notes])
    table.caption_justify = "left"
    return table


#: Patterns that match something of each kind.
_EXAMPLES = {
    "norm": "*bn*",
    "model": "resnet*",
    "attack": "pgd*",
    "objective": "apart*",
    "data set": "cifar*",
    "analysis": "*gap*",
    "study": "A/*",
}


def _matching(names: list[str], pattern: str, kind: str) -> list[str]:
    if not names:
        raise ConfigError(
            f"no {kind} matches {pattern!r}; leave it out to see all, or use one such as {_EXAMPLES[kind]!r}"
        )
    return names
