"""The routed norm: banks of statistics and affine parameters, and the plan that assigns samples to them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from advnorm._core.distributed import ProcessGroup, all_gather_rows, world_size
from advnorm._core.errors import ConfigError, RouteError, raise_all
from advnorm.norms import functional
from advnorm.norms.plan import Plan
from advnorm.norms.routing import Mode, Routed, Run, joined, per_part

#: Mean and variance, ``(groups, channels)``, by statistics bank; and with the number of values, ``(groups, 1)``.
Moments = dict[str, tuple[Tensor, Tensor]]
Counted = dict[str, tuple[Tensor, Tensor, Tensor]]


class RoutedNorm(Routed):
    """One norm layer of any plan.

    Buffers and parameters carry the names of ``nn.BatchNorm2d``; where there are several banks the bank's name is
    appended (``running_mean_clean``, ``weight_adv``). The module is no subclass of the built-in batch norm, so
    ``convert_sync_batchnorm`` leaves it alone; ``sync=True`` is its own synchronization over ranks.
    """

    def __init__(
        self,
        num_features: int | Sequence[int],
        plan: Plan,
        *,
        dim: int | None = 2,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        bias: bool = True,
        track_running_stats: bool = True,
        sync: bool = False,
        process_group: ProcessGroup | None = None,
        num_groups: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(plan)
        shape = tuple(num_features) if isinstance(num_features, Sequence) else (num_features,)
        raise_all(setting_problems(shape, plan, dim, eps, momentum, num_groups), f"bad norm {plan.name!r}")
        self.num_features = num_features
        self.shape = shape
        self.dim = dim
        self.eps = eps
        self.momentum = momentum
        self.num_groups = num_groups
        self.sync = sync
        self.process_group = process_group
        self.affine = affine and plan.statistics != "none"
        self.track_running_stats = track_running_stats and plan.statistics == "batch"
        self._statistics_names = _names(plan.statistics_banks, "running_mean", "running_var", "num_batches_tracked")
        self._affine_names = _names(plan.affine_banks, "weight", "bias")
        for weight, bias_name in self._affine_names.values():
            for name, wanted in ((weight, self.affine), (bias_name, self.affine and bias)):
                value = nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) if wanted else None
                self.register_parameter(name, value)
        for mean, var, count in self._statistics_names.values():
            empty = torch.empty(shape, device=device, dtype=dtype)
            for name, value in ((mean, empty), (var, empty.clone()), (count, torch.tensor(0, device=device))):
                self.register_buffer(name, value if self.track_running_stats else None)
        self.reset_parameters()

    # -- banks ---------------------------------------------------------------------------------------------------

    def affine_bank(self, bank: str) -> tuple[nn.Parameter | None, nn.Parameter | None]:
        """Weight and bias of an affine bank."""
        weight, bias = self._affine_names[bank]
        own = self._parameters  # faster than attributes; parametrized, pruned and sharded ones are no entries of it
        if weight in own and bias in own:
            return own[weight], own[bias]
        return getattr(self, weight), getattr(self, bias)

    def statistics_bank(self, bank: str) -> tuple[Tensor, Tensor, Tensor]:
        """Running mean, running (unbiased) variance and number of batches of a bank, where the norm tracks them."""
        mean, var, count = self._statistics_names[bank]
        return self._buffers[mean], self._buffers[var], self._buffers[count]  # pyright: ignore[reportReturnType]

    def set_affine_bank(self, bank: str, weight: nn.Parameter | None, bias: nn.Parameter | None) -> None:
        """Put given parameters, not copies of them, into an affine bank."""
        for name, value in zip(self._affine_names[bank], (weight, bias)):
            setattr(self, name, value)

    def set_statistics_bank(self, bank: str, mean: Tensor, var: Tensor, num_batches: Tensor | None) -> None:
        """Put given tensors, not copies of them, into a statistics bank."""
        for name, value in zip(self._statistics_names[bank], (mean, var, num_batches)):
            if value is not None:
                setattr(self, name, value)

    @torch.no_grad()
    def reset_running_stats(self) -> None:
        """Mean 0, variance 1, no batch seen, in every bank."""
        for bank in self._statistics_names if self.track_running_stats else ():
            mean, var, count = self.statistics_bank(bank)
            mean.zero_()
            var.fill_(1)
            count.zero_()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fresh statistics; weight 1 and bias 0 in every bank."""
        self.reset_running_stats()
        for bank in self._affine_names:
            weight, bias = self.affine_bank(bank)
            if weight is not None:
                weight.fill_(1)
            if bias is not None:
                bias.zero_()

    # -- forward -------------------------------------------------------------------------------------------------

    def forward(self, x: Tensor) -> Tensor:
        plan = self.plan
        self._check_input(x)
        if plan.statistics != "batch":
            runs = self.runs(x.shape[0], needs_route=plan.routed)
            return x if plan.statistics == "none" else per_part(x, runs, self._per_sample)
        mode: Mode = self.state.mode or ("batch" if self.training or not self.track_running_stats else "running")
        if mode == "running" and not self.track_running_stats:
            raise RouteError(
                "this norm keeps no running statistics (track_running_stats=False); use mode 'batch' or 'batch_frozen'"
            )
        runs = self.runs(x.shape[0], needs_route=plan.routed and not (plan.mixture and mode == "running"))
        if not self._mixes and self.state.delta is None:
            if mode == "running":
                return per_part(x, runs, self._native_running)
            spans = _spans(runs)
            if spans and self._native():
                for span in spans:
                    self._check_count(span.rows, x, span.feeds)
                return per_part(x, spans, self._native_batch if mode == "batch" else self._native_frozen)
        parts = x.split([run.rows for run in runs])
        moments = self._stored(runs) if mode == "running" else self._moments(parts, runs, mode)
        if self._mixes:
            return self._mixture(parts, runs, moments)
        return joined([self._given(part, run, moments) for part, run in zip(parts, runs)])

    @property
    def _mixes(self) -> bool:
        """Whether all banks normalize at once, weighted by the input."""
        return self.plan.mixture and self.state.component is None

    def _check_input(self, x: Tensor) -> None:
        allowed = (2, 3) if self.dim == 1 else (self.dim + 2,) if self.dim else ()
        if self.dim is not None and x.dim() not in allowed:
            raise ConfigError(
                f"{self.plan.name} for {self.dim}-d data takes inputs with {' or '.join(map(str, allowed))} "
                f"dimensions, got shape {tuple(x.shape)}; build the norm with dim={max(1, x.dim() - 2)}"
            )
        if self.plan.statistics != "last" and (x.dim() < 2 or x.shape[1] != self.num_features):
            raise ConfigError(f"{self.plan.name} has {self.num_features} channels, got input of shape {tuple(x.shape)}")

    # The built-in kernels, wherever a bank normalizes just the samples that feed it.

    def _per_sample(self, x: Tensor, run: Run) -> Tensor:
        weight, bias = self.affine_bank(run.affine)
        if self.plan.statistics == "last":
            return F.layer_norm(x, list(self.shape), weight, bias, self.eps)
        if self.dim is not None and x[0].numel() <= self.num_groups:  # a replaced nn.GroupNorm stays as it was
            raise RouteError(
                f"{self.plan.name} gets one value per group from input of shape {tuple(x.shape)} and would return "
                "zeros; use larger images, fewer groups, or a norm that averages over more"
            )
        return F.group_norm(x, self.num_groups, weight, bias, self.eps)

    def _native_running(self, x: Tensor, run: Run) -> Tensor:
        mean, var, _ = self.statistics_bank(run.normalized_by)
        weight, bias = self.affine_bank(run.affine)
        if torch.is_grad_enabled():  # the kernel's backward reads them as they are by then, whatever was fed meanwhile
            mean, var = mean.clone(), var.clone()
        return torch.batch_norm(x, weight, bias, mean, var, False, 0.0, self.eps, torch.backends.cudnn.enabled)

    def _native(self) -> bool:
        return (
            self.state.groups == 1
            and not self.synchronized
            and not (self.momentum is None and torch.compiler.is_compiling())  # its factor is a tensor there
        )

    def _native_batch(self, x: Tensor, span: Span) -> Tensor:
        if not self.track_running_stats:
            return self._native_frozen(x, span)
        mean, var, _ = self.statistics_bank(span.feeds)
        if self.recomputing():  # feeds copies, so that the kernel saves as many tensors as the first time
            return self._native_frozen(x, span, mean.clone(), var.clone())
        return self._native_frozen(x, span, mean, var, self._next_factor(span.feeds))

    def _native_frozen(
        self, x: Tensor, span: Span, mean: Tensor | None = None, var: Tensor | None = None, factor: float = 0.0
    ) -> Tensor:
        cudnn = torch.backends.cudnn.enabled
        if len(span.runs) == 1:
            weight, bias = self.affine_bank(span.runs[0].affine)
        else:
            weight = bias = None
        if mean is None and weight is None and x.dtype.itemsize < 4:
            # The kernel computes in the widest type it is given: these two are for it alone.
            mean, var = (x.new_full(x.shape[1:2], value, dtype=torch.float32) for value in (0.0, 1.0))
        out = torch.batch_norm(x, weight, bias, mean, var, True, factor, self.eps, cudnn)
        if len(span.runs) == 1:
            return out
        weight_N, bias_N = self._affine_rows(span.runs, x.dim())
        if weight_N is None:
            return out
        if bias_N is None:
            return (out * weight_N).to(x.dtype)
        return torch.addcmul(bias_N, out, weight_N).to(x.dtype)

    def _affine_rows(self, runs: Sequence[Run], ndim: int) -> tuple[Tensor | None, Tensor | None]:
        """Weight and bias of every row, ``(rows, channels, 1, ...)``."""
        rows = []
        for bank in zip(*(self.affine_bank(run.affine) for run in runs)):
            if bank[0] is None:
                rows.append(None)
                continue
            expanded = [value.expand(run.rows, -1) for value, run in zip(bank, runs)]
            rows.append(torch.cat(expanded).reshape(-1, self.shape[0], *(1,) * (ndim - 2)))
        return rows[0], rows[1]

    _version = 2  # as the built-in norm: older state dicts have no num_batches_tracked

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ):
        if (local_metadata.get("version") or 0) < 2 and self.track_running_stats:
            for bank, (*_, name) in self._statistics_names.items():
                count = self.statistics_bank(bank)[2]
                state_dict.setdefault(prefix + name, torch.tensor(0) if count.is_meta else count)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    # Given moments: groups, perturbed, crossed, synchronized and mixture statistics.

    def _stored(self, runs: Sequence[Run]) -> Moments:
        banks = self.plan.statistics_banks if self._mixes else {run.normalized_by for run in runs}
        stored = {bank: self.statistics_bank(bank)[:2] for bank in banks}
        return {
            bank: (functional.own_copy(mean)[None], functional.own_copy(var)[None])
            for bank, (mean, var) in stored.items()
        }

    def _moments(self, parts: Sequence[Tensor], runs: Sequence[Run], mode: Mode) -> Moments:
        """Moments of the samples that feed each bank, ``(groups, channels)`` each; feeds the bank in mode ``batch``."""
        groups, plan = self.state.groups, self.plan
        self._check_present(runs)
        for run in runs:
            if run.rows % groups:
                raise RouteError(
                    f"{run.rows} samples of one domain cannot be cut into {groups} equal groups; "
                    "choose a number of groups that divides each domain's share of the batch"
                )
        synchronized = self.synchronized
        local: Counted = {}
        for bank in plan.statistics_banks:
            own = [functional.grouped(part, groups) for part, run in zip(parts, runs) if run.feeds == bank]
            if own:
                x_GNC = own[0] if len(own) == 1 else torch.cat(own, 1)
                count = x_GNC[0].numel() // self.shape[0]
                if not synchronized:
                    self._check_count(x_GNC.shape[1], x_GNC[0], bank)
                mean, var = functional.moments(x_GNC)
                local[bank] = mean, var, mean.new_full((groups, 1), count)
            elif synchronized:
                zero = parts[0].new_zeros((groups, self.shape[0]), dtype=functional.accumulate_dtype(parts[0]))
                local[bank] = zero, zero, zero[:, :1]
        if synchronized:
            local = self._pool_over_ranks(local)
        if mode == "batch" and self.track_running_stats and not self.recomputing():
            for bank, moments in local.items():  # detached, since a recomputation feeds nothing, and saves nothing here
                self._feed(bank, *functional.pool_moments(*(value.detach() for value in moments)))
        return {bank: (mean, var) for bank, (mean, var, _) in local.items()}

    def _pool_over_ranks(self, local: Counted) -> Counted:
        """Moments over all ranks from one collective for all banks; gradients flow back to every rank's samples."""
        channels = self.shape[0]
        packed_KG = torch.stack([torch.cat(values, 1) for values in local.values()])
        ranks = all_gather_rows(packed_KG, self.process_group)
        mean, var, count = functional.pool_moments(*ranks.split([channels, channels, 1], -1))
        return {bank: (mean[k], var[k], count[k]) for k, bank in enumerate(local)}

    def _check_present(self, runs: Sequence[Run]) -> None:
        """Refuse batch statistics of a domain that the batch does not have."""
        plan = self.plan
        needed = plan.statistics_banks if self._mixes else tuple(dict.fromkeys(run.normalized_by for run in runs))
        present = {run.feeds for run in runs}
        if self.synchronized and self.state.route is not None:  # a domain's samples may all be on other ranks
            present |= {plan.banks(domain, forwarded=True)[1] for domain, _ in self.state.forwarded}
            beside = bool(self.state.forwarded)
            present |= {plan.banks(domain, beside=beside)[1] for domain, _ in self.state.route}
        missing = [bank for bank in needed if bank not in present]
        if missing:
            which, again = "such samples", ""
            if plan.crosses:
                which, again = "samples that are forwarded for them", f", forwarded={plan.example_route}"
            raise RouteError(
                f"{plan.name} normalizes by the batch statistics of {', '.join(missing)}, and this batch has no "
                f"{which}; concatenate under `with advnorm.route(model, {plan.example_route}{again}):`, or use stored "
                "statistics: `with advnorm.statistics(model, mode='running'):`"
            )

    def _effective(self, bank: str, moments: Moments, *, constant: bool = False) -> tuple[Tensor, Tensor]:
        """Mean and inverse standard deviation of a bank, perturbed where the scope says so (paper B, eq. 3)."""
        mean, var = (value.detach() for value in moments[bank]) if constant else moments[bank]
        invstd = (var + self.eps).rsqrt()
        if self.state.delta is not None and bank in self.state.delta:
            return functional.perturb_moments(mean, invstd, *self.state.delta[bank])
        return mean, invstd

    def _given(self, x: Tensor, run: Run, moments: Moments) -> Tensor:
        own = run.normalized_by == run.feeds
        mean, invstd = self._effective(run.normalized_by, moments, constant=not (own or self.plan.other_gradient))
        z = functional.standardize(functional.grouped(x, mean.shape[0]), mean, invstd)
        return self._scaled(z.flatten(0, 1), run, x.dtype)

    def _mixture(self, parts: Sequence[Tensor], runs: Sequence[Run], moments: Moments) -> Tensor:
        banks = self.plan.statistics_banks
        mean_K, invstd_K = zip(*(self._effective(bank, moments) for bank in banks))
        mean_KGC, invstd_KGC = torch.stack(mean_K), torch.stack(invstd_K)
        outputs, likelihoods = [], []
        for x, run in zip(parts, runs):
            x_GNC = functional.grouped(x, mean_KGC.shape[1])
            z, log_posterior = functional.mixture_standardize(x_GNC, mean_KGC, invstd_KGC)
            outputs.append(self._scaled(z.flatten(0, 1), run, x.dtype))
            likelihoods.append(-log_posterior[banks.index(run.feeds)].reshape(run.rows, -1).sum(1))
        if self.state.collected is not None and not self.recomputing():
            if self.state.route is None:
                raise RouteError("the likelihood needs to know each sample's domain; set a route around the forward")
            self.state.collected.append(joined(likelihoods))
        return joined(outputs)

    def _scaled(self, z: Tensor, run: Run, dtype: torch.dtype) -> Tensor:
        return functional.scaled(z, *self.affine_bank(run.affine)).to(dtype)

    # Feeding the banks.

    @property
    def synchronized(self) -> bool:
        """Whether batch moments are taken over several ranks."""
        return self.sync and not self.state.alone and world_size(self.process_group) > 1

    def _check_count(self, rows: int, x: Tensor, bank: str) -> None:
        if rows * math.prod(x.shape[2:]) <= 1:
            raise RouteError(
                f"batch statistics need more than one value per channel, and the bank {bank!r} gets one from input of "
                f"shape {tuple(x.shape)}; give each domain (and each group of it) at least two samples, drop_last=True "
                "in the loader, or use stored statistics: `with advnorm.statistics(model, mode='running'):`"
            )

    def _next_factor(self, bank: str) -> Any:
        """Count the batch and return the weight of its moments in the running ones; momentum None is the plain mean."""
        count = self.statistics_bank(bank)[2]
        count.add_(1)
        if self.momentum is not None:
            return self.momentum
        return 1.0 / count.double() if torch.compiler.is_compiling() else 1.0 / float(count)

    @torch.no_grad()
    def _feed(self, bank: str, mean: Tensor, var: Tensor, count: Tensor) -> None:
        """Exponential or cumulative average; the variance is stored unbiased, as the built-in norm stores it."""
        running_mean, running_var, seen = self.statistics_bank(bank)
        unbiased = var * (count / (count - 1).clamp(min=1))
        before = seen.clone()
        factor = self._next_factor(bank)
        for running, value in ((running_mean, mean), (running_var, unbiased)):
            fresh = value.to(running.dtype) * factor + running * (1 - factor)
            running.copy_(torch.where(count > 0, fresh, running))
        seen.copy_(torch.where(count.reshape(()) > 0, seen, before))

    def extra_repr(self) -> str:
        parts = [str(self.num_features), self.plan.name, f"domains={'|'.join(self.plan.domains)}"]
        if self.plan.statistics == "group":
            parts.append(f"num_groups={self.num_groups}")
        if self.plan.statistics == "batch":
            parts += [f"momentum={self.momentum}", f"sync={self.sync}"]
        return ", ".join([*parts, f"eps={self.eps}", f"affine={self.affine}"])


class Span(NamedTuple):
    """Neighbouring runs that feed one bank, normalized together."""

    feeds: str
    runs: tuple[Run, ...]

    @property
    def rows(self) -> int:
        return self.runs[-1].stop - self.runs[0].start


def _spans(runs: Sequence[Run]) -> list[Span]:
    """Runs by the bank they feed; none where one is normalized by another bank, or a bank's samples lie apart."""
    spans: list[Span] = []
    for run in runs:
        if run.normalized_by != run.feeds:
            return []
        if spans and spans[-1].feeds == run.feeds:
            spans[-1] = Span(run.feeds, (*spans[-1].runs, run))
        else:
            spans.append(Span(run.feeds, (run,)))
    return spans if len({span.feeds for span in spans}) == len(spans) else []


def setting_problems(
    shape: tuple[Any, ...], plan: Plan, dim: Any, eps: Any, momentum: Any, num_groups: Any
) -> list[str]:
    """What is wrong with the settings of a norm."""

    def counts(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= 1

    def within(value: Any, high: float) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= high

    problems = []
    if dim not in (None, 1, 2, 3):
        problems.append(f"dim is the number of spatial dimensions of the built-in norm, 1, 2 or 3; got {dim!r}")
    channels = bool(shape) and all(counts(size) for size in shape)
    if not channels:
        problems.append(
            f"num_features must be an integer of at least 1, got {shape[0] if len(shape) == 1 else shape!r}"
        )
    if not counts(num_groups):
        problems.append(f"num_groups must be an integer of at least 1, got {num_groups!r}")
    elif channels and plan.statistics == "group" and shape[0] % num_groups:
        problems.append(f"num_groups must divide the {shape[0]} channels, got {num_groups}")
    if not within(eps, math.inf):
        problems.append(f"eps must be a number of at least 0, got {eps!r}")
    if momentum is not None and not within(momentum, 1):
        problems.append(f"momentum must lie in [0, 1], or be None for the plain mean over batches, got {momentum!r}")
    return problems


def _names(banks: Sequence[str], *names: str) -> dict[str, tuple[str, ...]]:
    """The built-in norm's names for one bank, with the bank's name appended for several."""
    return {bank: tuple(f"{name}_{bank}" if len(banks) > 1 else name for name in names) for bank in banks}
