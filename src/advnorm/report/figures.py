"""Plots as SVG that takes its colours and fonts from the page around it, so that it follows light and dark.

A figure is 380 units wide, about the width of a phone: its text is legible there, and larger elsewhere. The classes
``b0`` to ``b2`` are the colours of bars, ``s0`` to ``s3`` those of lines, which have a marker of their own each, too.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """Shares of 1 over ``x``: numbers that stand at their place, or names that stand in a row."""

    kind: Literal["lines"]
    title: str
    x: Sequence[float] | Sequence[str]
    x_label: str
    rows: Sequence[Row]
    note: NotRequired[str]


Figure = Bars | Lines


def draw(figure: Figure) -> str:
    """The figure as one ``<svg>`` element."""
    if figure["kind"] == "bars":
        return _bars(figure)
    if figure["kind"] == "lines":
        return _lines(figure)
    raise ConfigError(f"unknown figure {figure['kind']!r}{did_you_mean(figure['kind'], ('bars', 'lines'))}")


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

    def up(value: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * value

    parts = []
    for tick in (0, 0.25, 0.5, 0.75, 1):
        parts.append(f'<path d="M{_LEFT} {up(tick):.1f}H{right:.1f}" class="grid"/>')
        parts.append(_text(_LEFT - 5, up(tick) + 4, f"{100 * tick:g}" + " %" * (tick == 1), anchor="end", kind="quiet"))
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
        series = row.get("colour", place)
        points = [(across(place), up(value)) for place, value in zip(places, row["values"]) if value is not None]
        kind = f"s{series}"
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
    span = places[-1] - places[0]
    step = next((s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500) if span / s <= 6), span / 4)
    ticks = [step * i for i in range(int(places[0] // step), int(places[-1] // step) + 1)]
    return [tick for tick in ticks if places[0] <= tick <= places[-1]] or [places[0]]


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
