"""A plan: which statistics bank normalizes a domain, which affine bank scales it, and which bank its samples feed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from advnorm._core.errors import ConfigError, did_you_mean, raise_all

Statistics = Literal["batch", "group", "last", "none"]

#: Name of the bank that all domains share.
SHARED = "shared"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Statistics banks × affine banks × who feeds what, one entry per domain.

    ``statistics`` says what a normalization is computed from: the ``batch`` (banks), the channel ``group`` of one
    sample (layer, group and instance norm), the ``last`` dimensions of one sample (the layer norm of transformers), or
    ``none``. For all but ``batch`` the statistics banks are empty.
    """

    name: str
    domains: tuple[str, ...]
    statistics: Statistics = "batch"
    normalized_by: tuple[str, ...] = ()
    feeds: tuple[str, ...] = ()
    affine: tuple[str, ...] = ()
    mixture: bool = False
    other_gradient: bool = False

    #: Names of the banks, in order of first use.
    statistics_banks: tuple[str, ...] = field(init=False, repr=False, compare=False)
    affine_banks: tuple[str, ...] = field(init=False, repr=False, compare=False)
    #: Whether two domains are treated differently, so that a forward must know where its samples come from.
    routed: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        problems = []
        if not self.domains:
            problems.append("a norm needs at least one domain")
        bad = [domain for domain in self.domains if not (isinstance(domain, str) and domain.isidentifier())]
        if bad:
            problems.append(f"domains are names made of letters, digits and '_', got {bad}")
        if len(set(self.domains)) != len(self.domains):
            problems.append(f"every domain needs a name of its own, got {list(self.domains)}")
        width = len(self.domains)
        for name in ("normalized_by", "feeds") if self.statistics == "batch" else ():
            if len(getattr(self, name)) != width:
                problems.append(f"{name} needs one bank per domain ({width}), got {len(getattr(self, name))}")
        if len(self.affine) != width:
            problems.append(f"affine needs one bank per domain ({width}), got {len(self.affine)}")
        unfed = sorted(set(self.normalized_by) - set(self.feeds))
        if unfed:
            problems.append(f"statistics banks {unfed} normalize but nothing feeds them")
        raise_all(problems, f"bad plan {self.name!r}")
        derived = {
            "statistics_banks": tuple(dict.fromkeys(self.feeds)),
            "affine_banks": tuple(dict.fromkeys(self.affine)),
            "routed": any(len(set(banks)) > 1 for banks in (self.normalized_by, self.feeds, self.affine)),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    @property
    def example_route(self) -> str:
        """A route over all domains, as one would type it, for messages."""
        return "{" + ", ".join(f"'{domain}': n{index}" for index, domain in enumerate(self.domains)) + "}"

    def index(self, domain: str) -> int:
        """Position of ``domain``, or an error that suggests the nearest name."""
        if domain not in self.domains:
            raise ConfigError(f"unknown domain {domain!r}{did_you_mean(domain, self.domains)}")
        return self.domains.index(domain)


def separate(name: str, domains: Sequence[str], *, statistics: bool = True, affine: bool = True) -> Plan:
    """Batch norms with an own or a shared bank of statistics and of affine parameters per domain (paper A, fig. 3)."""
    domains = tuple(domains)
    shared = (SHARED,) * len(domains)
    bank = domains if statistics else shared
    return Plan(name=name, domains=domains, normalized_by=bank, feeds=bank, affine=domains if affine else shared)


def crossed(name: str, domains: Sequence[str], *, other_gradient: bool = False, one_way: bool = False) -> Plan:
    """Each of two domains is normalized by the statistics of the other (paper A, sec. 3: Cross-BN).

    ``one_way``: both are normalized by the statistics of the first and share one affine bank, as in Cross-AT (paper A,
    fig. 1), where only the second is trained on; what the second feeds is kept beside, and normalizes nothing.
    """
    domains = tuple(domains)
    if len(domains) != 2:
        raise ConfigError(f"{name} crosses exactly two domains, got {list(domains)}")
    return Plan(
        name=name,
        domains=domains,
        normalized_by=(domains[0],) * 2 if one_way else domains[::-1],
        feeds=domains,
        affine=(SHARED,) * 2 if one_way else domains,
        other_gradient=other_gradient,
    )


def mixture(name: str, domains: Sequence[str]) -> Plan:
    """A Gaussian per domain, weighted by its posterior; one affine bank (paper C, app. F)."""
    domains = tuple(domains)
    if len(domains) < 2:
        raise ConfigError(f"{name} mixes at least two domains, got {list(domains)}")
    return Plan(
        name=name,
        domains=domains,
        normalized_by=domains,
        feeds=domains,
        affine=(SHARED,) * len(domains),
        mixture=True,
    )


def per_sample(name: str, domains: Sequence[str], *, statistics: Statistics, affine: bool) -> Plan:
    """Statistics of one sample, with an own or a shared affine bank per domain (paper A, table 4)."""
    domains = tuple(domains)
    return Plan(
        name=name,
        domains=domains,
        statistics=statistics,
        affine=domains if affine else (SHARED,) * len(domains),
    )
