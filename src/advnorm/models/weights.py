"""Weights on disk: read without running code, fitted to a model by their names, written as safetensors."""

from __future__ import annotations

import json
import pickle
import re
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from advnorm._core.errors import ConfigError, Description, did_you_mean, first_line
from advnorm._core.records import digest, read_bytes, require_regular, write_atomic, writing
from advnorm._core.tensors import special_kind
from advnorm._core.wrappers import unwrap_model
from advnorm.norms import RoutedModule

SAFETENSORS = ".safetensors"
#: Suffixes of files that ``torch.save`` wrote. They are read by ``torch.load(weights_only=True)``.
PICKLES = (".pt", ".pth", ".ckpt", ".bin")
#: A file, and after colons the entry or the branch to take from it: ``w.pt:ema``, ``w.safetensors:adv``.
_SOURCE = re.compile(rf"(.+(?:{'|'.join(map(re.escape, (SAFETENSORS, *PICKLES)))}))((?::\w+)*)")
#: Tensors that do not fit a model, as far as an error lists them.
MISMATCHES = 8
#: Components of names that DDP, DataParallel and ``torch.compile`` add, wherever they wrap a module.
_WRAPPED = re.compile(r"(?<![^.])(?:module|_orig_mod)\.")
#: Tensors of which a routed module has one for each bank: ``weight_adv``.
_BANKED = re.compile(r"((?:.*\.)?)(weight|bias|running_mean|running_var|num_batches_tracked)(?:_(\w+))?")


@dataclass(frozen=True)
class LoadedWeights:
    """The ``meta`` in the header of a file that advnorm wrote, and ``notes`` on what was done to make the names fit."""

    meta: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def load_weights(model: nn.Module, source: Path | str) -> LoadedWeights:
    """Fill a model from a ``.safetensors`` or ``.pt`` file, in place; memory format, device and dtype stay.

    A ``.pt`` file (or ``.pth``, ``.ckpt``, ``.bin``) is read by ``torch.load(weights_only=True)``, which runs no code.
    The state dict may lie inside it, under ``state_dict``, ``model``, ``ema`` or any other name. ``FILE:ema`` chooses
    between several. Prefixes such as ``module.`` and ``backbone.`` are removed or added if all names fit then.

    A file with one bank fills all banks of a routed norm. If the file has more banks than the model, ``FILE:adv``
    chooses the branch. The ``notes`` of the result list what was done. One error lists everything that does not fit.
    """
    path, choices = split_source(source)
    entries, meta = _read(path)
    return LoadedWeights(meta, fit_weights(model, entries, str(path), choices))


def split_source(source: Path | str) -> tuple[Path, tuple[str, ...]]:
    """Split ``FILE:PART`` into the file and the entries or branches to take from it."""
    found = None if Path(source).exists() else _SOURCE.fullmatch(str(source))
    return (Path(source), ()) if found is None else (Path(found[1]), tuple(found[2].split(":")[1:]))


def fit_weights(
    model: nn.Module, entries: Mapping[str, Mapping[str, Tensor]], source: str, choices: tuple[str, ...] = ()
) -> tuple[str, ...]:
    """Fill a model from the entry whose names fit; return notes on what was done. ``entries``: tensors by place."""
    model = unwrap_model(model)
    entries = {**entries, **{place: part for choice in choices for place, part in _parts(entries, choice).items()}}
    chosen = {place: set(place.split(".")) & set(choices) for place in entries}
    if named := max(chosen.values(), key=len, default=set[str]()):
        entries = {place: tensors for place, tensors in entries.items() if chosen[place] == named}
    branches = [choice for choice in choices if choice not in named]
    own = _own_names(model)
    of_entries = [_fits(own, tensors, place, branches) for place, tensors in entries.items()]
    fits = [min(fits, key=lambda fit: fit.wrong_names) for fits in of_entries]
    if not fits:
        raise ConfigError("empty", f"{source} holds no tensors", field="weights", hint="save model.state_dict()")
    best = min(fits, key=lambda fit: fit.wrong_names)
    if unknown := [branch for branch in branches if branch not in best.file_banks]:
        names = dict.fromkeys([*(part for place in entries for part in place.split(".") if part), *best.file_banks])
        raise ConfigError("unknown_name", f"{source} has no {unknown[0]!r}{did_you_mean(unknown[0], names)}", "weights")
    fitting = [fit for fit in fits if not fit.wrong_names]
    if not all(_equal(fit.tensors, best.tensors) for fit in fitting):
        message = f"{source} holds several sets of weights that fit: {', '.join(fit.place for fit in fitting)}"
        raise ConfigError("ambiguous", message, "weights", hint=f"choose one: {source}:{best.place.rpartition('.')[2]}")
    if fitting and best.undecided:
        message = f"{source} has the banks {', '.join(best.file_banks)}, and the model has others"
        hint = f"choose a branch: {source}:{best.file_banks[-1]}"
        raise ConfigError("ambiguous", message, field="weights", hint=hint)
    if best.wrong_names:
        _propose_part(model, entries, source)
    # An average of all tensors makes floats of counts.
    averaged = {n: value for n, value in best.tensors.items() if "num_batches_tracked" in n and not value.is_complex()}
    counts = {name: value.long() for name, value in averaged.items()}
    restore_model(model, best.tensors | counts, source)
    return best.notes()


# -- names -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _OwnNames:
    """Names in a model's state dict: of tensors that exist once, and of banks by layer, tensor and bank."""

    single: frozenset[str]
    banks: Mapping[tuple[str, str], Mapping[str, str]]  # ("bn1.", "weight") to {"adv": "bn1.weight_adv"}


def _own_names(model: nn.Module) -> _OwnNames:
    modules = dict(model.named_modules(remove_duplicate=False))
    single: set[str] = set()
    banks: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for name in model.state_dict():
        parsed = _BANKED.fullmatch(name)
        if parsed and (parsed[3] is None or isinstance(modules[parsed[1][:-1]], RoutedModule)):
            banks[parsed[1], parsed[2]][parsed[3] or ""] = name
        else:
            single.add(name)
    return _OwnNames(frozenset(single), banks)


@dataclass(frozen=True, kw_only=True)
class _Fit:
    """One way to match the names of an entry with those of a model."""

    place: str
    removed: str  # prefix
    added: str  # prefix
    tensors: dict[str, Tensor]  # by the names in the model; other tensors keep their names
    wrong_names: int  # names that only the file or only the model has
    file_banks: tuple[str, ...]
    undecided: bool  # several banks with different values could fill one of the model
    filled: tuple[str, ...]  # banks of the model that the file does not have
    filled_from: str
    dropped: tuple[str, ...]  # banks of the file that the model does not have

    def notes(self) -> tuple[str, ...]:
        notes = [f"took {self.place!r}"] if self.place else []
        notes += [f"removed the prefix {self.removed!r}"] if self.removed else []
        notes += [f"added the prefix {self.added!r}"] if self.added else []
        if self.filled:
            banks = f"the banks {', '.join(self.filled)}" if any(self.filled) else "the single bank"
            origin = f"the bank {self.filled_from}" if self.filled_from else "the single bank"
            notes.append(f"filled {banks} of the model from {origin} of the file")
        if self.dropped:
            notes.append(f"left out the banks {', '.join(self.dropped)} of the file")
        return tuple(notes)


def _fits(own: _OwnNames, tensors: Mapping[str, Tensor], place: str, branches: list[str]) -> Iterator[_Fit]:
    """Match the names as they are, then without or with the prefixes that all names of the file or the model share."""
    names = {*own.single, *(name for banks in own.banks.values() for name in banks.values())}
    wrappers = "".join(dict.fromkeys(part for name in tensors for part in _WRAPPED.findall(name)))
    unwrapped = {_WRAPPED.sub("", name): value for name, value in tensors.items()}
    sources = {"": tensors}
    if len(unwrapped) == len(tensors):  # else two names became one
        sources.setdefault(wrappers, unwrapped)
    for removed, source in sources.items():
        for outer, added in product(_shared_prefixes(source), _shared_prefixes(names)):
            renamed = {added + name.removeprefix(outer): value for name, value in source.items()}
            yield _match(own, renamed, branches, place=place, removed=removed + outer, added=added)


def _shared_prefixes(names: Collection[str]) -> list[str]:
    """The prefixes that all names share, from none to the longest: ``["", "model.", "model.net."]``."""
    first = next(iter(names), "").split(".")
    prefixes = ["".join(f"{part}." for part in first[:count]) for count in range(len(first))]
    return [prefix for prefix in prefixes if all(name.startswith(prefix) for name in names)]


def _match(own: _OwnNames, tensors: Mapping[str, Tensor], branches: list[str], **how: str) -> _Fit:
    """Match names exactly, and banks with the banks of the same layer."""
    file_banks: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for name in tensors:
        if parsed := _BANKED.fullmatch(name):
            file_banks[parsed[1], parsed[2]][parsed[3] or ""] = name
    fitted = {name: tensors[name] for name in own.single if name in tensors}
    left = {name for name in tensors if name not in fitted}
    missing = len(own.single) - len(fitted)
    undecided, filled, dropped, sources = False, dict[str, None](), dict[str, None](), dict[str, None]()
    for layer, banks in own.banks.items():
        found = file_banks.get(layer, {})
        if len({tensors[name].shape for name in found.values()}) > 1:  # no banks: ``weight_g`` of a weight norm
            found = {"": found[""]} if "" in found else {}
        missing += 0 if found else len(banks)
        for bank, name in banks.items() if found else ():
            options = [bank] if bank in found else [one for one in ("", *branches) if one in found] or list(found)
            fitted[name] = tensors[found[options[0]]]
            undecided |= not all(_same_bits(fitted[name], tensors[found[other]]) for other in options[1:])
            if options != [bank]:
                filled[bank], sources[options[0]] = None, None
        left -= set(found.values())
        dropped |= dict.fromkeys(bank for bank in found if bank and bank not in banks)
    return _Fit(
        tensors=fitted | {name: tensors[name] for name in tensors if name in left},
        wrong_names=missing + len(left),
        file_banks=tuple(dict.fromkeys(bank for layer in own.banks for bank in file_banks.get(layer, ()) if bank)),
        undecided=undecided,
        filled=tuple(filled),
        filled_from=next(iter(sources), ""),
        dropped=tuple(bank for bank in dropped if bank not in sources),
        **how,
    )


def _parts(entries: Mapping[str, Mapping[str, Tensor]], choice: str) -> dict[str, dict[str, Tensor]]:
    """The tensors of each entry whose names have the component ``choice``, as in ``model.conv.weight``, by place."""
    parts = {}
    for place, tensors in entries.items():
        split = [(name.split("."), value) for name, value in tensors.items()]
        part = {".".join(n[n.index(choice) + 1 :]): value for n, value in split if choice in n[:-1]}
        if part:
            parts[f"{place}.{choice}".lstrip(".")] = part
    return parts


def _propose_part(model: nn.Module, entries: Mapping[str, Mapping[str, Tensor]], source: str) -> None:
    """Raise if a part of an entry fits the model, such as ``model.`` beside the weights of a loss."""
    own, state = _own_names(model), model.state_dict()
    for tensors in entries.values():
        names = {name: _WRAPPED.sub("", name).partition(".")[0] for name in tensors}
        for choice in dict.fromkeys(names.values()):
            fits = [fit for part in _parts({"": tensors}, choice).values() for fit in _fits(own, part, choice, [])]
            if any(not f.wrong_names and all(_kind(f.tensors[n]) == _kind(state[n]) for n in state) for f in fits):
                others = _some([name for name, first in names.items() if first != choice])
                message = f"{source} has more than the model: {choice!r} fits, and {others} would be left out"
                hint = f"if the model does not need them, choose the part: {source}:{choice}"
                raise ConfigError("wrong_tensors", message, field="weights", hint=hint)


def _equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(_same_bits(value, other[name]) for name, value in one.items())


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Unlike ``torch.equal``, this compares NaN, 8-bit floats and tensors of two types."""
    return one is other or digest(one) == digest(other)


def restore_model(model: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
    """Copy tensors into a model in place; memory format, device and dtype stay. One error lists all mismatches."""
    model = unwrap_model(model)
    own = model.state_dict()
    wrong = [f"{name} is missing in the file" for name in own if name not in tensors]
    wrong += [f"{name} is not in the model" for name in tensors if name not in own]
    differ = [name for name in own if name in tensors and _kind(tensors[name]) != _kind(own[name])]
    wrong += [f"{name} is {_kind(tensors[name])} in the file and {_kind(own[name])} in the model" for name in differ]
    if wrong:
        hint = ""
        shapes = {(tensors[name].shape[:1], own[name].shape[:1]) for name in differ}
        if len(wrong) == len(differ) and len(shapes) == 1 and all(len(a) and a != b for a, b in shapes):  # the outputs
            hint = f"if this is the classifier, build the model with {tensors[differ[0]].shape[0]} classes"
        if own and tensors and own.keys().isdisjoint(tensors):
            wrong = [f"no name fits; the file has {_some(tensors)}, the model has {_some(own)}"]
        rest = [f"and {len(wrong) - MISMATCHES} more"] if len(wrong) > MISMATCHES else []
        message = f"{source} does not fit the model: {'; '.join([*wrong[:MISMATCHES], *rest])}"
        raise ConfigError("wrong_tensors", message, field="weights", hint=hint)
    model.load_state_dict(dict(tensors))


def _some(names: Collection[str]) -> str:
    return ", ".join([*list(names)[:3], *(["…"] if len(names) > 3 else [])])


def _kind(tensor: Tensor) -> str:
    """Shape, and kind if not floats; torch copies quantized weights as floats, and complex ones without a part."""
    kind = "" if tensor.is_floating_point() else "complex" if tensor.is_complex() else "integers"
    return f"{tuple(tensor.shape)} {special_kind(tensor) or kind}".rstrip()


# -- files -------------------------------------------------------------------------------------------------------------


def save_weights(path: Path | str, model: nn.Module, meta: Mapping[str, Any]) -> Path:
    """Write a model's parameters and buffers as a safetensors file with ``meta`` in its header."""
    path = Path(path)
    if path.suffix != SAFETENSORS:
        raise ConfigError("not_supported", f"{{field}} must end in {SAFETENSORS}", field="weights", got=path.name)
    with writing(path):
        write_atomic(path, pack_tensors(unwrap_model(model).state_dict(), meta))
    return path


def _read(path: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Tensors by the entry of the file that holds them, and the meta of a file that advnorm wrote."""
    require_regular(path, "weights")
    if path.suffix == SAFETENSORS:
        tensors, meta = unpack_tensors(path, read_bytes(path, "weights"))
        return {"": tensors}, meta
    if path.suffix not in PICKLES:
        message, hint = "{field} must be a .safetensors or .pt file", "save them with torch.save(model.state_dict(), …)"
        raise ConfigError("not_supported", message, field="weights", got=Description(path), hint=hint)
    return dict(_tensor_entries(_unpickle(path))), {}


def _unpickle(path: Path) -> Any:
    """The content of a file that ``torch.save`` wrote. An object of any class but tensors and containers raises."""
    try:
        with warnings.catch_warnings(action="ignore"):  # about old protocols and TorchScript
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        classes = "objects other than tensors"
        with suppress(Exception):  # the older format of torch.save cannot be listed
            classes = ", ".join(torch.serialization.get_unsafe_globals_in_checkpoint(path)) or classes
        message = f"{path} is a pickle that can run code: it needs {classes}, and nothing of it was loaded"
        hint = "save the state dict alone: torch.save(model.state_dict(), 'weights.pt'); "
        hint += f"if you trust the file: torch.load({path.name!r}, weights_only=False) reads it"
        raise ConfigError("unsafe_file", message, field="weights", hint=hint) from None
    except Exception as error:  # truncated, TorchScript, or no such file at all
        if "TorchScript" in str(error):
            message, hint = f"{path} is a TorchScript program", "save torch.jit.load(FILE).state_dict() instead"
            raise ConfigError("unsafe_file", message, field="weights", hint=hint) from None
        message = f"{path} is damaged or was not written by torch.save ({first_line(error).partition('. ')[0]})"
        raise ConfigError("damaged_file", message, field="weights", hint="fetch or write it again") from None


def _tensor_entries(content: Any, place: str = "", depth: int = 3) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Every mapping of names to tensors inside nested mappings, with its place such as ``ema.state_dict``."""
    if not isinstance(content, Mapping):
        return
    tensors = {name: value for name, value in content.items() if isinstance(name, str) and isinstance(value, Tensor)}
    if tensors:
        yield place, tensors
    for name, value in content.items() if depth else ():
        if isinstance(name, str):
            yield from _tensor_entries(value, f"{place}.{name}".lstrip("."), depth - 1)


def pack_tensors(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> bytes:
    """Safetensors bytes. A second name of the same memory is an alias in the header: the format has no sharing."""
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
        # A part of a larger storage is cloned: the format rejects overlapping tensors.
        whole = value.is_contiguous() and value.untyped_storage().nbytes() == value.nbytes
        stored[name] = value.cpu() if whole else value.cpu().clone(memory_format=torch.contiguous_format)
    # A single entry, because the format does not keep the order of several: the same tensors give the same bytes.
    return safetensors.torch.save(stored, {"advnorm": json.dumps({"aliases": aliases, "meta": dict(meta)})})


def unpack_tensors(path: Path, data: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors under all of their names, and the meta of the header."""
    try:
        tensors = safetensors.torch.load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__", {})
        ours = json.loads(header.get("advnorm", '{"aliases": {}, "meta": {}}'))
        tensors |= {name: tensors[other] for name, other in ours["aliases"].items()}
        return tensors, ours["meta"]
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        message = f"{path} is damaged or not a safetensors file ({error})"
        raise ConfigError("damaged_file", message, field="weights", hint="fetch or write it again") from None
