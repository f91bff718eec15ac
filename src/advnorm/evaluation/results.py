"""The result of an evaluation: verdicts per image with their conditions, as table and as record."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from advnorm._core.errors import ConfigError, did_you_mean
from advnorm._core.records import read_json
from advnorm.threat import ThreatModel

if TYPE_CHECKING:
    from rich.table import Table

#: Columns of a table as text.
RENDERED = 160


@dataclass(frozen=True, kw_only=True, eq=False)
class BenchmarkResult:
    """Verdicts per image and their conditions. An image is robust where it is right clean and under the attack.

    ``clean[route]`` and ``robust[route][attack]`` are boolean tensors in the order of the data.
    """

    threat: ThreatModel
    attacks: Mapping[str, str]
    clean: Mapping[str, Tensor]
    robust: Mapping[str, Mapping[str, Tensor]]
    seconds: Mapping[str, Mapping[str, float]]
    conditions: Mapping[str, Any]
    warnings: tuple[str, ...] = ()

    @property
    def routes(self) -> tuple[str, ...]:
        """The judged branches, ``"as called"`` for a model without one."""
        return tuple(self.clean)

    @property
    def images(self) -> int:
        """Number of images."""
        return len(self.clean[self.routes[0]])

    def union(self, route: str | None = None) -> Tensor:
        """Whether each image withstands all of the attacks."""
        route = self._one(route)
        return torch.stack([self.clean[route], *self.robust[route].values()]).all(0)

    def clean_accuracy(self, route: str | None = None) -> float:
        """Share of the images that are classified right without an attack."""
        return _share(self.clean[self._one(route)])

    def robust_accuracy(self, attack: str | None = None, route: str | None = None) -> float:
        """Share of the images that withstand an attack, or all of them (the union)."""
        if attack is None:
            return _share(self.union(route))
        verdicts = self.robust[self._one(route)]
        if attack not in verdicts:
            raise ConfigError(f"attack {attack!r} was not run{did_you_mean(attack, verdicts)}")
        return _share(verdicts[attack])

    @property
    def accuracy(self) -> dict[str, dict[str, float]]:
        """By route: ``clean``, each attack, and ``union``."""
        return {
            route: {
                "clean": _share(self.clean[route]),
                **{name: _share(verdicts) for name, verdicts in self.robust[route].items()},
                "union": _share(self.union(route)),
            }
            for route in self.routes
        }

    def _one(self, route: str | None) -> str:
        if route is None and len(self.routes) == 1:
            return self.routes[0]
        if route is None or route not in self.clean:
            raise ConfigError(f"say which route: {route!r} was not judged{did_you_mean(route, self.clean)}")
        return route

    def table(self, width: int | None = None) -> Table:
        """Accuracies for the terminal, a row per route; a row per attack where the names do not fit into ``width``."""
        from rich.table import Table

        title = f"accuracy, {self.images} images, {self.threat}"
        columns = ("clean", *self.attacks, "union")
        routes = max(map(len, ("route", *self.routes)))
        wide = sum(max(len(name), 6) + 3 for name in columns) + routes + 4
        cells = {route: [f"{100 * value:.2f}" for value in row.values()] for route, row in self.accuracy.items()}
        least = max(len(title) + 2, 78 if self.warnings else 60)  # room for the lines below
        table = Table(title=title, title_justify="left", min_width=least if width is None else min(least, width))
        if width is None or wide <= width:
            table.add_column("route")
            for column in columns:
                table.add_column(column, justify="right", no_wrap=True)
            for route, row in cells.items():
                table.add_row(route, *row)
        else:
            table.add_column("", no_wrap=True)
            for route in cells:
                table.add_column(route, justify="right")
            for name, row in zip(columns, zip(*cells.values())):
                table.add_row(name, *row)
        seconds = sum(sum(row.values()) for row in self.seconds.values())
        c = self.conditions
        caption = [f"{c['model']['class']}, seed {c['seed']}, {c['device']}, strict float32, {seconds:.1f} s"]
        caption += told_about(c)
        scopes = c.get("scopes")
        caption += [f"as called inside: {', '.join(' '.join(item) for item in scopes.items())}"] if scopes else []
        table.caption = "\n".join([*caption, *(f"note: {warning}" for warning in self.warnings)])
        table.caption_justify = "left"
        return table

    def __str__(self) -> str:
        return rendered(self.table(RENDERED))

    def record(self) -> dict[str, Any]:
        """All of it as plain data, for JSON; verdicts as strings of 0 and 1, an image each."""
        return {
            "format": "advnorm.benchmark/1",
            "accuracy": self.accuracy,
            "threat": dataclasses.asdict(self.threat),
            "attacks": dict(self.attacks),
            "routes": list(self.routes),
            "images": self.images,
            **self.conditions,
            "warnings": list(self.warnings),
            "seconds": {route: dict(row) for route, row in self.seconds.items()},
            "verdicts": {
                route: {
                    "clean": _letters(self.clean[route]),
                    **{name: _letters(verdicts) for name, verdicts in self.robust[route].items()},
                }
                for route in self.routes
            },
        }

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> BenchmarkResult:
        """The result that :meth:`record` came from."""
        if record.get("format") != "advnorm.benchmark/1":
            raise ConfigError(f"not the record of a benchmark: its format is {record.get('format')!r}")
        known = ("format", "accuracy", "threat", "attacks", "routes", "images", "warnings", "seconds", "verdicts")
        verdicts = {r: {n: _booleans(v) for n, v in row.items()} for r, row in record["verdicts"].items()}
        return cls(
            threat=ThreatModel(**record["threat"]),
            attacks=dict(record["attacks"]),
            clean={route: row["clean"] for route, row in verdicts.items()},
            robust={route: {n: v for n, v in row.items() if n != "clean"} for route, row in verdicts.items()},
            seconds=record["seconds"],
            conditions={key: value for key, value in record.items() if key not in known},
            warnings=tuple(record["warnings"]),
        )

    @classmethod
    def load(cls, path: Path | str) -> BenchmarkResult:
        """Read a record from disk."""
        return cls.of_record(read_json(Path(path)))


@dataclass(frozen=True, kw_only=True, eq=False)
class Curve:
    """Robust accuracy against a setting of the attack: number of steps, or eps."""

    parameter: str
    values: tuple[float, ...]
    #: The values as the caller wrote them, "2/255".
    labels: tuple[str, ...]
    result: BenchmarkResult

    def accuracy(self, route: str | None = None) -> list[float]:
        """Robust accuracy at each value."""
        return [self.result.robust_accuracy(name, route) for name in self.result.attacks]

    def table(self) -> Table:
        """A row per value, a column per route."""
        from rich.table import Table

        title = f"robust accuracy against {self.parameter}, {self.result.images} images, {self.result.threat.norm}"
        table = Table(self.parameter, title=title, title_justify="left", min_width=len(title) + 2)
        for route in self.result.routes:
            table.add_column(route, justify="right")
        table.add_row("clean", *(f"{100 * self.result.clean_accuracy(route):.2f}" for route in self.result.routes))
        for name, label in zip(self.result.attacks, self.labels):
            cells = [f"{100 * self.result.robust_accuracy(name, route):.2f}" for route in self.result.routes]
            table.add_row(label, *cells)
        return table

    def __str__(self) -> str:
        return rendered(self.table())

    def record(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        record = self.result.record()
        return {**record, "parameter": self.parameter, "values": list(self.values)}


def told_about(conditions: Mapping[str, Any]) -> list[str]:
    """Where model and data come from, in a line; none where nobody said."""
    about = conditions.get("about") or {}
    told = [f"{name} {about[name]}" for name in ("run", "checkpoint", "model", "weights", "data") if about.get(name)]
    told += [f"a training that is not finished ({about['unfinished']})"] if about.get("unfinished") else []
    return [", ".join(told)] if told else []


def _share(verdicts: Tensor) -> float:
    return verdicts.sum().item() / len(verdicts)


def _letters(verdicts: Tensor) -> str:
    return "".join("01"[value] for value in verdicts.int().tolist())


def _booleans(letters: str) -> Tensor:
    return torch.tensor([letter == "1" for letter in letters], dtype=torch.bool)


def rendered(table: Table) -> str:
    from rich.console import Console

    console = Console(width=RENDERED, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())
