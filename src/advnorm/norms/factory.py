"""Norms by name: each is a row of one table (plan, default domains, paper), not a class of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from advnorm._core.errors import ConfigError, did_you_mean, raise_all
from advnorm._core.registry import Registry
from advnorm.norms.plan import Plan, crossed, listed, mixture, per_sample, separate
from advnorm.norms.routed import RoutedNorm

CLEAN_ADV = ("clean", "adv")


@dataclass(frozen=True, kw_only=True)
class NormRecipe:
    """How a named norm is built: its plan from domains, and how many channel groups a per-sample norm has."""

    plan: Callable[..., Plan]
    domains: tuple[str, ...]
    num_groups: Callable[[int], int] | None = None
    options: tuple[str, ...] = ()
    summary: str
    paper: str


NORMS: Registry[NormRecipe] = Registry("norm")

#: Options that any norm takes, whatever its plan.
MODULE_OPTIONS = ("eps", "momentum", "affine", "track_running_stats", "sync", "process_group", "device", "dtype")


def _groups_of_32(channels: int) -> int:
    return math.gcd(32, channels)


def _register(name: str, plan: Callable[..., Plan], *, domains: tuple[str, ...] = CLEAN_ADV, **fields: Any) -> None:
    NORMS.add(name, NormRecipe(plan=partial(plan, name), domains=domains, **fields))


_mixed = partial(separate, statistics=False, affine=False)
_register("bn", _mixed, summary="one bank, fed by the whole batch", paper="single BN")
_register("dual_bn", separate, summary="own statistics and affine per domain", paper="Dual BN (A), Mixture BN (E)")
_register(
    "dual_affine_bn", partial(separate, statistics=False), summary="mixed statistics, own affine", paper="Setup1 (A)"
)
_register("dual_stats_bn", partial(separate, affine=False), summary="own statistics, one affine", paper="Setup2 (A)")
_register(
    "cross_bn",
    crossed,
    options=("other_gradient",),
    summary="the other domain's statistics, own affine",
    paper="Cross-AT, Cross-Hybrid-AT (A)",
)
_register(
    "triple_bn",
    separate,
    domains=("clean", "adv", "adv2"),
    summary="three domains, own statistics and affine",
    paper="three branches (A, sec. 2.2)",
)
_register("multi_bn", separate, summary="any list of domains, own statistics and affine", paper="")
_register("gmm_bn", mixture, summary="Gaussian per domain, posterior-weighted, one affine", paper="DBN (C, app. F)")
for _short, _long, _groups in (
    ("ln", "layer norm", lambda channels: 1),
    ("gn", "group norm", _groups_of_32),
    ("in", "instance norm", lambda channels: channels),
):
    _options = ("num_groups",) if _short == "gn" else ()
    for _prefix, _affine, _text, _paper in (
        ("", False, "one affine", "C, D, E"),
        ("dual_affine_", True, "own affine per domain", "dual AP (A, table 4)"),
    ):
        _register(
            _prefix + _short,
            partial(per_sample, statistics="group", affine=_affine),
            num_groups=_groups,
            options=_options,
            summary=f"{_long} per sample, {_text}",
            paper=_paper,
        )
_register("none", partial(per_sample, statistics="none", affine=False), summary="no normalization", paper="C, D")


def list_norms(pattern: str = "*") -> list[str]:
    """Names of the registered norms that match a shell pattern."""
    return NORMS.names(pattern)


def make_plan(name: str, *, domains: Sequence[str] | None = None, **options: Any) -> Plan:
    """The plan of a named norm, for its default or for given domains."""
    recipe = NORMS.get(name)
    domains = recipe.domains if domains is None else listed(domains)
    if name.startswith(("dual_", "triple_")) and len(domains) != (wanted := 2 if name.startswith("dual_") else 3):
        raise ConfigError(f"{name} has {wanted} domains, got {list(domains)}; use 'multi_bn' for another number")
    allowed = ("domains", *recipe.options, *MODULE_OPTIONS)
    raise_all(
        [
            f"unknown option {option!r}{did_you_mean(option, allowed)}"
            for option in options
            if option not in recipe.options
        ],
        f"bad options for {name}",
    )
    return recipe.plan(domains, **{key: value for key, value in options.items() if key != "num_groups"})


def channel_groups(name: str, channels: int) -> int:
    """Number of channel groups that the per-sample norm ``name`` has by default; 1 for the others."""
    groups = NORMS.get(name).num_groups
    return 1 if groups is None or not isinstance(channels, int) else groups(channels)


def make_norm(
    name: str,
    num_features: int,
    *,
    dim: int = 2,
    domains: Sequence[str] | None = None,
    **options: Any,
) -> RoutedNorm:
    """A norm layer by name, for ``num_features`` channels and inputs with ``dim`` spatial dimensions.

    ``domains`` renames the defaults (or lists any number for ``multi_bn``). ``num_groups`` belongs to ``gn`` (default
    32, or its greatest common divisor with the channels), ``other_gradient`` to ``cross_bn``: whether gradients flow
    through the other domain's statistics (default), or take them for constants. Every norm takes ``eps``, ``momentum``
    (None: cumulative average), ``affine``, ``track_running_stats``, ``sync`` and ``process_group``.
    """
    own = {key: value for key, value in options.items() if key not in MODULE_OPTIONS}
    plan = make_plan(name, domains=domains, **own)
    module_options = {key: value for key, value in options.items() if key in MODULE_OPTIONS}
    groups = channel_groups(name, num_features) if own.get("num_groups") is None else own["num_groups"]
    return RoutedNorm(num_features, plan, dim=dim, num_groups=groups, **module_options)
