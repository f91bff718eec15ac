"""The verb ``report``: one page of all studies from the records below a folder, or of the training runs in it."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from advnorm._core.errors import ConfigError, raise_all
from advnorm._core.records import writable_problems, write_atomic
from advnorm.cli.listing import tell
from advnorm.evaluation.overview import overview
from advnorm.report.page import render_page
from advnorm.report.runs import build_runs_page, drop_damaged
from advnorm.report.studies import count_verdicts, render_studies_page
from advnorm.studies.summary import summarize_studies


def report(console: Console, results: Path, out: Path) -> int:
    """Write the page and say what is in it; a record that cannot be read is told and skipped."""
    raise_all(writable_problems(out), "bad command")
    studied = (results / "records").is_dir()
    if not studied and _of_runs(console, results, out):
        return 0
    found = summarize_studies(results)
    if not studied and not found["others"] and not any(results.glob("**/*.json")):
        raise ConfigError(
            f"there are no records and no runs in {results}; name the --out of `advnorm study` or `train`"
        )
    write_atomic(out, render_studies_page(found).encode(errors="replace"))
    tell(console, found["problems"])
    if (others := found["others"]) and not studied:  # else the page says it
        first = ", ".join(list(others)[:3]) + (", …" if len(others) > 3 else "")
        told = (
            f"{sum(others.values())} JSON file(s) are no records of studies and were not read (in {first}); records "
            f"lie in {results / 'records'}: name the folder that `advnorm study` had as --out"
        )
        tell(console, [told])
    told = ", ".join(f"{count} {answer}" for answer, count in count_verdicts(found).items())
    console.print(f"{len(found['studies'])} studies: {told}", highlight=False)
    console.print(f"report: {out}", highlight=False, markup=False, soft_wrap=True)
    return 0


def _of_runs(console: Console, folder: Path, out: Path) -> bool:
    """The page of a folder of runs and evaluations, where it is one."""
    found = drop_damaged(overview(folder))
    kinds = {"run": found["runs"], "evaluation": found["benchmarks"], "audit": found["audits"]}
    told = ", ".join(f"{len(items)} {kind}{'s' * (len(items) > 1)}" for kind, items in kinds.items() if items)
    if told:
        tell(console, found["problems"])
        write_atomic(out, render_page(build_runs_page(found)).encode(errors="replace"))
        console.print(told, highlight=False)
        console.print(f"report: {out}", highlight=False, markup=False, soft_wrap=True)
    return bool(told)
