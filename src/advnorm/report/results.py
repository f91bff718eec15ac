"""The page of results as Markdown: the outcome in one sentence, and every claim with its verdict and evidence."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from advnorm.report.studies import (
    MARKS,
    PROTOCOLS,
    count_verdicts,
    describe_clause,
    describe_verdict,
    format_cost,
    margins_of,
    most_informative,
)

if TYPE_CHECKING:
    from advnorm.studies import report_data


def outcome_sentence(summary: report_data.StudiesSummary) -> str:
    """Return the number of claims by verdict and by protocol, the number of networks, and the time of training."""
    counts = count_verdicts(summary)
    verdicts = ", ".join(f"{counts[verdict]} {verdict}" for verdict in MARKS)
    decided = [result for result in map(most_informative, summary["studies"]) if result["verdict"] != "not run"]
    protocols = Counter(str(result["protocol"]) for result in decided)
    shares = ", ".join(
        f"{protocols[name]} by `{name}` ({re.split('[(;:,]', words)[0].strip()})"
        for name, words in PROTOCOLS.items()
        if protocols[name]
    )
    by_protocol = f" Verdicts other than not run: {shares}." if shares else ""
    hours = sum(minutes for device, minutes in summary["minutes"].items() if device != "cpu") / 60
    return (
        f"The five papers make {sum(counts.values())} claims: {verdicts}.{by_protocol} The records come from "
        f"{summary['networks']} trained networks and {hours:.1f} GPU hours of training."
    )


def results_markdown(summary: report_data.StudiesSummary) -> str:
    """Every claim with verdict, clauses, number of networks, cost and deviations; claims without a record come last."""
    tried = [study for study in summary["studies"] if _is_tried(study)]
    blocks = [outcome_sentence(summary), _verdict_table(summary)]
    blocks += [_study_block(study) for study in tried]
    blocks.append("## Not run")
    blocks.append(
        "In brackets: the cells without a record, and the data set of their training. `--stand-in imagenette` replaces "
        "imagenet in papers D and E."
    )
    blocks.append(
        "\n".join(
            f"- **{study['name']}**{_in_brackets(study['results'])}: {study['printed']['claim']}"
            for study in summary["studies"]
            if not _is_tried(study)
        )
    )
    return "\n\n".join(blocks)


def _in_brackets(results: Sequence[report_data.ProtocolResult]) -> str:
    """The missing cells of a study that was not run, or only as a smoke test."""
    return next((f" ({missing_cells(result)})" for result in results if result["protocol"] is None), "")


def missing_cells(result: report_data.ProtocolResult) -> str:
    """``8 cells on cifar10, 1 cell on imagenet``: the cells without a record; empty if there is none."""
    missing = [{**result["settings"], **cell["settings"]} for cell in result["cells"] if not cell["seeds"]]
    counts = Counter(settings["data"] for settings in missing)
    return ", ".join(f"{count} cell{'s' if count > 1 else ''} on {data}" for data, count in counts.items())


def _is_tried(study: report_data.StudySummary) -> bool:
    return any(result["protocol"] not in (None, "smoke") for result in study["results"])


def _verdict_table(summary: report_data.StudiesSummary) -> str:
    rows = ["| study | protocol | verdict | cells | GPU minutes |", "|---|---|---|---|---|"]
    for study in filter(_is_tried, summary["studies"]):
        result = most_informative(study)
        done = sum(bool(cell["seeds"]) for cell in result["cells"])
        minutes = sum(value for device, value in result["minutes"].items() if device != "cpu")
        anchor = (name := study["name"]).lower().replace("/", "").replace(".", "")
        rows.append(
            f"| [{name}](#{anchor}) | {result['protocol']} | {MARKS[result['verdict']]} "
            f"{describe_verdict(result)} | {done} of {len(result['cells'])} | {minutes:.1f} |"
        )
    return "\n".join(rows)


def _study_block(study: report_data.StudySummary) -> str:
    lines = [f"## {study['name']}", "", f"> {study['printed']['claim']}", ""]
    for result in study["results"]:
        if result["protocol"] not in (None, "smoke"):
            lines += [*_result_lines(result), ""]
    lines += [f"The paper's own numbers fail: {'; '.join(study['print_fails'])}.", ""] if study["print_fails"] else []
    lines += [f"Margins: {'; '.join(margins_of(study))}.", ""] if margins_of(study) else []
    lines += [f"Deviations: {' '.join(study['deviations'])}", ""] if study["deviations"] else []
    return "\n".join([*lines, f"Printed: {study['printed']['where']}. {study['printed']['notes']}".rstrip()])


def _result_lines(result: report_data.ProtocolResult) -> Sequence[str]:
    protocol = str(result["protocol"])
    done = [cell for cell in result["cells"] if cell["seeds"]]
    facts = [f"{len(done)} of {len(result['cells'])} cells", format_cost(result["minutes"]) or ""]
    facts += [f"no record of {missing}"] if (missing := missing_cells(result)) else []
    facts += [f"{result['without_outcomes']} records without results per image"] if result["without_outcomes"] else []
    facts += [f"outdated: {', '.join(result['outdated'])}"] if result["outdated"] else []
    clauses = [f"- {MARKS[clause[2]]} {describe_clause(clause)}" for clause in result["clauses"]]
    return [
        f"**{describe_verdict(result).capitalize()}** by `{protocol}` ({PROTOCOLS[protocol]}). "
        f"{'; '.join(filter(None, facts))}.",
        "",
        *clauses,
    ]
