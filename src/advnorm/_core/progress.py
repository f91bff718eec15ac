"""Progress of long work: bars on a terminal, else a log line at least every 30 seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

#: Seconds between two log lines: below 30, because the next step may take a while.
LINE_EVERY = 25.0


class ProgressDisplay:
    """Show nothing; the displays of :func:`show_progress` override this."""

    #: Seconds after which it is worth computing a new ``detail``; infinite if nothing is shown.
    detail_every = float("inf")

    def task(
        self, description: str, total: float | None = None, *, completed: float = 0, unit: str = ""
    ) -> ProgressTask:
        """Add a task. Without a ``total`` only its description is shown."""
        return ProgressTask(self, description, total, completed, unit)

    def print(self, line: str) -> None:
        """Print a line of its own, above the bars."""

    def refresh(self, task: ProgressTask) -> None:
        """Show the state of a task."""


class ProgressTask:
    """A piece of work with a description, completed and total amounts, and a detail line such as losses."""

    def __init__(
        self, display: ProgressDisplay, description: str, total: float | None, completed: float, unit: str
    ) -> None:
        self.display, self.description, self.total = display, description, total
        self.completed, self.unit, self.detail, self.done = completed, unit, "", False
        self.handle: Any = None
        self._next_detail = 0.0 if display.detail_every < float("inf") else float("inf")
        display.refresh(self)

    def update(
        self, completed: float | None = None, *, description: str | None = None, detail: str | None = None
    ) -> None:
        """Set the completed amount, the description or the detail line."""
        self.completed = self.completed if completed is None else completed
        self.description = self.description if description is None else description
        self.detail = self.detail if detail is None else detail
        self.display.refresh(self)

    def advance(self, amount: float = 1) -> None:
        """Add to the completed amount."""
        self.update(self.completed + amount)

    def finish(self) -> None:
        """Remove the task's bar."""
        self.done = True
        self.display.refresh(self)

    def wants_detail(self) -> bool:
        """Whether it is time for a new detail line; then the next one is due ``detail_every`` seconds later."""
        if (now := time.monotonic()) < self._next_detail:
            return False
        self._next_detail = now + self.display.detail_every
        return True


class _Lines(ProgressDisplay):
    detail_every = LINE_EVERY

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._last = stream, time.monotonic()

    def print(self, line: str) -> None:
        with suppress(OSError, ValueError):  # nobody reads the log any more: no reason to stop
            print(line, file=self._stream, flush=True)

    def refresh(self, task: ProgressTask) -> None:
        finished = task.done or task.completed == task.total
        if finished or time.monotonic() - self._last < LINE_EVERY:
            return
        self._last = time.monotonic()
        amount = "" if task.total is None else f": {int(task.completed):,} of {int(task.total):,} {task.unit}".rstrip()
        self.print(f"{task.description}{amount}{f'  {task.detail}' if task.detail else ''}")


class _Bars(ProgressDisplay):
    detail_every = 0.5  # a new detail may cost a device synchronization

    def __init__(self, bars: Any) -> None:
        self._bars = bars

    def print(self, line: str) -> None:
        console = self._bars.console
        console.print(fold(line, console.width))

    def refresh(self, task: ProgressTask) -> None:
        if task.handle is None:
            task.handle = self._bars.add_task(task.description, total=task.total, completed=task.completed)
            return
        self._bars.detail = fold(task.detail, self._bars.console.width)
        self._bars.update(task.handle, completed=task.completed, description=task.description, visible=not task.done)


@contextmanager
def show_progress(show: bool = True, *, stream: TextIO | None = None) -> Iterator[ProgressDisplay]:
    """Open a display on ``stream`` (standard error by default) that lasts as long as the scope."""
    stream = stream or sys.stderr
    if not show or stream is None:
        yield ProgressDisplay()
    elif not stream.isatty():
        yield _Lines(stream)
    else:
        with _rich_bars(stream) as bars:
            yield _Bars(bars)


def _rich_bars(stream: TextIO) -> Any:
    """Bars with the detail on a line of its own, so that both fit on a narrow terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class Bars(Progress):
        detail = ""

        def get_renderables(self) -> Iterator[Any]:
            yield self.make_tasks_table(self.tasks)
            if self.detail:
                yield Text(self.detail)

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    return Bars(
        *columns, console=Console(file=stream, markup=False, emoji=False, highlight=False), transient=True, expand=True
    )


def fold(text: str, width: int) -> str:
    """Break a text at its double spaces into lines of at most ``width``: a name stays with its number."""
    lines = [""]
    for piece in text.split("  "):
        joined = f"{lines[-1]}  {piece}" if lines[-1] else piece
        lines[-1:] = [joined] if len(joined) <= width else [lines[-1], piece]
    return "\n".join(lines)
