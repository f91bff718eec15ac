"""Validation of the JSON files that advnorm writes: the types of their entries, and a digest that shows edits."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from itertools import islice
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

from advnorm._core.errors import ConfigError, Problem, raise_problems
from advnorm._core.records import digest, read_json
from advnorm._core.settings import ACCEPTS, Setting, in_range, range_words, type_words

#: Problems of one file that are reported.
MOST_PROBLEMS = 5
#: An accuracy, or another share of the images, in a record.
Fraction = Annotated[float, Setting("A fraction.", "[0, 1]")]


def read_record(path: Path, shape: Any, form: str | int, fix: str) -> dict[str, Any]:
    """Read a JSON file of a format and a shape (a ``TypedDict`` or a dataclass); ``fix`` is the hint if it differs.

    A shape with an entry ``digest: str`` requires the digest. Shapes of older records, which have none, do not.
    """
    record = read_json(path, fix)
    check_record(record, shape, path, fix, form)
    return record


def check_record(record: Any, shape: Any, source: object, fix: str, form: str | int | None = None) -> None:
    """Raise if data have another format or shape, or a digest that does not fit them."""
    found = record if isinstance(record, Mapping) else {}
    if form is not None and found.get("format") != form:
        author = f"advnorm {found['advnorm']}" if "advnorm" in found else "another version of advnorm"
        words = f"{source}, written by {author}, must have the format {form!r}"
        raise ConfigError("not_supported", words, field=f"{source}: format", got=found.get("format"), hint=fix)
    problems = list(islice(_problems(record, shape, ""), MOST_PROBLEMS))
    if not problems and found.get("digest") not in (None, _content(found)):
        problems.append(Problem("damaged_file", "{field} does not fit the content: it was edited or damaged", "digest"))
    raise_problems([_in_file(problem, source, fix) for problem in problems])


def with_digest(record: Mapping[str, Any]) -> dict[str, Any]:
    """Add a digest of the content to a record, by which :func:`check_record` notices an edit."""
    return {**record, "digest": _content(record)}


def _content(record: Mapping[str, Any]) -> str:
    content = {key: value for key, value in record.items() if key != "digest"}
    return digest(json.dumps(content, sort_keys=True))


def _in_file(problem: Problem, source: object, fix: str) -> Problem:
    where = f"{source}: {problem.field}" if problem.field else str(source)
    return replace(problem, field=where, hint=fix)


def _problems(value: Any, hint: Any, where: str) -> Iterator[Problem]:
    origin, members = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        given = [member for member in members if member is not NoneType]
        if len(given) == 1 and value is not None:
            yield from _problems(value, given[0], where)
            return
        fits = any(next(_problems(value, member, where), None) is None for member in members)
    elif origin is Annotated:
        found, interval = list(_problems(value, members[0], where)), members[1].range
        if not found and not in_range(interval, value):
            found = [Problem("damaged_file", f"{{field}} must {range_words(interval)}", where, got=value)]
        yield from found
        return
    elif (is_typeddict(hint) or is_dataclass(hint)) and isinstance(value, dict):
        has_default = {f.name: f.default is not MISSING for f in fields(hint)} if is_dataclass(hint) else {}  # pyright: ignore
        for name, member in get_type_hints(hint, include_extras=True).items():
            optional = get_origin(member) is NotRequired
            if name in value:
                yield from _problems(value[name], get_args(member)[0] if optional else member, _join(where, name))
            elif not optional and not has_default.get(name):
                yield Problem(code="damaged_file", message="{field} is missing", field=_join(where, name))
        return
    elif (origin is dict and isinstance(value, dict)) or (origin is list and isinstance(value, list | tuple)):
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _problems(item, members[-1], _join(where, name))
        return
    elif origin is tuple and isinstance(value, list | tuple):  # JSON has lists for tuples
        fits = len(value) == len(members)
        for place, (item, member) in enumerate(zip(value, members)):
            yield from _problems(item, member, _join(where, place))
    elif origin is Literal:
        fits = isinstance(value, str) and value in members
    elif hint in (int, float):
        fits = ACCEPTS[hint](value)
    else:
        fits = hint is Any or (hint in (str, bool, NoneType, dict, list) and isinstance(value, hint))
    if not fits:
        yield Problem(code="damaged_file", message=f"{{field}} must be {type_words(hint)}", field=where, got=value)


def _join(where: str, name: object) -> str:
    return f"{where}.{name}" if where else str(name)
