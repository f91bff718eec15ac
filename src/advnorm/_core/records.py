"""Files that are complete or absent, checks that they can be written, and digests that identify their contents."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
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


def writable_problems(path: Path | str) -> list[Problem]:
    """Reasons why a file cannot be written, to report before the computation that it is for."""
    path = Path(path)
    parent = next(folder for folder in path.absolute().parents if folder.exists())
    if path.is_dir():
        reason = "it is a folder"
    elif not parent.is_dir():
        reason = f"{parent} is not a folder"
    elif not os.access(parent, os.W_OK | os.X_OK):
        reason = f"no permission for {parent}"
    else:
        return []
    words = f"cannot write {{field}}: {reason}"
    return [Problem(code="not_writable", message=words, field=str(path), hint="choose another place")]


def write_atomic(path: Path | str, data: bytes) -> None:
    """Write a file so that it is complete or absent, even after a power loss; an old file stays until then.

    A killed process leaves ``.NAME.PID.part``, see :func:`interrupted_write`.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)  # a new name survives a power loss only if its folder is synced
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def interrupted_write(path: Path) -> str | None:
    """The name of the file that a killed process was writing, if ``path`` is its remainder."""
    part = re.fullmatch(r"\.(.+)\.\d+\.part", path.name)
    return part and part[1]


def write_json(path: Path | str, data: Any) -> None:
    """Write ``data`` as JSON by :func:`write_atomic`."""
    write_atomic(path, (json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """Read a record that :func:`write_json` wrote."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        words = f"cannot read {{field}}: {error.strerror or error}"
        raise ConfigError("missing_file", words, field=str(path)) from None
    except ValueError:
        data = None
    if not isinstance(data, dict):
        words = "{field} is damaged or was not written by advnorm"
        raise ConfigError("damaged_file", words, field=str(path), hint="choose another file")
    return data


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
