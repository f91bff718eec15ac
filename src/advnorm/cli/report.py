"""The verb ``report``: one page of all studies, or of the training runs in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from advnorm.cli.command import console


def report(
    results: Annotated[Path, typer.Argument(help="The --out folder of `advnorm study` or `train`.")] = Path("results"),
    out: Annotated[Path, typer.Option(help="Name of the page, one HTML file.")] = Path("report.html"),
) -> None:
    """Write one page: all studies with their verdicts, or all training runs in a folder.

    Examples: `advnorm report results/ --out report.html`, `advnorm report runs/ --out report.html`
    """
    from advnorm._core.errors import ConfigError, raise_problems
    from advnorm._core.records import writable_problems, write_atomic
    from advnorm.evaluation.report_data import collect_results
    from advnorm.report.page import render_page
    from advnorm.report.runs import build_runs_page
    from advnorm.report.studies import count_verdicts, render_studies_page
    from advnorm.studies.report_data import summarize_studies

    raise_problems(writable_problems(out))
    problems: list[str] = []
    has_records = (results / "records").is_dir()
    runs = None if has_records else collect_results(results)
    kinds = {"run": runs["runs"], "evaluation": runs["benchmarks"], "audit": runs["audits"]} if runs else {}
    contents = ", ".join(f"{len(items)} {kind}{'s' * (len(items) > 1)}" for kind, items in kinds.items() if items)
    if runs and contents:
        page, problems = render_page(build_runs_page(runs)), list(runs["problems"])
    else:
        found = summarize_studies(results)
        others = found["others"]
        if not has_records and not others and not any(results.glob("**/*.json")):
            message = f"no records and no runs in {results}"
            hint = "name the --out folder of `advnorm study` or `advnorm train`"
            raise ConfigError("empty", message, field="results", hint=hint)
        page, problems = render_studies_page(found), list(found["problems"])
        if others and not has_records:
            first = ", ".join(list(others)[:3]) + (", …" if len(others) > 3 else "")
            problems.append(
                f"{sum(others.values())} JSON file(s) in {first} are not records of studies and are skipped; records "
                f"belong in {results / 'records'}: name the --out folder of `advnorm study`"
            )
        verdicts = ", ".join(f"{count} {answer}" for answer, count in count_verdicts(found).items())
        contents = f"{len(found['studies'])} studies: {verdicts}"
    write_atomic(out, page.encode(errors="replace"))
    for problem in problems:
        console.print(problem, style="yellow", highlight=False, markup=False, soft_wrap=True)
    console.print(contents, highlight=False)
    console.print(f"report: {out}", highlight=False, markup=False, soft_wrap=True)
