"""Records on disk: written whole or not at all, and hashes of what they belong to."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from advnorm._core.errors import ConfigError


def write_whole(path: Path | str, data: bytes) -> None:
    """Write a file that is there whole or not at all, also after a loss of power; the old one, if any, stays till then.

    What a killed process leaves is ``.NAME.PID.part``, see :func:`half_written`.
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
    folder = os.open(path.parent, os.O_RDONLY)  # a new name in a folder survives a loss of power only when it is synced
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def half_written(path: Path) -> str | None:
    """The name of the file that a killed process was writing, if ``path`` is what it left of it."""
    part = re.fullmatch(r"\.(.+)\.\d+\.part", path.name)
    return part and part[1]


def write_json(path: Path | str, data: Any) -> None:
    """Write ``data`` as JSON; a crash or a full disk leaves the old file, if any, untouched."""
    write_whole(path, (json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """A record as it was written; a damaged or foreign file is refused by name."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError:
        data = None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} is damaged or no record of ours; choose another file")
    return data


def digest(*parts: Any) -> str:
    """A hash of tensors, bit by bit, and of anything else by its repr."""
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
    structure = re.sub(r"0x[0-9a-f]+", "", repr(model))  # addresses differ from process to process
    return digest(structure, *(value for item in tensors.items() for value in item))
