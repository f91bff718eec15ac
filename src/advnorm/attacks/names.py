"""Attacks by name: the registry, and the grammar of names, ``FAMILY[STEPS]{-OPTION}``: ``pgd20-restarts5-worst``.

The longest registered family that fits counts. An option is a flag with a fixed value or a word with a number.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from advnorm._core.errors import ConfigError, Problem, raise_problems, unknown_name
from advnorm._core.registry import Registry
from advnorm.attacks.base import Attack
from advnorm.threat import Norm


@dataclass(frozen=True, kw_only=True)
class NameOption:
    """An option in an attack's name. It sets ``setting`` to ``value``, or to ``parse(number)`` if it takes a number.

    ``norm``: the only threat norm for which the number has a meaning.
    """

    setting: str
    value: Any = None
    parse: Callable[[str], Any] | None = None
    norm: Norm | None = None


@dataclass(frozen=True)
class AttackFamily:
    """A registered name: the attack class, the settings that the name fixes, and the options that it takes.

    ``steps`` is the default number of steps in the name, or None if the name takes no number.
    """

    attack: type[Attack]
    _: KW_ONLY
    summary: str
    paper: str = ""
    steps: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, NameOption] = field(default_factory=dict)


ATTACKS: Registry[AttackFamily] = Registry("attack", AttackFamily)
register_attack = ATTACKS.register
"""Decorator that registers an attack class: ``@register_attack(name, steps=10, summary="…")``.

``steps`` is the default number of steps; without it the name takes no number. ``options`` declares the options that may
follow in the name, by word: see :func:`count_options` and :class:`NameOption`. ``settings`` are fixed by the name.
``summary`` is required, ``paper`` is optional.
"""


def count_options(*settings: str) -> dict[str, NameOption]:
    """Options that set whole numbers under their own names: ``steps20``, ``restarts5``."""
    return {name: NameOption(setting=name, parse=int) for name in settings}


def list_attacks(pattern: str = "*") -> list[str]:
    """One name per registered attack that :func:`get` accepts; a shell pattern matches with or without its steps."""
    names = {name: f"{name}{ATTACKS.get(name).steps or ''}" for name in ATTACKS}
    return [full for name, full in names.items() if fnmatchcase(name, pattern) or fnmatchcase(full, pattern)]


def get(name: str, **settings: Any) -> Attack:
    """Create an attack by name: ``get("pgd20-restarts5", threat=threat)``; keywords set what the name leaves open."""
    family, named = parse_name(name)
    by_name = {**family.settings, **named}
    problems = []
    if "threat" not in settings:
        problems.append(Problem("missing", "{field} is missing", "threat", hint="give threat=ThreatModel(eps='8/255')"))
    for key in settings:
        if key in by_name:
            problems.append(Problem("conflict", "the name sets {field} already", key, hint="change one of the two"))
    norm = getattr(settings.get("threat"), "norm", None)
    for word, option in family.options.items():
        if option.norm is not None and option.setting in named and norm not in (None, option.norm):
            message = f"option {word!r} is defined for {option.norm} only, and the threat is {norm}"
            hint = f"create the attack with {option.setting}= instead of using its name"
            problems.append(Problem(code="conflict", field=option.setting, message=message, hint=hint))
    known = [f.name for f in dataclasses.fields(family.attack) if f.init]
    problems += [unknown_name("setting", key, known, field=key) for key in settings if key not in known]
    raise_problems(problems, f"bad attack {name!r}")
    return family.attack(**by_name, **settings)


def parse_name(name: str) -> tuple[AttackFamily, dict[str, Any]]:
    """Return the family of a name and the settings in it."""
    for family_name in sorted(ATTACKS, key=len, reverse=True):
        match = re.fullmatch(re.escape(family_name) + r"(\d+)?((?:-[a-z_]+[\d.]*)*)", str(name))
        if match is None:
            continue
        family, problems = ATTACKS.get(family_name), []
        settings: dict[str, Any] = {}
        if match[1] is not None and family.steps is None:
            message = f"{family_name} takes no number of {{field}}"
            problems.append(Problem(code="not_supported", field="steps", message=message, got=int(match[1])))
        elif family.steps is not None:
            settings["steps"] = int(match[1] or family.steps)
        for token in match[2].split("-")[1:]:
            problem = _parse_option(token, family, settings)
            problems += [problem] if problem else []
        raise_problems(problems, f"bad attack {name!r}")
        return family, settings
    raise ConfigError.listing([unknown_name("attack", name, list_attacks())])


def _parse_option(token: str, family: AttackFamily, settings: dict[str, Any]) -> Problem | None:
    """Add the setting of one option to ``settings``, or return the problem with it."""
    word = token if token in family.options else token.rstrip("0123456789.")
    option, number = family.options.get(word), token[len(word) :]
    if option is None:
        return unknown_name("option", word, family.options)
    if option.setting in settings:
        return Problem(code="conflict", field=option.setting, message="{field} is set twice")
    try:
        settings[option.setting] = option.parse(number) if option.parse else option.value
    except ValueError:
        kind = "a whole number" if option.parse is int else "a number"
        return Problem(code="wrong_type", field=option.setting, message=f"option {word!r} needs {kind}", got=number)
    if number and not option.parse:
        return Problem(code="wrong_type", field=option.setting, message=f"option {word!r} takes no number", got=number)
    return None
