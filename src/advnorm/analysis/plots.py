"""Shared parts of all figures: one style, panels of lines, grouped bars, legends and labels."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import fmean
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

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
#: The largest number of labels on an axis, and of markers on a line.
MOST_MARKS = 40

_SYMBOL = re.compile(r"(NS|AP)(?:\^(.+?))?(?:_(.+))?")


@contextmanager
def figure_style() -> Iterator[None]:
    """Scope: figures that read well in print and on screen, independent of the caller's matplotlib settings."""
    import matplotlib

    settings: Any = {
        "figure.constrained_layout.use": True,
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
        "lines.linewidth": 1.6,
        "legend.frameon": False,
        "legend.fontsize": 8,
        "svg.fonttype": "none",
        "svg.hashsalt": "advnorm",  # the same file every time
        "figure.facecolor": "white",
    }
    with matplotlib.rc_context(settings):
        yield


def new_figure(
    count: int = 1, columns: int = 1, *, height: float | None = None, **subplots: Any
) -> tuple[Figure, list[Any]]:
    """Return a figure of the common width and its panels, row by row."""
    from matplotlib.figure import Figure

    rows = -(-count // columns)
    figure = Figure(figsize=(7.0, 0.8 + 2.5 * rows if height is None else height))
    panels = list(figure.subplots(rows, columns, squeeze=False, **subplots).flat)
    for unused in panels[count:]:
        unused.remove()
    return figure, panels[:count]


def line_style(index: int, name: str = "") -> dict[str, Any]:
    """Return the style of a line by its position and domain. The first marker is largest, so that none hides another.

    NS has the colour of its affine bank, with hollow markers if the images belong to another domain.
    """
    match = _SYMBOL.fullmatch(name)
    above, below = match.groups()[1:] if match else (None, name)
    hollow = above is not None and above != below and below in DOMAIN_COLOURS
    turn, place = divmod(index, len(COLOURS))
    return {
        "color": DOMAIN_COLOURS.get(above or below or "", COLOURS[place]),
        "marker": MARKERS[place],
        "markersize": max(4.0, 6.5 - 0.5 * index),
        "linestyle": LINES[turn % 3],
        "fillstyle": "none" if hollow else FILLS[turn % 3],
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


def legend_below(figure: Figure, handles: Mapping[str, Any]) -> None:
    """Add one legend below all panels, in as few rows as possible; the figure grows with the rows."""
    longest = max(len(re.sub(r"\\mathrm|[${}\\]", "", label)) for label in handles)
    rows = -(-len(handles) // max(1, 100 // (longest + 6)))
    figure.set_figheight(figure.get_figheight() + 0.17 * (rows - 1))
    columns = -(-len(handles) // rows)
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=columns)


class Panel(NamedTuple):
    """Lines by name, each with values for every place on the horizontal axis: a number, or the name of a layer.

    Of several values at a place the mean is drawn, in a band from the lowest to the highest one.
    """

    title: str
    lines: Mapping[str, Mapping[Any, float | Sequence[float]]]
    axes: Mapping[str, Any] = MappingProxyType({})  # settings such as ylabel


def each_value(lines: Mapping[Any, Mapping[Any, Any]], value: Callable[[Any], Any]) -> dict[Any, dict[Any, Any]]:
    """Return lines of ``value(one)`` for every item of lines."""
    return {name: {place: value(one) for place, one in line.items()} for name, line in lines.items()}


def line_figure(
    panels: Sequence[Panel],
    *,
    columns: int = 1,
    xlabel: str = "norm layer, in the order of the forward pass",
    label: Callable[[str], str] = formula,
    heading: str = "",
    points_only: bool = False,
    **shared: Any,
) -> Figure:
    """Draw panels above one legend; a name has the same style in all of them. ``shared``: sharex, sharey.

    ``label`` returns the text of a name in the legend. ``points_only`` joins the points at one place, not the lines.
    """
    figure, grid = new_figure(len(panels), columns, **shared)
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    places = dict.fromkeys(place for panel in panels for line in panel.lines.values() for place in line)
    layers = {place: position for position, place in enumerate(places) if isinstance(place, str)}
    handles: dict[str, Any] = {}
    for axes, panel in zip(grid, panels):
        for name, line in panel.lines.items():
            x = [layers.get(place, place) for place in line]
            values = [value if isinstance(value, Sequence) else (value,) for value in line.values()]
            style = line_style(names.index(name), name)
            if max(map(len, values)) > 1:
                low, high = ([end(several) for several in values] for end in (min, max))
                axes.fill_between(x, low, high, color=style["color"], alpha=0.25, linewidth=0)
            style |= {"linestyle": "none"} if points_only else {"marker": ""} if len(x) > MOST_MARKS else {}
            (handles[label(name)],) = axes.plot(x, [fmean(several) for several in values], label=label(name), **style)
        if points_only:
            low, high = ([end(column) for column in zip(*(y.get_ydata() for y in axes.lines))] for end in (min, max))
            axes.vlines(range(len(layers)), low, high, color="#bbbbbb", linewidth=0.8, zorder=1)
    for number, (axes, panel) in enumerate(zip(grid, panels)):  # after all lines, which decide about shared limits
        inner_row, inner_column = number < len(panels) - columns, number % columns
        axes.set(title=panel.title, xlabel="" if inner_row and "sharex" in shared else xlabel, **panel.axes)
        if inner_column and "sharey" in shared:
            axes.set_ylabel("")
        if heading:
            axes.set_title(panel.title, fontweight="normal")
        if layers:
            step, angle = -(-len(layers) // MOST_MARKS), 90 if len(layers) > 8 else 0
            axes.set_xticks(range(0, len(layers), step), list(layers)[::step], rotation=angle, fontsize=7)
    figure.suptitle(heading, x=0.01, ha="left", fontsize=10, fontweight="bold")
    legend_below(figure, handles)
    return figure


def bar_figure(
    rows: Sequence[str], series: Mapping[str, Sequence[float]], *, number_format: str, **axes_settings: Any
) -> Figure:
    """Draw horizontal bars: a group for each row, a bar in it for each series, with their numbers."""
    figure, (axes,) = new_figure(height=1.3 + 0.23 * len(series) * len(rows))
    height, handles = 0.8 / len(series), {}
    for index, (name, values) in enumerate(series.items()):
        turn, colour = divmod(index, len(COLOURS))
        style = {"color": COLOURS[colour], "hatch": HATCHES[turn % 3], "edgecolor": "white"}
        places = [row + index * height for row in range(len(rows))]
        handles[name] = axes.barh(places, values, height, **style)
        axes.bar_label(handles[name], fmt=number_format, padding=3, fontsize=7)
    axes.set_yticks([row + 0.4 - height / 2 for row in range(len(rows))], rows)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    axes.margins(x=0.12)
    axes.set(**axes_settings)
    legend_below(figure, handles)
    return figure
