"""Building blocks of the checks of claims: margins, numbers over seeds, and clauses that show what they compare.

No paper defines "comparable" or "significant". A clause therefore carries its margin, and a margin states its meaning
and its source: the paper's words, or "our margin". Margins are never widened so that the printed numbers pass: a page
reports the clauses that the paper's own numbers fail (:attr:`Study.printed_conclusion`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from advnorm.studies.uncertainty import MeasuredValues

#: Measured numbers by cell and name, each a list over seeds.
Values = Mapping[tuple[str, str], Sequence[float]]


class Margin(float):
    """A threshold of a clause with its meaning and source. ``str`` gives both: ``up to 2 % (our margin: …)``."""

    meaning: str
    source: str

    def __new__(cls, value: float, meaning: str, source: str) -> Margin:
        found = super().__new__(cls, value)
        found.meaning, found.source = meaning.format(f"{value:g}"), source
        return found

    def __str__(self) -> str:
        return f"{self.meaning} ({self.source})"


COMPARABLE = Margin(
    3.0,
    "comparable, similar, nearly the same: within {} points; a large gap: more than {} points".replace("{}", "3"),
    "our margin: paper A calls differences of up to 2.3 points comparable; 1,000 images give ±3 points at 30 %",
)
ALMOST_NONE = Margin(2.0, "almost no robustness: up to {} %", "our margin: paper A writes almost zero for up to 0.5 %")
SIGNIFICANT = Margin(
    1.0, "significant: {} point or more", "our margin: the smallest gain that paper E calls significant is 1.6 points"
)
#: The words of a claim, for readers of a verdict.
DEFINITIONS = {
    "comparable": f"within {COMPARABLE:g} points",
    "far": f"by more than {COMPARABLE:g} points",
    "significant": f"by {SIGNIFICANT:g} point or more",
    "almost no robustness": f"up to {ALMOST_NONE:g} %",
}


def mean(values: Values, cell: str, value: str) -> float:
    """Return the mean of a value over seeds; raise KeyError if it was not measured."""
    found = values[cell, value]
    average = sum(found) / len(found)
    return values.estimate((cell, value), average) if isinstance(values, MeasuredValues) else average


def epochs_of(values: Values, cell: str, value: str) -> list[int]:
    """Return the epochs after which a value was measured, sorted; raise KeyError if there are none."""
    split = [path.partition("/") for name, path in values if name == cell]
    epochs = sorted(int(epoch) for epoch, _, rest in split if rest == value and epoch.isdecimal())
    if not epochs:
        raise KeyError((cell, value))
    return epochs


def means_along_training(values: Values, cell: str, value: str) -> list[float]:
    return [mean(values, cell, f"{epoch}/{value}") for epoch in epochs_of(values, cell, value)]


def are_robust(*accuracies: float, above: float = ALMOST_NONE) -> bool:
    """Whether each accuracy under attack, in percent, exceeds almost zero, or another level."""
    return min(accuracies) > above


def join_numbers(*numbers: float, form: str = ".1f") -> str:
    """``40.1 and 39.5``: the numbers that a clause compares, by default accuracies."""
    return " and ".join(f"{number:{form}}" for number in numbers)


class Clause(NamedTuple):
    """One part of a claim with the numbers that it compares, whether it holds, and its margin if it has one."""

    text: str
    held: bool
    margin: Margin | None = None

    @classmethod
    def higher(cls, text: str, one: float, other: float, *, by: float = 0.0, form: str = ".1f") -> Clause:
        """``one`` exceeds ``other`` by more than ``by``."""
        margin = by if isinstance(by, Margin) else None
        return cls(f"{text}: {join_numbers(one, other, form=form)}", one > other + by, margin)

    @classmethod
    def far_higher(cls, text: str, one: float, other: float) -> Clause:
        return cls.higher(text, one, other, by=COMPARABLE)

    @classmethod
    def lower(cls, text: str, one: float, other: float, *, form: str = ".1f") -> Clause:
        return cls(f"{text}: {join_numbers(one, other, form=form)}", one < other)

    @classmethod
    def significantly_higher(
        cls, text: str, one: float, other: float, *, by: Margin = SIGNIFICANT, form: str = ".1f"
    ) -> Clause:
        return cls(f"{text}: {join_numbers(one, other, form=form)}", one >= other + by, by)

    @classmethod
    def comparable(cls, text: str, one: float, other: float) -> Clause:
        return cls(f"{text}: {join_numbers(one, other)}", abs(one - other) <= COMPARABLE, COMPARABLE)

    @classmethod
    def robust(cls, text: str, *accuracies: float, above: Margin = ALMOST_NONE) -> Clause:
        return cls(f"{text}: {join_numbers(*accuracies)}", are_robust(*accuracies, above=above), above)

    @classmethod
    def almost_no_robustness(cls, text: str, *accuracies: float) -> Clause:
        return cls(f"{text}: {join_numbers(*accuracies)}", max(accuracies) <= ALMOST_NONE, ALMOST_NONE)

    @classmethod
    def in_cases(
        cls,
        text: str,
        held: Collection[bool],
        detail: str,
        *,
        share: Margin | None = None,
        margin: Margin | None = None,
    ) -> Clause:
        """``text: in 17 of 20 cases, DETAIL``. All cases must hold, or a ``share`` of them."""
        required = len(held) if share is None else share * len(held)
        return cls(f"{text}: in {sum(held)} of {len(held)} cases, {detail}", sum(held) >= required, share or margin)

    @classmethod
    def conjunction(cls, text: str, parts: Iterable[Clause]) -> Clause:
        """All parts hold. Shows those that fail, else all. A failing part decides even if a later one is missing."""
        read: list[Clause] = []
        try:
            read.extend(parts)
        except KeyError:
            if all(part.held for part in read):
                raise
        failed = [part for part in read if not part.held]
        return cls(f"{text}: {', '.join(part.text for part in failed or read)}", not failed)


T = TypeVar("T")


def for_each(items: Iterable[T], clauses: Callable[[T], Iterable[Clause]]) -> Iterator[Clause]:
    """Yield the clauses of every item. A number that one item lacks does not hide the clauses of the others."""
    missing: KeyError | IndexError | None = None
    for item in items:
        try:
            yield from clauses(item)
        except (KeyError, IndexError) as error:
            missing = error
    if missing is not None:
        raise missing


def in_parts(*parts: Iterable[Clause]) -> Iterator[Clause]:
    """Yield the clauses of every part. A number that one part lacks does not hide the clauses of the others."""
    return for_each(parts, iter)
