"""Independent oracles of the routed norms: the papers' formulas, written out in float64.

Nothing here uses advnorm's mathematics; only the names under which a norm stores its state are shared with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from advnorm.norms import RoutedNorm, make_norm, make_plan, route

#: Domains for the norms that have none of their own.
SOME_DOMAINS = ("clean", "adv", "noise")

MODES = ("batch", "batch_frozen", "running")

#: Marks the part of a batch that is forwarded for its statistics: ``clean*`` beside ``clean``.
FORWARDED = "*"


@dataclass(frozen=True)
class Row:
    """A norm as the papers describe it: whose statistics normalize a sample, and whose affine parameters scale it."""

    statistics: str  # mixed | own | other (of forwarded samples) | mixture | sample | scale (of the sample) | nothing
    affine: str  # one | own | sandwich (one, then own)
    channel_groups: Any = None  # for per-sample statistics: number of channel groups from the number of channels


#: Papers A (sec. 2.2, 3, 4; fig. 3; table 4), C (app. F) and E; Gong et al. 2021 for the sandwich.
PAPER: dict[str, Row] = {
    "bn": Row("mixed", "one"),
    "dual_bn": Row("own", "own"),
    "dual_affine_bn": Row("mixed", "own"),
    "dual_stats_bn": Row("own", "one"),
    "cross_bn": Row("other", "own"),
    "sandwich_bn": Row("own", "sandwich"),
    "triple_bn": Row("own", "own"),
    "multi_bn": Row("own", "own"),
    "gmm_bn": Row("mixture", "one"),
    "ln": Row("sample", "one", lambda channels: 1),
    "dual_affine_ln": Row("sample", "own", lambda channels: 1),
    "gn": Row("sample", "one", lambda channels: math.gcd(32, channels)),
    "dual_affine_gn": Row("sample", "own", lambda channels: math.gcd(32, channels)),
    "in": Row("sample", "one", lambda channels: channels),
    "dual_affine_in": Row("sample", "own", lambda channels: channels),
    "rms": Row("scale", "one", lambda channels: 1),
    "dual_affine_rms": Row("scale", "own", lambda channels: 1),
    "none": Row("nothing", "one"),
}

#: Norms with statistics banks, which batches update.
BANKED = [name for name, row in PAPER.items() if row.statistics in ("mixed", "own", "other", "mixture")]


def domains_of(name: str) -> tuple[str, ...]:
    return make_plan(name, **needed(name)).domains


def parts_of(name: str) -> tuple[str, ...]:
    """The parts of a batch: a norm of the other domain's statistics needs forwarded samples in front (A, sec. 3)."""
    domains = domains_of(name)
    first = [domain + FORWARDED for domain in domains] if PAPER[name].statistics == "other" else []
    return (*first, *domains)


def along(model: nn.Module, counts: Mapping[str, int]) -> Any:
    """The route of a batch of such parts."""
    forwarded = {part.removesuffix(FORWARDED): n for part, n in counts.items() if part.endswith(FORWARDED)}
    return route(
        model, {part: n for part, n in counts.items() if not part.endswith(FORWARDED)}, forwarded=forwarded or None
    )


def turned(counts: Mapping[str, int]) -> dict[str, int]:
    """The same parts in the reverse order, the forwarded ones in front."""
    parts = list(reversed(counts))
    first = [part for part in parts if part.endswith(FORWARDED)]
    return {part: counts[part] for part in dict.fromkeys([*first, *parts])}


def needed(name: str) -> dict[str, Any]:
    """Arguments that make_norm needs besides the name."""
    return {"domains": SOME_DOMAINS} if name == "multi_bn" else {}


def build(name: str, channels: int = 4, **options: Any) -> RoutedNorm:
    if "bias" in options:  # an option of the module, for surgery, not of the norm's name
        return RoutedNorm(channels, make_plan(name, **needed(name)), **options)
    return make_norm(name, channels, **{**needed(name), **options})


def randomized(module: nn.Module, seed: int = 0) -> Any:
    """Parameters and running statistics at values that could not hide a mix-up of banks."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            if tensor.is_floating_point():
                noise = torch.rand(tensor.shape, generator=generator, dtype=torch.float64)
                tensor.copy_(0.5 + noise if tensor.dim() < 2 else (noise - 0.5) / tensor[0].numel() ** 0.5)
    return module


def shares(name: str, *, unit: int = 1) -> dict[str, int]:
    """Unequal shares of a batch, one per part: ``unit`` times (5, 3), (4, 3, 2) or, two of them forwarded, 3 to 6."""
    parts = parts_of(name)
    counts = {1: (5,), 2: (5, 3), 3: (4, 3, 2), 4: (4, 6, 5, 3)}[len(parts)]
    return {part: unit * count for part, count in zip(parts, counts)}


def batch(counts: Mapping[str, int], channels: int = 4, spatial: Sequence[int] = (3, 2), *, seed: int = 1) -> Tensor:
    """Float64 inputs whose domains have means and scales of their own, per channel."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    ones = (1,) * len(spatial)
    parts = [
        normal(count, channels, *spatial) * (0.5 + normal(1, channels, *ones).abs()) + normal(1, channels, *ones)
        for count in counts.values()
    ]
    return torch.cat(parts)


def bank(prefix: str, kind: str, domain: str) -> str:
    """Name of a stored tensor: the domain is appended where each domain has its own."""
    return prefix if kind in ("mixed", "one", "sandwich") else f"{prefix}_{domain}"


class Oracle:
    """What the papers say a norm computes, differentiable by plain autograd, on float64 copies of the norm's state."""

    def __init__(self, name: str, norm: RoutedNorm, *, other_gradient: bool = True) -> None:
        self.row = PAPER[name]
        self.domains = norm.plan.domains
        self.channels = norm.shape[0]
        self.eps, self.momentum = norm.eps, norm.momentum
        self.other_gradient = other_gradient
        self.parameters = {k: v.detach().double().clone().requires_grad_() for k, v in norm.named_parameters()}
        self.buffers = {k: v.double().clone() if v.is_floating_point() else v.clone() for k, v in norm.named_buffers()}
        self.likelihood: Tensor | None = None

    # Who normalizes whom.

    def sources(self, part: str) -> list[str]:
        """The parts of the batch whose values make the statistics."""
        if self.row.statistics == "mixed":
            return list(self.domains)
        if self.row.statistics == "other" and not part.endswith(FORWARDED):
            return [self.other(part) + FORWARDED]
        return [part]

    def other(self, domain: str) -> str:
        (other,) = (name for name in self.domains if name != domain)
        return other

    def bank_of(self, part: str) -> str:
        """The domain whose statistics bank normalizes a part."""
        return self.sources(part)[0].removesuffix(FORWARDED)

    def lift(self, value_C: Tensor, x: Tensor) -> Tensor:
        return value_C.reshape(1, -1, *(1,) * (x.dim() - 2))

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """A, eq. 3 and C, eq. 8, 9: mean and biased variance of all values of a channel."""
        values_C = x.transpose(0, 1).reshape(self.channels, -1)
        mean_C = values_C.sum(1) / values_C.shape[1]
        return mean_C, ((values_C - mean_C[:, None]) ** 2).sum(1) / values_C.shape[1]

    def forward(
        self,
        x: Tensor,
        counts: Mapping[str, int],
        *,
        mode: str = "batch",
        groups: int = 1,
        deltas: Mapping[str, tuple[Tensor, Tensor]] | None = None,
    ) -> Tensor:
        """``deltas`` by statistics bank: the domain's name, or ``shared`` where the bank is mixed."""
        if self.row.statistics == "nothing":
            return x
        pieces = dict(zip(counts, x.split(list(counts.values()))))
        if self.row.statistics in ("sample", "scale"):
            return torch.cat([self.affine(self.per_sample(piece), domain) for domain, piece in pieces.items()])
        cut = 1 if mode == "running" else groups
        parts = {domain: piece.tensor_split(cut) for domain, piece in pieces.items() if len(piece)}
        outputs: dict[str, list[Tensor]] = {domain: [] for domain in parts}
        losses: dict[str, list[Tensor]] = {domain: [] for domain in parts}
        for g in range(cut):
            here = {domain: part[g] for domain, part in parts.items()}
            for domain, piece in here.items():
                if self.row.statistics == "mixture":
                    z, loss_N = self.mixture(piece, domain, here, mode, deltas)
                    losses[domain].append(loss_N)
                else:
                    mean, var = self.statistics(domain, here, mode)
                    z = self.standardize(piece, mean, var, self.delta(domain, deltas))
                outputs[domain].append(self.affine(z, domain))
        if self.row.statistics == "mixture":
            per_sample = torch.cat([value for parts in losses.values() for value in parts])
            self.likelihood = per_sample.sum() / len(per_sample)
        if mode == "batch" and self.buffers:
            self.update(pieces)
        return torch.cat([piece for parts in outputs.values() for piece in parts])

    def statistics(self, domain: str, here: Mapping[str, Tensor], mode: str) -> tuple[Tensor, Tensor]:
        sources = self.sources(domain)
        if mode == "running":
            stored = self.bank_of(domain)
            return tuple(self.buffers[bank(k, self.row.statistics, stored)] for k in ("running_mean", "running_var"))
        mean, var = self.moments(torch.cat([here[source] for source in sources if source in here]))
        if self.row.statistics == "other" and sources != [domain] and not self.other_gradient:
            mean, var = mean.detach(), var.detach()
        return mean, var

    def standardize(self, x: Tensor, mean: Tensor, var: Tensor, delta: tuple[Any, Any]) -> Tensor:
        """B, eq. 3 without the affine mapping: ``(1 + δ_σ) (x - (1 + δ_μ) μ) / σ``."""
        delta_mean, delta_std = delta
        std = (var + self.eps) ** 0.5
        return self.lift((1 + delta_std) / std, x) * (x - self.lift((1 + delta_mean) * mean, x))

    def delta(self, domain: str, deltas: Mapping[str, tuple[Tensor, Tensor]] | None) -> tuple[Any, Any]:
        key = "shared" if self.row.statistics == "mixed" else self.bank_of(domain)
        return (0.0, 0.0) if deltas is None else deltas[key]

    def mixture(
        self,
        x: Tensor,
        domain: str,
        here: Mapping[str, Tensor],
        mode: str,
        deltas: Mapping[str, tuple[Tensor, Tensor]] | None,
    ) -> tuple[Tensor, Tensor]:
        """C, eq. 10 to 16 and 21: z, and minus the log posterior of the true domain, summed over positions."""
        logs, standardized = [], []
        for k in self.domains:
            mean, var = self.statistics(k, here, mode)
            delta_mean, delta_std = self.delta(k, deltas)
            mean, std = (1 + delta_mean) * mean, (var + self.eps) ** 0.5 / (1 + delta_std)
            gaussian = torch.distributions.Normal(self.lift(mean, x), self.lift(std, x), validate_args=False)
            logs.append(gaussian.log_prob(x).sum(1, keepdim=True))
            standardized.append((x - self.lift(mean, x)) / self.lift(std, x))
        total = torch.logsumexp(torch.stack(logs), 0)
        z = sum((log - total).exp() * each for log, each in zip(logs, standardized))
        own = logs[self.domains.index(domain)] - total
        assert isinstance(z, Tensor)
        return z, -own.flatten(1).sum(1)

    def per_sample(self, x: Tensor) -> Tensor:
        """Mean 0 and variance 1, or mean square 1, over each group of channels and all positions of one sample."""
        assert self.row.channel_groups is not None
        values = x.reshape(len(x), self.row.channel_groups(self.channels), -1)
        mean = values.mean(2, keepdim=True) if self.row.statistics == "sample" else 0.0
        var = ((values - mean) ** 2).mean(2, keepdim=True)
        return ((values - mean) / (var + self.eps) ** 0.5).reshape(x.shape)

    def affine(self, z: Tensor, domain: str) -> Tensor:
        if domain.endswith(FORWARDED):  # BN_clean is one module: its AP is that of the branch it normalizes
            domain = self.other(domain.removesuffix(FORWARDED))
        names = [[bank(kind, self.row.affine, domain) for kind in ("weight", "bias")]]
        if self.row.affine == "sandwich":
            names.append([f"own_weight_{domain}", f"own_bias_{domain}"])
        for weight, bias in ([self.parameters.get(name) for name in pair] for pair in names):
            z = z if weight is None else z * self.lift(weight, z)
            z = z if bias is None else z + self.lift(bias, z)
        return z

    def update(self, pieces: Mapping[str, Tensor]) -> None:
        """Exponential (with momentum None: cumulative) average of the batch's mean and unbiased variance."""
        updated = {part: piece for part, piece in pieces.items() if len(piece)}
        if self.row.statistics == "mixed":
            updated = {"": torch.cat(list(pieces.values()))}
        elif self.row.statistics == "other":
            updated = {part.removesuffix(FORWARDED): p for part, p in updated.items() if part.endswith(FORWARDED)}
        for domain, x in updated.items():
            names = [
                bank(k, self.row.statistics, domain) for k in ("running_mean", "running_var", "num_batches_tracked")
            ]
            mean, var, seen = (self.buffers[n] for n in names)
            new_mean, new_var = self.moments(x.detach())
            count = x.numel() // self.channels
            seen += 1
            factor = 1 / seen.item() if self.momentum is None else self.momentum
            self.buffers[names[0]] = (1 - factor) * mean + factor * new_mean
            self.buffers[names[1]] = (1 - factor) * var + factor * new_var * count / (count - 1)


def snapshot(module: nn.Module) -> dict[str, Tensor]:
    """A copy of all state, to compare bit by bit."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def changed(module: nn.Module, before: Mapping[str, Tensor]) -> set[str]:
    """Names of the tensors that are not bit for bit what they were."""
    return {name for name, value in module.state_dict().items() if not torch.equal(value, before[name])}


def statistics_names(names: Sequence[str]) -> set[str]:
    return {name for name in names if "running_" in name or "num_batches_tracked" in name}
