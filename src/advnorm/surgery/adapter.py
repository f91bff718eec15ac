"""Adapters: how the norms of one foreign class become routed norms, and how ``strip`` gives that class back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn

from advnorm._core.distributed import ProcessGroup
from advnorm.norms.plan import Statistics
from advnorm.norms.routed_norm import RoutedNorm


@dataclass(frozen=True, kw_only=True)
class NormSettings:
    """One branch of a norm: the settings and tensors that a foreign norm and a routed norm have in common."""

    statistics: Statistics
    num_features: Any  # the number of channels, or the shape that a layer norm normalizes
    dim: int | None
    eps: float
    weight: nn.Parameter | None
    bias: nn.Parameter | None
    num_groups: int = 1
    momentum: float | None = 0.1
    running: tuple[Tensor, Tensor, Tensor | None] | None = None  # mean, variance, number of batches
    sync: bool = False
    process_group: ProcessGroup | None = None


class Kept(NamedTuple):
    """A norm that a conversion leaves in place."""

    reason: str
    is_routed: bool = False  # it already is the requested norm
    update: Callable[[], object] | None = None  # changes its settings, after every module has been accepted


class Rejected(NamedTuple):
    """A norm that cannot be converted without a change of what it computes."""

    reason: str
    hint: str = ""


class NormAdapter(ABC):
    """Converts norms of ``norm_class`` to :class:`NormSettings` and back.

    The adapter of a class that does more than normalize (an activation, dropout, another order of the dimensions) sets
    ``routed_class`` to a subclass of :class:`RoutedNorm` that does the same, names the additional children and tensors
    in ``parts``, copies them in :meth:`finish`, and puts them back in :meth:`restore`.
    """

    #: What the moments of this class are taken over.
    statistics: Statistics
    routed_class: type[RoutedNorm] = RoutedNorm
    parts: tuple[str, ...] = ()

    def __init__(self, norm_class: type[nn.Module]) -> None:
        self.norm_class = norm_class

    @abstractmethod
    def becomes(self, settings: NormSettings, family: str) -> bool:
        """Whether a norm with these settings can become a routed norm of ``family``: bn, ln, gn, in or none."""

    @abstractmethod
    def read(self, norm: Any) -> NormSettings | Kept | Rejected:
        """The settings of a foreign norm, or why it is kept or rejected."""

    def finish(self, norm: Any, routed: RoutedNorm) -> None:  # noqa: B027
        """Copy the parts of ``norm`` that :class:`NormSettings` does not have to the routed norm."""

    @abstractmethod
    def restore(self, settings: NormSettings, routed: RoutedNorm) -> nn.Module:
        """A norm of the foreign class that computes one branch of ``routed``."""


ADAPTERS: dict[type[nn.Module], NormAdapter] = {}

Adapter = TypeVar("Adapter", bound=NormAdapter)


def register_adapter(*norm_classes: type[nn.Module]) -> Callable[[type[Adapter]], type[Adapter]]:
    """Register an adapter for norms of exactly these classes.

    >>> @register_adapter(nn.GroupNorm)
    ... class GroupNormAdapter(NormAdapter): ...
    """

    def register(adapter: type[Adapter]) -> type[Adapter]:
        for norm_class in norm_classes:
            ADAPTERS[norm_class] = adapter(norm_class)
        return adapter

    return register


def adapter_of(norm: RoutedNorm) -> NormAdapter:
    """The adapter of the class that ``strip`` gives back: the replaced one, or the built-in one of the same kind."""
    adapter = ADAPTERS.get(norm.source_class) if norm.source_class is not None else None
    if adapter is not None and adapter.statistics == norm.plan.statistics:
        return adapter
    batch_norm = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d, None: nn.SyncBatchNorm}[norm.dim]
    return ADAPTERS[{"batch": batch_norm, "group": nn.GroupNorm, "last": nn.LayerNorm}[norm.plan.statistics]]


def branch_settings(norm: RoutedNorm, domain: str | None = None) -> NormSettings:
    """The settings and tensors of one domain's branch of a routed norm, with stored statistics."""
    plan = norm.plan
    index = 0 if domain is None else plan.index(domain)
    weight, bias = norm.affine_bank(plan.affine[index])
    return NormSettings(
        statistics=plan.statistics,
        num_features=norm.num_features,
        dim=norm.dim,
        eps=norm.eps,
        weight=weight,
        bias=bias,
        num_groups=norm.num_groups,
        momentum=norm.momentum,
        running=norm.statistics_bank(plan.normalized_by[index]) if norm.track_running_stats else None,
        sync=norm.sync,
        process_group=norm.process_group,
    )
