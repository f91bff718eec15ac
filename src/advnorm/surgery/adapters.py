"""An adapter names the kind of norm that a class is: all that surgery needs to convert it and to restore it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from advnorm._core.errors import ConfigError, SurgeryError, raise_problems, unknown_name
from advnorm.norms.factory import NORMS
from advnorm.norms.plan import Statistics
from advnorm.norms.replaced_class import eps_name
from advnorm.norms.routed_norm import RoutedNorm
from advnorm.surgery.library_classes import LIBRARY_CLASSES


@dataclass(frozen=True)
class Kind:
    """A kind of norm: its family (bn, ln, gn, in, rms), what its moments are taken over, its spatial dimensions.

    Channels are dimension 1. In a layer or root-mean-square norm without ``dim`` they are the last dimensions.
    """

    family: str
    statistics: Statistics
    dim: int | None = None

    def becomes(self, settings: Mapping[str, Any], family: str) -> bool:
        """Whether a norm of this kind and these settings can become a routed norm of ``family``."""
        if self.family == "gn":
            groups = {"ln": 1, "gn": settings["num_groups"], "in": settings["num_features"]}
            return groups.get(family) == settings["num_groups"]
        return self.family in ("bn", family)


#: Kinds by the names that :func:`register_adapter` and ``treat_as`` take.
KINDS: Mapping[str, Kind] = {
    "batch_norm": Kind("bn", "batch"),
    **{f"batch_norm_{dim}d": Kind("bn", "batch", dim) for dim in (1, 2, 3)},
    **{f"instance_norm_{dim}d": Kind("in", "group", dim) for dim in (1, 2, 3)},
    "group_norm": Kind("gn", "group"),
    "layer_norm": Kind("ln", "last"),
    "layer_norm_2d": Kind("ln", "last", 2),
    "rms_norm": Kind("rms", "last"),
    "rms_norm_2d": Kind("rms", "last", 2),
}


@dataclass(frozen=True)
class NormAdapter:
    """The kind of a norm class, and the children that a batch norm applies to its output, in this order.

    Per-sample norms (all but batch norms) run the forward of their class. Whatever it does besides normalizing, such as
    an activation or another order of the dimensions, stays. Batch norms run ours, which knows banks and modes.
    """

    kind: Kind
    after: tuple[str, ...] = ()


ADAPTERS: dict[type[nn.Module], NormAdapter] = {
    nn.BatchNorm1d: NormAdapter(KINDS["batch_norm_1d"]),
    nn.BatchNorm2d: NormAdapter(KINDS["batch_norm_2d"]),
    nn.BatchNorm3d: NormAdapter(KINDS["batch_norm_3d"]),
    nn.SyncBatchNorm: NormAdapter(KINDS["batch_norm"]),
    nn.InstanceNorm1d: NormAdapter(KINDS["instance_norm_1d"]),
    nn.InstanceNorm2d: NormAdapter(KINDS["instance_norm_2d"]),
    nn.InstanceNorm3d: NormAdapter(KINDS["instance_norm_3d"]),
    nn.GroupNorm: NormAdapter(KINDS["group_norm"]),
    nn.LayerNorm: NormAdapter(KINDS["layer_norm"]),
    nn.RMSNorm: NormAdapter(KINDS["rms_norm"]),
}
#: Classes that normalize and do nothing else, so that a norm of another kind can take their place.
BUILT_IN = frozenset(ADAPTERS)


def register_adapter(norm_class: type[nn.Module], kind: str, *, after: Sequence[str] = ()) -> type[nn.Module]:
    """Let :func:`convert_norm` convert norms of exactly this class as a ``kind`` of norm; return the class.

    A batch norm must compute what the built-in one computes and then apply its children named in ``after``. Other
    norms must treat each sample, an index of the first dimension, on its own and keep their affine parameters in
    ``weight`` and ``bias``; they run their own forward.

    >>> register_adapter(BatchNormAct, "batch_norm_2d", after=("drop", "act"))
    """
    ADAPTERS[norm_class] = make_adapter(norm_class, kind, after)
    return norm_class


def make_adapter(norm_class: Any, kind: Any, after: Sequence[str] = (), *, field: str = "kind") -> NormAdapter:
    """Validate the arguments of an adapter and build it."""
    if not (isinstance(norm_class, type) and issubclass(norm_class, nn.Module)):
        raise ConfigError("wrong_type", "{field} must be a subclass of nn.Module", field="norm_class", got=norm_class)
    if kind not in KINDS:
        raise_problems([unknown_name("kind of norm", kind, KINDS, field=field)])
    if after and KINDS[kind].statistics != "batch":
        message, hint = f"a {kind} runs its own forward", "leave {field} out"
        raise ConfigError("conflict", message, field="after", got=list(after), hint=hint)
    return NormAdapter(KINDS[kind], (after,) if isinstance(after, str) else tuple(after))


def find_adapter(norm_class: type[nn.Module]) -> NormAdapter | None:
    """The adapter of a class: registered, or known by its qualified name. Libraries are not imported for that."""
    if norm_class in ADAPTERS:
        return ADAPTERS[norm_class]
    name = f"{norm_class.__module__}.{norm_class.__qualname__}"
    for kind, after, patterns in LIBRARY_CLASSES:
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            return NormAdapter(KINDS[kind], after)
    return None


def kind_of(norm: RoutedNorm) -> Kind:
    """The kind of a routed norm, ours or a replaced one."""
    if norm.plan.statistics in ("batch", "group"):
        family = {"batch": "bn", "group": "gn"}[norm.plan.statistics]
        return Kind(family, norm.plan.statistics, norm.dim)
    return Kind(NORMS.get(norm.plan.name).family, norm.plan.statistics, norm.dim)


def has_channels_last(norm: nn.Module) -> bool:
    """Whether the channels of a norm, routed or not, are the last dimensions of its input; else they are dimension 1.

    A subclass that is not registered counts as its base class.
    """
    if isinstance(norm, RoutedNorm):
        return norm.plan.statistics == "last" and norm.dim is None
    adapter = next(filter(None, map(find_adapter, type(norm).__mro__)), None)
    return adapter is not None and adapter.kind.statistics == "last" and _spatial_dim(norm, adapter.kind) is None


def _spatial_dim(norm: nn.Module, kind: Kind) -> int | None:
    """The number of spatial dimensions behind the channels. Some classes of transformers decide it by a setting."""
    return 2 if getattr(norm, "data_format", None) == "channels_first" else kind.dim


def read_settings(norm: Any, kind: Kind) -> dict[str, Any]:
    """The arguments of a :class:`RoutedNorm` with the settings of ``norm``."""
    tensors = {**norm._parameters, **norm._buffers}
    weight, bias = (tensors.get(name) for name in ("weight", "bias"))
    eps = eps_name(norm)
    settings = {
        "dim": _spatial_dim(norm, kind),
        "eps": None if eps is None else getattr(norm, eps),
        "affine": weight is not None,
        "bias": bias is not None,
        "track_running_stats": tensors.get("running_mean") is not None,
    }
    if isinstance(norm, RoutedNorm):
        own = ("num_features", "dim", "momentum", "num_groups", "sync", "process_group")
        return settings | {name: getattr(norm, name) for name in own}
    if kind.family == "bn":
        _validate_tracking(norm)
        synchronized = isinstance(norm, nn.SyncBatchNorm)
        group = norm.process_group if synchronized else None
        own = {"num_features": norm.num_features, "momentum": norm.momentum}
        return settings | own | {"sync": synchronized, "process_group": group}
    if kind.family == "gn":
        return settings | {"num_features": norm.num_channels, "num_groups": norm.num_groups}
    if kind.family == "in":
        if settings["track_running_stats"]:
            message, hint = f"{type(norm).__name__} has running statistics", "build it with track_running_stats=False"
            raise SurgeryError("not_supported", message, hint=hint)
        return settings | {"num_features": norm.num_features, "num_groups": norm.num_features}
    shape = getattr(norm, "normalized_shape", (1,)) if weight is None else weight.shape
    return settings | {"num_features": tuple(shape)}


def _validate_tracking(norm: Any) -> None:
    stored = {norm.running_mean is not None, norm.running_var is not None}
    if True in stored and not (stored == {True} and norm.track_running_stats):
        message = f"{type(norm).__name__} evaluates with statistics that it does not update"
        hint = "set track_running_stats=True (momentum=0 keeps them), or running_mean and running_var to None"
        raise SurgeryError("not_supported", message, hint=hint)


def validate_forward(norm: nn.Module) -> None:
    """Raise if the forward of a per-sample norm takes more than the input, which a routed norm could not pass on."""
    parameters = list(inspect.signature(type(norm).forward).parameters)[1:]
    if len(parameters) != 1:
        message = (
            f"the forward of {type(norm).__name__} takes {', '.join(parameters)}, and a norm takes its input alone"
        )
        raise SurgeryError("not_supported", message)
