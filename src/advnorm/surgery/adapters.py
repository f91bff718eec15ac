"""Adapters: how the norms of one foreign class become routed norms, and how ``strip`` gives that class back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from advnorm._core.errors import SurgeryError
from advnorm.norms.plan import Statistics
from advnorm.norms.routed_norm import RoutedNorm

_DIMS: dict[int, tuple[type[nn.Module], ...]] = {
    1: (nn.BatchNorm1d, nn.InstanceNorm1d),
    2: (nn.BatchNorm2d, nn.InstanceNorm2d),
    3: (nn.BatchNorm3d, nn.InstanceNorm3d),
}


class NormAdapter(ABC):
    """Translates the settings of norms of ``norm_class`` to those of a routed norm and back.

    The adapter of a class that does more than normalize (an activation, dropout, another order of the dimensions) names
    the additional attributes in ``parts`` and sets ``routed_class`` to a subclass of :class:`RoutedNorm` that does the
    same with them. Surgery moves these attributes and the weight, bias and running statistics in both directions.
    """

    #: What the moments of this class are taken over.
    statistics: Statistics
    routed_class: type[RoutedNorm] = RoutedNorm
    parts: tuple[str, ...] = ()

    def __init__(self, norm_class: type[nn.Module]) -> None:
        self.norm_class = norm_class

    @abstractmethod
    def read_settings(self, norm: Any) -> dict[str, Any]:
        """The arguments of a :class:`RoutedNorm` with the settings of ``norm``, which starts as :func:`settings_of`."""

    @abstractmethod
    def becomes(self, settings: dict[str, Any], family: str) -> bool:
        """Whether a norm with these settings can become a routed norm of ``family``: bn, ln, gn, in or none."""

    @abstractmethod
    def create(self, routed: RoutedNorm) -> nn.Module:
        """A norm of the foreign class with the settings of ``routed``, on the device ``meta``."""


ADAPTERS: dict[type[nn.Module], NormAdapter] = {}

Adapter = TypeVar("Adapter", bound=NormAdapter)


def register_adapter(*norm_classes: type[nn.Module]) -> Callable[[type[Adapter]], type[Adapter]]:
    """Register an adapter for norms of exactly these classes.

    >>> @register_adapter(nn.GroupNorm)
    ... class GroupNormAdapter(NormAdapter): ...
    """

    def register(adapter: type[Adapter]) -> type[Adapter]:
        ADAPTERS.update({norm_class: adapter(norm_class) for norm_class in norm_classes})
        return adapter

    return register


def adapter_of(norm: RoutedNorm) -> NormAdapter:
    """The adapter of the class that ``strip`` gives back: the replaced one, or the built-in one of the same kind."""
    adapter = ADAPTERS.get(norm.source_class) if norm.source_class is not None else None
    if adapter is not None and adapter.statistics == norm.plan.statistics:
        return adapter
    batch_norm = nn.SyncBatchNorm if norm.dim is None else _DIMS[norm.dim][0]
    return ADAPTERS[{"batch": batch_norm, "group": nn.GroupNorm, "last": nn.LayerNorm}[norm.plan.statistics]]


def settings_of(norm: Any, *names: str) -> dict[str, Any]:
    """The settings that every norm has, and the attributes of these names."""
    return {
        "dim": next((dim for dim, kinds in _DIMS.items() if isinstance(norm, kinds)), None),
        "affine": norm.weight is not None,
        "bias": norm.bias is not None,
        "track_running_stats": getattr(norm, "running_mean", None) is not None,
        **{name: getattr(norm, name) for name in ("eps", *names)},
    }


@register_adapter(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
class BatchNormAdapter(NormAdapter):
    """Batch norms become any norm."""

    statistics = "batch"

    def read_settings(self, norm: Any) -> dict[str, Any]:
        stored = {norm.running_mean is not None, norm.running_var is not None}
        if True in stored and not (stored == {True} and norm.track_running_stats):
            message = f"{type(norm).__name__} evaluates with statistics that it does not update"
            hint = "set track_running_stats=True (momentum=0 keeps them), or running_mean and running_var to None"
            raise SurgeryError("not_supported", message, hint=hint)
        synchronized = isinstance(norm, nn.SyncBatchNorm)
        group = norm.process_group if synchronized else None
        return settings_of(norm, "num_features", "momentum") | {"sync": synchronized, "process_group": group}

    def becomes(self, settings: dict[str, Any], family: str) -> bool:
        return True

    def create(self, routed: RoutedNorm) -> nn.Module:
        channels: Any = routed.num_features
        group: Any = {"process_group": routed.process_group} if issubclass(self.norm_class, nn.SyncBatchNorm) else {}
        return self.norm_class(
            channels,
            eps=routed.eps,
            momentum=routed.momentum,
            affine=routed.affine,
            track_running_stats=routed.track_running_stats,
            device="meta",
            **group,
        )


@register_adapter(nn.GroupNorm)
class GroupNormAdapter(NormAdapter):
    """Group norms become routed norms with the same channel groups."""

    statistics = "group"

    def read_settings(self, norm: Any) -> dict[str, Any]:
        return settings_of(norm, "num_groups") | {"num_features": norm.num_channels}

    def becomes(self, settings: dict[str, Any], family: str) -> bool:
        groups = {"ln": 1, "gn": settings["num_groups"], "in": settings["num_features"]}
        return groups.get(family) == settings["num_groups"]

    def create(self, routed: RoutedNorm) -> nn.Module:
        channels: Any = routed.num_features
        return nn.GroupNorm(routed.num_groups, channels, eps=routed.eps, affine=routed.affine, device="meta")


@register_adapter(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
class InstanceNormAdapter(GroupNormAdapter):
    """Instance norms become group norms with one channel per group, whose kernel ``strip`` keeps."""

    def read_settings(self, norm: Any) -> dict[str, Any]:
        return settings_of(norm, "num_features") | {"num_groups": norm.num_features}

    def becomes(self, settings: dict[str, Any], family: str) -> bool:
        return family == "in" and settings["affine"] and not settings["track_running_stats"]


@register_adapter(nn.LayerNorm)
class LayerNormAdapter(NormAdapter):
    """Layer norms of the last dimensions become routed layer norms of the same dimensions."""

    statistics = "last"

    def read_settings(self, norm: Any) -> dict[str, Any]:
        return settings_of(norm) | {"num_features": norm.normalized_shape}

    def becomes(self, settings: dict[str, Any], family: str) -> bool:
        return family == "ln"

    def create(self, routed: RoutedNorm) -> nn.Module:
        return nn.LayerNorm(list(routed.shape), eps=routed.eps, elementwise_affine=routed.affine, device="meta")
