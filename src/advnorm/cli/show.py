"""The verb ``show``."""

from __future__ import annotations

from typing import Any

from advnorm.cli.command import console
from advnorm.cli.options import Overrides, Source


def show(source: Source = None, overrides: Overrides = None) -> None:
    """Print the full configuration of a file or of a study's cell. For a study, print the paper's numbers.

    Examples: `advnorm show recipes/cifar10_eps16.yaml --set norm=dual_bn epochs=30`, `advnorm show A/table3`,
    `advnorm show A/table3/dual_bn/eps16`
    """
    from rich.table import Table

    from advnorm._core.errors import ConfigError
    from advnorm.cli.study_tables import study_table
    from advnorm.cli.train import find_study, resolve_config
    from advnorm.config import explain

    study, cell = find_study(source) or (None, None)
    if study is not None and cell is None and overrides:
        raise ConfigError("conflict", "{field} changes a configuration, and a study has many", field="--set",
                          hint=f"name a cell: {study.name}/{next(iter(study.by_name))}")  # fmt: skip
    if study is None or cell is not None:
        config = resolve_config(source, overrides or ())
        name = config.run_name
        table = Table("setting", "value", title=name, title_justify="left", min_width=len(name))
        for key, value, is_default in explain(config):
            table.add_row(key, _as_typed(value), style="dim" if is_default else "bold")
        table.caption, table.caption_justify = "bold: set here; the others are defaults", "left"
        console.print(table)
    if study is not None:
        console.print(study_table(study, cell=cell and cell.name, width=console.width))


def _as_typed(value: Any) -> str:
    """A value as ``--set`` takes it."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
