"""The base of every analysis: findings with their records and figures, and the registry."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from torch import Tensor, nn

from advnorm._core.errors import raise_problems
from advnorm._core.records import write_figure, write_json
from advnorm._core.registry import Registry, keywords
from advnorm._core.settings import Setting, convert_options
from advnorm._core.shapes import with_digest
from advnorm.analysis.images import measure_images, reporting_progress
from advnorm.analysis.plots import Figure, figure_style
from advnorm.analysis.settings import empty_list_problems, is_declared, require_any
from advnorm.attacks.base import Progress
from advnorm.evaluation.model_branches import branches
from advnorm.evaluation.target import EvaluationTarget

#: Head and rows of a table for a terminal.
TableData = tuple[Sequence[str], Sequence[Sequence[str]]]


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

    def table(self) -> TableData | None:
        """Return head and rows for a terminal, or None if only the figure shows the result."""
        return None

    def figure(self) -> Figure:
        """Return the figure in the common style, independent of the caller's matplotlib settings."""
        with figure_style():
            return self.draw()

    def save(self, stem: Path | str) -> list[Path]:
        """Write ``stem.json``, ``stem.svg`` and ``stem.png``; return the paths."""
        stem = Path(stem)
        paths = [stem.with_name(f"{stem.name}.{kind}") for kind in ("json", "svg", "png")]
        write_json(paths[0], with_digest(self.record()))
        with figure_style():
            figure = self.draw()
            for path in paths[1:]:
                write_figure(path, figure)
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


# -- networks ----------------------------------------------------------------------------------------------------------

EveryRoute = Annotated[str | None, Setting("Branch of the models. Default: every branch, one after another.")]


class BranchView(NamedTuple):
    """A target through one branch, under a name that no other view has."""

    name: str
    target: EvaluationTarget
    route: str | None

    @property
    def data(self) -> tuple[nn.Module, Tensor, Tensor]:
        """Model, images and labels."""
        return self.target.model, self.target.images, self.target.labels

    @property
    def settings(self) -> dict[str, Any]:
        """Route and batch size, settings of a measurement."""
        return {"route": self.route, "batch_size": self.target.batch_size}


def branch_views(targets: Iterable[EvaluationTarget], *, route: EveryRoute = None) -> list[BranchView]:
    """Return every target through the given branch, else through each branch that its norms treat differently."""
    views: list[BranchView] = []
    for target in targets:
        routes = (route,) if route is not None else branches(target.model) or (None,)
        for branch in routes:
            label = f"{target.name} ({branch})" if len(routes) > 1 else target.name
            taken = {view.name for view in views}
            name = next(n for n in (label, *(f"{label} #{k}" for k in range(2, len(views) + 3))) if n not in taken)
            views.append(BranchView(name, target, branch))
    require_any(views, "targets", "one training run")
    return views


def view_conditions(views: Iterable[BranchView]) -> dict[str, Any]:
    """Return the conditions of each view by its name, for a record."""
    return {view.name: {**view.target.conditions, **view.settings} for view in views}


# -- registry ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Analysis:
    """A registered analysis: a function that returns a finding. What a training run gives it depends on ``takes``.

    ``images``: the network, and images by name that attacks craft from the test images; by default ``inputs``.
    ``run``, ``runs``: the evaluation target, or several ones. ``branches``: a view of each branch of several targets.

    The options are its declared settings but for the batch size, which is that of the target. They include the settings
    of ``measure``, a function of a model and images to which it passes them on.
    """

    function: Callable[..., Finding]
    summary: str
    paper: str = ""
    takes: Literal["images", "run", "runs", "branches"] = "run"
    inputs: tuple[str, ...] = ("clean", "adv")
    measure: Callable[..., Any] | None = None

    @property
    def several(self) -> bool:
        """Whether it takes a list of evaluation targets."""
        return self.takes in ("runs", "branches")

    def options(self) -> dict[str, inspect.Parameter]:
        """Return the options with their types and defaults."""
        preparing = {"images": measure_images, "branches": branch_views}.get(self.takes)
        owners = [owner for owner in (self.measure, preparing, self.function) if owner is not None]
        parameters = [item for owner in owners for item in keywords(owner).items()]
        return {name: one for name, one in parameters if is_declared(one) and name != "batch_size"}

    def run(self, target: Any, *, progress: Progress | None = None, **options: Any) -> Finding:
        """Convert and validate the options, then run the function on a target, or on a list of targets."""
        converted, problems = convert_options("", self.options(), options)
        raise_problems(problems + empty_list_problems(self.options(), converted), "bad analysis")
        with reporting_progress(progress):
            if self.takes == "images":
                return measure_images(self.function, target, **{"inputs": self.inputs, **converted})
            if self.takes == "branches":
                target = branch_views(target, route=converted.pop("route", None))
            return self.function(target, **converted)


ANALYSES: Registry[Analysis] = Registry("analysis", Analysis)
register_analysis = ANALYSES.register
"""Decorator that registers a function that returns a :class:`Finding`: ``@register_analysis(name, summary="…")``.

``takes`` names what the function gets:

- ``"run"`` (default): an evaluation target with ``model``, ``images`` and ``labels``
- ``"runs"``: several targets
- ``"branches"``: a view of each branch of several targets
- ``"images"``: the network, and images by name, by default those of ``inputs``: clean, adv

``summary`` is required. ``paper`` and ``measure`` are optional. The settings of the function ``measure`` become options
of the analysis.
"""


def list_analyses(pattern: str = "*") -> list[str]:
    """Return the names of the analyses that match a shell pattern."""
    return ANALYSES.names(pattern)
