"""The process around a verb: its signals, its standard streams and its exit status."""

from __future__ import annotations

import errno
import io
import os
import shutil
import signal
import sys
import threading
import traceback
from contextlib import suppress
from typing import Any, TextIO

from advnorm._core.errors import AdvnormError, printable
from advnorm._core.exit_codes import CRASHED, INTERRUPTED, PREEMPTED, USAGE, Terminated

#: Width below which tables cannot be printed.
LEAST_COLUMNS = 20


def run_command() -> int:
    """Run the command of this process and return its exit status.

    SIGTERM stops it with the status of a preempted job, until the output is written; then SIGTERM is ignored, because
    the process only ends. Otherwise the work alone decides the status: a reader who left, a terminal that lacks a
    character and a closed stream do not. An error for the user is one line on standard error.
    """
    signal.signal(signal.SIGTERM, _terminate)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: on busy cores, spinning threads starve others
    _widen_columns()
    before, hook = (sys.stdout, sys.stderr), sys.unraisablehook
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass  # a file that is opened later must not become a standard stream
    os.close(descriptor)
    sys.stdout, sys.stderr = map(_guarded, before)
    sys.unraisablehook = _send_again
    try:
        status = _run()
        return _flush_output(status)
    except Terminated:
        return PREEMPTED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BaseException:  # a bug, or user code that raises what is not an Exception: Python would leave with 1
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        traceback.print_exc()
        return CRASHED
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (sys.stdout, sys.stderr), sys.unraisablehook = before, hook


def _widen_columns() -> None:
    """Print at least ``LEAST_COLUMNS``: rich fails at a width of 1, and prints nothing at 0."""
    columns = shutil.get_terminal_size().columns  # COLUMNS, or else the terminal
    if "COLUMNS" in os.environ or columns < LEAST_COLUMNS:
        os.environ["COLUMNS"] = str(max(columns, LEAST_COLUMNS))


def _run() -> int:
    try:
        from advnorm.cli.app import app

        app()
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else 0 if left.code is None else USAGE
    except Exception as error:
        message = _message(error)
        if message is None:
            raise
        _print_error(message)
        return USAGE
    return 0


def _flush_output(status: int) -> int:
    """Write what is left of the output; return the status, or that of an output that cannot be written."""
    with suppress(ValueError, AttributeError):  # closed, or None
        sys.stdout.flush()
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    failure = raw.failure if isinstance(raw, _Output) else None
    if failure is None or failure.errno == errno.EPIPE:
        return status
    _print_error(f"cannot write standard output: {failure.strerror}")
    return status or USAGE


def _message(error: Exception) -> str | None:
    """The line for an error that the user or the operating system caused; None for an error of this package."""
    if isinstance(error, AdvnormError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error) or "out of memory" in str(error):
        return f"out of memory: {str(error).partition(chr(10))[0] or 'use less data or a smaller model'}"
    return None


def _print_error(message: str) -> None:
    from rich.console import Console
    from rich.text import Text

    line = Text.assemble(("error:", "bold red"), " ", printable(message.replace("\n", " ")))
    Console(stderr=True).print(line, highlight=False, soft_wrap=True)


def _terminate(*_: object) -> None:
    raise Terminated


def _send_again(lost: Any) -> None:
    """Python drops what a signal raises in a destructor or in the callback of a weak reference: send it again."""
    number = {Terminated: signal.SIGTERM, KeyboardInterrupt: signal.SIGINT}.get(lost.exc_type)
    if number is None:
        sys.__unraisablehook__(lost)
    else:
        threading.Timer(0.01, os.kill, (os.getpid(), number)).start()  # after the destructor


def _restore_default() -> None:
    if signal.getsignal(signal.SIGTERM) is _terminate:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_restore_default)  # a worker process ends at once


class _Output(io.FileIO):
    """Drops what cannot be written, and remembers why."""

    failure: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.failure = error
            return len(data)


def _guarded(stream: TextIO) -> TextIO:
    """The same stream over :class:`_Output`; characters that it lacks are replaced."""
    try:
        raw = _Output(stream.fileno(), "w", closefd=False)
    except (AttributeError, OSError, ValueError):  # no stream, or one that a caller put in its place
        return stream
    buffered = isinstance(stream, io.TextIOWrapper) and stream.line_buffering
    return io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, "replace", line_buffering=buffered)
