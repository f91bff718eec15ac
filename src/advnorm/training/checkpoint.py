"""Checkpoints and weights on disk: safetensors and JSON, written whole or not at all, never a pickle.

A folder holds a file of tensors per checkpoint and, for each name (``last``, ``best``), a JSON file that points to one
of them. A new checkpoint is a fresh file; then the pointer moves, in one atomic step; then what no pointer needs goes.
So whenever a process dies, the pointer leads to a whole checkpoint: the old one or the new one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from advnorm._core.errors import AdvnormError, ConfigError, did_you_mean, raise_all
from advnorm._core.records import interrupted_write, read_json, write_atomic, write_json
from advnorm._core.wrappers import unwrapped

FORMAT = "advnorm.checkpoint/1"

_NAME = re.compile(r"[A-Za-z0-9_]+")
_FILE = re.compile(r"[A-Za-z0-9_]+-\d{8,}-[0-9a-f]{8}\.safetensors")


class CheckpointError(AdvnormError, OSError):
    """A checkpoint that could not be written: a full disk, a missing permission. The one before is as it was."""


# -- checkpoints -------------------------------------------------------------------------------------------------------


def save(folder: Path | str, name: str, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> Path:
    """Write tensors and ``meta`` (JSON, with the number of the ``step``) as the checkpoint ``name``; returns the file.

    One process writes to a folder. Tensors that are the same memory under several names are stored once.
    """
    folder = Path(folder)
    step = meta.get("step")
    problems = _not_json(meta)
    if not _NAME.fullmatch(name):
        problems.append(f"a name is made of letters, digits and _, got {name!r}")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        problems.append(f"meta needs 'step', an integer from 0 on, got {step!r}")
    raise_all(problems, "bad checkpoint")
    data = _packed(tensors, {})
    hashed = _hash(data)
    path = folder / f"{name}-{step:08d}-{hashed[:8]}.safetensors"
    try:
        write_atomic(path, data)
        hashes = {"blake2b": hashed, "meta_blake2b": _hash(_canonical(meta))}
        _point(folder, name, {"format": FORMAT, "file": path.name, **hashes, "meta": dict(meta)})
    except OSError as error:
        sweep(folder)
        raise CheckpointError(
            f"cannot write the checkpoint {path} ({len(data)} bytes): {error.strerror or error}; free some space or "
            "choose another folder. The checkpoint before it, if any, is intact"
        ) from error
    sweep(folder)
    return path


def exists(folder: Path | str, name: str) -> bool:
    """Whether there is a checkpoint ``name``."""
    return _pointer(Path(folder), name).exists()


def load(folder: Path | str, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors, on the CPU, and meta of the checkpoint ``name``, as they were written: the hash is checked."""
    folder = Path(folder)
    record = _record(folder, name)
    path = folder / record["file"]
    try:
        data = path.read_bytes()
    except OSError as error:
        if _record(folder, name) != record:  # a run that goes on has saved another one meanwhile
            return load(folder, name)
        raise ConfigError(f"cannot read {path}: {error.strerror or error}; {_cure(folder, name)}") from None
    if _hash(data) != record["blake2b"]:
        raise ConfigError(f"{path} is damaged: its content does not match its hash; {_cure(folder, name)}")
    tensors, _ = _unpacked(path, data)
    return tensors, record["meta"]


def alias(folder: Path | str, source: str, name: str) -> None:
    """Let the checkpoint ``name`` be what ``source`` is now, whose later checkpoints leave it alone."""
    folder = Path(folder)
    if not _NAME.fullmatch(name):
        raise ConfigError(f"a name is made of letters, digits and _, got {name!r}")
    record = _record(folder, source)
    try:
        _point(folder, name, record)
    except OSError as error:
        raise CheckpointError(
            f"cannot write {_pointer(folder, name)}: {error.strerror or error}; free some space. "
            "What the name stood for before, if anything, is intact"
        ) from error
    sweep(folder)


def _pointer(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def _point(folder: Path, name: str, record: Mapping[str, Any]) -> None:
    write_json(_pointer(folder, name), record)


def _record(folder: Path, name: str) -> dict[str, Any]:
    """What a pointer says."""
    path = _pointer(folder, name)
    if not path.exists():
        names = sorted(other.stem for other in folder.glob("*.json") if _points_to(other))
        raise ConfigError(f"no checkpoint {name!r} in {folder}{did_you_mean(name, names)}")
    record = read_json(path)
    if record.get("format") != FORMAT:
        raise ConfigError(
            f"{path} has the format {record.get('format')!r}, this version of advnorm reads {FORMAT!r}; use the "
            "version that wrote it, or another folder"
        )
    parts = [("file", str), ("blake2b", str), ("meta", dict)]
    whole = all(isinstance(record.get(key), kind) for key, kind in parts) and _FILE.fullmatch(record["file"])
    if whole and "meta_blake2b" in record:
        whole = record["meta_blake2b"] == _hash(_canonical(record["meta"]))
    if not whole:
        raise ConfigError(f"{path} is damaged; {_cure(folder, name)}")
    return record


def _points_to(path: Path) -> str | None:
    """The file that a JSON file points to; None where it is no pointer of ours."""
    record = read_json(path)
    ours = str(record.get("format")).startswith("advnorm.checkpoint/")
    return str(record.get("file")) if ours else None


def sweep(folder: Path) -> None:
    """Remove the files that no pointer needs, and what a killed process left half written."""
    with suppress(ConfigError, OSError):  # a damaged pointer: no telling what it needs, so everything stays
        needed = {path.stem: file for path in folder.glob("*.json") if (file := _points_to(path))}
        for path in folder.iterdir():
            half = interrupted_write(path)
            written = half and (_FILE.fullmatch(half) or half.removesuffix(".json") in needed)
            if written or (_FILE.fullmatch(path.name) and path.name not in needed.values()):
                path.unlink()


def _cure(folder: Path, name: str) -> str:
    return f"delete {_pointer(folder, name)} to start anew, or continue from another checkpoint"


# -- optimizers --------------------------------------------------------------------------------------------------------

# How an optimizer computes depends on the device, not on the run: the live optimizer decides.
_NOT_SAVED = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")


def flatten_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """State as tensors called ``optimizer.<parameter>.<key>``; kind, groups and settings as data for JSON."""
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
    """Give an optimizer over the same parameters the state and settings of :func:`flatten_optimizer`, bit for bit.

    ``tensors`` may hold more than the optimizer's; only what starts with ``optimizer.`` is looked at.
    """
    kind = type(optimizer).__name__
    groups = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    saved = [group["parameters"] for group in meta["groups"]]
    live = {names[parameter]: parameter for group in optimizer.param_groups for parameter in group["params"]}
    wanted = {_state_name(name, key): (name, key) for name, keys in meta["state"].items() for key in keys}
    problems = [] if meta["kind"] == kind else [f"it is of {meta['kind']}, the optimizer is {kind}"]
    own, other = set().union(*groups), set().union(*saved)
    problems += [f"no state for parameter {name}" for name in sorted(own - other)]
    problems += [f"state for {name}, which is not optimized" for name in sorted(other - own)]
    if own == other and groups != saved:
        problems.append("its parameter groups are divided in another way (other weight decay of norms?)")
    problems += [f"missing: {name}" for name in wanted if name not in tensors]
    problems += [f"not expected: {name}" for name in tensors if name.startswith("optimizer.") and name not in wanted]
    problems += [
        f"{label} is {tuple(tensors[label].shape)}, its parameter is {tuple(live[name].shape)}"
        for label, (name, key) in wanted.items()
        if label in tensors and name in live and key != "step" and tensors[label].shape != live[name].shape
    ]
    raise_all(_shortened(problems), "the saved optimizer does not fit")

    position = {name: i for i, name in enumerate(name for group in groups for name in group)}
    state = {
        position[name]: {key: _like(live[name], key, tensors[_state_name(name, key)]) for key in keys}
        for name, keys in meta["state"].items()
        if keys
    }
    param_groups = []
    for group, saved_group in zip(optimizer.param_groups, meta["groups"]):
        settings = {key: _as_before(value, group.get(key)) for key, value in saved_group["settings"].items()}
        param_groups.append({**group, **settings, "params": [position[name] for name in saved_group["parameters"]]})
    optimizer.load_state_dict({"state": state, "param_groups": param_groups})


def _state_name(parameter: str, key: str) -> str:
    return f"optimizer.{parameter}.{key}"


def _like(parameter: Tensor, key: str, value: Tensor) -> Tensor:
    """A copy with the parameter's strides, since mixed strides are slow; a step count is placed by the optimizer."""
    if key == "step":
        return value.clone()
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)


def _as_before(value: Any, live: Any) -> Any:
    """JSON makes lists of tuples."""
    return tuple(value) if isinstance(live, tuple) else value


# -- weights -----------------------------------------------------------------------------------------------------------


def restore_model(model: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
    """Copy tensors into a model, in place: memory format, device and dtype stay. All that does not fit in one error."""
    model = unwrapped(model)
    problems = differences(tensors, model.state_dict(), "the file", "the model")
    raise_all(problems, f"{source} does not fit the model")
    model.load_state_dict(dict(tensors))


def save_weights(path: Path | str, model: nn.Module, meta: Mapping[str, Any]) -> Path:
    """Write a model's parameters and buffers as a safetensors file that any tool reads, ``meta`` in its header."""
    path = _weights_path(path)
    raise_all(_not_json(meta), "bad weights file")
    try:
        write_atomic(path, _packed(unwrapped(model).state_dict(), meta))
    except OSError as error:
        raise CheckpointError(
            f"cannot write {path}: {error.strerror or error}; free some space or choose another folder"
        ) from error
    return path


def load_weights(model: nn.Module, path: Path | str) -> dict[str, Any]:
    """Fill a model from a safetensors file, ours or another's; returns the meta in its header, ``{}`` where none is."""
    path = _weights_path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    tensors, meta = _unpacked(path, data)
    restore_model(model, tensors, str(path))
    return meta


def _weights_path(path: Path | str) -> Path:
    path = Path(path)
    if path.suffix != ".safetensors":
        raise ConfigError(
            f"weights must be a .safetensors file, got {path}; a pickle (.pt, .pth) can run any code, so convert it "
            "where you trust it: safetensors.torch.save_file(model.state_dict(), 'w.safetensors')"
        )
    return path


def differences(given: Mapping[str, Tensor], own: Mapping[str, Tensor], given_as: str, own_as: str) -> list[str]:
    """What is missing, unexpected or of another shape in ``given``; the first few in words."""
    problems = [f"{name} is missing in {given_as}" for name in own if name not in given]
    problems += [f"{name} is not in {own_as}" for name in given if name not in own]
    problems += [
        f"{name} is {tuple(given[name].shape)} in {given_as} and {tuple(value.shape)} in {own_as}"
        for name, value in own.items()
        if name in given and given[name].shape != value.shape
    ]
    return _shortened(problems)


def select(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names start with a prefix, by the rest of their names."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _shortened(problems: list[str], most: int = 8) -> list[str]:
    return problems if len(problems) <= most else [*problems[:most], f"and {len(problems) - most} more"]


# -- bytes -------------------------------------------------------------------------------------------------------------


def _packed(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> bytes:
    """Safetensors. The same memory under a second name is an alias in the header, since the format has no sharing."""
    stored: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, value in tensors.items():
        key = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
        if key in seen:
            aliases[name] = seen[key]
            continue
        seen[key] = name
        value = value.detach()
        # A part of a larger storage is cloned: the format would refuse two that overlap.
        whole = value.is_contiguous() and value.untyped_storage().nbytes() == value.nbytes
        stored[name] = value.cpu() if whole else value.cpu().clone(memory_format=torch.contiguous_format)
    # One entry, since the format does not keep the order of several: the same tensors give the same bytes.
    return safetensors.torch.save(stored, {"advnorm": json.dumps({"aliases": aliases, "meta": dict(meta)})})


def _unpacked(path: Path, data: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors under all of their names, and the meta of the header."""
    try:
        tensors = safetensors.torch.load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__", {})
        ours = json.loads(header.get("advnorm", '{"aliases": {}, "meta": {}}'))
        tensors |= {name: tensors[other] for name, other in ours["aliases"].items()}
        return tensors, ours["meta"]
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is damaged or no safetensors file ({error}); fetch or write it again") from None


def _not_json(meta: Mapping[str, Any]) -> list[str]:
    try:
        json.dumps(dict(meta), allow_nan=False)
    except (TypeError, ValueError) as error:
        return [f"meta must be plain JSON data without NaN and infinity: {error}"]
    return []


def _canonical(meta: Mapping[str, Any]) -> bytes:
    return json.dumps(dict(meta), sort_keys=True).encode()


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
