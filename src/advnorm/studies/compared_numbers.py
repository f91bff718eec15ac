"""Measured numbers beside the printed ones; numbers of figures, which print none, as single numbers and series."""

from __future__ import annotations

import statistics
from collections.abc import Set
from typing import TypedDict

from advnorm.studies.study import PrintedNumber, Values


class ComparedNumber(TypedDict):
    """A printed number and its measured mean over seeds; None if one of them is missing.

    ``spread`` is the standard deviation over at least two seeds, with n - 1 in the denominator.
    """

    row: str
    column: str
    cell: str
    value: str
    paper: float | None
    ours: float | None
    spread: float | None
    n: int
    difference: float | None


class NumberSeries(TypedDict):
    """Means over seeds along training, over radii or over channels. ``over`` names the axis."""

    cell: str
    value: str
    over: str
    x: list[int]
    ours: list[float]


def compare_number(values: Values, number: PrintedNumber) -> ComparedNumber:
    """Return a printed number with the measured one."""
    sample, paper = values.get((number.cell, number.value), ()), number.printed
    ours = statistics.fmean(sample) if sample else None
    return ComparedNumber(
        row=number.row,
        column=number.column,
        cell=number.cell,
        value=number.value,
        paper=paper,
        ours=ours,
        spread=statistics.stdev(sample) if len(sample) > 1 else None,
        n=len(sample),
        difference=None if ours is None or paper is None else ours - paper,
    )


def arrange_numbers(values: Values, first: Set[tuple[str, str]]) -> tuple[list[ComparedNumber], list[NumberSeries]]:
    """Separate single numbers from series: ``accuracy/0``, ``accuracy/1`` or ``1/loss``, ``2/loss``.

    Layers form a series too: ``layers/AP/bn1/total``, ``layers/AP/layer1.0.bn1/total``. The numbers in ``first`` come
    first. Other series that are constant are left out.
    """
    families: dict[tuple[str, str, str], dict[int, str]] = {}
    for cell, name in sorted(values, key=lambda key: key not in first):
        parts = name.split("/")
        if len(parts) > 1 and parts[0].isdecimal() and parts[1].endswith("layers"):
            continue  # layers along training: their sums are shown
        if len(parts) == 4 and parts[0].endswith("layers"):
            family = cell, "/".join([*parts[:2], parts[3]]), "layer, from input to output"
            layers = families.setdefault(family, {})
            layers[len(layers) + 1] = name
            continue
        places = [index for index, part in enumerate(parts) if part.isascii() and part.isdecimal()]
        at = (0 if places[0] == 0 else places[-1]) if places else len(parts)  # a leading number is an epoch
        family = "/".join([*parts[:at], *parts[at + 1 :]])
        if "conditions" not in parts and parts[0] != "channels" and parts[-1] not in ("epoch", "step"):
            drawn = "channels that were drawn, in order" if (cell, "channels/0") in values else "place in the list"
            over = ("epoch" if at == 0 else drawn) if places else ""
            families.setdefault((cell, family, over), {})[int(parts[at]) if places else 0] = name
    singles, series = [], []
    for (cell, family, over), names in families.items():
        if len(names) < 3:
            for name in names.values():
                number = PrintedNumber(row=cell, column=short_name(name), cell=cell, value=name, printed=None)
                singles.append(compare_number(values, number))
            continue
        ours = [statistics.fmean(values[cell, names[x]]) for x in sorted(names)]
        if len(set(ours)) > 1 or any((cell, name) in first for name in names.values()):
            series.append(NumberSeries(cell=cell, value=short_name(family), over=over, x=sorted(names), ours=ours))
    return singles, series


def short_name(name: str) -> str:
    """Drop the prefix that every value of a cell's only network has (see :class:`Measure`)."""
    return name.replace("networks/run/", "")
