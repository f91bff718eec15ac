"""A study is a table or figure of a paper: its trainings, its measurements, the printed numbers and the claim."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.resources import files
from typing import Any, Literal, get_args

from advnorm._core.errors import ConfigError, raise_problems, unknown_name
from advnorm._core.records import digest
from advnorm.config import Config
from advnorm.studies.claims import Values
from advnorm.studies.decision import Check, ClaimVerdict, Conclusion, decide_claim

#: ``paper``: as printed. ``authors``: as in the authors' code. ``fast``: a shorter schedule. ``imagenette``: a shorter
#: schedule on Imagenette instead of ImageNet. ``smoke``: two steps on synthetic images.
Protocol = Literal["paper", "authors", "fast", "imagenette", "smoke"]
#: Protocols that every study has.
GENERAL_PROTOCOLS: tuple[Protocol, ...] = ("paper", "fast", "smoke")
#: Maps a row label and a column of the printed table to a cell and a value name; None for derived numbers.
Locate = Callable[[Mapping[str, Any], str], tuple[str, str] | None]


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A measurement on a trained network: ``benchmark``, the name of an analysis, or ``metrics`` of the training.

    - ``benchmark`` takes the options ``attacks`` (name in the table: attack), ``route`` (a list of branches) and
      ``limit``, and ``threat`` and ``eps`` if they differ from training. Its values are ``branch/clean`` and
      ``branch/attack`` in percent. The branch is ``shared`` if no route is given.
    - The values of an analysis are the numbers in its record, named by their path. Its options ``eps`` and ``limit``
      apply to the attack and the images. A path calls the network ``run``. With ``beside``, a list of cells, the
      analysis also gets their networks and a path calls each network by its cell.
    - ``metrics`` gives ``epoch/name``.
    """

    name: str = "benchmark"
    options: dict[str, Any] = field(default_factory=dict)
    scale: float = 1.0  # 100 converts the shares of an analysis to percent
    #: None: ``best`` if images were held out, else ``last``. ``along``: every snapshot, with its epoch before a name.
    checkpoint: Literal["best", "last", "along"] | None = None

    @property
    def key(self) -> str:
        """The file name of the measurement beside a run; equal keys are the same measurement."""
        return f"{self.name}-{digest(json.dumps([self.options, self.checkpoint], sort_keys=True))[:8]}"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One training and its measurements.

    ``after`` names a cell of the same study that is trained first. This cell starts from its weights or, with
    ``features`` (a recipe such as ``"D_R"``), trains on features that its network extracts: from ordinary images, or
    from the features that the cell ``feature_images`` trains on. ``clip``: a shortened schedule always clips the
    gradients of this cell, because the cells that it is compared with need clipping. ``protocols``: functions of its
    paper's own protocols, each from this cell to the planned cell.
    """

    name: str
    config: Config
    measures: tuple[Measure, ...]
    after: str | None = None
    features: str | None = None
    feature_images: str | None = None
    clip: bool = False
    protocols: Mapping[str, Callable[[Cell], Cell]] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def identity(self) -> tuple[Any, ...]:
        """Equal for cells that give the same numbers. A cell that depends on other cells equals only itself."""
        depends = self.after or self.features or any("beside" in measure.options for measure in self.measures)
        measures = tuple((measure.key, measure.scale) for measure in self.measures)
        return self.config.digest, measures, self.clip, id(self) if depends else None


@dataclass(frozen=True, kw_only=True)
class PrintedNumber:
    """A number of a printed table, and the cell and value that reproduce it."""

    row: str
    column: str
    cell: str
    value: str
    printed: float | None


@dataclass(frozen=True, kw_only=True)
class Study:
    """A table, figure or section of a paper. ``locate`` finds the cell of a printed number, ``check`` the clauses.

    ``deviations`` lists what differs from the paper under every protocol. ``printed_elsewhere`` returns numbers that
    the check reads and that the paper prints in another place, by cell and value. ``compares_print``: the claim is that
    measured numbers equal the printed ones, which a stand-in for the data cannot show.
    """

    name: str
    cells: Callable[[], Iterable[Cell]]
    locate: Locate
    check: Check
    deviations: tuple[str, ...] = ()
    printed_elsewhere: Callable[[], Mapping[tuple[str, str], float]] = dict
    compares_print: bool = False

    @property
    def printed(self) -> Mapping[str, Any]:
        """The paper's entry: caption, claim, rows and columns."""
        return printed_entry(self.name)

    @cached_property
    def numbers(self) -> Sequence[PrintedNumber]:
        """Every printed number that a cell reproduces, in the printed order."""
        return tuple(_located_numbers(self))

    @cached_property  # each of the hundreds of configurations is validated when it is made
    def by_name(self) -> Mapping[str, Cell]:
        return {cell.name: cell for cell in self.cells()}

    @property
    def protocols(self) -> tuple[Protocol, ...]:
        """The general protocols and those of its paper."""
        own = next(iter(self.by_name.values())).protocols
        return tuple(one for one in get_args(Protocol) if one in GENERAL_PROTOCOLS or one in own)

    def cell(self, name: str) -> Cell:
        cells = self.by_name
        if name not in cells:
            raise_problems([unknown_name("cell", name, cells)], self.name)
        return cells[name]

    @cached_property
    def printed_values(self) -> Values:
        """The paper's numbers as if one seed had measured them."""
        own = {(n.cell, n.value): n.printed for n in self.numbers if n.printed is not None}
        return {key: [number] for key, number in {**self.printed_elsewhere(), **own}.items()}

    @cached_property
    def printed_conclusion(self) -> Conclusion:
        """The verdict on the paper's own numbers: a clause that they fail contradicts the paper's sentence."""
        return decide_claim(self.name, self.check, self.printed_values, self.by_name)

    def verdict(self, values: Values) -> ClaimVerdict:
        return self.evaluate_claim(values).verdict

    def evaluate_claim(self, values: Values) -> Conclusion:
        """Evaluate the claim; see :func:`decide_claim`."""
        return decide_claim(self.name, self.check, values, self.by_name)


def _located_numbers(study: Study) -> Iterator[PrintedNumber]:
    entry = printed_entries().get(study.name, {})  # a study of one's own prints none
    base: dict[str, float | None] = {}  # the row that rows of differences, such as "+3.0", are relative to
    for row in entry.get("rows", ()):
        relative = row["label"].get("relative") is True
        label = ", ".join(_label_text(key, part) for key, part in row["label"].items() if key != "relative")
        for column, value in zip(entry["columns"], row["values"]):
            if not relative:
                base[column] = value
            elif value is not None:
                above = base.get(column)
                value = None if above is None else round(above + value, 6)
            located = study.locate(row["label"], column)
            if located is not None:
                yield PrintedNumber(row=label, column=column, cell=located[0], value=located[1], printed=value)


def _label_text(key: str, part: Any) -> str:
    """``Dual BN`` unchanged; numbers and flags with their key: ``batch size 4096``, ``running statistics``."""
    name = key.replace("_", " ")
    if part is True:
        return name
    return f"{name} {part}" if re.fullmatch(r"[\d.]+", str(part)) else str(part)


@cache
def printed_entries() -> dict[str, Any]:
    """The tables and figures of all papers, as printed."""
    texts = [path.read_text(encoding="utf-8") for path in files("advnorm.papers").joinpath("printed").iterdir()]
    return {name: entry for text in sorted(texts) for name, entry in json.loads(text).items()}


def printed_entry(name: str) -> Mapping[str, Any]:
    """The printed numbers and the claim of a table or figure."""
    entries = printed_entries()
    if name not in entries:
        raise ConfigError.listing([unknown_name("table or figure", name, entries)])
    return entries[name]
