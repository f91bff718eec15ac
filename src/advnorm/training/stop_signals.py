"""Signals that stop a training at a checkpoint."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


class StopSignals:
    """Records SIGTERM and the first Ctrl-C; a second Ctrl-C raises at once."""

    def __init__(self) -> None:
        self.received = self.interrupted = False

    def _terminate(self, *_: object) -> None:
        self.received = True

    def _interrupt(self, *_: object) -> None:
        if self.interrupted:
            raise KeyboardInterrupt
        self.received = self.interrupted = True
        with suppress(OSError):  # not print, which a signal may have interrupted
            os.write(2, b"\nstopping at a checkpoint; Ctrl-C again stops at once\n")

    def pass_on(self, *, finished: bool) -> None:
        """Raise after Ctrl-C, and send SIGTERM again if it came too late to stop the training: the caller must stop."""
        if self.interrupted:
            raise KeyboardInterrupt
        if self.received and finished:
            signal.raise_signal(signal.SIGTERM)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Scope: record signals. Only the main thread can, and a program's own handler of Ctrl-C stays."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handlers: dict[int, Any] = {signal.SIGTERM: self._terminate}
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            handlers[signal.SIGINT] = self._interrupt
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
