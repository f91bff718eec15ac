"""A page in one file: no network access, light and dark, for a phone and for a wide screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from advnorm.report.figures import Figure, draw_figure
from advnorm.report.tables import MISSING, ReportTable, format_cell


class ReportPage(TypedDict):
    """The content of a page. Only the title is required. A condition that is None is shown as missing.

    ``details`` are tables below the figures that open on a click.
    """

    title: str
    about: NotRequired[str]
    lead: NotRequired[Sequence[str]]
    tables: NotRequired[Sequence[ReportTable]]
    figures: NotRequired[Sequence[Figure]]
    details: NotRequired[Sequence[ReportTable]]
    conditions: NotRequired[Mapping[str, str | int | float | None]]
    commands: NotRequired[Sequence[str]]


def render_page(page: ReportPage) -> str:
    """Return the page as HTML."""
    empty = {"about": "", "lead": (), "tables": (), "figures": (), "details": (), "conditions": {}, "commands": ()}
    return render_template("page.html", {**empty, **page})


def render_template(template: str, data: Mapping[str, Any]) -> str:
    """Fill a template of this folder and escape every text."""
    environment = make_environment(Path(__file__).parent, autoescape=True)
    draw = {"draw_figure": lambda figure: Markup(draw_figure(figure))}
    environment.globals.update(format_cell=format_cell, missing=MISSING, **draw)
    return environment.get_template(template).render(data)


def make_environment(folder: Path, *, autoescape: bool) -> Environment:
    """Return the environment of the templates in a folder. A missing variable is an error."""
    return Environment(
        loader=FileSystemLoader(folder),
        autoescape=autoescape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
