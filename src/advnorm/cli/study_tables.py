"""Tables of studies for the terminal: pending tasks with their cost, and the paper's numbers beside ours."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from statistics import fmean

from rich.box import SIMPLE
from rich.console import Group
from rich.table import Table
from rich.text import Text

from advnorm.report.studies import MARKS, describe_clause, printed_decimals
from advnorm.studies import Study
from advnorm.studies.claims import Values
from advnorm.studies.decision import Conclusion
from advnorm.studies.report_data import short_name
from advnorm.studies.results import values_read_by_check
from advnorm.studies.store import RecordStore
from advnorm.studies.task import Task
from advnorm.studies.uncertainty import MeasuredValues
from advnorm.training.cost import training_flops

#: Maximum number of figure values in the terminal.
MOST = 12
#: Minimum width of the label column.
LABEL = 20


def task_table(todo: Sequence[Task], store: RecordStore, rates: Mapping[str, float] | None = None) -> Group:
    """Return the cells of a study, the state of each, and the cost of the pending trainings.

    ``rates``: operations per second of finished trainings, by device.
    """
    table = Table(title=todo[0].study if todo else "", title_justify="left")
    table.add_column("cell", overflow="fold")  # a name is never cut
    for column in ("seed", "protocol", "state"):
        table.add_column(column)
    table.add_column("training, PFLOP", justify="right")
    for task in todo:
        record, state = store.find(task), store.state(task)
        other = record["study"] if isinstance(record, dict) and record["study"] != task.study else None
        flops = training_flops(task.planned_cell.config)
        pflop = "–" if flops is None else f"{flops / 1e15:.3g}"
        table.add_row(task.cell, str(task.seed), task.protocol, state if other is None else f"done, for {other}", pflop)
    cost = describe_cost(todo, store, rates)
    return Group(table, *([Text(cost, style="dim")] if cost else []))


def describe_cost(todo: Sequence[Task], store: RecordStore, rates: Mapping[str, float] | None = None) -> str:
    """Describe the number and the cost of the pending trainings of some tasks; of smoke tests, return nothing."""
    if all(task.protocol == "smoke" for task in todo):
        return ""
    pending = [task for task in todo if store.state(task) != "done"]
    configs = {f"{task.planned_cell.config.digest} {task.seed}": task.planned_cell.config for task in pending}
    left = [training_flops(config) for config in configs.values()]  # tasks share runs
    if not left:
        return "no pending trainings"
    known = sum(flops for flops in left if flops is not None)
    text = f"pending: {len(left)} training(s), an estimated {known / 1e15:.3g} PFLOP"
    if unknown := sum(flops is None for flops in left):
        text += f" and {unknown} on data sets of unknown size"
    for device, rate in (rates or {}).items() if known else ():
        minutes, speed = known / rate / 60, rate / 1e12
        text += f"; about {minutes:.3g} minutes at the {speed:.3g} TFLOP/s of the paper's trainings on {device}"
    return f"{text}; measurements are not included"


def study_table(
    found: Study,
    values: Values | None = None,
    protocol: str = "",
    *,
    conclusion: Conclusion | None = None,
    cell: str | None = None,
    width: int = 80,
) -> Group | Text:
    """Return the printed table with the measured numbers beside it: mean with interval, and spread over seeds.

    ``cell`` restricts it to one cell. ``conclusion`` is the verdict, by default that of the values; each part of the
    claim has its own line. A figure without printed numbers shows its claim and the verdict.
    """
    said = f"claim: {found.printed['claim']}"
    if protocol == "smoke":
        said = "A smoke test shows that the study runs; its numbers mean nothing and are not kept."
    elif values is not None:
        conclusion = conclusion or found.evaluate_claim(values)
        needs = f" ({conclusion.needs} would decide)" if conclusion.needs else ""
        parts = [f"{MARKS[clause.verdict]} {describe_clause(clause)}" for clause in conclusion.clauses]
        where = " on a stand-in" if protocol == "imagenette" else ""
        said = "\n".join([f"{said} {conclusion.verdict.capitalize()}{where}{needs}.", *parts])
    measured = None if values is None else MeasuredValues.wrap(values)
    title = f"{found.name}{'' if cell is None else f'/{cell}'} {protocol}".rstrip()
    rows: dict[str, dict[str, str]] = {}
    numbers = [number for number in found.numbers if cell in (None, number.cell)]
    decimals = printed_decimals(number.printed for number in numbers) or 1
    for number in numbers:
        text = "–" if number.printed is None else f"{number.printed:g}"
        key = number.cell, number.value
        if measured is not None and (ours := measured.samples.get(key)):
            spread = "" if ours.spread is None else f" ± {ours.spread:.{decimals}f} (n={len(ours.values)})"
            text += f" | {measured.estimate(key, ours.mean):.{decimals}f}{spread}"
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
    """Arrange rows in as few tables as fit into the width, one below another.

    No word of a column is broken; its spread over seeds wraps if there is no room. Labels get the remaining width, and
    ``tight`` columns stand closer together if labels fit only then.
    """
    longest = max(map(len, rows))
    least, whole = {}, {}
    for column in columns:
        texts = [row.get(column, "") for row in rows.values()]
        least[column] = max(map(len, [*column.split(), *(re.split(r" [±(]", text)[0] for text in texts)]))
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
