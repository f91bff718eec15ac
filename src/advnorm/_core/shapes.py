"""Files that we wrote are read back by their shape, the types of the entries that readers use; a digest shows edits."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

from advnorm._core.errors import ConfigError, Problem, raise_problems
from advnorm._core.records import digest, read_json
from advnorm._core.settings import type_words

#: Problems of one file that are reported.
MOST_PROBLEMS = 5


def read_record(path: Path, shape: Any, form: str | int, cure: str) -> dict[str, Any]:
    """Read a JSON file of a format and a shape (a ``TypedDict``); ``cure`` is the hint for a file that differs."""
    record = read_json(path)
    if record.get("format") != form:
        words = (
            f"{path}, written by advnorm {record.get('advnorm', 'of another version')}, must have the format {form!r}"
        )
        raise ConfigError("not_supported", words, field=f"{path}: format", got=record.get("format"), hint=cure)
    check_record(record, shape, path, cure)
    return record


def check_record(record: Any, shape: Any, source: object, cure: str) -> None:
    """Raise if data have another shape, or if they have a digest that does not fit them."""
    problems = list(islice(_problems(record, shape, ""), MOST_PROBLEMS))
    if not problems and isinstance(record, Mapping) and record.get("digest") not in (None, _content(record)):
        message = "{field} does not fit the content: it was edited or damaged"
        problems.append(Problem(code="damaged_file", message=message, field="digest"))
    raise_problems([_in_file(problem, source, cure) for problem in problems])


def with_digest(record: Mapping[str, Any]) -> dict[str, Any]:
    """Add a digest of the content to a record, by which :func:`check_record` notices an edit."""
    return {**record, "digest": _content(record)}


def _content(record: Mapping[str, Any]) -> str:
    content = {key: value for key, value in record.items() if key != "digest"}
    return digest(json.dumps(content, sort_keys=True))


def _in_file(problem: Problem, source: object, cure: str) -> Problem:
    where = f"{source}: {problem.field}" if problem.field else str(source)
    return Problem(code=problem.code, message=problem.message, field=where, got=problem.got, hint=cure)


def _problems(value: Any, hint: Any, where: str) -> Iterator[Problem]:
    origin, members = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        fits = any(next(_problems(value, member, where), None) is None for member in members)
    elif is_typeddict(hint) and isinstance(value, dict):
        for name, member in get_type_hints(hint, include_extras=True).items():
            optional = get_origin(member) is NotRequired
            if name in value:
                yield from _problems(value[name], get_args(member)[0] if optional else member, _join(where, name))
            elif not optional:
                yield Problem(code="damaged_file", message="{field} is missing", field=_join(where, name))
        return
    elif (origin is dict and isinstance(value, dict)) or (origin is list and isinstance(value, list)):
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _problems(item, members[-1], _join(where, name))
        return
    elif origin is tuple and isinstance(value, list):  # JSON has lists for tuples
        fits = len(value) == len(members)
        for place, (item, member) in enumerate(zip(value, members)):
            yield from _problems(item, member, _join(where, place))
    elif origin is Literal:
        fits = isinstance(value, str) and value in members
    elif hint in (int, float):
        fits = isinstance(value, int if hint is int else (int, float)) and not isinstance(value, bool)
    else:
        fits = hint is Any or (hint in (str, bool, NoneType, dict, list) and isinstance(value, hint))
    if not fits:
        yield Problem(code="damaged_file", message=f"{{field}} must be {type_words(hint)}", field=where, got=value)


def _join(where: str, name: object) -> str:
    return f"{where}.{name}" if where else str(name)
