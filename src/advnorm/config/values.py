"""Values of settings: brought into their types, or refused with one readable reason each."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from functools import lru_cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from advnorm._core.errors import ConfigError, did_you_mean, raise_all

T = TypeVar("T")
LARGEST = sys.float_info.max  # NaN and infinity fail the comparison, and integers that are no float


@dataclass(frozen=True, init=False, repr=False)
class Named:
    """A registered thing and its options: ``Named("trades", beta=6.0)``."""

    name: str
    options: dict[str, Any] = field(hash=False)

    def __init__(self, name: str, /, **options: Any) -> None:
        if "name" in options:
            raise ConfigError(f"an option cannot be called 'name'; write Named({name!r}, ...) once")
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "options", options)

    def __repr__(self) -> str:
        return f"Named({', '.join([repr(self.name), *(f'{key}={value!r}' for key, value in self.options.items())])})"


def shown(value: Any) -> str:
    """A value in a message: short, whatever it is."""
    try:
        text = repr(value)
    except Exception:  # an integer of 5000 digits, a very deep list, a foreign object
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def fitted(label: str, hint: Any, value: Any) -> Any:
    """``value`` in the type that a setting has, or an error: an int serves as float, a list as tuple, "none" as None.

    The members of a union are tried in their order.
    """
    origin, members = get_origin(hint), get_args(hint)
    text = value if isinstance(value, str) else None
    if origin in (Union, UnionType):
        if NoneType in members and (value is None or text == "none"):
            return None
        for member in members:
            try:
                return fitted(label, member, value)
            except ConfigError:
                continue
    elif origin is Literal:
        if text in members:
            return text
    elif origin is Sequence and not isinstance(value, list | tuple):
        with suppress(ConfigError):  # one stands for a list of it
            return (fitted(label, members[0], value),)
    elif origin in (tuple, Sequence):
        if isinstance(value, list | tuple):
            return tuple(fitted(label, members[0], item) for item in value)
    elif hint is bool:
        if isinstance(value, bool):
            return value
    elif hint is int:
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63:
            return int(value)
    elif hint is float:
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST:
            return float(value)
    elif hint is str:
        if text is not None and text.isprintable():
            return str(text)
    elif hint is Named:
        return _named(label, value)
    elif origin is dict:
        if isinstance(value, Mapping):
            return plain(label, value)
    elif hint is Any:
        return plain(label, value)
    elif is_dataclass(hint):
        if isinstance(value, hint):  # pyright: ignore[reportArgumentType]
            return value
        if isinstance(value, Mapping):
            try:
                return from_mapping(hint, value)  # pyright: ignore[reportArgumentType]
            except ConfigError as error:
                raise ConfigError(f"{label}: {told(error)}") from None
    names = [name for member in (hint, *members) if get_origin(member) is Literal for name in get_args(member)]
    if text is not None and names and bool not in members:
        raise ConfigError(f"unknown {label} {shown(value)}{did_you_mean(text, names)}")
    raise ConfigError(f"{label} must be {_words(hint)}, got {shown(value)}")


def _words(hint: Any) -> str:
    """A type, as it is called in messages."""
    origin, members = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(map(_words, members))
    if origin is Literal:
        return " or ".join(map(repr, members))
    if origin in (tuple, Sequence):
        return f"a list whose items are each {_words(members[0])}"
    if hint is Named:
        return "a name, or a mapping with a name and options"
    words = {bool: "true or false", int: "an integer", float: "a finite number", str: "a printable string"}
    return words.get(hint, "none" if hint is NoneType else "a mapping of settings")


def _named(label: str, value: Any) -> Named:
    if isinstance(value, Named):
        value = {**value.options, "name": value.name}
    elif isinstance(value, str):
        value = {"name": value}
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        raise ConfigError(f"{label} must be a name, or a mapping with a name and options, got {shown(value)}")
    options = plain(label, value)
    return Named(options.pop("name"), **options)


def plain(label: str, value: Any, depth: int = 0) -> Any:
    """Options as they are kept: None, booleans, numbers, strings, and tuples and dictionaries of them."""
    if isinstance(value, list | tuple) and depth < 5:
        return tuple(plain(label, item, depth + 1) for item in value)
    if isinstance(value, Mapping) and depth < 5:
        odd = [key for key in value if not (isinstance(key, str) and key.isidentifier())]
        if odd:
            raise ConfigError(f"{label}: the name of an option is made of letters, digits and '_', got {shown(odd[0])}")
        return {str(key): plain(f"{label}.{key}", item, depth + 1) for key, item in value.items()}
    for kind in (NoneType, bool, int, float, str):
        if isinstance(value, kind):
            return None if value is None else fitted(label, kind, value)
    raise ConfigError(f"{label} must be made of numbers, strings and short lists, got {shown(value)}")


def thawed(value: Any) -> Any:
    """The same in JSON's types."""
    if isinstance(value, Named):
        return {"name": value.name, **thawed(value.options)}
    if is_dataclass(value) and not isinstance(value, type):
        return {key: thawed(item) for key, item in vars(value).items()}
    if isinstance(value, Mapping):
        return {key: thawed(item) for key, item in value.items()}
    return [thawed(item) for item in value] if isinstance(value, tuple) else value


hints = lru_cache(get_type_hints)


def fit(settings: Any) -> dict[str, str]:
    """Bring every field of a frozen dataclass into its type; the problems by field."""
    problems = {}
    for name, hint in hints(type(settings)).items():
        try:
            object.__setattr__(settings, name, fitted(name, hint, getattr(settings, name)))
        except ConfigError as error:
            problems[name] = str(error)
    return problems


def from_mapping(kind: type[T], settings: Mapping[Any, Any], problems: Sequence[str] = ()) -> T:
    """A dataclass from a mapping; unknown keys, problems found before and those of the values in one error."""
    known = [f.name for f in fields(kind)]  # pyright: ignore[reportArgumentType]
    problems = list(problems)
    for key in settings:
        if key not in known:
            hint = did_you_mean(key if isinstance(key, str) else shown(key), known)
            problems.append(f"unknown setting {shown(key)}{hint}")
    made = None
    try:
        made = kind(**{key: settings[key] for key in known if key in settings})
    except ConfigError as error:
        problems.append(told(error))
    raise_all(problems, "bad configuration")
    assert made is not None
    return made


def told(error: ConfigError) -> str:
    """An error's problems without its heading."""
    return re.sub(r"\Abad [\w ]+: ", "", str(error))


def inside(limit: str, value: float) -> bool:
    low, high = map(float, limit[1:-1].split(","))
    return (low < value if limit[0] == "(" else low <= value) and (value < high if limit[-1] == ")" else value <= high)


def limit_words(limit: str) -> str:
    low, high = limit[1:-1].split(", ")
    if high != "inf":
        return f"lie in {limit}"
    return f"be {'above' if limit[0] == '(' else 'at least'} {low}"


def with_options(
    label: str, named: Named, allowed: Mapping[str, inspect.Parameter], elsewhere: Mapping[str, str]
) -> tuple[Named, list[str]]:
    """Bring options into the types of the parameters that take them; the problems. An empty ``label`` is not told."""
    problems, options = [], {}
    for name, value in named.options.items():
        options[name], where = value, f"{label}.{name}" if label else name
        if name in elsewhere:
            problems.append(f"{where}: {elsewhere[name]}")
        elif name not in allowed:
            hint = did_you_mean(name, [option for option in allowed if option not in elsewhere])
            problems.append(f"unknown option {name!r} of {named.name}{hint}")
        else:
            try:
                options[name] = fitted(where, allowed[name].annotation, value)
            except ConfigError as error:
                problems.append(str(error))
    return Named(named.name, **options), problems
