"""A named collection that knows how to help with a misspelt name."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, Generic, TypeVar

from advnorm._core.errors import ConfigError, did_you_mean

T = TypeVar("T")


@cache  # a configuration asks for them, and a study has hundreds
def keywords(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """What an entry takes by keyword only: its options, with their types and defaults."""
    parameters = inspect.signature(function, eval_str=True).parameters
    return {name: parameter for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY}


class Registry(Generic[T]):
    """Maps names to entries, in the order in which they were registered."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def add(self, name: str, entry: T) -> T:
        """Register ``entry`` under ``name``; a name can be taken once."""
        if name in self._entries:
            raise ConfigError(f"{self.kind} {name!r} is registered already; choose another name")
        self._entries[name] = entry
        return entry

    def get(self, name: str) -> T:
        """The entry called ``name``, or an error that suggests the nearest name."""
        if not isinstance(name, str) or name not in self._entries:
            raise ConfigError(f"unknown {self.kind} {name!r}{did_you_mean(name, self._entries)}")
        return self._entries[name]

    def names(self, pattern: str = "*") -> list[str]:
        """Registered names that match a shell pattern."""
        return [name for name in self._entries if fnmatch.fnmatchcase(name, pattern)]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
