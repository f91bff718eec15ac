"""What a study is: trainings that differ in one visible line, what is measured on them, and the printed numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from importlib import import_module
from importlib.resources import files
from typing import Any, Literal, NamedTuple, TypeVar

from advnorm._core.errors import ConfigError, did_you_mean, first_line
from advnorm._core.records import digest
from advnorm._core.registry import Registry
from advnorm.config.config import Config

#: As printed, by a shortened schedule, or two steps on synthetic images.
Protocol = Literal["paper", "fast", "smoke"]
#: Numbers that were measured, by cell and by name, each a list over seeds.
Values = Mapping[tuple[str, str], Sequence[float]]
Answer = Literal["confirmed", "not confirmed", "not run"]


class Clause(NamedTuple):
    """A part of a claim with what was measured of it, and whether it holds."""

    text: str
    held: bool


#: The parts of a claim, in turn; a KeyError where something was not measured.
Check = Callable[[Values], Iterable[Clause]]


class Conclusion(NamedTuple):
    """The verdict, the parts of the claim that could be judged, and what is wrong with the values, if anything."""

    answer: Answer
    clauses: Sequence[Clause] = ()
    problem: str | None = None


#: Images that an analysis looks at, where a measure does not say how many.
IMAGES = 1000


@dataclass(frozen=True, kw_only=True)
class Measure:
    """Numbers to take of a trained network: ``benchmark``, an analysis by name, or ``metrics`` along its training.

    ``benchmark`` takes ``attacks`` (name in the table: attack), ``route`` (a list of branches), ``limit``, and
    ``threat`` and ``eps`` where they differ from training's. Its numbers are ``branch/clean`` and ``branch/attack`` in
    percent, the branch ``shared`` where there is one way only. The numbers of an analysis are those of its record, by
    their path; ``eps`` and ``limit`` among its options are those of the attack and the images. ``metrics`` gives
    ``epoch/name``. In a path a network is called ``run``; with ``beside``, a list of cells, an analysis looks at
    their networks too and calls all of them by their cells.
    """

    name: str = "benchmark"
    options: dict[str, Any] = field(default_factory=dict)
    scale: float = 1.0  # 100 makes percent of an analysis' shares
    #: None: the best on held-out images where there are any. ``along``: every snapshot, with its epoch before a name.
    checkpoint: Literal["best", "last", "along"] | None = None

    @property
    def key(self) -> str:
        """Tells apart what would be measured differently."""
        return f"{self.name}-{digest(json.dumps([self.options, self.checkpoint], sort_keys=True))[:8]}"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One training and what is measured on it.

    ``after`` names a cell of the same study that must be done before: its weights are where this one starts from, or,
    with ``features`` (a recipe such as ``"D_R"``), its network makes the data that this one learns;
    ``"D_conflict:NAME"`` makes them from the features that the cell NAME learns.
    """

    name: str
    config: Config
    measures: tuple[Measure, ...]
    after: str | None = None
    features: str | None = None

    @cached_property
    def identity(self) -> tuple[Any, ...]:
        """Equal for cells of a paper that give the same numbers; one that needs another is like none but itself."""
        needs = self.after or self.features or any("beside" in measure.options for measure in self.measures)
        measures = tuple((measure.key, measure.scale) for measure in self.measures)
        return self.config.digest, measures, id(self) if needs else None


@dataclass(frozen=True, kw_only=True)
class Number:
    """A place in the printed table: whose value stands there, and what the paper prints."""

    row: str
    column: str
    cell: str
    value: str
    printed: float | None


@dataclass(frozen=True, kw_only=True)
class Study:
    """A table or figure of a paper: its cells, the places of its numbers, and the claim with its check."""

    name: str
    cells: Callable[[], Iterable[Cell]]
    place: Callable[[Mapping[str, Any], str], tuple[str, str] | None]
    check: Check

    @property
    def printed(self) -> Mapping[str, Any]:
        """The paper's entry: caption, claim, rows and columns."""
        return printed(self.name)

    def numbers(self) -> Sequence[Number]:
        """Every place of the printed table that a cell fills, in the printed order; made once."""
        return _numbers(self)

    def by_name(self) -> Mapping[str, Cell]:
        """Its cells by name, made once."""
        return _by_name(self)

    def cell(self, name: str) -> Cell:
        """The cell called ``name``, or an error that suggests the nearest."""
        cells = self.by_name()
        if name not in cells:
            raise ConfigError(f"{self.name} has no cell {name!r}{did_you_mean(name, cells)}")
        return cells[name]

    def answer(self, values: Values) -> Answer:
        """Whether what was measured bears the claim out; cells that are missing leave it open."""
        return self.concluded(values).answer

    def concluded(self, values: Values) -> Conclusion:
        """The answer by the parts of the claim, in turn, up to the first that needs what was not measured.

        One that fails decides. What the check cannot read, or cannot be read of it, is a problem.
        """
        clauses: list[Clause] = []
        whole, problem = False, None
        try:
            for clause in self.check(values):
                clauses.append(Clause(*clause))  # those before an error stay
            whole = bool(clauses)
        except (KeyError, IndexError):
            pass
        except ArithmeticError as error:  # of networks that collapsed: a spread or a smoothness of 0
            clauses.append(Clause(f"the networks have not collapsed ({first_line(error)})", False))
        except (ValueError, TypeError, AttributeError) as error:
            problem = f"the check of {self.name} and its values do not fit: {first_line(error)}"
        if not all(clause.held for clause in clauses):
            return Conclusion("not confirmed", clauses, problem)
        return Conclusion("confirmed" if whole else "not run", clauses, problem)


def _told(key: str, part: Any) -> str:
    """``Dual BN`` as it is; a number or a mark with its name, ``batch size 4096`` and ``running statistics``."""
    name = key.replace("_", " ")
    if part is True:
        return name
    return f"{name} {part}" if re.fullmatch(r"[\d.]+", str(part)) else str(part)


@cache  # hundreds of configurations, each checked when it is made
def _by_name(study: Study) -> Mapping[str, Cell]:
    return {cell.name: cell for cell in study.cells()}


@cache
def _numbers(study: Study) -> Sequence[Number]:
    return tuple(_placed(study))


def _placed(study: Study) -> Iterator[Number]:
    entry = study.printed
    above: dict[str, float | None] = {}  # what rows of differences, "+3.0", count from
    for row in entry.get("rows", ()):
        relative = row["label"].get("relative") is True
        label = ", ".join(_told(key, part) for key, part in row["label"].items() if key != "relative")
        for column, value in zip(entry["columns"], row["values"]):
            if not relative:
                above[column] = value
            elif value is not None:
                base = above.get(column)
                value = None if base is None else round(base + value, 6)
            placed = study.place(row["label"], column)
            if placed is not None:
                yield Number(row=label, column=column, cell=placed[0], value=placed[1], printed=value)


#: The module that defines the studies of a paper; it is imported when one of its studies is asked for.
PAPERS = {letter.upper(): f"advnorm.papers.{letter}" for letter in "abcde"}


class Studies(Registry[Study]):
    """Studies by name. Naming one of paper A imports paper A alone."""

    def get(self, name: str) -> Study:
        self._import(name)
        return super().get(name)

    def names(self, pattern: str = "*") -> list[str]:
        self._import(pattern)
        return super().names(pattern)

    def __contains__(self, name: object) -> bool:
        self._import(name)
        return super().__contains__(name)

    def __iter__(self) -> Iterator[str]:
        self._import("*")
        return super().__iter__()

    def __len__(self) -> int:
        self._import("*")
        return super().__len__()

    def _import(self, name: object) -> None:
        paper = str(name).partition("/")[0]
        for module in (PAPERS[paper],) if paper in PAPERS else PAPERS.values():
            import_module(module)


STUDIES = Studies("study")


def study(
    name: str,
    *,
    place: Callable[[Mapping[str, Any], str], tuple[str, str] | None],
    check: Check,
) -> Callable[[Callable[[], Iterable[Cell]]], Callable[[], Iterable[Cell]]]:
    """Register the function that makes a study's cells."""

    def add(cells: Callable[[], Iterable[Cell]]) -> Callable[[], Iterable[Cell]]:
        STUDIES.add(name, Study(name=name, cells=cells, place=place, check=check))
        return cells

    return add


T = TypeVar("T")


def each(part: Callable[[T], Iterable[Clause]], items: Iterable[T]) -> Iterator[Clause]:
    """The clauses of a part of a claim for each item: what is missing for one leaves those of the others."""
    missing: KeyError | IndexError | None = None
    for item in items:
        try:
            yield from part(item)
        except (KeyError, IndexError) as error:
            missing = error
    if missing is not None:
        raise missing


Place = tuple[str, str]


def same_as(study: str, cell: str) -> Sequence[Place]:
    """The cells of the paper's other studies with the same training and measurements, by study and name, in order."""
    names = tuple(STUDIES.names(f"{study.split('/')[0]}/*"))
    return [place for place in _same(names).get(STUDIES.get(study).cell(cell).identity, ()) if place[0] != study]


@cache
def _same(names: tuple[str, ...]) -> Mapping[tuple[Any, ...], Sequence[Place]]:
    places: dict[tuple[Any, ...], list[Place]] = {}
    for name in sorted(names):
        for cell in STUDIES.get(name).by_name().values():
            places.setdefault(cell.identity, []).append((name, cell.name))
    return places


def list_studies(pattern: str = "*") -> list[str]:
    """Names of the studies that match a shell pattern, such as ``"A/*"``."""
    return STUDIES.names(pattern)


def find(name: str) -> tuple[Study, Cell | None]:
    """A study, or a study and one of its cells: ``A/table3`` or ``A/table3/dual_bn/eps16``."""
    parts = str(name).split("/", 2)
    place = "/".join(parts[:2])
    if place not in STUDIES and place in _papers():
        entry = _papers()[place]
        raise ConfigError(f"{place} has nothing to run: {entry['caption']} {entry['notes']}")
    study = STUDIES.get(place)
    return study, study.cell(parts[2]) if len(parts) == 3 else None


def get(name: str) -> Config:
    """The configuration of a cell: ``get("A/table3/dual_bn/eps16")``, for :func:`advnorm.train`."""
    study, cell = find(name)
    if cell is None:
        raise ConfigError(f"{name} has several cells; name one: {', '.join(study.by_name())}")
    return cell.config


@lru_cache
def _papers() -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for path in sorted(files("advnorm.papers").joinpath("printed").iterdir(), key=lambda path: path.name):
        if path.name.endswith(".json"):
            entries |= json.loads(path.read_text(encoding="utf-8"))
    return entries


def printed(name: str) -> Mapping[str, Any]:
    """What a paper prints in a table or says of a figure."""
    entries = _papers()
    if name not in entries:
        raise ConfigError(f"no paper has {name!r}{did_you_mean(name, entries)}")
    return entries[name]


def mean(values: Values, cell: str, value: str) -> float:
    """The mean of a number over seeds; KeyError where it was not measured."""
    found = values[cell, value]
    return sum(found) / len(found)


def epochs_of(values: Values, cell: str, value: str) -> list[int]:
    """The epochs after which a number was measured, in order; KeyError where there are none."""
    split = [path.partition("/") for name, path in values if name == cell]
    epochs = sorted(int(epoch) for epoch, _, rest in split if rest == value and epoch.isdecimal())
    if not epochs:
        raise KeyError((cell, value))
    return epochs


def course(values: Values, cell: str, value: str) -> list[float]:
    """The means of a number along training."""
    return [mean(values, cell, f"{epoch}/{value}") for epoch in epochs_of(values, cell, value)]
