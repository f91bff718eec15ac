"""One table as plain data, shown in a terminal or on a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NotRequired, TypedDict

if TYPE_CHECKING:
    import rich.table

#: What a cell without a value shows: never a blank, never a zero.
MISSING = "not run"
Kind = Literal["text", "number", "percent", "points"]
Cell = str | float | None


class Column(TypedDict):
    """A heading and what is below it.

    Text; numbers as they are, or as text made already; shares shown as percent; differences of shares as points.
    """

    label: str
    kind: Kind


class Table(TypedDict):
    """Cells in rows, with a title above and a note below. A row of one cell is a heading for those that follow."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    note: NotRequired[str]


def shown(value: Cell, kind: Kind = "text") -> str:
    """A cell as text: ``0.279`` is ``27.9`` as percent and ``+27.9`` as points; the heading says the unit."""
    if value is None:
        return MISSING
    if isinstance(value, str) or kind in ("text", "number"):
        return str(value)
    if kind == "percent":
        return f"{100 * value:.1f}"
    points = round(100 * value, 1)
    return f"{points:+.1f}".replace("-", "−") if points else "0.0"


def terminal(table: Table) -> rich.table.Table:
    """The table for :mod:`rich`."""
    from rich.table import Table as RichTable
    from rich.text import Text

    made = RichTable(title=table["title"], title_justify="left", caption=table.get("note"), caption_justify="left")
    for column in table["columns"]:
        made.add_column(column["label"], justify="left" if column["kind"] == "text" else "right")
    for row in table["rows"]:
        cells = (shown(cell, column["kind"]) for cell, column in zip(row, table["columns"]))
        made.add_row(*(Text(cell, style="dim" if cell == MISSING else "") for cell in cells))
    return made
