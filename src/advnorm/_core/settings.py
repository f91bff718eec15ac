"""Settings: type, range, default and help in one declaration; conversion of values, with all problems at once.

    steps: Annotated[int, Setting("Number of gradient steps.", "[1, inf)")] = 10

A declaration is a field of a frozen dataclass or a keyword-only parameter. Validation, the shell's help, YAML files and
the reference page read it. Ours rather than pydantic, msgspec or cattrs: these accept infinity or ``True`` as numbers,
give one error per member of a union and no hint for a misspelt name, and the first two are compiled packages that need
not be installed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache, lru_cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from advnorm._core.errors import ConfigError, Problem, collect_problems, raise_problems, shown, unknown_name
from advnorm._core.registry import keywords

T = TypeVar("T")
#: No number of images, steps or epochs is larger; the product of two still fits 63 bits.
MOST = 2**31
#: Numbers of this size overflow float32, in which networks compute.
LARGEST = 2.0**127
#: Values that each scalar type accepts. NaN and infinity fail the comparison. None, not "", stands for no text.
ACCEPTS: Mapping[Any, Callable[[Any], bool]] = {
    bool: lambda value: isinstance(value, bool),
    int: lambda value: isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63,
    float: lambda value: isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST,
    str: lambda value: isinstance(value, str) and value != "" and value.isprintable(),
}


@dataclass(frozen=True)
class Setting:
    """Help of a setting, and the interval of its numbers, such as ``"[0, 1)"`` or ``"(0, inf)"``."""

    help: str
    range: str = ""


#: The range of every seed. Its upper limit leaves room for steps and ranks beside it in a 63-bit number.
SEEDS = "[0, 2147483647]"
Seed = Annotated[int, Setting("Seed of the random numbers of each image.", SEEDS)]


class SettingRow(NamedTuple):
    """One setting as help texts and the reference page show it."""

    name: str
    type_words: str
    range: str
    default: Any
    help: str


@dataclass(frozen=True, init=False, repr=False)
class Named:
    """The name of a registered object and its options: ``Named("trades", beta=6.0)``."""

    name: str
    options: dict[str, Any] = field(hash=False)

    def __init__(self, name: str, /, **options: Any) -> None:
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "options", options)

    def __repr__(self) -> str:
        return f"Named({', '.join([repr(self.name), *(f'{key}={value!r}' for key, value in self.options.items())])})"


# -- conversion --------------------------------------------------------------------------------------------------------


def convert(label: str, hint: Any, value: Any) -> Any:
    """Return ``value`` in the type ``hint`` and inside its range, or raise an error whose field is ``label``.

    An integer serves as float, a list as tuple, ``"none"`` as None. The members of a union are tried in order.
    """
    hint, setting = _split(hint)
    converted = _convert(label, hint, value)
    if setting.range:
        for number in converted if isinstance(converted, tuple) else (converted,):
            too_many = isinstance(number, int) and number >= MOST and "inf" in setting.range
            if too_many or (isinstance(number, int | float) and not in_range(setting.range, number)):
                words = f"{{field}} must {f'be below {MOST:,}' if too_many else range_words(setting.range)}"
                raise ConfigError("out_of_range", words, field=label, got=value)
    return converted


def _convert(label: str, hint: Any, value: Any) -> Any:
    origin, members = get_origin(hint), get_args(hint)
    text = value if isinstance(value, str) else None
    if origin in (Union, UnionType):
        if NoneType in members and (value is None or text == "none"):
            return None
        for member in members:
            with suppress(ConfigError):
                return convert(label, member, value)
    elif origin is Literal:
        if text in members:
            return text
    elif origin is Sequence and not isinstance(value, list | tuple):
        with suppress(ConfigError):  # a single value stands for a list of one
            return (convert(label, members[0], value),)
    elif origin in (tuple, Sequence):
        if isinstance(value, Mapping) and get_origin(members[0]) is tuple:  # a mapping whose order counts
            value = list(value.items())
        if isinstance(value, list | tuple):
            return tuple(convert(label, members[0], item) for item in value)
    elif hint in ACCEPTS:
        if ACCEPTS[hint](value):
            return hint(value)
    elif hint is Named:
        return _named(label, value)
    elif origin is dict:
        if isinstance(value, Mapping):
            return freeze(label, value)
    elif hint is Any or hint is inspect.Parameter.empty:
        return freeze(label, value)
    elif is_dataclass(hint):
        if isinstance(value, hint):  # pyright: ignore[reportArgumentType]
            return value
        if isinstance(value, Mapping):
            problems: list[Problem] = []
            with collect_problems(problems, label):
                return from_mapping(hint, value)  # pyright: ignore[reportArgumentType]
            raise_problems(problems)
    names = [name for member in (hint, *members) if get_origin(member) is Literal for name in get_args(member)]
    if text is not None and names and bool not in members:
        raise ConfigError.listing([unknown_name(label, value, names, label)])
    raise ConfigError("wrong_type", f"{{field}} must be {type_words(hint)}", field=label, got=value)


def _split(hint: Any) -> tuple[Any, Setting]:
    """Return a type and its declaration, which is empty if the type has none."""
    plain, *metadata = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    return plain, next((item for item in metadata if isinstance(item, Setting)), Setting(""))


def _named(label: str, value: Any) -> Named:
    if isinstance(value, Named):
        value = {**value.options, "name": value.name}
    elif isinstance(value, str):
        value = {"name": value}
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        raise ConfigError("wrong_type", f"{{field}} must be {type_words(Named)}", field=label, got=value)
    options = freeze(label, value)
    return Named(options.pop("name"), **options)


def freeze(label: str, value: Any, depth: int = 0) -> Any:
    """Return options as they are kept: None, booleans, numbers, strings, and tuples and dictionaries of them."""
    if isinstance(value, list | tuple) and depth < 5:
        return tuple(freeze(label, item, depth + 1) for item in value)
    if isinstance(value, Mapping) and depth < 5:
        for key in value:
            if not (isinstance(key, str) and key.isidentifier()):
                words = "{field}: the name of an option consists of letters, digits and '_'"
                raise ConfigError("unknown_name", words, field=label, got=key)
        return {str(key): freeze(f"{label}.{key}", item, depth + 1) for key, item in value.items()}
    for kind in (NoneType, bool, int, float, str):
        if isinstance(value, kind):
            return None if value is None else convert(label, kind, value)
    raise ConfigError("wrong_type", "{field} must consist of numbers, strings and short lists", field=label, got=value)


def to_json(value: Any) -> Any:
    """Return a frozen value in JSON's types."""
    if isinstance(value, Named):
        return {"name": value.name, **to_json(value.options)}
    if is_dataclass(value) and not isinstance(value, type):
        return {key: to_json(item) for key, item in vars(value).items()}
    if isinstance(value, Mapping):
        return {key: to_json(item) for key, item in value.items()}
    return [to_json(item) for item in value] if isinstance(value, tuple) else value


def in_range(interval: str, value: float) -> bool:
    """Whether a number lies in an interval such as ``"[0, 1)"``."""
    low, high = map(float, interval[1:-1].split(","))
    above = low < value if interval[0] == "(" else low <= value
    return above and (value < high if interval[-1] == ")" else value <= high)


def range_words(interval: str) -> str:
    """An interval in words that follow "must"."""
    low, high = interval[1:-1].split(", ")
    if high != "inf":
        return f"lie in {interval}"
    return f"be {'above' if interval[0] == '(' else 'at least'} {low}"


# -- declarations ------------------------------------------------------------------------------------------------------


@lru_cache
def _declared(kind: type) -> Mapping[str, Any]:
    """Type hints of the fields that are declared with a :class:`Setting`."""
    hints = get_type_hints(kind, include_extras=True)
    return {f.name: hints[f.name] for f in fields(kind) if _split(hints[f.name])[1].help}


def convert_fields(settings: Any) -> list[Problem]:
    """Convert every declared field of a frozen dataclass in place, for its ``__post_init__``; return the problems."""
    problems: list[Problem] = []
    for name, hint in _declared(type(settings)).items():
        with collect_problems(problems):
            object.__setattr__(settings, name, convert(name, hint, getattr(settings, name)))
    return problems


@cache
def class_settings(kind: type) -> Mapping[str, inspect.Parameter]:
    """The attributes that a class and its bases declare with a :class:`Setting`, as keyword-only parameters."""
    found: dict[str, inspect.Parameter] = {}
    for base in kind.__mro__:
        for name, hint in inspect.get_annotations(base, eval_str=True).items():
            if name not in found and _split(hint)[1].help:
                declared = {"default": getattr(kind, name), "annotation": hint}
                found[name] = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, **declared)
    return found


def convert_options(
    label: str,
    owner: Callable[..., Any] | Mapping[str, inspect.Parameter],
    options: Mapping[str, Any],
    elsewhere: Mapping[str, str] | None = None,
) -> tuple[dict[str, Any], list[Problem]]:
    """Convert options to the types of the keyword-only parameters that take them; return them with the problems.

    ``elsewhere``: parameters that are not options here, with the hint where to set them. Fields are ``label.name``.
    """
    parameters = owner if isinstance(owner, Mapping) else keywords(owner)
    elsewhere = elsewhere or {}
    converted, problems = dict(options), []
    for name, value in options.items():
        where = f"{label}.{name}" if label else name
        with collect_problems(problems):
            if name in elsewhere:
                raise ConfigError("conflict", "{field} is not an option", field=where, hint=elsewhere[name])
            if name not in parameters:
                kind = f"option of {label}" if label else "option"
                allowed = [option for option in parameters if option not in elsewhere]
                raise ConfigError.listing([unknown_name(kind, name, allowed, field=where)])
            converted[name] = convert(where, parameters[name].annotation, value)
    return converted, problems


def from_mapping(kind: type[T], settings: Mapping[Any, Any], problems: Sequence[Problem] = ()) -> T:
    """Build a dataclass from a mapping. One error lists ``problems``, unknown keys and the problems of the values."""
    known = [f.name for f in fields(kind)]  # pyright: ignore[reportArgumentType]
    problems = list(problems)
    for key in settings:
        if key not in known:
            name = key if isinstance(key, str) else shown(key)
            problems.append(unknown_name("setting", name, known, field=name))
    made = None
    with collect_problems(problems):
        made = kind(**{key: settings[key] for key in known if key in settings})
    raise_problems(problems, "bad configuration")
    assert made is not None
    return made


def describe(owner: type | Callable[..., Any]) -> list[SettingRow]:
    """List the declared settings of a dataclass, or the keyword-only parameters of another class or function."""
    if isinstance(owner, type) and is_dataclass(owner):
        hints = _declared(owner)
        defaults = {f.name: _default(f) for f in fields(owner)}
    else:
        hints = {name: parameter.annotation for name, parameter in keywords(owner).items()}
        defaults = {name: parameter.default for name, parameter in keywords(owner).items()}
    rows = []
    for name, declared in hints.items():
        hint, setting = _split(declared)
        rows.append(SettingRow(name, type_words(hint), setting.range, defaults[name], setting.help))
    return rows


def _default(declared: Any) -> Any:
    if declared.default_factory is not MISSING:
        return declared.default_factory()
    return inspect.Parameter.empty if declared.default is MISSING else declared.default


def type_words(hint: Any) -> str:
    """A type in words that follow "must be"."""
    hint, _ = _split(hint)
    origin, members = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(map(type_words, members))
    if origin is Literal:
        return " or ".join(map(repr, members))
    if origin is tuple and get_origin(members[0]) is tuple:
        return "a mapping of names"
    if origin in (tuple, list, Sequence):
        return f"a list whose items are each {type_words(members[0])}"
    if hint is Named:
        return "a name, or a mapping with a name and options"
    words = {bool: "true or false", int: "an integer", float: "a finite number", str: "a printable string"}
    return words.get(hint, "none" if hint is NoneType else "a mapping of settings")
