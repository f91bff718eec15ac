"""The registry of studies. Naming a study of a paper imports that paper's module only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from typing import Any

from advnorm._core.errors import ConfigError
from advnorm._core.registry import Registry
from advnorm.config import Config
from advnorm.studies.claims import Clause, for_each
from advnorm.studies.study import Cell, Check, Locate, Protocol, Study, printed_entries

#: The papers by letter. The module ``advnorm.papers.a`` registers the studies of paper A.
PAPERS = {
    "A": "Towards Understanding Dual BN in Hybrid Adversarial Training",
    "B": "Adversarially Perturbed Batch Normalization: A Simple Way to Improve Image Recognition",
    "C": "Improving the Accuracy-Robustness Trade-Off for Dual-Domain Adversarial Training",
    "D": "Batch Normalization Increases Adversarial Vulnerability: Disentangling Usefulness and Robustness of Model "
    "Features",
    "E": "Intriguing Properties of Adversarial Training",
}


class StudyRegistry(Registry[Study]):
    """Studies by name. Papers are imported on first use."""

    def get(self, name: str) -> Study:
        self._import_papers(name)
        return super().get(name)

    def names(self, pattern: str = "*") -> list[str]:
        """Names in the order of the printed entries: tables before figures of each paper."""
        self._import_papers(pattern)
        order = {name: place for place, name in enumerate(printed_entries())}
        return sorted(super().names(pattern), key=lambda name: (name.split("/")[0], order.get(name, len(order))))

    def __contains__(self, name: object) -> bool:
        self._import_papers(name)
        return super().__contains__(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def _import_papers(self, name: object) -> None:
        letter = str(name).partition("/")[0]
        for paper in (letter,) if letter in PAPERS else PAPERS:
            import_module(f"advnorm.papers.{paper.lower()}")


STUDIES = StudyRegistry("study")
#: Protocols of a paper beside the general ones, by letter: what each makes of a cell.
PAPER_PROTOCOLS: dict[str, dict[Protocol, Callable[[Cell], Cell]]] = {}


def register_study(
    name: str,
    *,
    cells: Callable[[], Iterable[Cell]],
    locate: Locate = lambda label, column: None,
    each: Sequence[Any] = (),
    deviations: Sequence[str] = (),
    printed_elsewhere: Callable[[], Mapping[tuple[str, str], float]] = dict,
    compares_print: bool = False,
) -> Callable[[Callable[..., Iterable[Clause]]], object]:
    """Register the decorated function as the check of a study. By default the paper prints no numbers.

    With ``each``, the check is called for each of the items, as the second argument (see :func:`for_each`).
    """

    def register(check: Callable[..., Iterable[Clause]]) -> object:
        whole: Check = (lambda values: for_each(each, partial(check, values))) if each else check
        own = PAPER_PROTOCOLS.setdefault(name.partition("/")[0], {})
        study = Study(
            name=name,
            cells=lambda: [replace(cell, protocols=own) for cell in cells()],
            locate=locate,
            check=whole,
            deviations=tuple(deviations),
            printed_elsewhere=printed_elsewhere,
            compares_print=compares_print,
        )
        return STUDIES.add(name, study)

    return register


def register_protocol(paper: str, protocol: Protocol) -> Callable[[Callable[[Cell], Cell]], Callable[[Cell], Cell]]:
    """Register the decorated function as a protocol of a paper: it returns a cell with replaced settings."""

    def register(plan: Callable[[Cell], Cell]) -> Callable[[Cell], Cell]:
        PAPER_PROTOCOLS.setdefault(paper, {})[protocol] = plan
        return plan

    return register


def list_studies(pattern: str = "*") -> list[str]:
    """Return the names of the studies that match a shell pattern, such as ``"A/*"``."""
    return STUDIES.names(pattern)


def names_paper(name: str) -> bool:
    """Whether ``name`` starts with the letter of a paper, as ``A/table3`` does. Imports no paper."""
    letter, slash, _ = name.partition("/")
    return bool(slash) and letter.upper() in PAPERS


def find(name: str) -> tuple[Study, Cell | None]:
    """Return a study, or a study and one of its cells: ``A/table3`` or ``A/table3/dual_bn/eps16``."""
    parts = str(name).split("/", 2)
    study = STUDIES.get("/".join(parts[:2]))
    return study, study.cell(parts[2]) if len(parts) == 3 else None


def find_all(pattern: str) -> list[tuple[Study, Cell | None]]:
    """Return the studies that match a shell pattern such as ``E/*``, or what :func:`find` returns for a name."""
    if not set(pattern) & set("*?["):
        return [find(pattern)]
    names = STUDIES.names(pattern)
    if not names:
        hint = "a pattern stands for studies, for example 'A/*'; see advnorm ls studies"
        raise ConfigError("unknown_name", f"no study matches {pattern!r}", field="study", hint=hint)
    return [find(name) for name in names]


def get(name: str) -> Config:
    """Return the configuration of a cell: ``get("A/table3/dual_bn/eps16")``, for :func:`advnorm.train`."""
    study, cell = find(name)
    if cell is None:
        hint = f"name one of its cells: {', '.join(study.by_name)}"
        raise ConfigError("missing_name", f"{name} is a study, not a cell", field="cell", hint=hint)
    return cell.config


#: A study and one of its cells.
CellAddress = tuple[str, str]


def equivalent_cells(study: str, cell: str) -> Sequence[CellAddress]:
    """Cells of the paper's other studies with the same training and measurements, sorted."""
    names = tuple(STUDIES.names(f"{study.split('/')[0]}/*"))
    found = _addresses_by_identity(names).get(STUDIES.get(study).cell(cell).identity, ())
    return [address for address in found if address[0] != study]


@cache
def _addresses_by_identity(names: tuple[str, ...]) -> Mapping[tuple[Any, ...], Sequence[CellAddress]]:
    addresses: dict[tuple[Any, ...], list[CellAddress]] = {}
    for name in sorted(names):
        for cell in STUDIES.get(name).by_name.values():
            addresses.setdefault(cell.identity, []).append((name, cell.name))
    return addresses
