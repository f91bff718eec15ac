"""Errors for users. A problem is data; only this module renders it to text."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self

#: Maximum number of names in the list of allowed ones; timm has more than a thousand.
MOST_NAMES = 40
#: Maximum number of places in one sentence; a ResNet-50 has 53 norms.
MOST_PLACES = 6


class NOTHING:
    """Stands for "no value was received", since ``None`` is a value."""


@dataclass(frozen=True)
class Problem:
    """One problem: a stable code, the setting or argument, the requirement, the received value and the fix.

    Code and tests compare ``code`` and ``field``. The sentence is ``[PLACE: ]message[, got GOT][; HINT]``; ``{field}``
    in the message stands for the full name of the field: ``steps`` of an attack becomes ``attack.steps``.
    """

    code: str
    message: str
    field: str = ""
    got: Any = NOTHING
    hint: str = ""
    place: str = ""

    def __str__(self) -> str:
        return render((self,))

    @property
    def statement(self) -> str:
        """What is wrong and what was received, without place and fix."""
        got = "" if self.got is NOTHING else f", got {shown(self.got)}"
        return f"{self.message.replace('{field}', self.field)}{got}"

    def inside(self, parent: str) -> Problem:
        """Return the problem of a part of ``parent``: field ``steps`` inside ``attack`` becomes ``attack.steps``."""
        place = self.place if "{field}" in self.message else ": ".join(filter(None, (parent, self.place)))
        return replace(self, place=place, field=f"{parent}.{self.field}" if self.field else parent)


class AdvnormError(Exception):
    """Base of every error that advnorm raises on purpose; ``problems`` lists them all.

    >>> raise ConfigError("out_of_range", "{field} must be at least 1", field="epochs", got=0)
    """

    def __init__(
        self, code: str, message: str, field: str = "", *, got: Any = NOTHING, hint: str = "", heading: str = ""
    ) -> None:
        self._set((Problem(code, message, field, got, hint),), heading)

    @classmethod
    def listing(cls, problems: Iterable[Problem], heading: str = "") -> Self:
        """One error for several problems."""
        error = cls.__new__(cls)
        error._set(tuple(problems), heading)
        return error

    def _set(self, problems: tuple[Problem, ...], heading: str) -> None:
        self.problems, self.heading = problems, heading
        text = render(problems)
        Exception.__init__(self, f"{heading}: {text}" if heading else text)

    @property
    def code(self) -> str:
        """The code of the first problem."""
        return self.problems[0].code

    def __reduce__(self) -> Any:  # raised again from worker processes
        return type(self).listing, (self.problems, self.heading)


class ConfigError(AdvnormError, ValueError):
    """A setting, a name or a file that is not allowed."""


class RouteError(AdvnormError, RuntimeError):
    """A forward whose samples cannot be assigned to statistics banks and affine banks."""


class SurgeryError(AdvnormError, TypeError):
    """A model that cannot be converted or stripped without changing what it computes."""


def raise_problems(problems: Iterable[Problem], heading: str = "", kind: type[AdvnormError] = ConfigError) -> None:
    """Raise one error that lists every problem; do nothing without problems."""
    found = tuple(problems)
    if found:
        raise kind.listing(found, heading)


@contextmanager
def collect_problems(problems: list[Problem], parent: str = "") -> Iterator[None]:
    """Append the problems of an error, as problems inside ``parent``, to a list instead of raising the error."""
    try:
        yield
    except AdvnormError as error:
        problems.extend(problem.inside(parent) if parent else problem for problem in error.problems)


def render(problems: Iterable[Problem]) -> str:
    """Return the sentences of problems: one for equal problems of several places, and an equal fix once."""
    places: dict[tuple[str, str], list[str]] = {}
    for problem in problems:
        places.setdefault((problem.statement, problem.hint), []).append(problem.place)
    sentences: list[str] = []
    for (statement, hint), where in places.items():
        if hint and sentences and sentences[-1] == hint:
            sentences.pop()
        where = [*dict.fromkeys(filter(None, where))]
        more = f" and {len(where) - MOST_PLACES} more" if len(where) > MOST_PLACES else ""
        sentences.append(f"{', '.join(where[:MOST_PLACES])}{more}: {statement}" if where else statement)
        sentences += [hint] if hint else []
    return "; ".join(sentences)


def unknown_name(kind: str, name: object, allowed: Iterable[str], field: str = "") -> Problem:
    """Return the problem of an unknown name, with the nearest known name."""
    message = f"unknown {kind} {shown(name)}{did_you_mean(name, allowed)}"
    return Problem(code="unknown_name", message=message, field=field or kind.replace(" ", "_"))


def did_you_mean(name: object, allowed: Iterable[str]) -> str:
    """Return a hint for a misspelt name: ``, did you mean 'dual_bn'?`` or the list of allowed names."""
    allowed = list(allowed)
    nearest = nearest_name(name, allowed)
    if nearest is not None:
        return f", did you mean {nearest!r}?"
    names = ", ".join(map(repr, allowed[:MOST_NAMES])) or "nothing"
    more = len(allowed) - MOST_NAMES
    return f"; allowed: {names}{f' and {more} more' if more > 0 else ''}"


def nearest_name(name: object, allowed: Iterable[str]) -> str | None:
    """Return the shortest name that begins with ``name``, else the most similar one, else None."""
    folded = {option.lower(): option for option in allowed}
    wanted = str(name).lower()
    longer = [option for option in folded if option.startswith(wanted)] if len(wanted) > 2 else []
    close = [min(longer, key=len)] if longer else difflib.get_close_matches(wanted, folded, n=1, cutoff=0.6)
    return folded[close[0]] if close else None


def shown(value: object) -> str:
    """Return the repr of a value for a message, at most 80 characters."""
    if isinstance(value, Description):
        return str(value)
    try:
        text = repr(value)
    except Exception:  # an integer of 5000 digits, a very deep list, a foreign object
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def printable(text: str) -> str:
    """Return text without control characters and without bytes that are not Unicode: these are escaped."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


class Description(str):
    """A received value in words, rendered without quotes: ``got=Description(f"dtype {x.dtype}")``."""


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error message, or the error's name if it has no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
