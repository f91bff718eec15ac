"""The page of all studies: verdicts, printed numbers beside measured ones, and the conditions of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from advnorm.report.figures import DotPlot, DotRow, LineChart
from advnorm.report.page import render_template
from advnorm.report.tables import MISSING, CellValue, ReportTable, make_columns

if TYPE_CHECKING:  # a summary is plain data, so the page does not need torch
    from advnorm.studies import report_data
    from advnorm.studies.decision import ClauseResult

PROTOCOLS = {
    "paper": "the schedule as printed; on a GPU AutoAttack searches in bf16, and float32 decides",
    "fast": "a shortened schedule (30 epochs, batch 512, one cycle), AutoAttack with a search in bf16, analyses on "
    "1,000 images; not the paper's",
    "authors": "what the authors' public code does where it differs from the text",
    "imagenette": "on a stand-in: Imagenette at 128 pixels instead of ImageNet, one cycle of 15 epochs, smaller "
    "networks and batches in paper E, evaluations on 200 images, attacks that may search in bf16; other cells as under "
    "fast",
    "smoke": "two steps on synthetic images: shows that the parts work together, but nothing about the claim",
}
MARKS = {"supported": "✓", "contradicted": "✗", "undecided": "◐", "not run": "○"}
NONE = "–"
#: Limits of the page: an analysis may have thousands of numbers. The records have all.
MOST_ENTRIES, MOST_FIGURES, LINES_PER_FIGURE = 60, 8, 4


def render_studies_page(summary: report_data.StudiesSummary) -> str:
    """Return the page as HTML, from the result of :func:`advnorm.studies.report_data.summarize_studies`."""
    studies = [_study_data(study) for study in summary["studies"]]
    papers = [
        {"letter": letter, "title": summary["papers"].get(letter, ""), "studies": list(group)}
        for letter, group in groupby(studies, key=lambda study: study["name"].split("/")[0])
    ]
    data = {
        "title": "Papers and measurements, side by side",
        "counts": count_verdicts(summary),
        "marks": MARKS,
        "cost": format_cost(summary["minutes"]),
        "definitions": summary["definitions"],
        "papers": papers,
        "problems": summary["problems"],
        "others": ", ".join(f"{folder} ({count})" for folder, count in summary["others"].items()),
    }
    return render_template("studies.html", data)


def count_verdicts(summary: report_data.StudiesSummary) -> dict[str, int]:
    """Count the studies by verdict. A study with several protocols counts once, with its most informative verdict."""
    found = Counter(most_informative(study)["verdict"] for study in summary["studies"])
    return {verdict: found[verdict] for verdict in MARKS}


def most_informative(study: report_data.StudySummary) -> report_data.ProtocolResult:
    """The result that decides the claim; the paper's protocol comes first."""
    order = ("supported", "contradicted"), ("undecided",), ("not run",)
    return next(result for rank in order for result in study["results"] if result["verdict"] in rank)


def describe_clause(clause: ClauseResult) -> str:
    """The clause with its numbers, marked if it is undecided or fails."""
    text, held, verdict, _, one_network = clause
    state = "holds" if held else "fails"
    if one_network:
        return f"{state} on one network: {text}"
    if verdict == "undecided":
        return f"undecided, {state} as measured: {text}"
    return text if held else f"fails: {text}"


def margins_of(study: report_data.StudySummary) -> list[str]:
    """The margins of the evaluated clauses with their sources, each once."""
    clauses = (clause for result in study["results"] for clause in result["clauses"])
    return list(dict.fromkeys(margin for *_, margin, _ in clauses if margin))


def describe_verdict(result: report_data.ProtocolResult) -> str:
    """``undecided (2 more seeds would decide)``, ``supported``; with the number of networks."""
    needs = f" ({result['needs']} would decide)" if result["needs"] else ""
    count = result["networks"]
    networks = f", on {count} network{'s' if count > 1 else ''}" if count else ""
    return f"{result['verdict']}{name_stand_in(result)}{needs}{networks}"


def name_stand_in(result: report_data.ProtocolResult) -> str:
    """`` on a stand-in``, behind a verdict that rests on other data than the paper's."""
    return " on a stand-in" if result["protocol"] == "imagenette" and result["verdict"] != "not run" else ""


def format_cost(minutes: Mapping[str, float]) -> str | None:
    """``61.2 GPU minutes (NVIDIA H200)``; None if nothing was run."""
    texts = [
        f"{value:.1f} CPU minutes" if device == "cpu" else f"{value:.1f} GPU minutes ({device})"
        for device, value in minutes.items()
    ]
    return ", ".join(texts) or None


def _study_data(study: report_data.StudySummary) -> dict[str, Any]:
    return {
        **study["printed"],
        "name": study["name"],
        "said": study["printed"].get("printed", ()),  # numbers of the paper's text
        "anchor": study["name"].replace("/", "-"),
        "deviations": study["deviations"],
        "print_fails": study["print_fails"],
        "margins": margins_of(study),
        "open": any(result["protocol"] is not None for result in study["results"]),
        "results": [_result_data(study, result) for result in study["results"]],
    }


def _result_data(study: report_data.StudySummary, result: report_data.ProtocolResult) -> dict[str, Any]:
    protocol = result["protocol"]
    done = [cell for cell in result["cells"] if cell["seeds"]]
    shown = result["entries"][:MOST_ENTRIES] if _unprinted(result) else result["entries"]
    compared = not _unprinted(result) and any(entry["n"] for entry in result["entries"]) and protocol != "smoke"
    charts = _line_charts(study, result)[:MOST_FIGURES]
    drawn = sum(len(chart["rows"]) for chart in charts)
    left_out = len(result["entries"]) - len(shown) + len(result["series"]) - drawn
    facts = {
        "protocol": None if protocol is None else f"{protocol}: {PROTOCOLS[protocol]}",
        "cells": f"{len(done)} of {len(result['cells'])} run",
        **({"outdated records": ", ".join(result["outdated"])} if result["outdated"] else {}),
        "measured": "; ".join(result["measures"]) or None,
        **({"no results per image": f"{result['without_outcomes']} records"} if result["without_outcomes"] else {}),
        "training cost": format_cost(result["minutes"]),
        "hardware": ", ".join(result["minutes"]) or None,
        "precision": ", ".join(result["precision"]) or None,
        "torch": ", ".join(result["torch"]) or None,
        "commit": ", ".join(result["commits"]) or None,
    }
    return {
        "protocol": protocol,
        "about": "" if protocol is None else PROTOCOLS[protocol],
        "verdict": result["verdict"],
        "stand_in": name_stand_in(result),
        "needs": result["needs"],
        "networks": result["networks"],
        "clauses": [(clause[2], describe_clause(clause)) for clause in result["clauses"]],
        "failed": [text for text, _, verdict, *_ in result["clauses"] if verdict == "contradicted"],
        "done": f"{len(done)} of {len(result['cells'])} cells{_seed_counts(done)}"
        + (f", {len(result['outdated'])} outdated" if result["outdated"] else ""),
        "table": _number_table(shown) if shown else None,
        "figure": _dot_plot(study, result) if compared else None,
        "lines": charts,
        "left_out": left_out,
        "cells": _cell_table(result),
        "settings": result["settings"],
        "facts": facts if done else {"cells": facts["cells"]},
    }


def _seed_counts(done: Sequence[report_data.CellStatus]) -> str:
    """``, 1 to 3 seeds``."""
    counts = sorted({len(cell["seeds"]) for cell in done})
    if not counts:
        return ""
    span = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    return f", {span} seed{'s' if counts[-1] > 1 else ''}"


def _unprinted(result: report_data.ProtocolResult) -> bool:
    return all(entry["paper"] is None for entry in result["entries"])


def printed_decimals(printed: Iterable[float | None]) -> int | None:
    """The number of decimals that the paper prints; None if it prints no number."""
    fractions = [repr(float(number)).partition(".")[2] for number in printed if number is not None]
    return min(max(map(len, fractions)), 4) if fractions else None


def _format_number(value: float, decimals: int | None, sign: str = "") -> str:
    if decimals is None:
        return f"{value:{sign}.4g}".replace("-", "−")
    rounded = round(value, decimals)
    return f"{rounded:{sign}.{decimals}f}".replace("-", "−") if rounded else f"{0:.{decimals}f}"


def _format_ours(entry: report_data.ComparedNumber, decimals: int | None) -> str | None:
    """The mean, its interval and the spread."""
    if entry["ours"] is None:
        return None
    bounds = [_format_number(bound, decimals) for bound in entry["interval"] or ()]
    interval = f" ({'–'.join(bounds)})" if bounds else ""
    spread = "" if entry["spread"] is None else f" ± {_format_number(entry['spread'], decimals)}"
    return f"{_format_number(entry['ours'], decimals)}{interval}{spread}"


def _number_table(entries: Sequence[report_data.ComparedNumber]) -> ReportTable:
    """Paper, ours, difference under the heading of each row; only ours if the paper prints no number."""
    decimals = printed_decimals(entry["paper"] for entry in entries)
    rows: list[list[CellValue]] = []
    for heading, group in groupby(entries, key=lambda entry: entry["row"]):
        rows.append([heading])
        for entry in group:
            ours = [_format_ours(entry, decimals), str(entry["n"])]
            paper, difference = (
                NONE if value is None else _format_number(value, decimals, sign)
                for value, sign in ((entry["paper"], ""), (entry["difference"], "+"))
            )
            rows.append([entry["column"], *(ours if decimals is None else [paper, *ours, difference])])
    labels = ["ours", "n"] if decimals is None else ["paper", "ours", "n", "difference"]
    note = "Ours: mean (Wilson's 95 % confidence interval of an accuracy) ± standard deviation over n seeds. "
    compared = f"Difference: ours minus paper. {NONE}: a number is missing."
    return {
        "title": "Numbers",
        "columns": make_columns({"text": [""], "number": labels}),
        "rows": rows,
        "note": note + ("The paper prints no numbers." if decimals is None else compared),
    }


def _line_charts(study: report_data.StudySummary, result: report_data.ProtocolResult) -> list[LineChart]:
    """Charts that compare series of several cells or, with one cell, series whose names differ in one part."""
    several = len({series["cell"] for series in result["series"]}) > 1
    groups: dict[str, list[tuple[str, report_data.NumberSeries]]] = {}
    for series in result["series"]:
        *before, part, last = ["", *series["value"].split("/")]
        alone = several or not part
        title = series["value"] if alone else "/".join([*filter(None, before), last])
        groups.setdefault(title, []).append((series["cell"] if alone else part, series))
    labels = dict.fromkeys(label for rows in groups.values() for label, _ in rows)
    colours = {label: place for place, label in enumerate(labels)}  # a label has one colour in all charts of the study
    return [
        _line_chart(f"{study['name']}: {title}", rows[start : start + LINES_PER_FIGURE], colours)
        for title, rows in groups.items()
        for start in range(0, len(rows), LINES_PER_FIGURE)
    ]


def _dot_plot(study: report_data.StudySummary, result: report_data.ProtocolResult) -> DotPlot:
    decimals = printed_decimals(entry["paper"] for entry in result["entries"])
    cells = {cell["name"]: cell for cell in result["cells"]}

    def dot(entry: report_data.ComparedNumber) -> DotRow:
        cell, printed, ours = cells[entry["cell"]], entry["paper"], entry["ours"]
        paper = "no number" if printed is None else _format_number(printed, decimals)
        parts = [f"{entry['row']}, {entry['column']}: paper {paper}, ours {_format_ours(entry, decimals) or MISSING}"]
        if cell["seeds"]:
            parts.append(f"n = {entry['n']}, protocol {result['protocol']}, seeds {', '.join(map(str, cell['seeds']))}")
            parts += cell["devices"]
        hint = " · ".join([*parts, f"cell {entry['cell']}", f"value {entry['value']}"])
        return {"label": entry["column"], "paper": printed, "ours": ours, "spread": entry["spread"], "hint": hint}

    groups = [(row, [*map(dot, group)]) for row, group in groupby(result["entries"], key=lambda entry: entry["row"])]
    note = "Point at a row, tap it or select it with the keyboard to see its conditions here."
    return {"kind": "dots", "title": f"{study['name']}: paper and ours", "groups": groups, "note": note}


def _line_chart(
    title: str, named: Sequence[tuple[str, report_data.NumberSeries]], colours: Mapping[str, int]
) -> LineChart:
    x = sorted({place for _, row in named for place in row["x"]})
    values = {label: dict(zip(row["x"], row["ours"])) for label, row in named}
    return {
        "kind": "lines",
        "title": title,
        "x": x,
        "x_label": named[0][1]["over"],
        "plain": True,
        "rows": [
            {"label": label, "values": [found.get(i) for i in x], "colour": colours[label]}
            for label, found in values.items()
        ],
        "note": "Ours, the mean over seeds; the paper prints no numbers.",
    }


def _cell_table(result: report_data.ProtocolResult) -> ReportTable:
    rows: list[list[CellValue]] = []
    for cell in result["cells"]:
        own = ", ".join(f"{key} {value}" for key, value in cell["settings"].items())
        seeds = ", ".join(map(str, cell["seeds"])) or None
        minutes = None if cell["minutes"] is None else f"{cell['minutes']:.1f}"
        others = f" (for {', '.join(cell['measured_for'])})" if cell["measured_for"] else ""
        rows.append([f"{cell['name']}{others}", own or "only the common settings", seeds, minutes])
    return {
        "title": "Cells",
        "columns": make_columns({"text": ["cell", "own settings"], "number": ["seeds", "minutes"]}),
        "rows": rows,
        "note": "Minutes of training over all seeds. A training that studies share is run once and listed in each."
        + (" For: the study that it was measured for." if any(c["measured_for"] for c in result["cells"]) else ""),
    }
