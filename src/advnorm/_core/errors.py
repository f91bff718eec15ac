"""Errors meant for users: each says what came, what is allowed and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class AdvnormError(Exception):
    """Base of every error that advnorm raises on purpose."""


class ConfigError(AdvnormError, ValueError):
    """A setting or a name that is not allowed."""


class RouteError(AdvnormError, RuntimeError):
    """A forward whose samples cannot be assigned to statistics and affine banks."""


class SurgeryError(AdvnormError, TypeError):
    """A model that cannot be converted or stripped without changing what it computes."""


def did_you_mean(name: object, allowed: Iterable[str]) -> str:
    """A hint for a misspelt name: ``, did you mean 'dual_bn'?`` or the list of what is allowed."""
    allowed = list(allowed)
    folded = {option.lower(): option for option in allowed}
    close = difflib.get_close_matches(str(name).lower(), folded, n=1, cutoff=0.6)
    if close:
        return f", did you mean {folded[close[0]]!r}?"
    return f"; allowed: {', '.join(map(repr, allowed)) or 'nothing'}"


def first_line(error: BaseException) -> str:
    """What an error of somebody else's says, without the pages below; its name where it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def raise_all(problems: Sequence[str], heading: str, kind: type[AdvnormError] = ConfigError) -> None:
    """Raise one error that lists every problem, or return when there is none."""
    if problems:
        raise kind(f"{heading}: " + "; ".join(problems))
