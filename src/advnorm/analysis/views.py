"""What an analysis looks at: a subject through one of its branches, on the device of its model."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from advnorm._core.errors import ConfigError, did_you_mean
from advnorm.analysis.base import COLOURS, LINES, MARKERS
from advnorm.evaluation.plan import branches
from advnorm.evaluation.target import EvaluationTarget
from advnorm.norms import routed_modules
from advnorm.objectives.base import needs_both_domains

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class View(NamedTuple):
    """A subject through one branch, under a name that no other view has."""

    name: str
    subject: EvaluationTarget
    route: str | None


def views(subjects: Iterable[EvaluationTarget], route: str | None) -> list[View]:
    """Every subject through the given branch; without one, through each branch that its norms treat differently."""
    found: list[View] = []
    for subject in subjects:
        own = (route,) if route is not None else branches(subject.model) or (None,)
        for branch in own:
            label = f"{subject.name} ({branch})" if len(own) > 1 else subject.name
            taken = {view.name for view in found}
            name = next(n for n in (label, *(f"{label} #{k}" for k in range(2, len(found) + 3))) if n not in taken)
            found.append(View(name, subject, branch))
    if not found:
        raise ConfigError("no network to look at; give at least one subject")
    return found


def conditions(seen: Iterable[View]) -> dict[str, Any]:
    """What the numbers of each view hold under, for a record."""
    return {
        view.name: {**view.subject.conditions, "route": view.route, "batch_size": view.subject.batch_size}
        for view in seen
    }


def setting_problems(model: Any, *, route: Any, statistics: str, batch_size: Any = 1) -> list[str]:
    """What is wrong with how a model should be looked at."""
    problems = []
    allowed = ("running", "batch_frozen")
    if statistics not in allowed:
        problems.append(f"unknown statistics {statistics!r}{did_you_mean(statistics, allowed)}")
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        problems.append(f"batch_size must be an integer of at least 1, got {batch_size!r}")
    if not isinstance(model, nn.Module):
        problems.append(f"the model must be an nn.Module, got {type(model).__name__}; wrap a function in a module")
    elif route is not None and not routed_modules(model):
        problems.append(f"{type(model).__name__} has no routed norms, and so no route {route!r}; leave route out")
    return problems


def one_domain_problems(model: Any, statistics: str, *, paired: bool = False) -> list[str]:
    """What speaks against normalizing batches of one domain by their own statistics; ``paired``: by a chosen bank."""
    if statistics == "running" or not isinstance(model, nn.Module):
        return []
    plans = dict.fromkeys(module.plan for module in routed_modules(model).values())
    return [
        f"{plan.name} normalizes by the batch statistics of both domains, and these batches are of one; use "
        "statistics='running'"
        for plan in plans
        if needs_both_domains(plan) and (plan.mixture or not paired)
    ]


def number(value: float) -> float | None:
    """A number for JSON, which has no NaN and no infinity: None."""
    return value if math.isfinite(value) else None


def numbers(values: float | Sequence[float]) -> tuple[Any, ...]:
    """Several numbers; one may come without a list."""
    return (values,) if isinstance(values, int | float) else tuple(values)


def look(place: int) -> dict[str, Any]:
    """Colour and marker of the series at a place; more than colours begin again with dashed lines, hollow markers."""
    turn, place = divmod(place, len(COLOURS))
    return {
        "color": COLOURS[place],
        "marker": MARKERS[place],
        "linestyle": LINES[turn % 3],
        "fillstyle": ("full", "none", "left")[turn % 3],
    }


def wrapped(names: Iterable[object], width: int) -> list[str]:
    """Names in lines of at most so many letters, broken at spaces and behind underscores where there are any."""
    fit = partial(textwrap.fill, width=max(width, 8))
    return [fit(str(name).replace("_", "_ ")).replace("_ ", "_") for name in names]


def legend(figure: Figure, names: Sequence[str], handles: Sequence[Any]) -> None:
    """One legend below all panels, in as few rows as hold the names; the figure grows by what they take."""
    fits = max(1, 100 // (max(map(len, names)) + 6))
    rows = -(-len(names) // fits)
    figure.set_figheight(figure.get_figheight() + 0.17 * (rows - 1))
    figure.legend(handles, names, loc="outside lower center", ncols=-(-len(names) // rows))
