"""Shared parts of all figures: one style, colours, markers, legends and labels."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure
else:
    Figure = Any  # matplotlib is imported when a figure is drawn

#: Colours and markers that stay distinct for colour-blind readers and in grey (Okabe & Ito 2008).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
#: If there are more series than colours, the colours repeat with the next of these.
LINES, HATCHES, FILLS = ("-", "--", ":"), ("", "///", "..."), ("full", "none", "left")
#: Colours of clean, adversarial and other inputs in every figure.
DOMAIN_COLOURS = {"clean": COLOURS[0], "adv": COLOURS[1], "autoattack": COLOURS[2], "noise": COLOURS[4]}

_SYMBOL = re.compile(r"(NS|AP)(?:\^(.+?))?(?:_(.+))?")


@contextmanager
def figure_style() -> Iterator[None]:
    """Scope: figures that read well in print and on screen, independent of the caller's matplotlib settings."""
    import matplotlib
    from cycler import cycler

    settings: Any = {
        "figure.constrained_layout.use": True,
        "figure.figsize": (7.0, 3.6),
        "font.size": 9,
        "axes.titlesize": 10,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "grid.color": "#dddddd",
        "grid.linewidth": 0.6,
        "axes.axisbelow": True,
        "axes.prop_cycle": cycler(color=COLOURS, marker=MARKERS),
        "lines.linewidth": 1.6,
        "lines.markersize": 4,
        "legend.frameon": False,
        "legend.fontsize": 8,
        "svg.fonttype": "none",
        "svg.hashsalt": "advnorm",  # the same file every time
        "figure.facecolor": "white",
    }
    with matplotlib.rc_context(settings):
        yield


def new_figure(rows: int = 1, columns: int = 1, *, height: float = 3.6, **subplots: Any) -> tuple[Figure, Any]:
    """Return a figure of the common width and its panels: one, or an array of rows and columns."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, height))
    return figure, figure.subplots(rows, columns, **subplots)


def series_style(index: int) -> dict[str, Any]:
    """Return colour, marker and line of a series."""
    turn, place = divmod(index, len(COLOURS))
    return {
        "color": COLOURS[place],
        "marker": MARKERS[place],
        "linestyle": LINES[turn % 3],
        "fillstyle": FILLS[turn % 3],
    }


def bar_style(index: int) -> dict[str, Any]:
    """Return colour and hatch of the bars of a series."""
    turn, place = divmod(index, len(COLOURS))
    return {"color": COLOURS[place], "hatch": HATCHES[turn % 3], "edgecolor": "white"}


def domain_style(index: int, name: str = "") -> dict[str, Any]:
    """Return the style of a series by its domain. The first marker is largest, so that none hides another.

    NS has the colour of its affine bank, with hollow markers if the images belong to another domain.
    """
    match = _SYMBOL.fullmatch(name)
    above, below = match.groups()[1:] if match else (None, name)
    hollow = above is not None and above != below and below in DOMAIN_COLOURS
    return {
        "color": DOMAIN_COLOURS.get(above or below or "", COLOURS[index % len(COLOURS)]),
        "marker": MARKERS[index % len(MARKERS)],
        "markersize": max(3.5, 6.5 - index),
        "linestyle": LINES[index // len(COLOURS) % 3],
        "fillstyle": "none" if hollow else "full",
    }


def formula(name: str) -> str:
    """Return ``NS^adv_clean`` or ``AP_adv`` as a matplotlib formula, and other text unchanged."""
    match = _SYMBOL.fullmatch(name)
    if match is None:
        return name
    marks = (f"{sign}{{\\mathrm{{{text}}}}}" for sign, text in zip("^_", match.groups()[1:]) if text)
    return f"$\\mathrm{{{match[1]}}}{''.join(marks)}$".replace("_", r"\_").replace(r"\_{", "_{")


def wrap_names(names: Iterable[object], width: int) -> list[str]:
    """Break names at spaces and after underscores into lines of at most ``width`` characters."""
    fill = partial(textwrap.fill, width=max(width, 8))
    return [fill(str(name).replace("_", "_ ")).replace("_ ", "_") for name in names]


def legend_below(figure: Figure, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """Add one legend below all panels, in as few rows as possible; the figure grows with the rows."""
    longest = max(len(re.sub(r"\\mathrm|[${}\\]", "", label)) for label in labels)
    rows = -(-len(labels) // max(1, 100 // (longest + 6)))
    figure.set_figheight(figure.get_figheight() + 0.17 * (rows - 1))
    figure.legend(handles, labels, loc="outside lower center", ncols=-(-len(labels) // rows))


def label_layers(axes: Any, names: Sequence[str]) -> None:
    """Label the horizontal axis with layers in the order of the forward pass, at most 40 of them."""
    step = -(-len(names) // 40)
    axes.set_xticks(range(0, len(names), step), names[::step], rotation=90 if len(names) > 8 else 0, fontsize=7)
    axes.set_xlabel("norm layer, in the order of the forward pass")


def label_line_ends(axes: Any, names: Sequence[str], ends: Sequence[tuple[float, float]]) -> None:
    """Write names beside the ends of lines, in their colours, and move them apart if they would touch."""
    low, high = axes.get_ylim()
    height = float("-inf")
    for i in sorted(range(len(names)), key=lambda i: ends[i][1]):
        height = max(ends[i][1], height + (high - low) * 0.055)
        axes.annotate(
            names[i], (ends[i][0], height), xytext=(6, 0), textcoords="offset points", va="center", color=COLOURS[i]
        )


def grouped_bars(
    axes: Any, rows: Sequence[str], series: Mapping[str, Sequence[float]], *, number_format: str, **label_settings: Any
) -> None:
    """Draw horizontal bars: a group for each row, a bar in it for each series, with their numbers."""
    height = 0.8 / len(series)
    for index, (name, values) in enumerate(series.items()):
        places = [row + index * height for row in range(len(rows))]
        bars = axes.barh(places, values, height, label=name, **bar_style(index))
        axes.bar_label(bars, fmt=number_format, padding=3, fontsize=7)
    axes.set_yticks([row + 0.4 - height / 2 for row in range(len(rows))], rows, **label_settings)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
