"""Parts of pages that the build writes from the code, in place of markers such as ``<!-- ls: norms -->``."""

import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from rich.text import Text

MARKER = re.compile(r"<!-- (ls: (?P<kind>\w+)|commands|public names) -->")


def fill_markers(markdown: str) -> str:
    """Replace every marker of a page."""
    return MARKER.sub(lambda match: "\n".join(_lines(match)), markdown)


def _lines(match: re.Match[str]) -> Iterator[str]:
    if match["kind"]:
        return registered(match["kind"])
    return commands() if match[1] == "commands" else public_names()


def registered(kind: str) -> Iterator[str]:
    """The table of ``advnorm ls KIND``."""
    from advnorm.cli import listing

    table = getattr(listing, kind)("*")
    yield from _table(
        [str(column.header) for column in table.columns], zip(*(column.cells for column in table.columns))
    )
    if table.caption and "README" not in str(table.caption):
        yield f"\n{str(table.caption).capitalize()}."


def commands() -> Iterator[str]:
    """The reference that typer writes, without its head and its repetitions."""
    words = [sys.executable, "-m", "typer", "advnorm.cli.app", "utils", "docs", "--name", "advnorm"]
    text = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    text = re.sub(r"^\* `--help`.*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"\*\*Options\*\*:\n\n(?=#|$)", "", text)
    text = re.sub(r"\*\*Commands\*\*:\n\n(\* .*\n)+", "", text)
    text = re.sub(r"\*\*(Usage|Arguments|Options)\*\*:\n", "", text)
    yield text.partition("\n## ")[0].partition("```\n")[2]
    yield "\n## " + text.partition("\n## ")[2]


def public_names() -> Iterator[str]:
    """The names of ``advnorm.__all__`` with the first sentence of their docstrings."""
    import advnorm

    rows = []
    for name in sorted(advnorm.__all__, key=str.lower):
        item = getattr(advnorm, name)
        link = f"({name}.md)" if inspect.ismodule(item) else f"[{_home(item)}.{name}]"
        rows.append((f"[`advnorm.{name}`]{link}", (inspect.getdoc(item) or "").partition("\n")[0]))
    yield from _table(("name", "what it is"), rows)


def _home(item: Any) -> str:
    """The module whose page describes an object: its package if that exports it, else the module itself."""
    module = item.__module__
    package = ".".join(module.split(".")[:2])
    return package if item.__name__ in getattr(import_module(package), "__all__", ()) else module


def _table(head: Any, rows: Any) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for row in rows:
        cells = [Text.from_markup(cell).plain if "[/" in str(cell) else str(cell) for cell in row]
        yield "| " + " | ".join(re.sub(r"\s*\n\s*", "<br>", cell).replace("|", "\\|") for cell in cells) + " |"
