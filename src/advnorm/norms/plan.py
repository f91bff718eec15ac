"""A plan assigns to each domain the banks that normalize and scale its samples, and the bank that they update."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from advnorm._core.errors import ConfigError, Problem, raise_problems, unknown_name

Statistics = Literal["batch", "group", "rms", "last", "none"]

#: Name of the bank that all domains share.
SHARED = "shared"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The banks of each domain: ``normalized_by``, ``feeds`` (the bank that its samples update) and ``affine``.

    A domain that is normalized by one bank and updates another is *crossed*. Its images are then forwarded twice in one
    batch. The first copy, the *forwarded* samples, only updates the bank. It is normalized by its own statistics, and
    scaled like the samples that this bank normalizes. The second copy gives the loss and updates no bank. In a batch
    without forwarded samples every sample updates the bank of its domain.

    ``statistics`` names what the moments are taken over: the ``batch``, a channel ``group`` of one sample (layer, group
    and instance norm), the root mean square of one sample (``rms``), the ``last`` dimensions of one sample (the layer
    norm of transformers), or ``none``. Only ``batch`` has statistics banks.

    ``sandwich``: an affine mapping that all domains share comes before the one of each affine bank.
    """

    name: str
    domains: tuple[str, ...]
    statistics: Statistics = "batch"
    normalized_by: tuple[str, ...] = ()
    feeds: tuple[str, ...] = ()
    affine: tuple[str, ...] = ()
    mixture: bool = False
    sandwich: bool = False
    other_gradient: bool = True

    #: Names of the banks, in order of first use.
    statistics_banks: tuple[str, ...] = field(init=False, repr=False, compare=False)
    affine_banks: tuple[str, ...] = field(init=False, repr=False, compare=False)
    #: Whether two domains use different banks, so that a forward must know where its samples come from.
    routed: bool = field(init=False, repr=False, compare=False)
    #: Whether a domain is normalized by another bank than it updates.
    crosses: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        raise_problems(self._problems(), f"bad plan {self.name!r}")
        derived = {
            "statistics_banks": tuple(dict.fromkeys(self.feeds)),
            "affine_banks": tuple(dict.fromkeys(self.affine)),
            "routed": any(len(set(banks)) > 1 for banks in (self.normalized_by, self.feeds, self.affine)),
            "crosses": self.normalized_by != self.feeds,
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def _problems(self) -> list[Problem]:
        problems = []
        domains, width = self.domains, len(self.domains)
        if not domains:
            problems.append(Problem(code="empty", message="{field} must name at least one domain", field="domains"))
        bad = [domain for domain in domains if not (isinstance(domain, str) and domain.isidentifier())]
        if bad:
            message = "{field} must be names of letters, digits and '_'"
            problems.append(Problem(code="wrong_type", message=message, field="domains", got=bad))
        if len(set(domains)) != width:
            problems.append(Problem(code="conflict", message="{field} must differ", field="domains", got=list(domains)))
        for name in ("normalized_by", "feeds", "affine") if self.statistics == "batch" else ("affine",):
            count = len(getattr(self, name))
            if count != width:
                message = f"{{field}} must have one bank per domain ({width})"
                problems.append(Problem(code="wrong_shape", message=message, field=name, got=count))
        unused = sorted(set(self.normalized_by) - set(self.feeds))
        if unused:
            problems.append(Problem("conflict", "{field} must only name banks in feeds", "normalized_by", got=unused))
        return problems

    @property
    def example_route(self) -> str:
        """A route over all domains for error messages: ``{'clean': n0, 'adv': n1}``."""
        return "{" + ", ".join(f"'{domain}': n{index}" for index, domain in enumerate(self.domains)) + "}"

    def banks(self, domain: str, *, forwarded: bool = False, with_forwarded: bool = True) -> tuple[str, str, str]:
        """The banks that normalize a domain's samples, that they update, and that scale them; empty for none.

        ``with_forwarded``: the batch has forwarded samples, so that crossed samples update no bank.
        """
        index = self.domains.index(domain)
        by, feeds = (self.normalized_by[index], self.feeds[index]) if self.feeds else ("", "")
        if not forwarded:
            return by, feeds if by == feeds or not with_forwarded else "", self.affine[index]
        crossed = by != feeds and feeds in self.normalized_by
        return feeds, feeds, self.affine[self.normalized_by.index(feeds) if crossed else index]

    def forwarded_for(self, routed: Collection[str]) -> tuple[str, ...]:
        """The domains whose samples must be forwarded for the batch statistics that normalize the ``routed`` ones."""
        rows = list(zip(self.domains, self.normalized_by, self.feeds))
        needed = {by for domain, by, feeds in rows if domain in routed and by != feeds}
        return tuple(d for d, by, feeds in rows if feeds in needed and not (d in routed and by == feeds))

    def index(self, domain: str) -> int:
        """The position of ``domain``."""
        if domain not in self.domains:
            raise_problems([unknown_name("domain", domain, self.domains)])
        return self.domains.index(domain)


def parse_domains(domains: Sequence[str]) -> tuple[str, ...]:
    """Domains as a tuple; a single string is rejected."""
    if isinstance(domains, str) or not isinstance(domains, Iterable):
        message = "{field} must be a list of names such as ['clean', 'adv']"
        raise ConfigError("wrong_type", message, field="domains", got=domains)
    return tuple(domains)


def batch_plan(name: str, domains: tuple[str, ...], *, own_statistics: bool = True, own_affine: bool = True) -> Plan:
    """Batch norms with one bank per domain, or one shared bank, of statistics and of affine parameters (A, fig. 3)."""
    shared = (SHARED,) * len(domains)
    bank = domains if own_statistics else shared
    return Plan(name=name, domains=domains, normalized_by=bank, feeds=bank, affine=domains if own_affine else shared)


def sandwich_plan(name: str, domains: tuple[str, ...]) -> Plan:
    """Own statistics per domain, a shared affine mapping, then an own one (Gong et al. 2021, SaAuxBN)."""
    return Plan(name=name, domains=domains, normalized_by=domains, feeds=domains, affine=domains, sandwich=True)


def crossed_plan(name: str, domains: tuple[str, ...], *, other_gradient: bool = True) -> Plan:
    """Each of two domains is normalized by the statistics of the other (paper A, sec. 3: Cross-BN).

    The paper's BN_clean is the statistics bank ``clean`` with the affine bank ``adv``, which the adversarial branch
    trains. Its statistics are those of clean samples that pass through BN_clean themselves, "used only for forward
    propagation to get the BN statistics" (Cross-AT). With the statistics of crossed samples, the ratio of the domains'
    variances would roughly square from norm to norm. With another affine bank, it would drift.

    ``other_gradient``: gradients flow through these statistics. If they are treated as constants, the weights grow and
    the network learns much more slowly or diverges (Ioffe & Szegedy 2015, sec. 2, give the reason).
    """
    return Plan(
        name=name,
        domains=domains,
        normalized_by=domains[::-1],
        feeds=domains,
        affine=domains,
        other_gradient=other_gradient,
    )


def mixture_plan(name: str, domains: tuple[str, ...]) -> Plan:
    """A Gaussian per domain, weighted by its posterior; one affine bank (paper C, app. F)."""
    if len(domains) < 2:
        message = f"{{field}} of {name} must name at least two domains"
        raise ConfigError("out_of_range", message, field="domains", got=list(domains))
    shared = (SHARED,) * len(domains)
    return Plan(name=name, domains=domains, normalized_by=domains, feeds=domains, affine=shared, mixture=True)


def per_sample_plan(name: str, domains: tuple[str, ...], *, statistics: Statistics, own_affine: bool) -> Plan:
    """Statistics of one sample, with one affine bank per domain or one shared bank (paper A, table 4)."""
    affine = domains if own_affine else (SHARED,) * len(domains)
    return Plan(name=name, domains=domains, statistics=statistics, affine=affine)
