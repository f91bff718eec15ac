"""Norms by name. Each is a row of one table (plan, domains, paper), not a class of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

from advnorm._core.errors import ConfigError, raise_problems, unknown_name
from advnorm._core.registry import Registry
from advnorm.norms.plan import (
    Plan,
    batch_plan,
    crossed_plan,
    mixture_plan,
    parse_domains,
    per_sample_plan,
    sandwich_plan,
)
from advnorm.norms.routed_norm import RoutedNorm


@dataclass(frozen=True)
class NormRecipe:
    """How a named norm is built: ``plan(name, domains, **options)`` gives its plan.

    >>> @register_norm("own_bn", num_domains=2, summary="own statistics and affine per domain")
    ... def own_plan(name, domains):
    ...     return Plan(name=name, domains=domains, normalized_by=domains, feeds=domains, affine=domains)
    """

    plan: Callable[..., Plan]
    _: KW_ONLY
    family: str = "bn"  # the kind of norm that it generalizes: bn, ln, gn, in, rms or none
    domains: tuple[str, ...] = ("clean", "adv")
    num_domains: int | None = None  # if the number of domains is fixed
    num_groups: Callable[[int], int] | None = None  # channel groups of a per-sample norm, from its channels
    options: tuple[str, ...] = ()
    summary: str = ""
    paper: str = ""


#: One norm, or norms by pattern of module names: the first pattern that matches a layer decides.
NormNames = str | Mapping[str, str] | Sequence[tuple[str, str]]

NORMS: Registry[NormRecipe] = Registry("norm", NormRecipe)
register_norm = NORMS.register
"""Decorator that registers a norm: ``@register_norm(name, num_domains=2, summary="…")``.

It decorates a function that gets the name and the domains and returns a :class:`Plan`. All keywords are optional:
``domains`` (default: clean, adv), ``num_domains`` (if their number is fixed), ``family`` (the kind of norm that it
generalizes: bn, ln, gn, in, rms or none), ``num_groups`` (a function from channels to channel groups), ``options``
(names of the options that only this norm has), ``summary`` and ``paper``.
"""

#: Options that every norm accepts.
MODULE_OPTIONS = ("eps", "momentum", "affine", "track_running_stats", "sync", "process_group", "device", "dtype")

_TWO: dict[str, Any] = {"num_domains": 2}
_CROSSED: dict[str, Any] = {"num_domains": 2, "options": ("other_gradient",)}
_THREE: dict[str, Any] = {"num_domains": 3, "domains": ("clean", "adv", "adv2")}

for _name, _plan, _details, _summary, _paper in (
    ("bn", partial(batch_plan, own_statistics=False, own_affine=False), {}, "one bank for all samples", "single BN"),
    ("dual_bn", batch_plan, _TWO, "own statistics and affine per domain", "Dual BN (A), Mixture BN (E)"),
    ("dual_affine_bn", partial(batch_plan, own_statistics=False), _TWO, "mixed statistics, own affine", "Setup1 (A)"),
    ("dual_stats_bn", partial(batch_plan, own_affine=False), _TWO, "own statistics, one affine", "Setup2 (A)"),
    ("cross_bn", crossed_plan, _CROSSED, "the other domain's statistics, own affine", "Cross-AT, Cross-Hybrid-AT (A)"),
    ("sandwich_bn", sandwich_plan, {}, "own statistics, shared then own affine", "SaAuxBN (Gong et al. 2021)"),
    ("triple_bn", batch_plan, _THREE, "three domains, own statistics and affine", "three branches (A, sec. 2.2)"),
    ("multi_bn", batch_plan, {}, "any list of domains, own statistics and affine", ""),
    ("gmm_bn", mixture_plan, {}, "Gaussian per domain, posterior-weighted, one affine", "DBN (C, app. F)"),
):
    register_norm(_name, **_details, summary=_summary, paper=_paper)(_plan)
for _short, _long, _groups, _papers in (
    ("ln", "layer norm", lambda channels: 1, ("C, D, E", "dual AP (A, table 4)")),
    ("gn", "group norm", lambda channels: math.gcd(32, channels), ("C, D, E", "dual AP (A, table 4)")),
    ("in", "instance norm", lambda channels: channels, ("C, D, E", "dual AP (A, table 4)")),
    ("rms", "root mean square", lambda channels: 1, ("", "")),
):
    _statistics = "rms" if _short == "rms" else "group"
    _per_sample: Any = {"family": _short, "num_groups": _groups, "options": ("num_groups",) if _short == "gn" else ()}
    register_norm(_short, **_per_sample, summary=f"{_long} per sample, one affine", paper=_papers[0])(
        partial(per_sample_plan, statistics=_statistics, own_affine=False)
    )
    _per_sample |= {"summary": f"{_long} per sample, own affine per domain", "paper": _papers[1]}
    register_norm(f"dual_affine_{_short}", num_domains=2, **_per_sample)(
        partial(per_sample_plan, statistics=_statistics, own_affine=True)
    )
register_norm("none", family="none", summary="no normalization", paper="C, D")(
    partial(per_sample_plan, statistics="none", own_affine=False)
)


def list_norms(pattern: str = "*") -> list[str]:
    """Names of the registered norms that match a shell pattern."""
    return NORMS.names(pattern)


def make_plan(name: str, *, domains: Sequence[str] | None = None, **options: Any) -> Plan:
    """The plan of a named norm, for its default domains or for the given ones."""
    recipe = NORMS.get(name)
    domains = recipe.domains if domains is None else parse_domains(domains)
    if recipe.num_domains not in (None, len(domains)):
        message, hint = f"{name} has {recipe.num_domains} {{field}}", "use 'multi_bn' for another number"
        raise ConfigError("out_of_range", message, field="domains", got=list(domains), hint=hint)
    known = ("domains", *recipe.options, *MODULE_OPTIONS)
    unknown = [option for option in options if option not in recipe.options]
    raise_problems([unknown_name("option", o, known, field=o) for o in unknown], f"bad options for {name}")
    return recipe.plan(name, domains, **{key: value for key, value in options.items() if key != "num_groups"})


def make_plans(norms: NormNames, options: Mapping[str, Any]) -> dict[str, Plan]:
    """The plan of each pattern of module names; one norm for all layers is the pattern ``*``.

    Each norm gets the options that it knows. Norms of any number of domains take the domains of the others.
    """
    pairs = [("*", norms)] if isinstance(norms, str) else norms.items() if isinstance(norms, Mapping) else norms
    valid = isinstance(pairs, Collection) and pairs and all(_is_pair(pair) for pair in pairs)
    if not valid or len(dict(pairs)) != len(pairs):
        message = "{field} must be a norm or a mapping such as {'layer4.*': 'dual_bn', '*': 'bn'}"
        raise ConfigError("wrong_type", message, field="norm", got=norms)
    recipes = {pattern: NORMS.get(norm) for pattern, norm in pairs}
    known = {option for recipe in recipes.values() for option in recipe.options}
    widest = max((recipe.domains for recipe in recipes.values()), key=len)
    plans = {}
    for pattern, norm in pairs:
        recipe = recipes[pattern]
        wanted = {"domains": widest if recipe.num_domains is None else None, **options}
        own = {k: v for k, v in wanted.items() if k not in MODULE_OPTIONS and (k in recipe.options or k not in known)}
        plans[pattern] = make_plan(norm, **own)
    domains = {plan.domains for plan in plans.values()}
    if len(domains) > 1:
        message, hint = "all norms of a model need the same domains", "use norms with the same number of domains"
        raise ConfigError("conflict", message, field="norm", got=sorted(map(list, domains)), hint=hint)
    return plans


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, tuple | list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)


def channel_groups(name: str, channels: int) -> int:
    """The default number of channel groups of the per-sample norm ``name``; 1 for other norms."""
    groups = NORMS.get(name).num_groups
    return 1 if groups is None or not isinstance(channels, int) else groups(channels)


def make_norm(
    name: str, num_features: int, *, dim: int = 2, domains: Sequence[str] | None = None, **options: Any
) -> RoutedNorm:
    """Build a norm layer by name, for ``num_features`` channels and inputs with ``dim`` spatial dimensions.

    ``domains`` renames the default domains, or lists any number of them for ``multi_bn``. Every norm accepts ``eps``,
    ``momentum`` (None for a cumulative average), ``affine``, ``track_running_stats``, ``sync`` and ``process_group``.
    ``num_groups`` belongs to ``gn`` (default: the greatest common divisor of 32 and the channels). ``other_gradient``
    belongs to ``cross_bn``: whether gradients flow through the statistics of the other domain (default True). ``rms``
    has no bias.
    """
    own = {key: value for key, value in options.items() if key not in MODULE_OPTIONS}
    plan = make_plan(name, domains=domains, **own)
    module_options = {key: value for key, value in options.items() if key in MODULE_OPTIONS}
    groups = channel_groups(name, num_features) if own.get("num_groups") is None else own["num_groups"]
    bias = plan.statistics != "rms"
    return RoutedNorm(num_features, plan, dim=dim, num_groups=groups, bias=bias, **module_options)
