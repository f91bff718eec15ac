"""The verb ``report``: one page of all studies from the records below a folder."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from advnorm._core.errors import raise_all
from advnorm._core.records import write_whole
from advnorm.engine.partial import unwritable
from advnorm.report.studies import counts, render_studies
from advnorm.studies.summary import summary


def report(console: Console, results: Path, out: Path) -> int:
    """Write the page and say what is in it; a record that cannot be read is told and skipped."""
    raise_all(unwritable(out), "bad command")
    found = summary(results)
    write_whole(out, render_studies(found).encode(errors="replace"))
    for problem in found["problems"]:
        console.print(problem, style="yellow", highlight=False, markup=False, soft_wrap=True)
    if others := found["others"]:
        first = ", ".join(list(others)[:3]) + (", …" if len(others) > 3 else "")
        told = (
            f"{sum(others.values())} JSON file(s) are no records of studies and were not read (in {first}); records "
            f"lie in {results / 'records'}: name the folder that `advnorm study` had as --out"
        )
        console.print(told, style="yellow", highlight=False, markup=False, soft_wrap=True)
    told = ", ".join(f"{count} {answer}" for answer, count in counts(found).items())
    console.print(f"{len(found['studies'])} studies: {told}", highlight=False)
    console.print(f"report: {out}", highlight=False, markup=False, soft_wrap=True)
    return 0
