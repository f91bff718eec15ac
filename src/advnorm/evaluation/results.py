"""The result of an evaluation: one boolean per image and attack with all conditions, as table and as record."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NotRequired, TypedDict

import torch
from torch import Tensor

from advnorm._core.errors import ConfigError, unknown_name
from advnorm._core.records import read_json
from advnorm._core.shapes import Fraction, check_record
from advnorm.evaluation.intervals import format_accuracy
from advnorm.evaluation.outcomes import DEFAULT_ROUTE, OLD_DEFAULT_ROUTE, encode_rows, pack_bits, read_outcomes
from advnorm.threat import ThreatModel

if TYPE_CHECKING:
    from rich.table import Table

#: What the brackets in a table of accuracies mean.
INTERVALS = "percent, in brackets Wilson's 95 % confidence interval"
#: Columns of a table that is printed without a terminal.
TEXT_WIDTH = 160
#: What to do with an existing file in the place of a record that is to be written.
CURE = "delete it to start again, or choose another file"


class BenchmarkRecord(TypedDict):
    """The entries of an evaluation's record that readers use."""

    threat: ThreatModel
    attacks: dict[str, str]
    outcomes: NotRequired[dict[str, dict[str, str]]]
    rows: NotRequired[list[Any]]
    verdicts: NotRequired[dict[str, dict[str, str]]]  # version 1
    seconds: dict[str, dict[str, float]]
    warnings: list[str]
    model: dict[str, Any]
    seed: int
    device: str
    about: NotRequired[dict[str, Any] | None]
    scopes: NotRequired[dict[str, str]]
    stages: NotRequired[dict[str, dict[str, dict[str, Fraction]]]]


@dataclass(frozen=True, kw_only=True, eq=False)
class BenchmarkResult:
    """Results per image and their conditions. A robust image is classified correctly clean and under the attack.

    ``clean[route]`` and ``robust[route][attack]`` are boolean tensors. ``rows`` are the places of the images in their
    data set.
    """

    FORMAT: ClassVar[str] = "advnorm.benchmark/2"
    #: Formats that can be read. Version 1 has strings of 0 and 1.
    FORMATS: ClassVar[tuple[str, ...]] = (FORMAT, "advnorm.benchmark/1")
    #: What to do with a file that is no such record; it may be a record of something else, to be kept.
    READ_CURE: ClassVar[str] = "name a record that advnorm evaluate wrote"
    SHAPE: ClassVar[type] = BenchmarkRecord

    threat: ThreatModel
    attacks: Mapping[str, str]
    clean: Mapping[str, Tensor]
    robust: Mapping[str, Mapping[str, Tensor]]
    seconds: Mapping[str, Mapping[str, float]]
    conditions: Mapping[str, Any]
    rows: Tensor
    warnings: tuple[str, ...] = ()

    @property
    def outcomes(self) -> dict[str, dict[str, Tensor]]:
        """All results per image, by route and attack; ``clean`` is the result without an attack."""
        return {route: {"clean": clean, **self.robust[route]} for route, clean in self.clean.items()}

    @property
    def routes(self) -> tuple[str, ...]:
        """The evaluated branches; ``"default"`` for an evaluation without a route."""
        return tuple(self.clean)

    @property
    def images(self) -> int:
        return len(self.clean[self.routes[0]])

    def union(self, route: str | None = None) -> Tensor:
        """Return whether each image is robust to every attack."""
        route = self._resolve(route)
        return torch.stack([self.clean[route], *self.robust[route].values()]).all(0)

    def accuracy(self, attack: str | None = None, route: str | None = None) -> float:
        """Return the clean accuracy, or the accuracy under one attack."""
        route = self._resolve(route)
        if attack is None:
            return fraction(self.clean[route])
        if attack not in self.robust[route]:
            raise ConfigError.listing([unknown_name("attack", attack, self.robust[route])])
        return fraction(self.robust[route][attack])

    def robust_accuracy(self, attack: str | None = None, route: str | None = None) -> float:
        """Return the accuracy under all attacks (the union: the worst case of each image), or under one attack."""
        return fraction(self.union(route)) if attack is None else self.accuracy(attack, route)

    @property
    def accuracies(self) -> dict[str, dict[str, float]]:
        """All accuracies by route: ``clean``, each attack, and ``union``."""
        return {
            route: {
                "clean": self.accuracy(route=route),
                **{name: self.accuracy(name, route) for name in self.robust[route]},
                "union": self.robust_accuracy(route=route),
            }
            for route in self.routes
        }

    def _resolve(self, route: str | None) -> str:
        known = list(self.clean)
        if route is None and len(known) > 1:
            hint = f"use {' or '.join(known)}"
            raise ConfigError("missing_route", "the result has several routes", field="route", hint=hint)
        route = known[0] if route is None else route
        if route not in self.clean:
            raise ConfigError.listing([unknown_name("route", route, self.clean)])
        return route

    def table(self, width: int | None = None) -> Table:
        """Return a table for the terminal with a row per attack and a column per route."""
        title = f"accuracy, {self.images} images, {self.threat}"
        least = max(len(title) + 2, 78 if self.warnings else 60)  # room for the caption
        columns = {route: row.values() for route, row in self.accuracies.items()}
        names = ("clean", *self.attacks, "union")
        least = least if width is None else min(least, width)
        table = _accuracy_table("", title, names, columns, least, self.images)
        seconds = sum(sum(row.values()) for row in self.seconds.values())
        c = self.conditions
        caption = [f"{c['model'].get('class')}, noise seed {c['seed']}, {c['device']}, strict float32, {seconds:.1f} s"]
        caption += [INTERVALS, *describe_origin(c)]
        if scopes := c.get("scopes"):
            caption.append(f"inside the scopes: {', '.join(' '.join(item) for item in scopes.items())}")
        caption += [f"note: {warning}" for warning in self.warnings]
        table.caption = "\n".join(caption)
        table.caption_justify = "left"
        return table

    def __str__(self) -> str:
        return render_table(self.table(TEXT_WIDTH))

    def record(self) -> dict[str, Any]:
        """Return plain data for JSON; the results per image are packed bits."""
        return {
            "format": self.FORMAT,
            "accuracy": self.accuracies,
            "threat": dataclasses.asdict(self.threat),
            "attacks": dict(self.attacks),
            "routes": list(self.routes),
            "images": self.images,
            **{key: value for key, value in self.conditions.items() if key != "digest"},
            "warnings": list(self.warnings),
            "seconds": {route: dict(row) for route, row in self.seconds.items()},
            "rows": encode_rows(self.rows),
            "outcomes": {
                route: {name: pack_bits(values) for name, values in row.items()} for route, row in self.outcomes.items()
            },
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any], source: object = "the record") -> BenchmarkResult:
        """Rebuild the result of :meth:`record`; ``source`` names the record in errors."""
        form = record.get("format") if isinstance(record, Mapping) else None
        check_record(record, cls.SHAPE, source, cls.READ_CURE, form if form in cls.FORMATS else cls.FORMAT)
        try:
            rows, robust = read_outcomes(record)
        except (ConfigError, LookupError, TypeError, ValueError) as error:
            message = "{field} must have a bit for each image of each attack, and of clean"
            raise ConfigError("damaged_file", message, field=f"{source}: outcomes", hint=cls.READ_CURE) from error
        known = ("format", "accuracy", "threat", "attacks", "routes", "images", "warnings", "seconds", "verdicts")
        known += ("rows", "outcomes")
        seconds = {DEFAULT_ROUTE if key == OLD_DEFAULT_ROUTE else key: row for key, row in record["seconds"].items()}
        return cls(
            threat=ThreatModel(**record["threat"]),
            attacks=record["attacks"],
            clean={route: row.pop("clean") for route, row in robust.items()},
            robust=robust,
            seconds=seconds,
            rows=rows,
            conditions={key: value for key, value in record.items() if key not in known} | read_from(record),
            warnings=tuple(record["warnings"]),
        )

    @classmethod
    def load(cls, path: Path | str) -> BenchmarkResult:
        """Read a record from disk."""
        return cls.from_record(read_json(Path(path)), path)


@dataclass(frozen=True, kw_only=True, eq=False)
class Curve:
    """Robust accuracy against a setting of the attack: the number of steps, or eps."""

    parameter: str
    values: tuple[float, ...]
    #: The values as the caller wrote them, such as ``2/255``.
    labels: tuple[str, ...]
    result: BenchmarkResult

    def robust_accuracies(self, route: str | None = None) -> list[float]:
        """Return the robust accuracy at each value."""
        return [self.result.robust_accuracy(name, route) for name in self.result.attacks]

    def table(self) -> Table:
        """Return a table for the terminal with a row per value and a column per route."""
        title = f"robust accuracy against {self.parameter}, {self.result.images} images, {self.result.threat.norm}"
        columns = {r: (self.result.accuracy(route=r), *self.robust_accuracies(r)) for r in self.result.routes}
        names = ("clean", *self.labels)
        return _accuracy_table(self.parameter, title, names, columns, len(title) + 2, self.result.images)

    def __str__(self) -> str:
        return render_table(self.table())

    def record(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {**self.result.record(), "parameter": self.parameter, "values": list(self.values)}


def _accuracy_table(
    head: str, title: str, names: Sequence[str], columns: Mapping[str, Collection[float]], min_width: int, images: int
) -> Table:
    """A table of percentages and their intervals, with a row per name and a column per route."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", min_width=min_width)
    words = [word for name in names for word in name.split()]  # a label such as `pgd3 loss=cw` wraps at its spaces
    table.add_column(head, min_width=max(map(len, words), default=0))
    for route in columns:
        table.add_column(label_of(route), justify="right")
    for name, row in zip(names, zip(*columns.values())):
        table.add_row(name, *(format_accuracy(value, images, 2) for value in row))
    return table


def label_of(route: str) -> str:
    """Return the name of a route in tables."""
    return "default route" if route == DEFAULT_ROUTE else route


def read_from(record: Mapping[str, Any]) -> dict[str, str]:
    """The condition of a result that was read back: the digest of its record; records of older versions have none."""
    return {"digest": record.get("digest") or "none"}


def describe_origin(conditions: Mapping[str, Any]) -> list[str]:
    """Return at most one line with the origin of model and data."""
    about = conditions.get("about") or {}
    parts = [f"{name} {about[name]}" for name in ("run", "checkpoint", "model", "weights", "data") if about.get(name)]
    parts += [f"training is not finished ({about['unfinished']})"] if about.get("unfinished") else []
    parts += ["record without digest"] if conditions.get("digest") == "none" else []
    return [", ".join(parts)] if parts else []


def fraction(values: Tensor) -> float:
    """Return the fraction of true values."""
    return values.sum().item() / len(values)


def render_table(table: Table) -> str:
    """Render a table as plain text."""
    from rich.console import Console

    off: dict[str, Any] = dict.fromkeys(("force_terminal", "force_jupyter", "markup", "emoji"), False)
    console = Console(width=TEXT_WIDTH, color_system=None, **off)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())
