"""Tables as text: CSV and JSON for programs, Markdown for people."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from advnorm.report.page import ReportPage
from advnorm.report.tables import ReportTable, format_cell

if TYPE_CHECKING:
    from advnorm.studies.report_data import StudiesSummary

#: Formats of a report.
FORMATS = ("html", "md", "csv", "json")
#: The start of a report's text by format; a file that starts otherwise is not replaced.
STARTS = {
    "html": '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
    "md": "# Training runs in |## Papers and measurements",
    "csv": "run,error,|study,protocol,",
    "json": r'\[\]|\[\n \{\n  "(run|study)":',
}


def is_report(text: bytes, form: str) -> bool:
    """Whether a text starts like a report of a format."""
    return re.match(STARTS[form].encode(), text) is not None


def rows_text(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], form: str) -> str:
    """Return rows as ``csv``, or as ``json``: a list of objects that all have every column."""
    plain = [{name: row.get(name) for name in columns} for row in rows]
    if form == "json":
        return json.dumps(plain, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(plain)
    return text.getvalue()


def page_markdown(page: ReportPage) -> str:
    """Return the tables of a page as Markdown; figures are left out."""
    tables = [*page.get("tables", ()), *page.get("details", ())]
    return "\n\n".join([f"# {page['title']}", *map(table_markdown, tables)]) + "\n"


def table_markdown(table: ReportTable) -> str:
    """Return a table as Markdown. The heading of a group of rows becomes their first column."""
    grouped = any(len(row) == 1 for row in table["rows"]) and len(table["columns"]) > 1
    labels = [*([""] if grouped else []), *(column["label"] for column in table["columns"])]
    sides = ["---" if column["kind"] == "text" else "---:" for column in table["columns"]]
    lines, heading = [labels, [*(["---"] if grouped else []), *sides]], ""
    for row in table["rows"]:
        if grouped and len(row) == 1:
            heading = str(row[0])
            continue
        cells = [format_cell(cell, column["kind"]) for cell, column in zip(row, table["columns"])]
        lines.append([*([heading] if grouped else []), *cells])
    text = "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
    note = table.get("note")
    return f"## {table['title']}\n\n{text}" + (f"\n\n{note}" if note else "")


def study_rows(summary: StudiesSummary) -> list[dict[str, Any]]:
    """Return a row per study, protocol and number: the paper's beside ours."""
    return [
        {"study": study["name"], "protocol": result["protocol"], "verdict": result["verdict"], **entry}
        for study in summary["studies"]
        for result in study["results"]
        for entry in result["entries"]
    ]
