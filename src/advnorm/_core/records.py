"""Records on disk: written whole or not at all, and hashes of what they belong to."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from advnorm._core.errors import ConfigError


def write_json(path: Path | str, data: Any) -> None:
    """Write ``data`` as JSON; a crash or a full disk leaves the old file, if any, untouched."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())  # as a plain open() would; mkstemp's are for the owner alone
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def read_json(path: Path) -> dict[str, Any]:
    """A record as it was written; a damaged or foreign file is refused by name."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError:
        data = None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} is damaged or no record of ours; delete it, or choose another record")
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
