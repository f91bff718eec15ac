"""Regular files: reading, atomic writing, checks before a computation, and digests of contents."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from advnorm._core.errors import AdvnormError, ConfigError, Problem


class NotWritable(AdvnormError):
    """A file could not be written; ``result`` is its intended content if the computation is complete."""

    result: Any = None


@contextmanager
def writing(path: Path | str | None, result: Any = None) -> Iterator[None]:
    """Turn an operating system error (full disk, missing folder) into :class:`NotWritable`, which keeps ``result``."""
    try:
        yield
    except OSError as error:
        if isinstance(error, AdvnormError):
            raise
        words = f"cannot write {{field}}: {error.strerror or error}"
        hint = "free disk space or choose another place; earlier files are intact, and the same command resumes"
        failure = NotWritable("not_writable", words, field=str(path), hint=hint)
        failure.result = result
        raise failure from error


def require_regular(path: Path | str, field: str = "", hint: str = "") -> Path:
    """Return the path of a regular file. A FIFO can block its reader forever, and /dev/zero never ends."""
    with _read_errors(path, field, hint):
        _check_regular(path)
    return Path(path)


def read_bytes(path: Path | str, field: str = "", hint: str = "") -> bytes:
    """Return the content of a regular file."""
    with _read_errors(path, field, hint):
        return require_regular(path, field, hint).read_bytes()


@contextmanager
def _read_errors(path: Path | str, field: str, hint: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        words = f"cannot read {path}: {error.strerror or error}"
        raise ConfigError("missing_file", words, field=field or str(path), hint=hint) from None


def _check_regular(path: Path | str) -> None:
    try:
        mode = os.stat(path).st_mode
    except ValueError as error:  # a null byte
        raise OSError(errno.EINVAL, str(error)) from None
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, f"it is {'a folder' if stat.S_ISDIR(mode) else 'not a regular file'}", str(path))


#: Bytes that locks, partial records and unfinished files add to a name.
_ADDED = 32


def writable_problems(path: Path | str) -> list[Problem]:
    """Reasons why a file cannot be written, to report before the computation that it is for."""
    try:
        target = _behind_links(path)
        folder = next(folder for folder in target.parents if folder.exists())
        with suppress(FileNotFoundError):
            os.lstat(target.with_name(target.name + "x" * _ADDED))
        if os.access(folder, os.W_OK | os.X_OK):
            return []
        reason = f"no permission for {folder}"
    except (OSError, ValueError) as error:  # ValueError: a null byte
        reason = getattr(error, "strerror", None) or str(error)
    return [Problem("not_writable", f"cannot write {{field}}: {reason}", str(path), hint="choose another place")]


def output_problems(path: Path | str, is_own: Callable[[dict[str, Any]], bool]) -> list[Problem]:
    """Reasons why a file cannot or must not be written: a file of another kind, such as an input, is not replaced.

    ``is_own`` tells whether the same command wrote an existing file, from its record, which is empty if the file is no
    JSON object. An empty file is replaced.
    """
    problems = writable_problems(path)
    if not problems and os.path.exists(path) and (content := read_bytes(path)):
        data = parse_json(content)
        if not is_own(data if isinstance(data, dict) else {}):
            words = "{field} exists and is not an earlier output of this command"
            problems = [Problem("already_exists", words, str(path), hint="choose another name, or delete the file")]
    return problems


def _behind_links(path: Path | str) -> Path:
    """The file that a path leads to. It is regular or absent: replacing a FIFO or a device would destroy it."""
    target = Path(os.path.realpath(path))
    with suppress(FileNotFoundError):
        _check_regular(target)
    return target


def write_atomic(path: Path | str, data: bytes) -> None:
    """Write a file so that it is complete or absent, even after a power loss; an old file stays until then.

    The permissions of an old file stay. A link stays, and its target is written. A killed process leaves
    ``.NAME.PID.part``, see :func:`interrupted_write`.
    """
    path = _behind_links(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            with suppress(OSError):  # no old file, or a file system without permissions
                os.fchmod(file.fileno(), stat.S_IMODE(os.stat(path).st_mode))
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    with suppress(OSError):  # the file is written, also if its folder cannot be read or synced
        folder = os.open(path.parent, os.O_RDONLY)  # a new name survives a power loss only if its folder is synced
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_figure(path: Path | str, figure: Any) -> None:
    """Write a matplotlib figure by :func:`write_atomic`, in the format that the name ends in."""
    content = io.BytesIO()
    figure.savefig(content, format=Path(path).suffix.removeprefix("."), dpi=150)
    write_atomic(path, content.getvalue())


def interrupted_write(path: Path) -> str | None:
    """The name of the file that a killed process was writing, if ``path`` is its remainder."""
    part = re.fullmatch(r"\.(.+)\.\d+\.part", path.name)
    return part and part[1]


def write_json(path: Path | str, data: Any) -> None:
    """Write ``data`` as JSON by :func:`write_atomic`. Names that are not valid Unicode are escaped."""
    text = json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_atomic(path, text.encode(errors="backslashreplace"))


def read_json(path: Path, hint: str = "choose another file") -> dict[str, Any]:
    """Read a record that :func:`write_json` wrote; ``hint`` is the fix if it is damaged."""
    data = parse_json(read_bytes(path))
    if not isinstance(data, dict):
        words = "{field} is damaged or was not written by advnorm"
        raise ConfigError("damaged_file", words, field=str(path), hint=hint)
    return data


def parse_json(text: bytes) -> Any:
    """Return the data of a JSON text; None if it is damaged. Numbers that are not finite are damage: we write none."""
    try:
        return json.loads(text, parse_constant=int, parse_float=_finite)
    except (ValueError, RecursionError):
        return None


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):  # 1e999
        raise ValueError(text)
    return value


def digest(*parts: Any) -> str:
    """A hash of tensors, bit by bit, and of other values by their repr."""
    hashed = hashlib.blake2b(digest_size=16)
    for part in parts:
        if isinstance(part, Tensor):
            array = part.detach().cpu().contiguous()
            hashed.update(f"{array.dtype}{tuple(array.shape)}".encode())
            hashed.update(array.reshape(-1).view(torch.uint8).numpy().tobytes() if array.numel() else b"")
        else:
            hashed.update(repr(part).encode() + b"\0")
    return hashed.hexdigest()


def model_fingerprint(model: nn.Module) -> str:
    """A hash of a model's structure, parameters and statistics."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    structure = re.sub(r"0x[0-9a-f]+", "", repr(model))  # addresses differ between processes
    return digest(structure, *(value for item in tensors.items() for value in item))
