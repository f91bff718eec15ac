"""Plots as SVG that takes its colours and fonts from the page around it, so that it follows light and dark.

A figure is 380 units wide, about the width of a phone: its text is legible there, and larger elsewhere. The classes
``b0`` to ``b2`` are the colours of bars, ``s0`` to ``s3`` those of lines, which have a marker of their own each, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from itertools import pairwise
from typing import Literal, NotRequired, TypedDict

from advnorm._core.errors import ConfigError, did_you_mean
from advnorm.report.tables import MISSING, shown

WIDTH = 380
_CHARACTER = 6.8  # units, the average width of one


class Row(TypedDict):
    """A label and shares of 1; None where nothing was measured. ``colour``: by default that of its place."""

    label: str
    values: Sequence[float | None]
    colour: NotRequired[int]


class Bars(TypedDict):
    """Groups of horizontal bars. ``gap`` names two series: what the second loses against the first is hatched."""

    kind: Literal["bars"]
    title: str
    series: Sequence[str]
    rows: Sequence[Row]
    gap: NotRequired[tuple[int, int]]
    note: NotRequired[str]


class Lines(TypedDict):
    """Shares of 1 over ``x``: numbers that stand at their place, or names that stand in a row.

    With ``plain`` they are any numbers, and the axis is as long as they need.
    """

    kind: Literal["lines"]
    title: str
    x: Sequence[float] | Sequence[str]
    x_label: str
    rows: Sequence[Row]
    plain: NotRequired[bool]
    note: NotRequired[str]


class Dot(TypedDict):
    """A number as printed and as measured; None where there is none. ``hint`` is what pointing at it shows."""

    label: str
    paper: float | None
    ours: float | None
    spread: float | None
    hint: str


class Dots(TypedDict):
    """Printed numbers beside measured ones, in groups with a heading."""

    kind: Literal["dots"]
    title: str
    groups: Sequence[tuple[str, Sequence[Dot]]]
    note: NotRequired[str]


Figure = Bars | Lines | Dots


def draw(figure: Figure) -> str:
    """The figure as one ``<svg>`` element."""
    if figure["kind"] == "bars":
        return _bars(figure)
    if figure["kind"] == "lines":
        return _lines(figure)
    if figure["kind"] == "dots":
        return _dots(figure)
    raise ConfigError(f"unknown figure {figure['kind']!r}{did_you_mean(figure['kind'], ('bars', 'lines', 'dots'))}")


def _svg(height: float, title: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>{''.join(parts)}</svg>"
    )


def _text(x: float, y: float, text: str, *, anchor: str = "start", kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(text)}</text>'


# -- bars --------------------------------------------------------------------------------------------------------------

_BAR, _GROUP = 16, 22  # height of a bar with the space below it; of a group's label


def _bars(figure: Bars) -> str:
    names, gap = figure["series"], figure.get("gap")
    left = 10 + _CHARACTER * max(map(len, names))
    scale = WIDTH - left - 56  # room for a number behind a full bar
    parts, y = [], 0.0
    for row in figure["rows"]:
        y += _GROUP
        parts.append(_text(0, y - 6, row["label"], kind="strong"))
        for place, (name, value) in enumerate(zip(names, row["values"])):
            parts.append(_text(left - 8, y + 10, name, anchor="end", kind="quiet"))
            end = left + scale * (value or 0)
            parts.append(
                f'<rect x="{left:.1f}" y="{y + 1:.1f}" width="{end - left:.2f}" height="11" class="b{place}"/>'
            )
            before = row["values"][gap[0]] if gap and place == gap[1] else None
            if value is not None and before is not None and before > value:
                lost = scale * (before - value)
                parts.append(f'<rect x="{end:.2f}" y="{y + 1.5:.1f}" width="{lost:.2f}" height="10" class="lost"/>')
                end += lost
            value_text = MISSING if value is None else f"{shown(value, 'percent')} %"
            parts.append(_text(end + 5, y + 10.5, value_text, kind="quiet" if value is None else "number"))
            y += _BAR
        y += 8
    return _svg(y, figure["title"], parts)


# -- lines -------------------------------------------------------------------------------------------------------------

_TOP, _BOTTOM, _LEFT = 12, 200, 44


def _lines(figure: Lines) -> str:
    rows, x = figure["rows"], figure["x"]
    names = [item for item in x if isinstance(item, str)]
    places = [float(i) if names else float(item) for i, item in enumerate(x)]
    right = WIDTH - 20 - _CHARACTER * max(len(row["label"]) for row in rows)
    first, length = places[0], max(places[-1] - places[0], 1e-9)

    def across(place: float) -> float:
        return _LEFT + 6 + (right - _LEFT - 6) * (place - first) / length

    values = [value for row in rows for value in row["values"] if value is not None]
    heights = _scale(values) if figure.get("plain") else [0, 0.25, 0.5, 0.75, 1]
    bottom, top = heights[0], heights[-1]

    def up(value: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * (value - bottom) / (top - bottom)

    parts = []
    for tick in heights:
        label = f"{tick:g}" if figure.get("plain") else f"{100 * tick:g}" + " %" * (tick == 1)
        parts.append(f'<path d="M{_LEFT} {up(tick):.1f}H{right:.1f}" class="grid"/>')
        parts.append(_text(_LEFT - 5, up(tick) + 4, label, anchor="end", kind="quiet"))
    height = _BOTTOM + 36.0
    if names:  # under a slant, so that they find room
        for place, name in zip(places, names):
            at = f"translate({across(place) + 4:.1f} {_BOTTOM + 14}) rotate(-35)"
            parts.append(f'<g transform="{at}">{_text(0, 0, name, anchor="end", kind="quiet")}</g>')
        height += 4 * max(map(len, names)) - 10
    else:
        for place in _ticks(places):
            parts.append(_text(across(place), _BOTTOM + 15, f"{place:g}", anchor="middle", kind="quiet"))
    parts.append(_text((_LEFT + right) / 2, height - 4, figure["x_label"], anchor="middle", kind="quiet"))

    ends = []
    for place, row in enumerate(rows):
        turn, series = divmod(row.get("colour", place), _COLOURS)  # more lines than colours begin again, dashed
        points = [(across(place), up(value)) for place, value in zip(places, row["values"]) if value is not None]
        kind = f"s{series}" + (f" turn{turn % 3}" if turn else "")
        if points:
            path = "L".join(f"{a:.1f} {b:.1f}" for a, b in points)
            parts.append(f'<path d="M{path}" class="line {kind}"/>')
            parts += [_marker(series, a, b) for a, b in (points if len(points) < 12 else points[-1:])]
        ends.append((points[-1] if points else (right, _BOTTOM), row["label"], bool(points), kind))
    for ((a, b), label, measured, kind), y in zip(ends, _apart([end[0][1] for end in ends])):
        if measured:
            parts.append(f'<path d="M{a + 4:.1f} {b:.1f}L{right + 13:.1f} {y:.1f}" class="leader {kind}"/>')
        parts.append(_text(right + 16, y + 4, label if measured else f"{label}: {MISSING}"))
    return _svg(height, figure["title"], parts)


#: How many colours and markers the lines have.
_COLOURS = 4


def _marker(series: int, x: float, y: float) -> str:
    """Circle, square, triangle, diamond."""
    shape = (
        f"M{x - 3.2:.1f} {y:.1f}a3.2 3.2 0 1 0 6.4 0a3.2 3.2 0 1 0 -6.4 0",
        f"M{x - 3:.1f} {y - 3:.1f}h6v6h-6z",
        f"M{x - 3.8:.1f} {y + 3:.1f}h7.6l-3.8 -6.8z",
        f"M{x:.1f} {y - 4.2:.1f}l4.2 4.2l-4.2 4.2l-4.2 -4.2z",
    )[series]
    return f'<path d="{shape}" class="marker s{series}"/>'


def _ticks(places: Sequence[float]) -> list[float]:
    """A few round places between the first and the last."""
    step = max(_step(places[-1] - places[0]), 1)
    ticks = [step * i for i in range(int(places[0] // step), int(places[-1] // step) + 1)]
    return [tick for tick in ticks if places[0] <= tick <= places[-1]] or [places[0]]


def _step(span: float) -> float:
    """A round number that goes at most six times into ``span``: 1, 2 or 5 with zeros."""
    unit = 10 ** math.floor(math.log10(max(span, 1e-9) / 6))
    return next(step * unit for step in (1, 2, 5, 10) if span <= 6 * step * unit * (1 + 1e-9))


def _scale(values: Sequence[float]) -> list[float]:
    """Round numbers from zero, or below, to the largest value, or above."""
    low, high = min(0.0, *values, 0.0), max(0.0, *values, 0.0)
    step = _step((high - low) or 1.0)
    first = math.floor(low / step + 1e-9)
    last = max(math.ceil(high / step - 1e-9), first + 1)
    return [round(step * i, 12) for i in range(first, last + 1)]


def _apart(wanted: Sequence[float], distance: float = 15) -> list[float]:
    """The nearest heights to the wanted ones that labels can stand at without touching, above the axis."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    found = list(wanted)
    for before, i in pairwise(order):
        found[i] = max(found[i], found[before] + distance)
    limit: float = _BOTTOM
    for i in reversed(order):
        found[i] = min(found[i], limit)
        limit = found[i] - distance
    return found


# -- dots --------------------------------------------------------------------------------------------------------------

_ROW, _LONGEST = 18, 28  # height of a row; characters of a label


def _dots(figure: Dots) -> str:
    dots = [dot for _, group in figure["groups"] for dot in group]
    ticks = _scale([value for dot in dots for value in (dot["paper"], dot["ours"]) if value is not None])
    labels = [_short(dot["label"]) for dot in dots]
    left = 14 + _CHARACTER * max(map(len, labels), default=0)
    right = WIDTH - 12

    def across(value: float) -> float:  # a spread may reach beyond the axis
        return left + (right - left) * min(max((value - ticks[0]) / (ticks[-1] - ticks[0]), 0), 1)

    parts = [_diamond(6, 10), _text(16, 14, "paper"), _circle(70, 10), _text(80, 14, "ours")]
    y = 26.0
    axis = y + 10
    parts += [_text(across(tick), y + 5, f"{tick:g}", anchor="middle", kind="quiet") for tick in ticks]
    rows = []
    y += 10
    for heading, group in figure["groups"]:
        y += _GROUP
        rows.append(_text(0, y - 6, heading, kind="strong"))
        for dot in group:
            rows.append(_row(dot, y, left, across))
            y += _ROW
    parts += [f'<path d="M{across(tick):.1f} {axis:g}V{y:g}" class="grid"/>' for tick in ticks]
    return _svg(y + 4, figure["title"], parts + rows)


def _row(dot: Dot, y: float, left: float, across: Callable[[float], float]) -> str:
    """A row that can be pointed at and reached by the keyboard; its hint is its title."""
    middle = y + _ROW / 2
    paper, ours, spread = dot["paper"], dot["ours"], dot["spread"]
    parts = [
        f'<g class="row" tabindex="0"><title>{escape(dot["hint"])}</title>',
        f'<rect x="0" y="{y:.1f}" width="{WIDTH}" height="{_ROW}" class="hit"/>',
        _text(left - 8, middle + 4, _short(dot["label"]), anchor="end", kind="quiet"),
    ]
    if paper is not None and ours is not None:
        parts.append(f'<path d="M{across(paper):.1f} {middle:.1f}H{across(ours):.1f}" class="apart"/>')
    if ours is not None and spread:
        ends = across(ours - spread), across(ours + spread)
        parts.append(f'<path d="M{ends[0]:.1f} {middle:.1f}H{ends[1]:.1f}" class="spread"/>')
    if paper is not None:
        parts.append(_diamond(across(paper), middle))
    if ours is not None:
        parts.append(_circle(across(ours), middle))
    else:  # beside the printed number, where there is room
        at = left if paper is None else across(paper)
        end = at > WIDTH - 70
        parts.append(
            _text(at - 9 if end else at + 9, middle + 4, MISSING, anchor="end" if end else "start", kind="quiet")
        )
    return "".join(parts) + "</g>"


def _diamond(x: float, y: float) -> str:
    return f'<path d="M{x:.1f} {y - 5:.1f}l5 5l-5 5l-5 -5z" class="paper"/>'


def _circle(x: float, y: float) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" class="ours"/>'


def _short(label: str) -> str:
    return label if len(label) <= _LONGEST else f"{label[: _LONGEST - 1]}…"
