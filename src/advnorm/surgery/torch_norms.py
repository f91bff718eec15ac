"""Adapters of the norms that are built into PyTorch."""

from __future__ import annotations

from typing import Any

from torch import nn

from advnorm.norms.routed_norm import RoutedNorm
from advnorm.surgery.adapter import Kept, NormAdapter, NormSettings, Rejected, register_adapter

_DIMS: dict[type[nn.Module], int] = {
    nn.BatchNorm1d: 1,
    nn.BatchNorm2d: 2,
    nn.BatchNorm3d: 3,
    nn.InstanceNorm1d: 1,
    nn.InstanceNorm2d: 2,
    nn.InstanceNorm3d: 3,
}


def _common(norm: Any) -> dict[str, Any]:
    dim = next((dim for kind, dim in _DIMS.items() if isinstance(norm, kind)), None)
    return {"dim": dim, "eps": norm.eps, "weight": norm.weight, "bias": norm.bias}


@register_adapter(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
class BatchNormAdapter(NormAdapter):
    """Batch norms become any norm."""

    statistics = "batch"

    def becomes(self, settings: NormSettings, family: str) -> bool:
        return True

    def read(self, norm: Any) -> NormSettings | Rejected:
        stored = [norm.running_mean is not None, norm.running_var is not None]
        if any(stored) and not (all(stored) and norm.track_running_stats):
            return Rejected(
                f"{type(norm).__name__} evaluates with statistics that it does not update",
                hint="set track_running_stats=True (momentum=0 keeps them), or running_mean and running_var to None",
            )
        return NormSettings(
            **_common(norm),
            statistics="batch",
            num_features=norm.num_features,
            momentum=norm.momentum,
            running=(norm.running_mean, norm.running_var, norm.num_batches_tracked) if all(stored) else None,
            sync=isinstance(norm, nn.SyncBatchNorm),
            process_group=getattr(norm, "process_group", None),
        )

    def restore(self, settings: NormSettings, routed: RoutedNorm) -> nn.Module:
        group: Any = {"process_group": settings.process_group} if self.norm_class is nn.SyncBatchNorm else {}
        plain: Any = self.norm_class(
            settings.num_features,
            eps=settings.eps,
            momentum=settings.momentum,
            affine=settings.weight is not None,
            track_running_stats=settings.running is not None,
            device="meta",
            **group,
        )
        plain.weight, plain.bias = settings.weight, settings.bias
        if settings.running is not None:
            plain.running_mean, plain.running_var, plain.num_batches_tracked = settings.running
        return plain


@register_adapter(nn.GroupNorm)
class GroupNormAdapter(NormAdapter):
    """Group norms become routed norms with the same channel groups."""

    statistics = "group"

    def becomes(self, settings: NormSettings, family: str) -> bool:
        groups = {"ln": 1, "gn": settings.num_groups, "in": settings.num_features}
        return groups.get(family) == settings.num_groups

    def read(self, norm: Any) -> NormSettings | Kept:
        return NormSettings(
            **_common(norm), statistics="group", num_features=norm.num_channels, num_groups=norm.num_groups
        )

    def restore(self, settings: NormSettings, routed: RoutedNorm) -> nn.Module:
        channels: Any = settings.num_features
        affine = settings.weight is not None
        plain: Any = nn.GroupNorm(settings.num_groups, channels, eps=settings.eps, affine=affine, device="meta")
        plain.weight, plain.bias = settings.weight, settings.bias
        return plain


@register_adapter(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
class InstanceNormAdapter(GroupNormAdapter):
    """Instance norms become group norms with one channel per group, whose kernel ``strip`` keeps."""

    def becomes(self, settings: NormSettings, family: str) -> bool:
        return family == "in"

    def read(self, norm: Any) -> NormSettings | Kept:
        if norm.track_running_stats or not norm.affine:
            return Kept(f"{type(norm).__name__} without affine parameters or with running statistics is not routed")
        channels = norm.num_features
        return NormSettings(**_common(norm), statistics="group", num_features=channels, num_groups=channels)


@register_adapter(nn.LayerNorm)
class LayerNormAdapter(NormAdapter):
    """Layer norms of the last dimensions become routed layer norms of the same dimensions."""

    statistics = "last"

    def becomes(self, settings: NormSettings, family: str) -> bool:
        return family == "ln"

    def read(self, norm: Any) -> NormSettings:
        return NormSettings(**_common(norm), statistics="last", num_features=norm.normalized_shape)

    def restore(self, settings: NormSettings, routed: RoutedNorm) -> nn.Module:
        plain: Any = nn.LayerNorm(
            list(routed.shape),
            eps=settings.eps,
            elementwise_affine=settings.weight is not None,
            bias=settings.bias is not None,
            device="meta",
        )
        plain.weight, plain.bias = settings.weight, settings.bias
        return plain
