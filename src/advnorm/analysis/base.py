"""What every analysis gives: numbers with their conditions, and the figure that shows them, in one style."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from advnorm._core.records import write_json
from advnorm._core.registry import Registry, keywords

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Colours that stay apart for colour-blind readers and in grey (Okabe & Ito 2008), with markers that do too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
#: Of more series than colours, by how often these begin again.
LINES, HATCHES = ("-", "--", ":"), ("", "///", "...")
#: What clean, adversarial and other inputs look like in every figure.
DOMAIN_COLOURS = {"clean": COLOURS[0], "adv": COLOURS[1], "autoattack": COLOURS[2], "noise": COLOURS[4]}


def bar_look(index: int) -> dict[str, Any]:
    """Colour of the bars of a series; more series than colours begin again with a hatch."""
    turn, place = divmod(index, len(COLOURS))
    return {"color": COLOURS[place], "hatch": HATCHES[turn % 3], "edgecolor": "white"}


class Finding(ABC):
    """What an analysis found. ``record()`` is plain data for JSON, ``figure()`` draws it."""

    @abstractmethod
    def record(self) -> dict[str, Any]:
        """Numbers and conditions, in JSON's types."""

    @abstractmethod
    def draw(self) -> Figure:
        """The figure; called inside :func:`style`."""

    def table(self) -> tuple[Sequence[str], Sequence[Sequence[str]]] | None:
        """Head and rows of what a terminal shows of it; None where the figure says it better."""
        return None

    def figure(self) -> Figure:
        """The figure in the common style, independent of the caller's settings."""
        with style():
            return self.draw()

    def save(self, stem: Path | str) -> list[Path]:
        """Write ``stem.json``, ``stem.svg`` and ``stem.png``; returns them."""
        stem = Path(stem)
        stem.parent.mkdir(parents=True, exist_ok=True)
        paths = [stem.with_name(f"{stem.name}.{kind}") for kind in ("json", "svg", "png")]
        write_json(paths[0], self.record())
        with style():
            figure = self.draw()
            for path in paths[1:]:
                figure.savefig(path, dpi=150)
        return paths


@contextmanager
def style() -> Iterator[None]:
    """Scope: figures that read well in print and on screen, whatever the caller's matplotlib says."""
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


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """An analysis by name: of one subject or of several, with options by keyword."""

    run: Callable[..., Finding]
    summary: str
    paper: str
    several: bool = False

    def options(self) -> Mapping[str, inspect.Parameter]:
        """What it takes by keyword, with its types."""
        return keywords(self.run)


ANALYSES: Registry[Analysis] = Registry("analysis")


def list_analyses(pattern: str = "*") -> list[str]:
    """Names of the analyses that match a shell pattern."""
    return ANALYSES.names(pattern)


def register(name: str, *, summary: str, paper: str, several: bool = False) -> Callable[[Any], Any]:
    """Register a function of a subject (or, with ``several``, of a list of them) and keyword options."""

    def add(function: Callable[..., Finding]) -> Callable[..., Finding]:
        ANALYSES.add(name, Analysis(run=function, summary=summary, paper=paper, several=several))
        return function

    return add


def percent(share: float) -> str:
    """A share of 1 in a table."""
    return f"{100 * share:.1f} %"


def batches(count: int, size: int) -> Iterator[slice]:
    """Slices over so many images, equally large but for one image: a last one of few has statistics unlike the rest."""
    parts = -(-count // size)
    for part in range(parts):
        yield slice(part * count // parts, (part + 1) * count // parts)


def direct_labels(axes: Any, names: Sequence[str], at: Sequence[tuple[float, float]]) -> None:
    """Names beside the ends of lines, in their colours, moved apart where they would touch."""
    low, high = axes.get_ylim()
    least = (high - low) * 0.055
    order = sorted(range(len(names)), key=lambda i: at[i][1])
    placed = float("-inf")
    for i in order:
        placed = max(at[i][1], placed + least)
        axes.annotate(
            names[i], (at[i][0], placed), xytext=(6, 0), textcoords="offset points", va="center", color=COLOURS[i]
        )
