"""The values of a configuration in rows."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from advnorm.config.config import Config
from advnorm.config.validation import ELSEWHERE, WITH_OPTIONS, option_parameters


def explain(config: Config) -> list[tuple[str, Any, bool]]:
    """List every setting as ``(key, value, is_default)``; parts have dotted keys, as in overrides."""
    defaults = _flat(Config())
    for label in WITH_OPTIONS:
        if label != "data" and (named := getattr(config, label)) is not None:
            for name, parameter in option_parameters(label, named.name).items():
                if name not in ELSEWHERE.get(label, ()):
                    defaults[f"{label}.{name}"] = parameter.default
    rows = {**defaults, **_flat(config)}
    order = [f.name for f in fields(config)]
    return [
        (key, rows[key], key in defaults and defaults[key] == rows[key])
        for key in sorted(rows, key=lambda key: order.index(key.partition(".")[0]))
    ]


def _flat(config: Config) -> dict[str, Any]:
    rows = {}
    for key, value in config.to_dict().items():
        if not isinstance(value, dict):
            rows[key] = value
            continue
        if "name" in value:
            rows[key] = value.pop("name")
        rows |= {f"{key}.{part}": item for part, item in value.items()}
    return rows
