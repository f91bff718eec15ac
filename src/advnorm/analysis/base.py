"""The base of every analysis: findings with their records and figures, and the registry."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import Tensor

from advnorm._core.errors import raise_problems
from advnorm._core.records import write_json
from advnorm._core.registry import Registry, keywords
from advnorm._core.settings import convert_options
from advnorm.analysis.plots import Figure, figure_style
from advnorm.attacks.base import Progress


@dataclass(frozen=True, kw_only=True, eq=False)
class Finding(ABC):
    """The result of an analysis. ``record()`` returns plain data for JSON, ``figure()`` draws it."""

    #: The fields and properties in the record, in order. Studies address numbers by these names.
    RECORD: ClassVar[tuple[str, ...]]

    conditions: Mapping[str, Any] = field(default_factory=dict)

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
        return replace(self, conditions=conditions)


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
