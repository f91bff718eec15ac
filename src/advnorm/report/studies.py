"""The page of all studies: verdicts, the papers' numbers beside ours, and the conditions of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from advnorm.report.figures import Dot, Dots, Lines
from advnorm.report.page import filled
from advnorm.report.tables import MISSING, Cell, Table

if TYPE_CHECKING:  # a summary is plain data: the page is made where there is no torch
    from advnorm.studies.summary import CellState, Entry, Result, Series, StudySummary, Summary

PROTOCOLS = {
    "paper": "the schedule as printed",
    "fast": "a shortened schedule (30 epochs, batch 512, one cycle), AutoAttack for accuracies with a search in bf16, "
    "analyses on 1,000 images; not the paper's",
    "smoke": "two steps on synthetic images: shows that the parts work together, and nothing about the claim",
}
PARTLY = "partly run"
MARKS = {"confirmed": "✓", "not confirmed": "✗", PARTLY: "◐", "not run": "○"}
NONE = "–"
#: A figure's analysis may have thousands of numbers: the page shows so many, the records have all.
MOST_ENTRIES, MOST_FIGURES, LINES_EACH = 60, 8, 4


def render_studies(summary: Summary) -> str:
    """The page as HTML, from what :func:`advnorm.studies.summary.summary` gives."""
    studies = [_study(study) for study in summary["studies"]]
    papers = [
        {"letter": letter, "title": summary["papers"].get(letter, ""), "studies": list(group)}
        for letter, group in groupby(studies, key=lambda study: study["name"].split("/")[0])
    ]
    data = {
        "title": "Papers and measurements, side by side",
        "counts": counts(summary),
        "marks": MARKS,
        "cost": cost(summary["minutes"]),
        "words": summary["words"],
        "papers": papers,
        "problems": summary["problems"],
        "others": ", ".join(f"{folder} ({count})" for folder, count in summary["others"].items()),
    }
    return filled("studies.html", data)


def counts(summary: Summary) -> dict[str, int]:
    """How many studies have each verdict; of several protocols the one that says most counts, the first of equals."""
    order = ("confirmed", "not confirmed"), (PARTLY,), ("not run",)

    def counted(study: StudySummary) -> str:
        answers = [_answer(result) for result in study["results"]]
        return next((answer for rank in order for answer in answers if answer in rank), "not run")

    verdicts = Counter(map(counted, summary["studies"]))
    return {answer: verdicts[answer] for answer in MARKS}


def _answer(result: Result) -> str:
    """The verdict; where there is none, whether some of what it needs is there. A smoke test is nothing of it."""
    partly = result["protocol"] != "smoke" and any(cell["seeds"] for cell in result["cells"])
    return PARTLY if result["answer"] == "not run" and partly else result["answer"]


def cost(minutes: Mapping[str, float]) -> str | None:
    """``61.2 GPU minutes (NVIDIA H200)``; None where nothing was run."""
    texts = [
        f"{value:.1f} CPU minutes" if device == "cpu" else f"{value:.1f} GPU minutes ({device})"
        for device, value in minutes.items()
    ]
    return ", ".join(texts) or None


def _study(study: StudySummary) -> dict[str, Any]:
    return {
        **study,
        "anchor": study["name"].replace("/", "-"),
        "open": any(result["protocol"] is not None for result in study["results"]),
        "results": [_result(study, result) for result in study["results"]],
    }


def _result(study: StudySummary, result: Result) -> dict[str, Any]:
    protocol = result["protocol"]
    done = [cell for cell in result["cells"] if cell["seeds"]]
    shown = result["entries"][:MOST_ENTRIES] if _unprinted(result) else result["entries"]
    compared = not _unprinted(result) and any(entry["n"] for entry in result["entries"]) and protocol != "smoke"
    lines = _all_lines(study, result)[:MOST_FIGURES]
    left_out = len(result["entries"]) - len(shown) + len(result["series"]) - sum(len(each["rows"]) for each in lines)
    facts = {
        "protocol": None if protocol is None else f"{protocol}: {PROTOCOLS[protocol]}",
        "cells": f"{len(done)} of {len(result['cells'])} run",
        **({"of other settings than now": ", ".join(result["outdated"])} if result["outdated"] else {}),
        "measured": "; ".join(result["measures"]) or None,
        "training cost": cost(result["minutes"]),
        "hardware": ", ".join(result["minutes"]) or None,
        "precision": ", ".join(result["precision"]) or None,
        "torch": ", ".join(result["torch"]) or None,
        "commit": ", ".join(result["commits"]) or None,
    }
    return {
        "protocol": protocol,
        "about": "" if protocol is None else PROTOCOLS[protocol],
        "answer": _answer(result),
        "clauses": result["clauses"],
        "failed": [text for text, held in result["clauses"] if not held],
        "done": f"{len(done)} of {len(result['cells'])} cells{_seeds(done)}"
        + (f", {len(result['outdated'])} of other settings than now" if result["outdated"] else ""),
        "table": _table(shown) if shown else None,
        "figure": _dots(study, result) if compared else None,
        "lines": lines,
        "left_out": left_out,
        "cells": _cells(result),
        "settings": result["settings"],
        "facts": facts if done else {"cells": facts["cells"]},
    }


def _seeds(done: Sequence[CellState]) -> str:
    """``, 1 to 3 seeds``."""
    counts = sorted({len(cell["seeds"]) for cell in done})
    if not counts:
        return ""
    span = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    return f", {span} seed{'s' if counts[-1] > 1 else ''}"


# -- numbers -----------------------------------------------------------------------------------------------------------


def _unprinted(result: Result) -> bool:
    return all(entry["paper"] is None for entry in result["entries"])


def decimals_of(printed: Iterable[float | None]) -> int | None:
    """As many as the paper prints; None where it prints no number."""
    fractions = [repr(float(number)).partition(".")[2] for number in printed if number is not None]
    return min(max(map(len, fractions)), 4) if fractions else None


def _number(value: float, decimals: int | None, sign: str = "") -> str:
    if decimals is None:
        return f"{value:{sign}.4g}".replace("-", "−")
    rounded = round(value, decimals)
    return f"{rounded:{sign}.{decimals}f}".replace("-", "−") if rounded else f"{0:.{decimals}f}"


def _ours(entry: Entry, decimals: int | None) -> str | None:
    """Mean and spread."""
    if entry["ours"] is None:
        return None
    spread = "" if entry["spread"] is None else f" ± {_number(entry['spread'], decimals)}"
    return f"{_number(entry['ours'], decimals)}{spread}"


def _table(entries: Sequence[Entry]) -> Table:
    """Paper, ours, difference under the heading of each row; ours alone where the paper prints no number."""
    decimals = decimals_of(entry["paper"] for entry in entries)
    rows: list[list[Cell]] = []
    for heading, group in groupby(entries, key=lambda entry: entry["row"]):
        rows.append([heading])
        for entry in group:
            ours = [_ours(entry, decimals), str(entry["n"])]
            paper, difference = (
                NONE if value is None else _number(value, decimals, sign)
                for value, sign in ((entry["paper"], ""), (entry["difference"], "+"))
            )
            rows.append([entry["column"], *(ours if decimals is None else [paper, *ours, difference])])
    labels = ["ours", "n"] if decimals is None else ["paper", "ours", "n", "difference"]
    note = "Ours: mean ± standard deviation over n seeds. "
    compared = f"Difference: ours minus paper. {NONE}: the paper's number is missing, or there is nothing to compare."
    return {
        "title": "Numbers",
        "columns": [{"label": "", "kind": "text"}, *({"label": label, "kind": "number"} for label in labels)],
        "rows": rows,
        "note": note + ("The paper prints no numbers." if decimals is None else compared),
    }


def _all_lines(study: StudySummary, result: Result) -> list[Lines]:
    """A figure for every few series that are compared: of several cells, else of names that differ in one part."""
    several = len({series["cell"] for series in result["series"]}) > 1
    groups: dict[str, list[tuple[str, Series]]] = {}
    for series in result["series"]:
        *before, part, last = ["", *series["value"].split("/")]
        alone = several or not part
        title = series["value"] if alone else "/".join([*filter(None, before), last])
        groups.setdefault(title, []).append((series["cell"] if alone else part, series))
    labels = dict.fromkeys(label for rows in groups.values() for label, _ in rows)
    colours = {label: place for place, label in enumerate(labels)}  # of a line in every figure of the study
    return [
        _lines(f"{study['name']}: {title}", rows[start : start + LINES_EACH], colours)
        for title, rows in groups.items()
        for start in range(0, len(rows), LINES_EACH)
    ]


def _dots(study: StudySummary, result: Result) -> Dots:
    decimals = decimals_of(entry["paper"] for entry in result["entries"])
    seeds = {cell["name"]: cell for cell in result["cells"]}

    def hint(entry: Entry) -> str:
        cell = seeds[entry["cell"]]
        paper = "no number" if entry["paper"] is None else _number(entry["paper"], decimals)
        parts = [f"{entry['row']}, {entry['column']}: paper {paper}, ours {_ours(entry, decimals) or MISSING}"]
        if cell["seeds"]:
            parts.append(f"n = {entry['n']}, protocol {result['protocol']}, seeds {', '.join(map(str, cell['seeds']))}")
            parts += cell["devices"]
        return " · ".join([*parts, f"cell {entry['cell']}", f"value {entry['value']}"])

    groups = [
        (
            row,
            [
                Dot(
                    label=entry["column"],
                    paper=entry["paper"],
                    ours=entry["ours"],
                    spread=entry["spread"],
                    hint=hint(entry),
                )
                for entry in group
            ],
        )
        for row, group in groupby(result["entries"], key=lambda entry: entry["row"])
    ]
    note = "Point at a row, tap it or reach it with the keyboard: its conditions appear here."
    return {"kind": "dots", "title": f"{study['name']}: paper and ours", "groups": groups, "note": note}


def _lines(title: str, named: Sequence[tuple[str, Series]], colours: Mapping[str, int]) -> Lines:
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


def _cells(result: Result) -> Table:
    rows: list[list[Cell]] = []
    for cell in result["cells"]:
        own = ", ".join(f"{key} {value}" for key, value in cell["settings"].items())
        seeds = ", ".join(map(str, cell["seeds"])) or None
        minutes = None if cell["minutes"] is None else f"{cell['minutes']:.1f}"
        others = f" (for {', '.join(cell['measured_for'])})" if cell["measured_for"] else ""
        rows.append([f"{cell['name']}{others}", own or "all as below", seeds, minutes])
    return {
        "title": "Cells",
        "columns": [
            {"label": "cell", "kind": "text"},
            {"label": "its own settings", "kind": "text"},
            {"label": "seeds", "kind": "number"},
            {"label": "minutes", "kind": "number"},
        ],
        "rows": rows,
        "note": "Minutes of training over all seeds; a training that studies share is done once and shown in each."
        + (" For: the study that it was measured for." if any(c["measured_for"] for c in result["cells"]) else ""),
    }
