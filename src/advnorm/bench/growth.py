"""How time and memory of a training grow: a fitted law for each setting that takes several values."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

#: Distinct values of a setting that a law needs, so that its error has a meaning.
VALUES = 3
#: The settings of a row; others are in ``settings``.
_SETTINGS = ("model", "mode", "batch_size", "attack_steps", "image_size", "processes")
#: Seconds of a step; bytes of memory.
Quantity = Literal["seconds", "memory"]


@dataclass(frozen=True, kw_only=True)
class Law:
    """``a · x^b`` (power) or ``a + b · x`` (affine), fitted by least squares of relative errors.

    A power law is a line in logarithms. ``axis``: the setting x; ``depth`` is the first number in the model's name.
    """

    quantity: Quantity
    axis: str
    form: Literal["power", "affine"]
    a: float
    b: float
    error: float  # the largest relative error of the fit
    values: tuple[float, ...]  # of the setting
    fixed: dict[str, Any]  # the other settings

    @property
    def formula(self) -> str:
        """The law in milliseconds of a step or GiB of memory, with the setting as x."""
        name, unit = {"seconds": ("ms", 1e-3), "memory": ("GiB", 2**30)}[self.quantity]
        if self.form == "power":
            return f"{name} = {self.a / unit:.3g} · x^{self.b:.2f}"
        return f"{name} = {self.a / unit:.3g} {'-' if self.b < 0 else '+'} {abs(self.b) / unit:.3g} · x"


def fit_laws(rows: Sequence[Mapping[str, Any]]) -> list[Law]:
    """Fit a law to time and memory along each size in which rows differ and everything else is equal.

    Sizes are the numbers of a row and positive numeric options of the model and of the data.
    Rows are those of a record of ``advnorm bench train``, also of an older one.
    """
    names = dict.fromkeys(name for row in rows for name in _conditions(row))
    laws = []
    for axis in (*(name for name in names if name in _SETTINGS or name.startswith(("model.", "data."))), "depth"):
        lines: dict[str, list[tuple[float, Mapping[str, Any]]]] = {}
        for row in rows:
            conditions = _with_depth(_conditions(row)) if axis == "depth" else _conditions(row)
            x = conditions.pop(axis, None)
            if _is_size(x):
                lines.setdefault(json.dumps(conditions, sort_keys=True), []).append((x, row))
        for fixed, line in lines.items():
            if len({x for x, _ in line}) >= VALUES:
                laws += _fit_line(axis, json.loads(fixed), line)
    return laws


def _fit_line(axis: str, fixed: dict[str, Any], line: Sequence[tuple[float, Mapping[str, Any]]]) -> list[Law]:
    """The laws of rows that differ in one setting, in order of its values."""
    line = sorted(line, key=lambda point: point[0])
    form = "affine" if axis == "attack_steps" else "power"
    measured: dict[Quantity, list[Any]] = {
        "seconds": [row["batch_size"] / row["images_per_second"] for _, row in line],
        "memory": [row["memory"] for _, row in line],
    }
    values, laws = tuple(x for x, _ in line), []
    for quantity, found in measured.items():
        if all(map(_is_size, found)):
            a, b, error = fit(values, found, form)
            law = Law(quantity=quantity, axis=axis, form=form, a=a, b=b, error=error, values=values, fixed=fixed)
            laws.append(law)
    return laws


def fit(x: Sequence[float], y: Sequence[float], form: Literal["power", "affine"]) -> tuple[float, float, float]:
    """Return a, b and the largest relative error of ``a · x^b``, or of ``a + b · x`` with weights ``1 / y²``."""
    xs, ys = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    if form == "power":
        b, intercept = np.polyfit(np.log(xs), np.log(ys), 1)
        a = np.exp(intercept)
        fitted = a * xs**b
    else:
        b, a = np.polyfit(xs, ys, 1, w=1 / ys)  # numpy squares the weighted errors
        fitted = a + b * xs
    return float(a), float(b), float(np.abs(fitted / ys - 1).max())


def _conditions(row: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a row; older rows have images of 32 pixels."""
    settings = {name: row[name] for name in _SETTINGS if name in row}
    return {"image_size": 32, **settings, **row.get("settings", {})}


def _with_depth(conditions: dict[str, Any]) -> dict[str, Any]:
    """Replace the first number in the model's name by N; it is the depth."""
    model = conditions["model"]
    number = re.search(r"(?<=[a-z_])\d+", model)
    if number is None:
        return conditions
    return {**conditions, "model": f"{model[: number.start()]}N{model[number.end() :]}", "depth": int(number[0])}


def _is_size(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
