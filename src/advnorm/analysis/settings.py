"""Settings that several analyses declare, and the problems of settings and models that they share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, get_origin

from torch import nn

from advnorm._core.errors import Problem, raise_problems
from advnorm._core.registry import keywords
from advnorm._core.settings import Setting, convert_options
from advnorm.norms import routed_modules
from advnorm.objectives.base import needs_both_domains

RouteSetting = Annotated[str | None, Setting("Branch for attacks and analysis. Default: adv, else the last.")]
BatchSize = Annotated[int, Setting("Number of images in a forward pass.", "[1, inf)")]
Seed = Annotated[int, Setting("Seed of all random choices.")]
StatisticsMode = Annotated[
    Literal["running", "batch_frozen"],
    Setting("Statistics of the norms: the running ones, or those of each batch without an update."),
]
Inputs = Annotated[
    Sequence[str],
    Setting("Images by name: clean, adv (the attack of the run), noise (uniform, same eps), or an attack's name."),
]
LayerName = Annotated[str | None, Setting("Name of a layer.")]


def is_declared(parameter: inspect.Parameter) -> bool:
    """Whether a parameter is declared with a :class:`Setting`."""
    return get_origin(parameter.annotation) is Annotated


def setting_problems(
    function: Callable[..., Any], values: Mapping[str, Any], *, any_bank: bool = False
) -> list[Problem]:
    """Return the problems of a measurement's declared settings and of its model; pass ``locals()`` at its start."""
    declared = {name: values[name] for name, parameter in keywords(function).items() if is_declared(parameter)}
    problems = convert_options("", function, declared)[1] + empty_list_problems(keywords(function), declared)
    if {"model", "route"} <= values.keys():
        how = (values["route"], values.get("statistics", "running"))
        problems += model_problems(values["model"], *how, any_bank=any_bank)
    return problems


def model_problems(
    model: nn.Module, route: object, statistics: str = "running", *, any_bank: bool = False
) -> list[Problem]:
    """Return why a model cannot be analysed through a branch with batches of one domain.

    Some norms need batches of both domains for batch statistics. ``any_bank``: the caller chooses the statistics bank
    itself, which only mixture norms do not allow.
    """
    problems = []
    if route is not None and not routed_modules(model):
        message = f"{type(model).__name__} has no routed norms, and therefore no route {route!r}"
        problems.append(Problem(code="wrong_route", message=message, field="route", hint="leave route out"))
    if statistics != "running" and not isinstance(route, Mapping):
        for plan in dict.fromkeys(module.plan for module in routed_modules(model).values()):
            if needs_both_domains(plan) and (plan.mixture or not any_bank):
                message, hint = f"{plan.name} needs batches of both domains", "use statistics='running'"
                problems.append(Problem(code="conflict", message=message, field="statistics", hint=hint))
    return problems


def empty_list_problems(known: Mapping[str, inspect.Parameter], values: Mapping[str, Any]) -> list[Problem]:
    """Return a problem for every setting that is an empty list; the default is an example."""
    empty = [name for name, value in values.items() if name in known and value in ((), [])]
    return [problem for name in empty for problem in empty_problems((), name, str(known[name].default))]


def as_tuple(values: Any) -> tuple[Any, ...]:
    """Return several values as a tuple; a single value needs no list."""
    return (values,) if isinstance(values, int | float | str) else tuple(values)


def empty_problems(items: Any, field: str, example: str) -> list[Problem]:
    """Return a problem if a collection is empty."""
    return [] if items else [Problem("empty", "{field} must not be empty", field, hint=f"for example {example}")]


def require_any(items: Any, field: str, example: str) -> None:
    """Raise if a collection is empty."""
    raise_problems(empty_problems(items, field, example))
