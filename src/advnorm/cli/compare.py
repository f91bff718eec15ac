"""The verb ``compare``: the paired difference of two evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from advnorm.cli.command import check_copy, console, write_copy
from advnorm.cli.options import JsonCopy


def compare(
    records: Annotated[
        list[Path],
        typer.Argument(help="Two records; one, to compare its branches or attacks; with --against, one per seed."),
    ],
    against: Annotated[list[Path] | None, typer.Option(help="The second side, if it has several records.")] = None,
    attack: Annotated[list[str] | None, typer.Option(help="clean or an attack, or one for each side.")] = None,
    route: Annotated[list[str] | None, typer.Option(help="A branch, or one for each side.")] = None,
    json: JsonCopy = None,
) -> None:
    """Compare two evaluations on the same images: networks, branches, attacks, seeds or protocols.

    Examples: `advnorm compare one.json other.json`, `advnorm compare one.json --route clean adv --attack pgd10`,
    `advnorm compare a0.json a1.json --against b0.json b1.json --attack autoattack`
    """
    from advnorm._core.errors import ConfigError
    from advnorm.evaluation import comparison

    check_copy(json, comparison.FORMAT)
    for name, words in {"attack": attack, "route": route}.items():
        if words and len(words) > 2:
            raise ConfigError("conflict", "{field} takes one name, or one for each side", field=name, got=len(words))
    first, second = (records[:1], records[1:]) if against is None else (records, against)
    if len(second) > 1 and against is None:
        hint = "name the second side's records after --against"
        raise ConfigError("conflict", "more than two records", field="records", got=len(records), hint=hint)
    attacks, routes = ((words[0], words[-1]) if words else None for words in (attack, route))
    found = comparison.compare(first, second or None, attack=attacks, route=routes)
    console.print(found.table())
    write_copy(json, found)
