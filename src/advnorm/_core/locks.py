"""Locks on files and folders that end with the process that holds them."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from advnorm._core.errors import ConfigError

#: Seconds to wait for a lock: :func:`is_held` in another process holds it for a moment.
_PATIENCE = 0.2
_handles: set[int] = set()


class Busy(ConfigError):
    """Another process holds the lock."""


def _close_inherited() -> None:
    for handle in _handles:
        os.close(handle)
    _handles.clear()


# A lock lasts as long as any process has its file open, so worker processes must not keep that of a dead parent.
os.register_at_fork(after_in_child=_close_inherited)


def lock_path(target: Path) -> Path:
    """The lock file of a folder (inside it) or of a file (beside it); links to one file share its lock."""
    target = Path(os.path.realpath(target))
    return target / ".lock" if target.is_dir() else target.with_name(f"{target.name}.lock")


@contextmanager
def exclusive(target: Path | str | None) -> Iterator[None]:
    """Hold the lock of a file or folder; raise :class:`Busy` if another process holds it. None needs no lock."""
    if target is None:
        yield
        return
    path = lock_path(Path(target))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = _acquire(path, Path(target))
    except OSError as error:
        words, hint = f"cannot write {{field}}: {error.strerror or error}", "choose another place"
        raise ConfigError("not_writable", words, field=str(target), hint=hint) from error
    _handles.add(handle)
    try:
        yield
    finally:
        if handle in _handles:  # not in a forked child
            _handles.discard(handle)
            with suppress(OSError):
                path.unlink(missing_ok=True)  # under the lock; _acquire notices
            with suppress(OSError):
                os.close(handle)


def _acquire(path: Path, target: Path) -> int:
    """Open and lock a file. A file that its last holder has removed meanwhile is not the lock: open it again."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(handle), os.stat(path)):
                return handle
        except FileNotFoundError:
            pass
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(handle)
                words, hint = "another process is writing {field}", "wait for it, or choose another place"
                raise Busy("busy", words, field=str(target), hint=hint) from None
            time.sleep(0.02)
        except OSError:  # a file system without locks
            return handle
        os.close(handle)


def is_held(target: Path) -> bool:
    """Whether another process holds the lock of a file or folder."""
    try:
        handle = os.open(lock_path(target), os.O_RDONLY | os.O_NONBLOCK)  # opening a FIFO would block
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(handle)
