"""Progress on a terminal and in a log."""

import io

import pytest

from advnorm._core import progress
from advnorm._core.progress import ProgressDisplay, fold, show_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Closed(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError("closed")


def work(stream: io.StringIO, show: bool = True) -> str:
    with show_progress(show, stream=stream) as display:
        task = display.task("adv pgd10", 1000, unit="images")
        task.update(10)
        task.advance(20.5)
        display.print("a line of its own")
        if task.wants_detail():
            task.update(40, detail="ce 1.234  lr 0.1")
        assert not task.wants_detail()
        task.finish()
    return stream.getvalue()


def test_nothing_is_shown_unless_wanted():
    assert not ProgressDisplay().task("training").wants_detail()  # it may cost a device synchronization
    assert work(Terminal(), show=False) == ""


def test_short_work_leaves_only_explicit_lines_in_a_log():
    assert work(io.StringIO()) == "a line of its own\n"


def test_long_work_logs_a_line_from_time_to_time(monkeypatch):
    clock = iter(range(0, 10_000, 31))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with show_progress(stream=(stream := io.StringIO())) as display:
        task = display.task("adv pgd10", 1000, unit="images")
        task.update(10.7)
        task.update(1000)
        task.update(900, description="clean pgd10", detail="ce 1.2")
        display.task("measuring")
    assert stream.getvalue().splitlines() == [
        "adv pgd10: 0 of 1,000 images",
        "adv pgd10: 10 of 1,000 images",
        "clean pgd10: 900 of 1,000 images  ce 1.2",
        "measuring",
    ]


def test_a_terminal_gets_a_bar_and_the_detail_below_it(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    shown = work(Terminal())
    assert "adv pgd10" in shown and "a line of its own" in shown and "ce 1.234" in shown


@pytest.mark.parametrize("stream", [Closed(), None])
def test_work_continues_if_nobody_reads_the_log(stream, monkeypatch):
    monkeypatch.setattr(progress.sys, "stderr", None)
    monkeypatch.setattr(progress, "LINE_EVERY", 0.0)
    with show_progress(stream=stream) as display:
        display.task("pgd10", 10).update(3)
        display.print("line")


def test_lines_break_between_entries_only():
    assert fold("ce 1.0  kl 2.0  lr 0.1", 14) == "ce 1.0  kl 2.0\nlr 0.1"
    assert fold("one long entry", 5).endswith("one long entry")
