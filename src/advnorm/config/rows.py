"""The values of a configuration in rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from advnorm.config.config import Config
from advnorm.config.validation import ELSEWHERE, WITH_OPTIONS, option_parameters


def explain(config: Config) -> list[tuple[str, Any, bool]]:
    """List every setting as ``(key, value, is_default)``; parts have dotted keys, as in overrides."""
    defaults = flat_settings(Config())
    for label in WITH_OPTIONS:
        if label != "data" and (named := getattr(config, label)) is not None:
            for name, parameter in option_parameters(label, named.name).items():
                if name not in ELSEWHERE.get(label, ()):
                    defaults[f"{label}.{name}"] = parameter.default
    rows = {**defaults, **flat_settings(config)}
    order = [f.name for f in fields(config)]
    return [
        (key, rows[key], key in defaults and defaults[key] == rows[key])
        for key in sorted(rows, key=lambda key: order.index(key.partition(".")[0]))
    ]


def flat_settings(config: Config) -> dict[str, Any]:
    """The settings of a configuration with dotted names, as ``--set`` has them."""
    flat: dict[str, Any] = {}
    for name, value in config.to_dict().items():
        parts = value if isinstance(value, Mapping) else {"name": value}
        own = {"name": parts["name"]} if "name" in parts else {}  # comes first
        flat |= {name if part == "name" else f"{name}.{part}": inner for part, inner in {**own, **parts}.items()}
    return flat
