"""A plan: which statistics bank normalizes a domain, which affine bank scales it, and which bank its samples feed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from advnorm._core.errors import ConfigError, did_you_mean, raise_all

Statistics = Literal["batch", "group", "last", "none"]

#: Name of the bank that all domains share.
SHARED = "shared"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Statistics banks × affine banks × who feeds what, one entry per domain.

    Where a domain is normalized by another bank than it feeds, its samples feed theirs while they are *forwarded*: a
    second time, beside those that the loss is taken of, normalized by their own statistics and scaled as what the bank
    normalizes. In a batch without forwarded samples every sample feeds the bank of its domain.

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
    other_gradient: bool = True

    #: Names of the banks, in order of first use.
    statistics_banks: tuple[str, ...] = field(init=False, repr=False, compare=False)
    affine_banks: tuple[str, ...] = field(init=False, repr=False, compare=False)
    #: Whether two domains are treated differently, so that a forward must know where its samples come from.
    routed: bool = field(init=False, repr=False, compare=False)
    #: Whether a domain is normalized by another bank than it feeds.
    crosses: bool = field(init=False, repr=False, compare=False)

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
            "crosses": self.normalized_by != self.feeds,
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    @property
    def example_route(self) -> str:
        """A route over all domains, as one would type it, for messages."""
        return "{" + ", ".join(f"'{domain}': n{index}" for index, domain in enumerate(self.domains)) + "}"

    def banks(self, domain: str, *, forwarded: bool = False, beside: bool = True) -> tuple[str, str, str]:
        """Which banks normalize a domain's samples, are fed by them and scale them; empty: none.

        ``beside``: forwarded samples lie beside them, and feed the banks of crossed ones alone.
        """
        index = self.domains.index(domain)
        by, feeds = (self.normalized_by[index], self.feeds[index]) if self.feeds else ("", "")
        if not forwarded:
            return by, feeds if by == feeds or not beside else "", self.affine[index]
        crossed = by != feeds and feeds in self.normalized_by
        return feeds, feeds, self.affine[self.normalized_by.index(feeds) if crossed else index]

    def forwarded_for(self, routed: Collection[str]) -> tuple[str, ...]:
        """The domains whose samples must be forwarded for the batch statistics that normalize the ``routed`` ones."""
        rows = list(zip(self.domains, self.normalized_by, self.feeds))
        needed = {by for domain, by, feeds in rows if domain in routed and by != feeds}
        return tuple(d for d, by, feeds in rows if feeds in needed and not (d in routed and by == feeds))

    def index(self, domain: str) -> int:
        """Position of ``domain``, or an error that suggests the nearest name."""
        if domain not in self.domains:
            raise ConfigError(f"unknown domain {domain!r}{did_you_mean(domain, self.domains)}")
        return self.domains.index(domain)


def listed(domains: Sequence[str]) -> tuple[str, ...]:
    """Domains as a tuple; a single name is no list of them."""
    if isinstance(domains, str):
        raise ConfigError(f"domains is a list of names, got the string {domains!r}; write [{domains!r}, ...]")
    if not isinstance(domains, Iterable):
        raise ConfigError(f"domains is a list of names such as ['clean', 'adv'], got {domains!r}")
    return tuple(domains)


def separate(name: str, domains: Sequence[str], *, statistics: bool = True, affine: bool = True) -> Plan:
    """Batch norms with an own or a shared bank of statistics and of affine parameters per domain (paper A, fig. 3)."""
    domains = tuple(domains)
    shared = (SHARED,) * len(domains)
    bank = domains if statistics else shared
    return Plan(name=name, domains=domains, normalized_by=bank, feeds=bank, affine=domains if affine else shared)


def crossed(name: str, domains: Sequence[str], *, other_gradient: bool = True) -> Plan:
    """Each of two domains is normalized by the statistics of the other (paper A, sec. 3: Cross-BN).

    BN_clean of the paper is the statistics bank ``clean`` with the affine bank ``adv``, which the adversarial branch
    trains. Its statistics are those of clean samples that go through BN_clean themselves, "used only for forward
    propagation to get the BN statistics" (Cross-AT). With those of the crossed samples the ratio of the domains'
    variances would about square from norm to norm, and with another affine bank it would drift.

    ``other_gradient``: gradients flow through these statistics; to constants the weights pay no heed, and run away
    (Ioffe & Szegedy 2015, sec. 2).
    """
    domains = tuple(domains)
    if len(domains) != 2:
        raise ConfigError(f"{name} crosses exactly two domains, got {list(domains)}")
    return Plan(
        name=name,
        domains=domains,
        normalized_by=domains[::-1],
        feeds=domains,
        affine=domains,
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
