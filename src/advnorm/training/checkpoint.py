"""Checkpoints on disk: safetensors and JSON, written atomically, never a pickle.

A folder holds one file of tensors per checkpoint and, for each name (``last``, ``best``), a JSON file that points to
one of them. Saving writes a new file, moves the pointer in one atomic step, and then deletes files without a pointer.
If the process dies at any moment, the pointer leads to a complete checkpoint: the old one or the new one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor

from advnorm._core.errors import AdvnormError, ConfigError, did_you_mean
from advnorm._core.records import interrupted_write, read_bytes, read_json, write_atomic, write_json
from advnorm._core.shapes import read_record
from advnorm.models.weights import pack_tensors, unpack_tensors
from advnorm.training.sharding import shard_like

FORMAT = "advnorm.checkpoint/1"

_FILE = re.compile(r"[A-Za-z0-9_]+-\d{8,}-[0-9a-f]{8}\.safetensors")


class Pointer(TypedDict):
    """The JSON file of a checkpoint's name."""

    file: str
    blake2b: str
    meta: dict[str, Any]
    meta_blake2b: str


class CheckpointError(AdvnormError, OSError):
    """A checkpoint that could not be written, such as on a full disk. The previous checkpoint is intact."""


# -- checkpoints -------------------------------------------------------------------------------------------------------


def save(folder: Path | str, name: str, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> Path:
    """Write tensors and ``meta`` (JSON data with the ``step``) as the checkpoint ``name``; return the file.

    One process writes to a folder. A tensor with several names is stored once.
    """
    folder, data = Path(folder), pack_tensors(tensors, {})
    hashes = {"blake2b": _hash(data), "meta_blake2b": _hash(_canonical(meta))}
    path = folder / f"{name}-{meta['step']:08d}-{hashes['blake2b'][:8]}.safetensors"
    try:
        write_atomic(path, data)
        _point(folder, name, {"format": FORMAT, "file": path.name, **hashes, "meta": dict(meta)})
    except OSError as error:
        sweep(folder)
        raise _write_error(f"the checkpoint {path} ({len(data)} bytes)", error) from error
    sweep(folder)
    return path


def exists(folder: Path | str, name: str) -> bool:
    """Whether the checkpoint ``name`` exists."""
    return _pointer(Path(folder), name).exists()


def load(folder: Path | str, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Load tensors, on the CPU, and meta of the checkpoint ``name``; their hashes are verified."""
    folder = Path(folder)
    record = _record(folder, name)
    path = folder / record["file"]
    try:
        data = read_bytes(path, hint=_recovery(folder, name))
    except ConfigError:
        if _record(folder, name) != record:  # a training has saved another checkpoint meanwhile
            return load(folder, name)
        raise
    if _hash(data) != record["blake2b"]:
        message = f"{path} is damaged: its content does not match its hash"
        raise ConfigError("damaged_file", message, hint=_recovery(folder, name))
    tensors, _ = unpack_tensors(path, data)
    return tensors, record["meta"]


def alias(folder: Path | str, source: str, name: str) -> None:
    """Keep the current checkpoint ``source`` under ``name`` too."""
    folder = Path(folder)
    record = _record(folder, source)
    try:
        _point(folder, name, record)
    except OSError as error:
        raise _write_error(str(_pointer(folder, name)), error) from error
    sweep(folder)


def _write_error(what: str, error: OSError) -> CheckpointError:
    hint = "free some space or choose another folder; the previous checkpoint, if any, is intact"
    return CheckpointError("not_writable", f"cannot write {what}: {error.strerror or error}", hint=hint)


def _pointer(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def _point(folder: Path, name: str, record: Mapping[str, Any]) -> None:
    write_json(_pointer(folder, name), record)


def _record(folder: Path, name: str) -> dict[str, Any]:
    """The content of a pointer."""
    path = _pointer(folder, name)
    if not path.exists():
        names = sorted(other.stem for other in folder.glob("*.json") if _points_to(other))
        raise ConfigError("unknown_name", f"no checkpoint {name!r} in {folder}{did_you_mean(name, names)}", "name")
    record = read_record(path, Pointer, FORMAT, _recovery(folder, name))
    if not _FILE.fullmatch(record["file"]) or record["meta_blake2b"] != _hash(_canonical(record["meta"])):
        raise ConfigError("damaged_file", f"{path} is damaged", field=str(path), hint=_recovery(folder, name))
    return record


def _points_to(path: Path) -> str | None:
    """The file that a JSON file points to; None if it is not a pointer."""
    record = read_json(path)
    ours = str(record.get("format")).startswith("advnorm.checkpoint/")
    return str(record.get("file")) if ours else None


def sweep(folder: Path) -> None:
    """Delete files without a pointer, and files that a killed process left incomplete."""
    with suppress(ConfigError, OSError):  # a damaged pointer may need any file, so all stay
        needed = {path.stem: file for path in folder.glob("*.json") if (file := _points_to(path))}
        for path in folder.iterdir():
            half = interrupted_write(path)
            written = half and (_FILE.fullmatch(half) or half.removesuffix(".json") in needed)
            if written or (_FILE.fullmatch(path.name) and path.name not in needed.values()):
                path.unlink()


def _recovery(folder: Path, name: str) -> str:
    return f"delete {_pointer(folder, name)} to start from the beginning, or continue from another checkpoint"


# -- optimizers --------------------------------------------------------------------------------------------------------

# These depend on the device, not on the run: the live optimizer has its own.
_NOT_SAVED = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")


def flatten_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """State as tensors named ``optimizer.<parameter>.<key>``; class, groups and settings as JSON data."""
    tensors, state = {}, {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            values = {key: value for key, value in optimizer.state.get(parameter, {}).items() if value is not None}
            state[names[parameter]] = list(values)
            tensors |= {_state_name(names[parameter], key): value for key, value in values.items()}
    groups = [
        {
            "parameters": [names[parameter] for parameter in group["params"]],
            "settings": {key: value for key, value in group.items() if key not in _NOT_SAVED},
        }
        for group in optimizer.param_groups
    ]
    return tensors, {"kind": type(optimizer).__name__, "groups": groups, "state": state}


def restore_optimizer(
    optimizer: torch.optim.Optimizer,
    names: Mapping[Tensor, str],
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, Any],
) -> None:
    """Restore the state and settings of :func:`flatten_optimizer` bit for bit; other ``tensors`` are ignored."""
    groups = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    if (type(optimizer).__name__, groups) != (meta["kind"], [group["parameters"] for group in meta["groups"]]):
        raise ConfigError("wrong_tensors", "the saved optimizer is of another kind or of other parameters")
    live = {names[parameter]: parameter for group in optimizer.param_groups for parameter in group["params"]}
    state = {
        name: {key: _like(live[name], key, tensors[_state_name(name, key)]) for key in keys}
        for name, keys in meta["state"].items()
        if keys
    }
    param_groups = []
    for group, saved in zip(optimizer.param_groups, meta["groups"]):
        # JSON has lists for tuples.
        settings = {k: tuple(v) if isinstance(group.get(k), tuple) else v for k, v in saved["settings"].items()}
        param_groups.append({**group, **settings, "params": saved["parameters"]})
    optimizer.load_state_dict({"state": state, "param_groups": param_groups})


def _state_name(parameter: str, key: str) -> str:
    return f"optimizer.{parameter}.{key}"


def _like(parameter: Tensor, key: str, value: Tensor) -> Tensor:
    """A copy with the parameter's strides, because mixed strides are slow; the optimizer places a step count."""
    if key == "step":
        return value.clone()
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(shard_like(value, parameter))


def select(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names start with a prefix, by the rest of their names."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _canonical(meta: Mapping[str, Any]) -> bytes:
    return json.dumps(dict(meta), sort_keys=True, allow_nan=False).encode()


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
