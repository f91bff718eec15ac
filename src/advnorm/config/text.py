"""Settings as text: YAML 1.2 scalars without constructors, JSON, and ``key=value`` overrides."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from advnorm._core.errors import ConfigError, did_you_mean, raise_all, shown


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
    """Plain data only. Duplicate keys, tags and aliases are refused: none of them says what it seems to say."""
    try:
        node = yaml.compose(text, Loader=yaml.BaseLoader)  # no constructors: nothing in a file can make an object
        return None if node is None else _value(node, set())
    except RecursionError:
        raise ConfigError("nested too deeply") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        raise ConfigError(f"cannot be read as YAML: {where}{getattr(error, 'problem', None) or error}") from None


def _value(node: yaml.Node, seen: set[int]) -> Any:
    line = f"line {node.start_mark.line + 1}"
    if node.tag.removeprefix("tag:yaml.org,2002:") not in ("str", "seq", "map"):
        raise ConfigError(f"{line}: tags such as {node.tag!r} are not allowed; write plain values")
    if isinstance(node, yaml.ScalarNode):
        return node.value if node.style else _scalar(node.value)
    if id(node) in seen:
        raise ConfigError(f"{line}: aliases are not allowed; write the value out")
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, seen) for item in node.value]
    return _unique([(key.value, _value(item, seen)) for key, item in node.value])


def _unique(pairs: Sequence[tuple[Any, Any]]) -> dict[str, Any]:
    counts = Counter(str(key) for key, _ in pairs)  # a YAML key may be a list; it is told as unknown
    raise_all([f"{shown(key)} stands there twice; keep one" for key, n in counts.items() if n > 1], "duplicate keys")
    return {str(key): value for key, value in pairs}


class Dumper(yaml.SafeDumper):
    """Quotes every string that would be read as something else."""


Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style=None if _scalar(text) == text else "'"
    ),
)


def overridden(
    settings: Mapping[Any, Any], overrides: Sequence[str], in_parts: Mapping[str, Any]
) -> tuple[dict[Any, Any], list[str]]:
    """Settings with ``key=value`` texts applied, whole settings before their parts whatever the order; problems.

    ``in_parts``: settings whose parts can be set one by one, as ``attack.steps=20``, with their defaults.
    """
    if isinstance(overrides, str):
        return dict(settings), [f"overrides are a list of texts, got the text {shown(overrides)}; put it into a list"]
    changed, problems, given = dict(settings), [], {}
    for text in overrides:
        key, equals, value = str(text).partition("=")
        key = key.strip()
        if not equals or not key:
            problems.append(f"cannot read {shown(text)}; write key=value, for example epochs=30")
        elif key in given:
            problems.append(f"{key} is set twice; keep one")
        else:
            try:
                given[key] = parse_yaml(value)
            except ConfigError as error:
                problems.append(f"{shown(text)}: {error}")
    for key in sorted(given, key=lambda key: key.count(".")):
        whole, dot, part = key.partition(".")
        if not dot:
            changed[key] = given[key]
        elif whole not in in_parts:
            problems.append(f"unknown setting {key!r}{did_you_mean(whole, in_parts)}")
        else:
            before = changed.get(whole, in_parts[whole])
            before = {"name": before} if isinstance(before, str) else before
            before = {} if before is None else before
            if isinstance(before, Mapping):  # else its own problem is told
                changed[whole] = {**before, part: given[key]}
    return changed, problems


def text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError("is no text in UTF-8") from None


def read_yaml(path: Path) -> Any:
    settings = parse_yaml(text_of(path))
    return {} if settings is None else settings


def read_json_file(path: Path) -> Any:
    try:
        return json.loads(text_of(path), object_pairs_hook=_unique)
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"cannot be read as JSON: {error}") from None
