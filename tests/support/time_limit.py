"""A time limit for what could wait forever, so that a test fails instead."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Scope: the test fails after some seconds, also inside a system call that waits."""

    def fail(*_: object) -> None:
        pytest.fail(f"no end after {seconds} s")  # not an OSError, which code under test may handle

    before = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
