"""A page in one file: no network, light and dark, for a phone as for a wide screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from advnorm.report.figures import Figure, draw
from advnorm.report.tables import MISSING, Table, shown


class Page(TypedDict):
    """What a page says. All but the title may be left out; a condition that is None is shown as missing."""

    title: str
    about: NotRequired[str]
    lead: NotRequired[Sequence[str]]
    tables: NotRequired[Sequence[Table]]
    figures: NotRequired[Sequence[Figure]]
    conditions: NotRequired[Mapping[str, str | int | float | None]]
    commands: NotRequired[Sequence[str]]


def render(data: Page) -> str:
    """The page as HTML."""
    empty = {"about": "", "lead": (), "tables": (), "figures": (), "conditions": {}, "commands": ()}
    return filled("page.html", {**empty, **data})


def filled(template: str, data: Mapping[str, Any]) -> str:
    """A template of this folder with its data, every text in it escaped."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals.update(shown=shown, missing=MISSING, draw=lambda figure: Markup(draw(figure)))
    return environment.get_template(template).render(data)
