"""A named collection that suggests the nearest name for a misspelt one."""

from __future__ import annotations

import fnmatch
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any, ClassVar, Generic, TypeVar

from advnorm._core.errors import ConfigError, unknown_name

T = TypeVar("T")
Target = TypeVar("Target")


@cache  # studies with hundreds of configurations ask for the same ones
def keywords(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The keyword-only parameters of a function or class: its options, with their types and defaults."""
    parameters = inspect.signature(function, eval_str=True).parameters
    return {name: parameter for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY}


#: Entry points of installed packages: modules that register parts when they are imported.
PLUGINS = "advnorm.plugins"


_plugins_loaded = False


def load_plugins() -> None:
    """Import the modules that installed packages name in the group ``advnorm.plugins``, once.

    Called when a name is looked up that is not registered, or when names are listed. A module that cannot be imported
    is reported by a warning, so that it does not stop work that does not need it.
    """
    global _plugins_loaded
    if _plugins_loaded:
        return
    _plugins_loaded = True  # before the imports: a plugin may list names itself
    for plugin in entry_points(group=PLUGINS):
        from advnorm._core.torchvision_operators import prepare_torchvision  # reports are read without torch

        prepare_torchvision()  # the plugin may import timm
        try:
            plugin.load()
        except Exception as error:  # a plugin may raise anything
            warnings.warn(f"plugin {plugin.name} ({plugin.value}): {type(error).__name__}: {error}", stacklevel=2)


class Registry(Generic[T]):
    """Entries by name, in the order of their registration.

    >>> MODELS = Registry("model", ModelEntry)
    >>> register_model = MODELS.register  # @register_model("resnet18", depth=18)

    ``make`` builds an entry from the decorated object and the details of the decorator; without it the object is the
    entry.
    """

    #: Number of entries that were added to any registry.
    additions: ClassVar[int] = 0

    def __init__(self, kind: str, make: Callable[..., T] | None = None) -> None:
        self.kind = kind
        self._make = make
        self._entries: dict[str, T] = {}

    def register(self, name: str, **details: Any) -> Callable[[Target], Target]:
        """Return a decorator that registers a class or function under ``name``."""

        def add(target: Target) -> Target:
            entry: Any = target if self._make is None else self._make(target, **details)
            self.add(name, entry)
            return target

        return add

    def add(self, name: str, entry: T) -> T:
        """Register ``entry`` under ``name``."""
        if name in self._entries:
            words = f"{self.kind} {name!r} is already registered"
            raise ConfigError("already_exists", words, field="name", hint="choose another name")
        self._entries[name] = entry
        Registry.additions += 1
        return entry

    def get(self, name: str) -> T:
        """Return the entry called ``name``; the error for an unknown name suggests the nearest one."""
        if not Registry.__contains__(self, name):
            raise ConfigError.listing([unknown_name(self.kind, name, self.suggestions(name))])
        return self._entries[name]

    def suggestions(self, name: object) -> list[str]:
        """The names that the error for the unknown ``name`` can suggest."""
        return list(self)

    def names(self, pattern: str = "*") -> list[str]:
        """Registered names that match a shell pattern."""
        # Not ``for name in self``: a subclass may iterate over this list.
        return [name for name in Registry.__iter__(self) if fnmatch.fnmatchcase(name, pattern)]

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str):
            return False
        if name not in self._entries:
            load_plugins()
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        load_plugins()
        return iter(dict(self._entries))

    def __len__(self) -> int:
        return len(self._entries)
