"""Tables of ``advnorm bench train`` for the terminal."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE
from rich.console import Group
from rich.table import Table
from rich.text import Text

from advnorm.bench.growth import Law
from advnorm.bench.start_up import CACHES
from advnorm.bench.train import TrainBenchmark
from advnorm.bench.train_group import TrainRow
from advnorm.bench.training_modes import REFERENCES

STYLE: dict[str, Any] = {"title_justify": "left", "box": SIMPLE, "collapse_padding": True, "pad_edge": False}
#: Columns of a table in 80 characters, beside the mode.
MOST_COLUMNS = 8
Cell = Callable[[TrainRow], str]
#: Settings of a row with their headers; a setting with one value stands in the title.
SETTINGS = {"batch_size": "batch", "attack_steps": "attack\nsteps", "image_size": "pixels", "processes": "proc-\nesses"}


def train_tables(result: TrainBenchmark) -> Group:
    """Return speed, share of the peak and memory of each mode: a table per network, and the laws of growth."""
    tables = []
    for model in dict.fromkeys(row.model for row in result.rows):
        tables += _tables(result, [row for row in result.rows if row.model == model])
    tables += [_parts(row) for row in result.rows if row.parts is not None]
    peak_of = {row.processes: row.peak_tflops for row in result.rows}
    peaks = ", ".join(
        f"{peak:.3g} TFLOP/s" + (f" in each of {count} processes" if count > 1 else "")
        for count, peak in peak_of.items()
    )
    caption = [
        f"median over {result.steps} steps; batch: all processes together; epoch: 50,000 images; peak: "
        f"{peaks} for a large matrix product in this run; memory: per process; "
        "start: building, compiling, capturing and the first steps"
    ]
    if any(row.first_step for row in result.rows):
        caption.append("cold / warm: first step of a fresh process, without and with cached compilations")
    if any(row.cost is not None for row in result.rows):
        caption.append("cost: time relative to the first row of the same mode")
    lines = ["; ".join(caption), *map(_law, result.laws), *(f"note: {note}" for note in result.notes)]
    return Group(*tables, *(Text(line, style="dim") for line in lines))


def _tables(result: TrainBenchmark, rows: Sequence[TrainRow]) -> list[Table]:
    """Return one table of rows, or a second one for the ratios; the title has the equal settings of the rows."""
    title = [rows[0].model]
    settings: dict[str, Cell] = {}
    for name, header in SETTINGS.items():
        values = {getattr(row, name) for row in rows}
        if len(values) == 1:
            title.append(f"{name.replace('_', ' ')} {values.pop()}")
        else:
            settings[header] = lambda row, name=name: str(getattr(row, name))
    names = dict.fromkeys(name for row in rows for name in row.settings)
    settings |= {_header(name): lambda row, name=name: _shown(row.settings[name]) for name in names}
    title += [_shown(result.config[name]) for name in ("norm", "objective", "data") if name not in names]
    title += [f"eps {result.config['eps']}", result.device]
    speed: dict[str, Cell] = {
        "images\nper s": lambda row: f"{row.images_per_second:,.0f}",
        "epoch\ns": lambda row: f"{row.epoch_seconds:,.{0 if row.epoch_seconds >= 1000 else 2}f}",
        "of\npeak": lambda row: f"{row.share_of_peak:.0%}",
        "memory\nGiB": lambda row: _number(None if row.memory is None else row.memory / 2**30, 1),
        "start\ns": lambda row: _number(row.start_up_seconds, 1 if row.start_up_seconds < 100 else 0),
    }
    if any(row.first_step for row in rows):
        speed |= {f"{name}\ns": lambda row, name=name: _number((row.first_step or {}).get(name), 1) for name in CACHES}
    measured = [name for name in REFERENCES if any(name in row.speedups for row in rows)]
    ratios: dict[str, Cell] = {
        _header(f"times {name}"): lambda row, name=name: _number(row.speedups.get(name)) for name in measured
    }
    if any(row.cost is not None for row in rows):
        ratios["cost"] = lambda row: _number(row.cost)
    together = settings | speed | ratios
    parts = [together] if len(together) <= MOST_COLUMNS else [settings | speed, settings | ratios]
    return [_table(", ".join(title), rows, columns) for columns in parts]


def _table(title: str, rows: Sequence[TrainRow], columns: Mapping[str, Cell]) -> Table:
    table = Table(title=title, **STYLE)
    table.add_column("mode", no_wrap=True)
    for header in columns:
        table.add_column(header, justify="right", overflow="fold")
    for row in rows:
        table.add_row(row.mode.replace("_", "\n"), *(cell(row) for cell in columns.values()))
    return table


def _number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _header(name: str) -> str:
    """The words of a name, one per line."""
    return re.sub(r"[ _.]", "\n", name)


def _shown(value: Any) -> str:
    """A setting in short: the name of a part, without its options."""
    if isinstance(value, Mapping):
        value = value.get("name", value)
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _law(law: Law) -> str:
    """A law with the settings that it was fitted for."""
    fixed = ", ".join(f"{name.replace('_', ' ')} {_shown(value)}" for name, value in law.fixed.items())
    values = ", ".join(f"{value:g}" for value in law.values)
    return f"{law.formula}, x = {law.axis.replace('_', ' ')}: {values}; largest error {law.error:.1%}; {fixed}"


def _parts(row: TrainRow) -> Table:
    """Return how the time of a step is spent."""
    settings = [f"{name} {_shown(value)}" for name, value in row.settings.items()]
    sizes = [f"batch {row.batch_size}", f"{row.attack_steps} attack steps", f"{row.processes} process(es)"]
    title = ", ".join([f"a step of {row.model}", row.mode, *sizes, *settings])
    table = Table("", title=title, **STYLE)
    for column in ("ms", "share"):
        table.add_column(column, justify="right", no_wrap=True)
    assert row.parts is not None
    whole = sum(row.parts.values())
    for kind, milliseconds in row.parts.items():
        table.add_row(kind, f"{milliseconds:,.2f}", f"{milliseconds / whole:.0%}")
    return table
