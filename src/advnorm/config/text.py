"""Settings as text: YAML 1.2 scalars without constructors, and ``key=value`` overrides."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from advnorm._core.errors import ConfigError, Problem, collect_problems, did_you_mean, raise_problems, shown


def _scalar(text: str) -> Any:
    """A plain scalar by the rules of YAML 1.2: ``1e-3`` is a number; ``yes``, ``010:30`` and ``16/255`` are strings."""
    if text in ("", "~", "null", "Null", "NULL"):
        return None
    if text in ("true", "True", "TRUE", "false", "False", "FALSE"):
        return text.lower() == "true"
    if re.fullmatch(r"[-+]?[0-9]{1,30}", text):
        return int(text)
    if re.fullmatch(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", text):
        return float(text)
    return text


def parse_yaml(text: str) -> Any:
    """Parse plain data. Duplicate keys, tags and aliases are rejected, since they are easy to misread."""
    try:
        node = yaml.compose(text, Loader=yaml.BaseLoader)  # no constructors: a file cannot make an object
        return None if node is None else _value(node, set())
    except RecursionError:
        raise _bad_yaml("nested too deeply") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        raise _bad_yaml(f"not valid YAML: {where}{getattr(error, 'problem', None) or error}") from None


def _bad_yaml(message: str, hint: str = "") -> ConfigError:
    return ConfigError("damaged_file", message, hint=hint)


def _value(node: yaml.Node, seen: set[int]) -> Any:
    line = f"line {node.start_mark.line + 1}"
    if node.tag.removeprefix("tag:yaml.org,2002:") not in ("str", "seq", "map"):
        raise _bad_yaml(f"{line}: tags such as {node.tag!r} are not allowed", "write plain values")
    if isinstance(node, yaml.ScalarNode):
        return node.value if node.style else _scalar(node.value)
    if id(node) in seen:
        raise _bad_yaml(f"{line}: aliases are not allowed", "write the value out")
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, seen) for item in node.value]
    return unique_keys([(key.value, _value(item, seen)) for key, item in node.value])


def unique_keys(pairs: Sequence[tuple[Any, Any]]) -> dict[str, Any]:
    """Return a dictionary of pairs whose keys must differ."""
    counts = Counter(str(key) for key, _ in pairs)  # a YAML key may be a list, reported as unknown later
    raise_problems([_set_twice(key) for key, count in counts.items() if count > 1], "duplicate keys")
    return {str(key): value for key, value in pairs}


def _set_twice(key: str) -> Problem:
    return Problem(code="conflict", message="{field} is set twice", field=shown(key)[1:-1], hint="keep one")


class Dumper(yaml.SafeDumper):
    """Quotes every string that would be read as another value."""


Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style=None if _scalar(text) == text else "'"
    ),
)


def apply_overrides(
    settings: Mapping[Any, Any], overrides: Sequence[str], part_defaults: Mapping[str, Any]
) -> tuple[dict[Any, Any], list[Problem]]:
    """Return settings with ``key=value`` texts applied, and the problems. Whole settings go before their parts.

    ``part_defaults``: settings whose parts can be set one by one, as ``attack.steps=20``, with their defaults.
    """
    overrides = [overrides] if isinstance(overrides, str) else overrides
    changed, given, problems = dict(settings), {}, []
    for text in overrides:
        key, equals, value = str(text).partition("=")
        key = key.strip()
        if not equals or not key:
            words, hint = f"cannot read {shown(text)}", "write key=value, for example epochs=30"
            problems.append(Problem(code="wrong_type", message=words, field="overrides", hint=hint))
        elif key in given:
            problems.append(_set_twice(key))
        else:
            with collect_problems(problems, key):
                given[key] = parse_yaml(value)
    for key in sorted(given, key=lambda key: key.count(".")):
        whole, dot, part = key.partition(".")
        if not dot:
            changed[key] = given[key]
        elif whole not in part_defaults:
            words = f"unknown setting {key!r}{did_you_mean(whole, part_defaults)}"
            problems.append(Problem(code="unknown_name", message=words, field=key))
        else:
            before = changed.get(whole, part_defaults[whole]) or {}
            before = {"name": before} if isinstance(before, str) else before
            if isinstance(before, Mapping):  # otherwise its own problem is reported
                changed[whole] = _with_part(before, part, given[key])
    return changed, problems


def _with_part(settings: Mapping[Any, Any], key: str, value: Any) -> dict[Any, Any]:
    """Return a mapping with one part set; ``options.decay`` is a part of the mapping ``options``."""
    whole, dot, part = key.partition(".")
    inside = settings.get(whole) or {}
    if not dot or key in settings or not isinstance(inside, Mapping):
        return {**settings, key: value}
    return {**settings, whole: _with_part(inside, part, value)}
