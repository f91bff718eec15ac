"""The verb ``report``: one page of all studies, or of the training runs in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from advnorm.cli.command import say

if TYPE_CHECKING:
    from advnorm.evaluation.report_data import FolderResults


def report(
    results: Annotated[Path, typer.Argument(help="The --out folder of `advnorm study` or `train`.")] = Path("results"),
    out: Annotated[Path | None, typer.Option(help="Name of the file. Default: report.html, or report.FORMAT.")] = None,
    form: Annotated[
        str | None,
        typer.Option(
            "--format", help="html, md (tables), csv or json (all numbers). Default: by the name of the file."
        ),
    ] = None,
) -> None:
    """Write one page or table: all studies with their verdicts, or all training runs in a folder.

    Examples: `advnorm report results/ --out report.html`, `advnorm report runs/`, `advnorm report runs/ --format csv`
    """
    from advnorm._core.errors import ConfigError, raise_problems, unknown_name
    from advnorm._core.records import writable_problems, write_atomic
    from advnorm.evaluation.report_data import collect_results
    from advnorm.report.files import FORMATS

    suffix = out.suffix.removeprefix(".") if out else ""
    form = form or suffix or "html"
    raise_problems([] if form in FORMATS else [unknown_name("format", form, FORMATS)])
    if suffix not in ("", form):
        hint = f"omit --format, or name the file {out and out.with_suffix(f'.{form}')}"
        raise ConfigError("conflict", f"{{field}} ends in .{suffix}, but --format is {form}", "out", hint=hint)
    out = out or Path(f"report.{form}")
    raise_problems(writable_problems(out))
    found = None if (results / "records").is_dir() else collect_results(results)
    if found and (found["runs"] or found["benchmarks"] or found["audits"]):
        text, contents, problems = _runs_report(found, form)
    else:
        text, contents, problems = _studies_report(results, form)
    write_atomic(out, text.encode(errors="replace"))
    for problem in problems:
        say(problem, style="yellow")
    say(contents)
    say(f"report: {out}")


def _runs_report(found: FolderResults, form: str) -> tuple[str, str, list[str]]:
    """Return the text of the file for training runs, a line on its contents, and problems."""
    from advnorm.report.files import page_markdown, rows_text
    from advnorm.report.page import render_page
    from advnorm.report.rows import column_names, result_rows
    from advnorm.report.runs import build_runs_page

    kinds = {"run": found["runs"], "evaluation": found["benchmarks"], "audit": found["audits"]}
    contents = ", ".join(f"{len(items)} {kind}{'s' * (len(items) > 1)}" for kind, items in kinds.items() if items)
    rows = result_rows(found)
    problems = [f"{row.get('record') or row['run']} is skipped: {row['error']}" for row in rows if row.get("error")]
    if form in ("csv", "json"):
        return rows_text(rows, column_names(rows), form), contents, problems
    return (render_page if form == "html" else page_markdown)(build_runs_page(found)), contents, problems


def _studies_report(results: Path, form: str) -> tuple[str, str, list[str]]:
    """Return the text of the file for studies, a line on its contents, and problems."""
    from advnorm._core.errors import ConfigError
    from advnorm.report.files import rows_text, study_rows, table_markdown
    from advnorm.report.studies import count_verdicts, render_studies_page
    from advnorm.report.tables import make_columns
    from advnorm.studies.report_data import summarize_studies

    summary = summarize_studies(results)
    others, problems = summary["others"], list(summary["problems"])
    if not (results / "records").is_dir():
        if not others and not any(results.glob("**/*.json")):
            message = f"no records and no runs in {results}"
            hint = "name the --out folder of `advnorm study` or `advnorm train`"
            raise ConfigError("empty", message, field="results", hint=hint)
        if others:
            first = ", ".join(list(others)[:3]) + (", …" if len(others) > 3 else "")
            problems.append(
                f"{sum(others.values())} JSON file(s) in {first} are not records of studies and are skipped; records "
                f"belong in {results / 'records'}: name the --out folder of `advnorm study`"
            )
    numbers = study_rows(summary)
    columns = list(dict.fromkeys(name for row in numbers for name in row))
    if form == "html":
        text = render_studies_page(summary)
    elif form == "md":
        cells = [[None if row[name] is None else str(row[name]) for name in columns] for row in numbers]
        labels = make_columns({"text": columns})
        text = table_markdown({"title": "Papers and measurements", "columns": labels, "rows": cells}) + "\n"
    else:
        text = rows_text(numbers, columns, form)
    verdicts = ", ".join(f"{count} {answer}" for answer, count in count_verdicts(summary).items())
    return text, f"{len(summary['studies'])} studies: {verdicts}", problems
