"""Charts as inline SVG that takes its colours and fonts from the page around it and follows light and dark.

Matplotlib would need fixed colours, so no dark mode, no hints per row, and 10 to 50 times the bytes per figure; that is
why the SVG is written here. A figure is 380 units wide, about the width of a phone, where its text stays legible. The
classes ``b0`` to ``b2`` are the colours of bars, ``s0`` to ``s3`` those of lines, each with a marker of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from itertools import pairwise
from typing import Literal, NotRequired, TypedDict

from advnorm.report.tables import MISSING, format_cell

WIDTH = 380
_CHARACTER_WIDTH = 6.8  # on average


class FigureRow(TypedDict):
    """A label and shares of 1; None if not measured. ``colour`` is by default that of the row's position."""

    label: str
    values: Sequence[float | None]
    colour: NotRequired[int]


class BarChart(TypedDict):
    """Groups of horizontal bars. ``gap`` names two series: the loss of the second against the first is hatched."""

    kind: Literal["bars"]
    title: str
    series: Sequence[str]
    rows: Sequence[FigureRow]
    gap: NotRequired[tuple[int, int]]
    note: NotRequired[str]


class LineChart(TypedDict):
    """Shares of 1 over ``x``, which are numbers on a scale or evenly spaced names.

    With ``plain`` the values are any numbers, and the axis fits them.
    """

    kind: Literal["lines"]
    title: str
    x: Sequence[float] | Sequence[str]
    x_label: str
    rows: Sequence[FigureRow]
    plain: NotRequired[bool]
    note: NotRequired[str]


class DotRow(TypedDict):
    """A printed and a measured number; None if missing. ``hint`` is shown when the row is pointed at."""

    label: str
    paper: float | None
    ours: float | None
    spread: float | None
    hint: str


class DotPlot(TypedDict):
    """Printed numbers beside measured ones, in groups with a heading."""

    kind: Literal["dots"]
    title: str
    groups: Sequence[tuple[str, Sequence[DotRow]]]
    note: NotRequired[str]


class PointRow(TypedDict):
    """Shares of 1 with their spreads, one per series; None if not measured."""

    label: str
    values: Sequence[float | None]
    spreads: Sequence[float | None]


class PointPlot(TypedDict):
    """A line of points for each row, in groups with a heading; at most four series."""

    kind: Literal["points"]
    title: str
    series: Sequence[str]
    groups: Sequence[tuple[str, Sequence[PointRow]]]
    note: NotRequired[str]


Figure = BarChart | LineChart | DotPlot | PointPlot


def draw_figure(figure: Figure) -> str:
    """Return the figure as one ``<svg>`` element."""
    if figure["kind"] == "bars":
        return _draw_bars(figure)
    if figure["kind"] == "lines":
        return _draw_lines(figure)
    return _draw_dots(figure) if figure["kind"] == "dots" else _draw_points(figure)


def _svg(height: float, title: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>{''.join(parts)}</svg>"
    )


def _text(x: float, y: float, text: str, *, anchor: str = "start", kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(text)}</text>'


# -- bars --------------------------------------------------------------------------------------------------------------

_BAR, _GROUP = 16, 22  # heights: a bar with the space below it, a group's label


def _draw_bars(figure: BarChart) -> str:
    names, gap = figure["series"], figure.get("gap")
    left = 10 + _CHARACTER_WIDTH * max(map(len, names))
    scale = WIDTH - left - 56  # leaves room for a number after a full bar
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
            value_text = MISSING if value is None else f"{format_cell(value, 'percent')} %"
            parts.append(_text(end + 5, y + 10.5, value_text, kind="quiet" if value is None else "number"))
            y += _BAR
        y += 8
    return _svg(y, figure["title"], parts)


# -- lines -------------------------------------------------------------------------------------------------------------

_TOP, _BOTTOM, _LEFT = 12, 200, 44
_BESIDE = 18  # characters of the longest label beside its line


def _draw_lines(figure: LineChart) -> str:
    rows, x = figure["rows"], figure["x"]
    names = [item for item in x if isinstance(item, str)]
    places = [float(i) if names else float(item) for i, item in enumerate(x)]
    below = max(len(row["label"]) for row in rows) > _BESIDE  # long labels leave no room for the lines
    right = WIDTH - 20 - (0 if below else _CHARACTER_WIDTH * max(len(row["label"]) for row in rows))
    first, length = places[0], max(places[-1] - places[0], 1e-9)

    def across(place: float) -> float:
        return _LEFT + 6 + (right - _LEFT - 6) * (place - first) / length

    values = [value for row in rows for value in row["values"] if value is not None]
    heights = _axis_ticks(values) if figure.get("plain") else [0, 0.25, 0.5, 0.75, 1]
    bottom, top = heights[0], heights[-1]

    def up(value: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * (value - bottom) / (top - bottom)

    parts = []
    for tick in heights:
        label = f"{tick:g}" if figure.get("plain") else f"{100 * tick:g}" + " %" * (tick == 1)
        parts.append(f'<path d="M{_LEFT} {up(tick):.1f}H{right:.1f}" class="grid"/>')
        parts.append(_text(_LEFT - 5, up(tick) + 4, label, anchor="end", kind="quiet"))
    height = _BOTTOM + 36.0
    if names:  # slanted, to save room
        for place, name in zip(places, names):
            at = f"translate({across(place) + 4:.1f} {_BOTTOM + 14}) rotate(-35)"
            parts.append(f'<g transform="{at}">{_text(0, 0, name, anchor="end", kind="quiet")}</g>')
        height += 4 * max(map(len, names)) - 10
    else:
        for place in _x_ticks(places):
            parts.append(_text(across(place), _BOTTOM + 15, f"{place:g}", anchor="middle", kind="quiet"))
    parts.append(_text((_LEFT + right) / 2, height - 4, figure["x_label"], anchor="middle", kind="quiet"))

    ends = []
    for place, row in enumerate(rows):
        turn, series = divmod(row.get("colour", place), _COLOURS)  # more lines than colours: dashed
        points = [(across(place), up(value)) for place, value in zip(places, row["values"]) if value is not None]
        kind = f"s{series}" + (f" turn{turn % 3}" if turn else "")
        if points:
            path = "L".join(f"{a:.1f} {b:.1f}" for a, b in points)
            parts.append(f'<path d="M{path}" class="line {kind}"/>')
            parts += [_marker(series, a, b) for a, b in (points if len(points) < 12 else points[-1:])]
        ends.append((points[-1] if points else (right, _BOTTOM), row["label"], bool(points), kind))
    for place, (_, label, measured, kind) in enumerate(ends[: len(ends) * below]):
        parts.append(f'<path d="M4 {height + 14:.1f}h26" class="line {kind}"/>')
        parts.append(_marker(rows[place].get("colour", place) % _COLOURS, 17, height + 14))
        parts.append(_text(38, height + 18, _shorten(label if measured else f"{label}: {MISSING}", 50)))
        height += 17
    beside = [] if below else _spread_labels([end[0][1] for end in ends])
    for ((a, b), label, measured, kind), y in zip(ends, beside):
        if measured:
            parts.append(f'<path d="M{a + 4:.1f} {b:.1f}L{right + 13:.1f} {y:.1f}" class="leader {kind}"/>')
        parts.append(_text(right + 16, y + 4, label if measured else f"{label}: {MISSING}"))
    return _svg(height + 8 * below, figure["title"], parts)


#: Number of colours and markers of lines.
_COLOURS = 4
#: Height of a label beside a line.
_LABEL_HEIGHT = 15


def _marker(series: int, x: float, y: float) -> str:
    """Circle, square, triangle, diamond."""
    shape = (
        f"M{x - 3.2:.1f} {y:.1f}a3.2 3.2 0 1 0 6.4 0a3.2 3.2 0 1 0 -6.4 0",
        f"M{x - 3:.1f} {y - 3:.1f}h6v6h-6z",
        f"M{x - 3.8:.1f} {y + 3:.1f}h7.6l-3.8 -6.8z",
        f"M{x:.1f} {y - 4.2:.1f}l4.2 4.2l-4.2 4.2l-4.2 -4.2z",
    )[series]
    return f'<path d="{shape}" class="marker s{series}"/>'


def _x_ticks(places: Sequence[float]) -> list[float]:
    """Round positions between the first and the last; whole ones on a scale of whole numbers."""
    step = _round_step(places[-1] - places[0])
    if all(place == int(place) for place in places):
        step = max(step, 1)
    first, last = (math.floor(place / step + 1e-9) for place in (places[0], places[-1]))
    ticks = [round(step * i, 12) for i in range(first, last + 1)]
    return [tick for tick in ticks if places[0] <= tick <= places[-1]] or [places[0]]


def _round_step(span: float) -> float:
    """The smallest step of 1, 2 or 5 times a power of ten that divides ``span`` into at most six."""
    unit = 10 ** math.floor(math.log10(max(span, 1e-9) / 6))
    return next(step * unit for step in (1, 2, 5, 10) if span <= 6 * step * unit * (1 + 1e-9))


def _axis_ticks(values: Sequence[float]) -> list[float]:
    """Round ticks that cover zero and all values."""
    low, high = min(0.0, *values, 0.0), max(0.0, *values, 0.0)
    step = _round_step((high - low) or 1.0)
    first = math.floor(low / step + 1e-9)
    last = max(math.ceil(high / step - 1e-9), first + 1)
    return [round(step * i, 12) for i in range(first, last + 1)]


def _spread_labels(wanted: Sequence[float]) -> list[float]:
    """Move labels to the closest heights above the axis at which they do not touch."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    found = list(wanted)
    for before, i in pairwise(order):
        found[i] = max(found[i], found[before] + _LABEL_HEIGHT)
    limit: float = _BOTTOM
    for i in reversed(order):
        found[i] = min(found[i], limit)
        limit = found[i] - _LABEL_HEIGHT
    return found


# -- dots --------------------------------------------------------------------------------------------------------------

_ROW, _LONGEST = 18, 28  # height of a row, characters of a label


def _draw_dots(figure: DotPlot) -> str:
    dots = [dot for _, group in figure["groups"] for dot in group]
    ticks = _axis_ticks([value for dot in dots for value in (dot["paper"], dot["ours"]) if value is not None])
    labels = [_shorten(dot["label"]) for dot in dots]
    left = 14 + _CHARACTER_WIDTH * max(map(len, labels), default=0)
    right = WIDTH - 12

    def across(value: float) -> float:  # a spread may exceed the axis
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
            rows.append(_draw_dot_row(dot, y, left, across))
            y += _ROW
    parts += [f'<path d="M{across(tick):.1f} {axis:g}V{y:g}" class="grid"/>' for tick in ticks]
    return _svg(y + 4, figure["title"], parts + rows)


def _draw_dot_row(dot: DotRow, y: float, left: float, across: Callable[[float], float]) -> str:
    """A row that the pointer and the keyboard can reach; its hint is its title."""
    middle = y + _ROW / 2
    paper, ours, spread = dot["paper"], dot["ours"], dot["spread"]
    parts = [
        f'<g class="row" tabindex="0"><title>{escape(dot["hint"])}</title>',
        f'<rect x="0" y="{y:.1f}" width="{WIDTH}" height="{_ROW}" class="hit"/>',
        _text(left - 8, middle + 4, _shorten(dot["label"]), anchor="end", kind="quiet"),
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
    else:  # beside the printed number, on the side with room
        at = left if paper is None else across(paper)
        end = at > WIDTH - 70
        place, anchor = (at - 9, "end") if end else (at + 9, "start")
        parts.append(_text(place, middle + 4, MISSING, anchor=anchor, kind="quiet"))
    return "".join(parts) + "</g>"


def _diamond(x: float, y: float) -> str:
    return f'<path d="M{x:.1f} {y - 5:.1f}l5 5l-5 5l-5 -5z" class="paper"/>'


def _circle(x: float, y: float) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" class="ours"/>'


def _shorten(label: str, longest: int = _LONGEST) -> str:
    return label if len(label) <= longest else f"{label[: longest - 1]}…"


# -- points ------------------------------------------------------------------------------------------------------------


def _draw_points(figure: PointPlot) -> str:
    labels = [row["label"] for _, group in figure["groups"] for row in group]
    left = 14 + _CHARACTER_WIDTH * max(map(len, labels))
    scale, parts, x, y = WIDTH - left - 14, [], 6.0, 10.0
    for series, name in enumerate(figure["series"]):  # the legend, in as many lines as it needs
        width = 30 + _CHARACTER_WIDTH * len(name)
        x, y = (x, y) if x + width < WIDTH or x == 6 else (6.0, y + 17)
        parts += [_marker(series, x, y), _text(x + 9, y + 4, name)]
        x += width
    y += 20
    ticks, axis, rows = (0, 0.25, 0.5, 0.75, 1), y + 6, []
    parts += [_text(left + scale * tick, y, f"{100 * tick:g}", anchor="middle", kind="quiet") for tick in ticks]
    y += 6
    for heading, group in figure["groups"]:
        y += _GROUP
        rows.append(_text(0, y - 6, _shorten(heading, 54), kind="strong"))
        for row in group:
            middle = y + _ROW / 2
            rows.append(_text(left - 8, middle + 4, row["label"], anchor="end", kind="quiet"))
            for series, (value, spread) in enumerate(zip(row["values"], row["spreads"])):
                at = left + scale * (value or 0)
                if value is not None and spread:
                    ends = (left + scale * min(max(value + side * spread, 0), 1) for side in (-1, 1))
                    rows.append(f'<path d="M{next(ends):.1f} {middle:.1f}H{next(ends):.1f}" class="line s{series}"/>')
                rows += [_marker(series, at, middle)] if value is not None else []
            y += _ROW
    parts += [f'<path d="M{left + scale * tick:.1f} {axis:g}V{y:g}" class="grid"/>' for tick in ticks]
    return _svg(y + 4, figure["title"], parts + rows)
