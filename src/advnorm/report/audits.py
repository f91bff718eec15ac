"""The part of a page about audits: the ladder of each, its accuracy against eps, and the evidence of its verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from advnorm.report.figures import LineChart, PointPlot, PointRow
from advnorm.report.tables import CellValue, ReportTable, make_columns

if TYPE_CHECKING:
    from advnorm.evaluation.report_data import EvaluationFile

#: Marks of measurements that are not as expected, by their weight.
MARKS = {"decides": "✗", "doubt": "?", "note": "i"}


def audit_figures(audits: Sequence[EvaluationFile], names: Mapping[str, str]) -> list[PointPlot | LineChart]:
    """Draw the ladder of each audit and its accuracy against eps; ``names`` has the title of each file."""
    figures: list[PointPlot | LineChart] = []
    for audit in audits:
        record, name = audit["record"], names[audit["file"]]
        rungs = [rung for rung in record["ladder"] if not rung["skipped"]]
        rows = [
            PointRow(label=rung["attack"], values=[rung["alone"], rung["worst"]], spreads=[None, None])
            for rung in rungs
        ]
        figures.append(
            {
                "kind": "points",
                "title": f"Ladder of attacks: {name}",
                "series": ["this attack alone", "worst case so far"],
                "groups": [(f"{record['verdict']}, {audit['threat']}", rows)],
                "note": "An attack without a result of its own ran on the images that withstood the attacks above it.",
            }
        )
        eps, accuracy = zip(*record["eps_curve"])
        if len(eps) > 1:
            line: dict[str, Any] = {"label": record["verdict"], "values": accuracy}
            constant = {"label": "one class", "values": [record["chance"]] * len(eps)}
            figures.append(
                {
                    "kind": "lines",
                    "title": f"Accuracy against eps: {name}",
                    "x": eps,
                    "x_label": f"eps in {record['threat']['norm']}",
                    "rows": [line, constant],  # pyright: ignore[reportAssignmentType, reportArgumentType]
                    "note": f"The claim is made at {audit['threat']}.",
                }
            )
    return figures


def evidence_tables(audits: Sequence[EvaluationFile], names: Mapping[str, str]) -> list[ReportTable]:
    """Return the measurements of each audit with their limits, its reasons and its advice."""
    tables: list[ReportTable] = []
    for audit in audits:
        record = audit["record"]
        rows: list[list[CellValue]] = [
            ["✓" if item["ok"] else MARKS[item["weight"]], item["text"], item["measured"], item["expected"] or "–"]
            for item in record["evidence"]
        ]
        tried = [f"What to try: {'; '.join(record['advice'])}."] if record["advice"] else []
        tables.append(
            {
                "title": f"Evidence: {names[audit['file']]}",
                "columns": make_columns({"text": ["", "measurement"], "number": ["measured", "expected"]}),
                "rows": rows,
                "stacked": True,
                "note": " ".join(
                    [
                        f"{record['verdict'].capitalize()}: {'; '.join(record['reasons'])}.",
                        *tried,
                        "✗ decides for false, ? speaks against real, i is information.",
                    ]
                ),
            }
        )
    return tables
