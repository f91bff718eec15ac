"""Sweeps: all combinations of several values of several settings."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product

from advnorm._core.errors import Problem, collect_problems, raise_problems, shown
from advnorm.config.config import Config

#: A value. Commas inside brackets and quotes belong to it.
_VALUE = re.compile(r"""(?:[^,\[\]{}"']|\[[^\]]*\]|\{[^}]*\}|"[^"]*"|'[^']*')+""")


def sweep_configs(config: Config, sweep: Sequence[str]) -> list[Config]:
    """Return a configuration for each combination of ``norm=bn,dual_bn``, ``seed=0,1``; the last one varies fastest.

    One error lists the problems of all combinations.
    """
    problems: list[Problem] = []
    choices: list[list[str]] = []
    for text in sweep:
        key, equals, values = text.partition("=")
        parts = _VALUE.findall(values)
        if not (key and equals) or ",".join(parts) != values or not values:
            message, hint = f"cannot read {shown(text)}", "write KEY=VALUE,VALUE, for example norm=bn,dual_bn"
            problems.append(Problem(code="wrong_type", message=message, field="sweep", hint=hint))
        choices.append([f"{key}={value}" for value in parts])
    raise_problems(problems, "bad sweep")
    configs: dict[Config, None] = {}
    for combination in product(*choices):
        found: list[Problem] = []
        with collect_problems(found):
            configs[config.with_overrides(combination)] = None
        problems += [problem for problem in found if problem not in problems]
    if config.name is not None and len({made.digest for made in configs}) > 1:
        message = "runs that differ in more than the seed need names of their own"
        problems.append(Problem(code="conflict", message=message, field="name", got=config.name, hint="omit the name"))
    raise_problems(problems, "bad sweep")
    return list(configs)
