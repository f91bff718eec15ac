"""Tables of `advnorm ls`: what is registered, with options and sources."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from rich.table import Table

from advnorm._core.errors import ConfigError
from advnorm.analysis import ANALYSES
from advnorm.attacks import list_attacks
from advnorm.attacks.names import parse_name
from advnorm.data import DATASETS
from advnorm.models import create_model, list_models
from advnorm.norms import NORMS
from advnorm.objectives import OBJECTIVES, REGULARIZERS, SECOND_PASSES, Objective
from advnorm.studies import STUDIES, find
from advnorm.studies.report_data import list_cell_statuses


def norms(pattern: str) -> Table:
    """List norms with their banks and their papers."""
    table = _table("norms", "norm", "what it is", "domains", "paper")
    for name in _matching(NORMS.names(pattern), pattern, "norm"):
        recipe = NORMS.get(name)
        table.add_row(name, recipe.summary, ", ".join(recipe.domains), recipe.paper)
    return table


def models(pattern: str) -> Table:
    """List models with their number of parameters."""
    caption = "10 classes; imagenet_*: 1000. Also timm:NAME, torchvision:NAME, transformers:NAME"
    table = _table("models", "model", caption=caption)
    table.add_column("parameters", justify="right")
    for name in _matching(list_models(pattern), pattern, "model"):
        with torch.device("meta"):
            model = create_model(name, num_classes=1000 if name.startswith("imagenet_") else 10)
        table.add_row(name, f"{sum(p.numel() for p in model.parameters()):,}")
    return table


def attacks(pattern: str) -> Table:
    """List attacks with their options; options are part of a name: ``pgd20-restarts5``."""
    caption = "a number after the name sets the steps; options follow after '-', for example pgd20-restarts5-cw"
    table = _table("attacks", "attack", "what it is", "options", "paper", caption=caption)
    for name in _matching(list_attacks(pattern), pattern, "attack"):
        family, _ = parse_name(name)
        options = ", ".join(f"{word}N" if option.parse else word for word, option in family.options.items())
        table.add_row(name, family.summary, options, family.paper)
    return table


def finding_table(name: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return the table of an analysis."""
    table = _table(name, *head)
    for row in rows:
        table.add_row(*row)
    return table


def objectives(pattern: str) -> Table:
    """List objectives, and the second passes and regularizers that can be combined with each of them."""
    caption = "label_smoothing, running_epochs and mix (mixup, cutmix) are settings of the configuration"
    table = _table("objectives", "objective", "what it is", "options", "paper", caption=caption)
    common = Objective.options()
    registries = {"": OBJECTIVES, "second_pass=": SECOND_PASSES, "regularizer=": REGULARIZERS}
    _matching([name for registry in registries.values() for name in registry.names(pattern)], pattern, "objective")
    for setting, registry in registries.items():
        for name in registry.names(pattern):
            kind = registry.get(name)
            options = (f"{option}={p.default}" for option, p in kind.options().items() if option not in common)
            table.add_row(f"{setting}{name}", kind.summary, "\n".join(options), kind.paper)
        table.add_section()
    return table


def datasets(pattern: str) -> Table:
    """List data sets with their splits and options."""
    table = _table("data sets", "data set", "what it is", "splits", "options")
    for name in _matching(DATASETS.names(pattern), pattern, "data set"):
        source = DATASETS.get(name)
        table.add_row(name, source.summary, ", ".join(source.splits), ", ".join(source.options))
    return table


def analyses(pattern: str) -> Table:
    """List analyses with their options and papers."""
    caption = (
        "NS: normalization statistics, AP: affine parameters; advnorm ls studies lists the tables of papers A to E"
    )
    table = _table("analyses", "analysis", "what it shows", "runs", "--set", "paper", caption=caption)
    table.columns[0].no_wrap = True
    for name in _matching(ANALYSES.names(pattern), pattern, "analysis"):
        analysis = ANALYSES.get(name)
        options = ", ".join(sorted(analysis.options().keys() - {"progress"}))
        table.add_row(name, analysis.summary, "several" if analysis.several else "one", options, analysis.paper)
    return table


def studies(pattern: str) -> Table:
    """List studies with the claim they check; for the name of a study or a pattern of cells, list the cells."""
    names = STUDIES.names(pattern)
    if pattern in STUDIES or not names:
        return cells(pattern)
    table = _table("studies", "study", "cells", "claim", caption=f"cells of a study: advnorm ls studies {names[0]}")
    for name in names:
        found = STUDIES.get(name)
        table.add_row(name, str(len(found.by_name)), found.printed["claim"])
    return table


def cells(pattern: str) -> Table:
    """List the cells of a study, or those that match ``A/table3/dual_*``, with the settings in which they differ."""
    if not set(pattern) & set("*?["):
        found, one = find(pattern)
        pattern = pattern if one is not None else f"{found.name}/*"
    table = _table("cells", "cell", "own settings")
    for name in STUDIES.names("/".join(pattern.split("/")[:2])):
        for state in list_cell_statuses(STUDIES.get(name).by_name.values(), None, ())[0]:
            if fnmatchcase(full := f"{name}/{state['name']}", pattern):
                table.add_row(full, ", ".join(f"{key} {value}" for key, value in state["settings"].items()))
    _matching([str(name) for name in table.columns[0].cells], pattern, "study")
    return table


#: A pattern with matches for each kind.
_EXAMPLES = {"norm": "*bn*", "model": "resnet*", "attack": "pgd*", "objective": "apart*", "data set": "cifar*"}
_EXAMPLES |= {"analysis": "*gap*", "study": "A/*"}


def _table(title: str, *columns: str, caption: str | None = None) -> Table:
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")  # a name is never cut
    return table


def _matching(names: list[str], pattern: str, kind: str) -> list[str]:
    if not names:
        hint = f"omit it to list all, or try {_EXAMPLES[kind]!r}"
        raise ConfigError("unknown_name", f"no {kind} matches {pattern!r}", field="pattern", hint=hint)
    return names
