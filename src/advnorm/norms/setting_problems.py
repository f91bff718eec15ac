"""Validation of the settings of a routed norm."""

from __future__ import annotations

from typing import Any

from advnorm._core.errors import Problem
from advnorm._core.settings import ACCEPTS, MOST, convert_options
from advnorm.norms.plan import Plan


def setting_problems(norm_class: type, shape: tuple[Any, ...], plan: Plan, dim: Any, **settings: Any) -> list[Problem]:
    """Problems of the arguments of a norm of ``norm_class``; its annotations have the ranges of the ``settings``."""
    _, problems = convert_options("", norm_class, settings)
    if dim not in (None, 1, 2, 3):
        message = "{field} must be the number of spatial dimensions, 1, 2 or 3"
        problems.append(Problem(code="out_of_range", message=message, field="dim", got=dim))
    if not shape or not all(ACCEPTS[int](size) and 1 <= size < MOST for size in shape):
        message = f"{{field}} must be integers from 1 to {MOST - 1:,}"
        problems.append(Problem(code="out_of_range", message=message, field="num_features", got=shape))
    if not problems and plan.statistics == "group" and shape[0] % settings["num_groups"]:
        message = f"{{field}} must divide the {shape[0]} channels"
        problems.append(Problem("not_divisible", message, "num_groups", got=settings["num_groups"]))
    return problems
