"""Settings in rows: the values of a configuration, and the reference table of all settings."""

from __future__ import annotations

from dataclasses import fields
from inspect import Parameter
from typing import Any

from advnorm._core.settings import Named, SettingRow, describe
from advnorm.config.config import Config
from advnorm.config.fields import AttackConfig
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


def declared_settings() -> list[SettingRow]:
    """Every setting as declared; those of the attack follow ``attack`` with dotted names."""
    rows = []
    for row in describe(Config):
        rows.append(row)
        if row.name == "attack":
            rows += [part._replace(name=f"attack.{part.name}") for part in describe(AttackConfig)]
    return rows


#: Types in fewer words than error messages use.
_SHORT = {
    "'": "`",
    "` or `": "`, `",
    "a list whose items are each": "list:",
    "an integer": "integer",
    "a finite number": "number",
    "a printable string": "text",
    "a name, or a mapping with a name and options": "name, or mapping with name and options",
    "a mapping of settings": "mapping",
}


def settings_table() -> str:
    """The reference table of all settings, in Markdown."""
    lines = ["| setting | default | type | meaning |", "|---|---|---|---|"]
    for row in declared_settings():
        words = row.type_words
        for long, short in _SHORT.items():
            words = words.replace(long, short)
        allowed = f"{words}, in {row.range}" if row.range else words
        lines.append(f"| `{row.name}` | {_default_words(row.default)} | {allowed} | {row.help} |")
    return "\n".join(lines) + "\n"


def _default_words(default: Any) -> str:
    if default is Parameter.empty or isinstance(default, AttackConfig):
        return ""
    if isinstance(default, Named):
        default = default.name
    if default is None or default in ((), {}):
        return "none"
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"
