"""The state that open scopes set for a forward: route, statistics mode, perturbation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

from torch import Tensor

Mode = Literal["batch", "batch_frozen", "running"]
MODES: tuple[Mode, ...] = get_args(Mode)

Route = str | Mapping[str, int]


class ScopeState(NamedTuple):
    """The state that scopes set on a routed module. The defaults hold outside of every scope."""

    route: tuple[tuple[str, int | None], ...] | None = None  # (domain, number of samples); None is the whole batch
    forwarded: tuple[tuple[str, int], ...] = ()  # samples before those of the route, for their statistics only
    pair: tuple[str, str] | None = None  # the domain of the statistics bank, the domain of the affine bank
    component: str | None = None  # the domain whose Gaussian alone normalizes in a mixture norm
    mode: Mode | None = None
    groups: int = 1
    perturbation: Mapping[str, tuple[Tensor, Tensor]] | None = None  # by statistics bank: of the mean, of the std
    likelihoods: list[Tensor] | None = None  # collects the negative log-likelihoods of mixture norms
    local: bool = False  # use the moments of this rank's samples even if the norm synchronizes
    recomputing: bool = False  # the forward repeats an earlier one that already updated the banks
    thread: int | None = None  # the thread that opened the scope


UNSCOPED = ScopeState()


def frozen_mode(mode: Mode) -> Mode:
    """The mode that uses the same statistics as ``mode`` and updates no running statistics."""
    return "batch_frozen" if mode == "batch" else mode
