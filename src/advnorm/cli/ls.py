"""The verb ``ls``."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from advnorm.cli.command import console


class Kind(StrEnum):
    """What ``advnorm ls`` can list."""

    norms = "norms"
    models = "models"
    attacks = "attacks"
    objectives = "objectives"
    datasets = "datasets"
    analyses = "analyses"
    studies = "studies"


def ls(
    kind: Annotated[Kind, typer.Argument(help="What to list.")],
    pattern: Annotated[str, typer.Argument(help="A shell pattern such as 'dual_*', or the name of a study.")] = "*",
) -> None:
    """List norms, models, attacks, objectives, data sets, analyses or studies.

    Examples: `advnorm ls norms`, `advnorm ls models 'resnet*'`, `advnorm ls studies 'A/*'`. The cells of a study:
    `advnorm ls studies A/table3`
    """
    from advnorm.cli import listing

    console.print(getattr(listing, kind.value)(pattern))
