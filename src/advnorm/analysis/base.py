"""The base of every analysis: findings with their records and figures, declared settings, and the registry."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeVar, get_origin

from torch import Tensor, nn

from advnorm._core.errors import Problem, raise_problems
from advnorm._core.records import write_json
from advnorm._core.registry import Registry, keywords
from advnorm._core.settings import Setting, convert_options
from advnorm.analysis.plots import figure_style
from advnorm.attacks.base import Progress
from advnorm.norms import routed_modules
from advnorm.objectives.base import needs_both_domains

if TYPE_CHECKING:
    from matplotlib.figure import Figure

T = TypeVar("T")

# -- findings ----------------------------------------------------------------------------------------------------------


class Finding(ABC):
    """The result of an analysis. ``record()`` returns plain data for JSON, ``figure()`` draws it."""

    #: The fields and properties in the record, in order. Studies address numbers by these names.
    RECORD: ClassVar[tuple[str, ...]]

    def record(self) -> dict[str, Any]:
        """Return numbers and conditions in JSON's types."""
        return {name: to_record(getattr(self, name)) for name in self.RECORD}

    @abstractmethod
    def draw(self) -> Figure:
        """Draw the figure; called inside :func:`figure_style`."""

    def table(self) -> tuple[Sequence[str], Sequence[Sequence[str]]] | None:
        """Return head and rows for a terminal, or None if only the figure shows the result."""
        return None

    def figure(self) -> Figure:
        """Return the figure in the common style, independent of the caller's matplotlib settings."""
        with figure_style():
            return self.draw()

    def save(self, stem: Path | str) -> list[Path]:
        """Write ``stem.json``, ``stem.svg`` and ``stem.png``; return the paths."""
        stem = Path(stem)
        stem.parent.mkdir(parents=True, exist_ok=True)
        paths = [stem.with_name(f"{stem.name}.{kind}") for kind in ("json", "svg", "png")]
        write_json(paths[0], self.record())
        with figure_style():
            figure = self.draw()
            for path in paths[1:]:
                figure.savefig(path, dpi=150)
        return paths

    def under(self, conditions: Mapping[str, Any]) -> Self:
        """Return the same finding with other conditions."""
        return replace(self, conditions=conditions)  # pyright: ignore[reportArgumentType]


def to_record(value: Any) -> Any:
    """Return a value in JSON's types. JSON has no NaN and no infinity: they become None.

    An object contributes the names in its ``RECORD``, else all of its fields. Tuples as keys are joined by "-".
    """
    if isinstance(value, Tensor):
        return to_record(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {"-".join(key) if isinstance(key, tuple) else str(key): to_record(item) for key, item in value.items()}
    if hasattr(value, "record"):
        return value.record()
    names = getattr(value, "RECORD", getattr(value, "_fields", None))
    if names or is_dataclass(value):
        names = names or [field.name for field in fields(value)]
        return {name: to_record(getattr(value, name)) for name in names}
    return [to_record(item) for item in value] if isinstance(value, list | tuple) else value


def format_percent(share: float) -> str:
    """Format a share of 1 for a table."""
    return f"{100 * share:.1f} %"


# -- settings ----------------------------------------------------------------------------------------------------------

RouteSetting = Annotated[
    str | None, Setting("Branch of the model that attacks and analysis use. Default: adv, else the last.")
]
EveryRouteSetting = Annotated[str | None, Setting("Branch of the models. Default: every branch, one after another.")]
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


def setting_problems(function: Callable[..., Any], values: Mapping[str, Any]) -> list[Problem]:
    """Return the problems of the values of a function's declared settings; pass ``locals()`` at its start."""
    declared = {name: values[name] for name, parameter in keywords(function).items() if is_declared(parameter)}
    return convert_options("", function, declared)[1]


def model_problems(model: Any, route: object, statistics: str = "running", *, any_bank: bool = False) -> list[Problem]:
    """Return why a model cannot be analysed through a branch with batches of one domain.

    Some norms need batches of both domains for batch statistics. ``any_bank``: the caller chooses the statistics bank
    itself, which only mixture norms do not allow.
    """
    if not isinstance(model, nn.Module):
        message, hint = "{field} must be an nn.Module", "wrap a function in a module"
        return [Problem(code="wrong_type", message=message, field="model", got=type(model).__name__, hint=hint)]
    problems = []
    if route is not None and not routed_modules(model):
        message = f"{type(model).__name__} has no routed norms, and therefore no route {route!r}"
        problems.append(Problem(code="wrong_route", message=message, field="route", hint="leave route out"))
    if statistics != "running" and not isinstance(route, Mapping):
        plans = dict.fromkeys(module.plan for module in routed_modules(model).values())
        problems += [
            Problem(
                code="conflict",
                message=f"{plan.name} needs batch statistics of both domains, but these batches have one domain",
                field="statistics",
                hint="use statistics='running'",
            )
            for plan in plans
            if needs_both_domains(plan) and (plan.mixture or not any_bank)
        ]
    return problems


def as_tuple(values: Any) -> tuple[Any, ...]:
    """Return several values as a tuple; a single value needs no list."""
    return (values,) if isinstance(values, int | float | str) else tuple(values)


# -- registry ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Analysis:
    """A registered analysis: a function of one evaluation target, or of several, with keyword-only settings."""

    function: Callable[..., Finding]
    summary: str
    paper: str
    several: bool = False

    def options(self) -> Mapping[str, inspect.Parameter]:
        """Return the keyword-only parameters of the function."""
        return keywords(self.function)

    def run(self, target: Any, *, progress: Progress | None = None, **options: Any) -> Finding:
        """Convert and validate the options, then run the function on a target, or on a list of targets."""
        converted, problems = convert_options("", self.function, options)
        raise_problems(problems, "bad analysis")
        if "progress" in self.options():
            converted["progress"] = progress
        return self.function(target, **converted)


ANALYSES: Registry[Analysis] = Registry("analysis", Analysis)
register_analysis = ANALYSES.register


def list_analyses(pattern: str = "*") -> list[str]:
    """Return the names of the analyses that match a shell pattern."""
    return ANALYSES.names(pattern)


# -- loops -------------------------------------------------------------------------------------------------------------


def even_slices(count: int, size: int) -> Iterator[slice]:
    """Yield slices of at most ``size`` images whose lengths differ by at most one.

    A short last batch would have unusual statistics.
    """
    parts = -(-count // size)
    for part in range(parts):
        yield slice(part * count // parts, (part + 1) * count // parts)


def track(items: Iterable[T], progress: Progress | None) -> Iterator[T]:
    """Yield the items and report after each one how many are done."""
    items = list(items)
    for done, item in enumerate(items, 1):
        yield item
        if progress is not None:
            progress(done, len(items))


def empty_problems(items: Any, field: str, example: str) -> list[Problem]:
    """Return a problem if a collection is empty."""
    message, hint = "{field} must not be empty", f"for example {example}"
    return [] if items else [Problem(code="empty", message=message, field=field, hint=hint)]


def require_any(items: Any, field: str, example: str) -> None:
    """Raise if a collection is empty."""
    raise_problems(empty_problems(items, field, example))
