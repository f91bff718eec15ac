"""A lock on a folder that a dead process does not hold."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from advnorm._core.errors import ConfigError

#: The file that a process holds which writes into a folder.
LOCK = ".lock"
_locks: set[int] = set()


class Busy(ConfigError):
    """Another process holds what is wanted."""


def _let_go() -> None:
    for handle in _locks:
        os.close(handle)


# A lock lives as long as any process has its file open: worker processes must not keep that of a dead parent.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Scope: this process alone holds the file; a lock dies with its process. No lock where the system has none."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    _locks.add(handle)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Busy(
                f"another process is training into {path.parent}; wait for it, or choose another out or name"
            ) from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        _locks.discard(handle)
        with suppress(OSError):
            os.close(handle)


def busy(path: Path) -> bool:
    """Whether another process holds the file."""
    if not path.exists():
        return False
    try:
        with locked(path):
            return False
    except Busy:
        return True
