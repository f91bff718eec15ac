"""One table as plain data, for a terminal or a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NotRequired, TypedDict

if TYPE_CHECKING:
    import rich.table

#: Text of a cell without a value: never a blank, never a zero.
MISSING = "not run"
ColumnKind = Literal["text", "number", "percent", "points"]
CellValue = str | float | None


class ReportColumn(TypedDict):
    """A heading and the kind of its cells.

    Text; numbers, or text that is already formatted; shares shown as percent; differences of shares shown as points.
    """

    label: str
    kind: ColumnKind


def make_columns(labels: Mapping[ColumnKind, Sequence[str]]) -> list[ReportColumn]:
    """``make_columns({"text": ["attack"], "percent": ["clean", "adv"]})``: headings by the kind of their cells."""
    return [ReportColumn(label=label, kind=kind) for kind, group in labels.items() for label in group]


class ReportTable(TypedDict):
    """Cells in rows, with a title above and a note below. A row with one cell is a heading of the rows below it.

    ``stacked``: on a phone, each row is a list of labels and cells; always so with more than 7 columns.
    """

    title: str
    columns: Sequence[ReportColumn]
    rows: Sequence[Sequence[CellValue]]
    stacked: NotRequired[bool]
    note: NotRequired[str]


def format_cell(value: CellValue, kind: ColumnKind = "text") -> str:
    """``0.279`` is ``27.9`` as percent and ``+27.9`` as points; the heading names the unit."""
    if value is None:
        return MISSING
    if isinstance(value, str) or kind in ("text", "number"):
        return str(value)
    if kind == "percent":
        return f"{100 * value:.1f}"
    points = round(100 * value, 1)
    return f"{points:+.1f}".replace("-", "−") if points else "0.0"


def to_rich_table(table: ReportTable) -> rich.table.Table:
    """Return the table for :mod:`rich`."""
    from rich.table import Table
    from rich.text import Text

    title = Text(table["title"], style="table.title")  # text, not markup: names of data may contain [brackets]
    note = Text(table.get("note", ""), style="table.caption")
    made = Table(title=title, title_justify="left", caption=note or None, caption_justify="left")
    for column in table["columns"]:
        made.add_column(column["label"], justify="left" if column["kind"] == "text" else "right", overflow="fold")
    for row in table["rows"]:
        cells = (format_cell(cell, column["kind"]) for cell, column in zip(row, table["columns"]))
        made.add_row(*(Text(cell, style="dim" if cell == MISSING else "") for cell in cells))
    return made
