"""The routed norm: banks of statistics and affine parameters, and the plan that assigns samples to them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from advnorm._core.distributed import ProcessGroup, all_gather_rows, world_size
from advnorm._core.errors import ConfigError, Description, Problem, RouteError, raise_problems
from advnorm._core.settings import ACCEPTS, MOST, Setting, convert_options
from advnorm.norms import functional
from advnorm.norms.concatenated import normalize_parts
from advnorm.norms.plan import Plan
from advnorm.norms.replaced_class import bank_views, empty_copy
from advnorm.norms.routed_module import RoutedModule
from advnorm.norms.segments import Segment, Span, are_equal, concatenate, find_spans, map_parts
from advnorm.norms.state import Mode

#: Mean and variance, ``(groups, channels)``, by statistics bank; and with the number of values, ``(groups, 1)``.
Moments = dict[str, tuple[Tensor, Tensor]]
Counted = dict[str, tuple[Tensor, Tensor, Tensor]]

#: Key of the affine mapping in front of all banks, in a sandwich.
IN_FRONT = ""

_USE_STORED = "use stored statistics: `with advnorm.statistics(model, mode='running'):`"


class RoutedNorm(RoutedModule):
    """A norm layer with any plan.

    Buffers and parameters have the names of ``nn.BatchNorm2d``; with several banks, the name of the bank is appended
    (``running_mean_clean``, ``weight_adv``). In a sandwich, ``weight`` and ``bias`` are the mapping in front, and
    ``own_weight_adv`` and ``own_bias_adv`` those of a bank. The module is not a subclass of the built-in batch norm, so
    that ``convert_sync_batchnorm`` does not replace it; ``sync=True`` synchronizes the statistics over ranks.
    """

    eps: Any
    template: nn.Module | None
    _views: dict[str, nn.Module]

    def __init__(
        self,
        num_features: int | Sequence[int],
        plan: Plan,
        *,
        dim: int | None = 2,
        eps: Annotated[float, Setting("Added to the variance.", "[0, inf)")] = 1e-5,
        momentum: Annotated[float | None, Setting("Weight of a new batch; None: cumulative average.", "[0, 1]")] = 0.1,
        affine: bool = True,
        bias: bool = True,
        track_running_stats: bool = True,
        sync: bool = False,
        process_group: ProcessGroup | None = None,
        num_groups: Annotated[int, Setting("Channel groups of a per-sample norm.", "[1, inf)")] = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(plan)
        shape = tuple(num_features) if isinstance(num_features, Sequence) else (num_features,)
        settings = {"eps": eps, "momentum": momentum, "num_groups": num_groups}
        raise_problems(_setting_problems(shape, plan, dim, **settings), f"bad norm {plan.name!r}")
        self.num_features = num_features
        self.shape = shape
        self.dim = dim
        self.eps = eps
        self.momentum = momentum
        self.num_groups = num_groups
        self.sync = sync
        self.process_group = process_group
        self.parts: tuple[str, ...] = ()  # names of a replaced norm's other modules, parameters and buffers
        self.after: tuple[str, ...] = ()  # the modules among them that are applied to the output
        self.__dict__["template"] = None  # a hidden module of the replaced class; ``strip`` gives that class back
        self.__dict__["_views"] = {}  # by affine bank: the template with the bank's parameters
        self.affine = affine and plan.statistics != "none"
        self.track_running_stats = track_running_stats and plan.statistics == "batch"
        self._statistics_names = _names(plan.statistics_banks, "running_mean", "running_var", "num_batches_tracked")
        own = "own_" if plan.sandwich else ""
        self.affine_names = {IN_FRONT: ("weight", "bias")} if plan.sandwich else {}
        self.affine_names |= _names(plan.affine_banks, f"{own}weight", f"{own}bias")
        for weight, bias_name in self.affine_names.values():
            for name, wanted in ((weight, self.affine), (bias_name, self.affine and bias)):
                value = nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) if wanted else None
                self.register_parameter(name, value)
        for mean, var, count in self._statistics_names.values():
            empty = torch.empty(shape, device=device, dtype=dtype)
            for name, value in ((mean, empty), (var, empty.clone()), (count, torch.tensor(0, device=device))):
                self.register_buffer(name, value if self.track_running_stats else None)
        self.reset_parameters()

    # -- the replaced class --------------------------------------------------------------------------------------

    def adopt_class(self, norm: nn.Module, template: nn.Module, parts: Sequence[str], after: Sequence[str]) -> None:
        """Take over the class of ``template`` and the ``parts`` of the replaced ``norm``.

        A per-sample norm runs the forward of that class with the parameters of each bank, so that whatever it does
        besides normalizing stays. A batch norm applies the parts named in ``after`` to its output.
        """
        for name in parts:
            owned = next(c for c in ("_modules", "_parameters", "_buffers") if name in getattr(norm, c))
            getattr(self, owned)[name] = getattr(norm, owned)[name]
        self.parts, self.after = tuple(parts), tuple(after)
        self.__dict__["template"] = empty_copy(template)
        self.__dict__["_views"] = bank_views(self)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_views": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__["_views"] = bank_views(self)

    # -- banks ---------------------------------------------------------------------------------------------------

    def affine_bank(self, bank: str) -> functional.Affine:
        """Weight and bias that an affine bank applies: its parameters, in a sandwich composed with the shared ones."""
        own = self._affine_parameters(bank)
        return functional.compose_affine(self._affine_parameters(IN_FRONT), own) if self.plan.sandwich else own

    def _affine_parameters(self, bank: str) -> tuple[nn.Parameter | None, nn.Parameter | None]:
        weight, bias = self.affine_names[bank]
        own = self._parameters  # faster than attributes; does not hold parametrized, pruned or sharded ones
        if weight in own and bias in own:
            return own[weight], own[bias]
        return getattr(self, weight), getattr(self, bias)

    def statistics_bank(self, bank: str) -> tuple[Tensor, Tensor, Tensor]:
        """Running mean, running (unbiased) variance and number of batches of a bank, if the norm tracks them."""
        mean, var, count = self._statistics_names[bank]
        return self._buffers[mean], self._buffers[var], self._buffers[count]  # pyright: ignore[reportReturnType]

    def set_affine_bank(self, bank: str, weight: nn.Parameter | None, bias: nn.Parameter | None) -> None:
        """Put the given parameters into an affine bank, without a copy."""
        for name, value in zip(self.affine_names[bank], (weight, bias)):
            setattr(self, name, value)

    def set_statistics_bank(self, bank: str, mean: Tensor, var: Tensor, num_batches: Tensor | None) -> None:
        """Put the given tensors into a statistics bank, without a copy."""
        for name, value in zip(self._statistics_names[bank], (mean, var, num_batches)):
            if value is not None:
                setattr(self, name, value)

    @torch.no_grad()
    def reset_running_stats(self) -> None:
        """Set every statistics bank to mean 0, variance 1 and no batches."""
        for bank in self._statistics_names if self.track_running_stats else ():
            mean, var, count = self.statistics_bank(bank)
            mean.zero_()
            var.fill_(1)
            count.zero_()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Reset the statistics; set weight 1 and bias 0 in every affine bank."""
        self.reset_running_stats()
        for bank in self.affine_names:
            for value, start in zip(self._affine_parameters(bank), (1.0, 0.0)):
                if value is not None:
                    value.fill_(start)

    # -- forward -------------------------------------------------------------------------------------------------

    def forward(self, x: Tensor) -> Tensor:
        x = self._normalized(x)
        for name in self.after:
            x = self._modules[name](x)  # pyright: ignore[reportOptionalCall]
        return x

    def _normalized(self, x: Tensor) -> Tensor:
        plan = self.plan
        self._validate_input(x)
        if plan.statistics != "batch":
            segments = self.segments(x.shape[0], needs_route=plan.routed)
            return x if plan.statistics == "none" else map_parts(x, segments, self._per_sample)
        mode: Mode = self.state.mode or ("batch" if self.training or not self.track_running_stats else "running")
        if mode == "running" and not self.track_running_stats:
            raise RouteError("not_supported", "this norm has no running statistics; use another mode", field="mode")
        segments = self.segments(x.shape[0], needs_route=plan.routed and not (plan.mixture and mode == "running"))
        if not self._mixes and self.state.perturbation is None:
            if mode == "running":
                return map_parts(x, segments, self._native_running)
            spans = find_spans(segments)
            if spans and self._has_native_kernel():
                for span in spans:
                    self._validate_count(span.rows, x, span.feeds)
                if len(segments) > 1 and are_equal(spans) and torch.compiler.is_compiling():
                    return self._in_one_piece(x, segments, spans, mode)
                return map_parts(x, spans, self._native_batch if mode == "batch" else self._native_kernel)
        parts = x.split([segment.rows for segment in segments])
        moments = self._stored_moments(segments) if mode == "running" else self._batch_moments(parts, segments, mode)
        if self._mixes:
            return self._mixture(parts, segments, moments)
        return concatenate([self._normalize(part, segment, moments) for part, segment in zip(parts, segments)])

    @property
    def _mixes(self) -> bool:
        """Whether all banks normalize at once, weighted by the input."""
        return self.plan.mixture and self.state.component is None

    def _validate_input(self, x: Tensor) -> None:
        allowed = (2, 3) if self.dim == 1 else (self.dim + 2,) if self.dim else ()
        if self.dim is not None and x.dim() not in allowed:
            message = f"{self.plan.name} takes inputs with {' or '.join(map(str, allowed))} dimensions"
            got, hint = Description(f"shape {tuple(x.shape)}"), f"build the norm with dim={max(1, x.dim() - 2)}"
            raise ConfigError("wrong_shape", message, field="x", got=got, hint=hint)
        if self.plan.statistics != "last" and (x.dim() < 2 or x.shape[1] != self.num_features):
            got = Description(f"input of shape {tuple(x.shape)}")
            raise ConfigError("wrong_shape", f"{self.plan.name} has {self.num_features} channels", field="x", got=got)

    # The built-in kernels, for banks that normalize exactly the samples that update them.

    def _per_sample(self, x: Tensor, segment: Segment) -> Tensor:
        if self._views:
            return self._views[segment.affine].forward(x)
        weight, bias = self.affine_bank(segment.affine)
        if self.plan.statistics == "rms":
            return functional.sample_rms_norm(x, weight, bias, self.eps)
        if x[0].numel() <= self.num_groups:
            message = f"{self.plan.name} has one value per group in an input of shape {tuple(x.shape)}"
            raise RouteError("too_few_samples", message, field="x", hint="use larger images or fewer groups")
        return F.group_norm(x, self.num_groups, weight, bias, self.eps)

    def _native_running(self, x: Tensor, segment: Segment) -> Tensor:
        mean, var, _ = self.statistics_bank(segment.normalized_by)
        weight, bias = self.affine_bank(segment.affine)
        if torch.is_grad_enabled():  # the kernel's backward reads them, and an update may change them before that
            mean, var = mean.clone(), var.clone()
        return torch.batch_norm(x, weight, bias, mean, var, False, 0.0, self.eps, torch.backends.cudnn.enabled)

    def _has_native_kernel(self) -> bool:
        return (
            self.state.groups == 1
            and not self.synchronized
            and not (self.momentum is None and torch.compiler.is_compiling())  # the factor is a tensor there
        )

    def _native_batch(self, x: Tensor, span: Span) -> Tensor:
        if not self.track_running_stats:
            return self._native_kernel(x, span)
        mean, var, _ = self.statistics_bank(span.feeds)
        if self.recomputing():  # updates copies, so that the kernel saves as many tensors as the first time
            return self._native_kernel(x, span, mean.clone(), var.clone())
        return self._native_kernel(x, span, mean, var, self._next_factor(span.feeds))

    def _native_kernel(
        self, x: Tensor, span: Span, mean: Tensor | None = None, var: Tensor | None = None, factor: float = 0.0
    ) -> Tensor:
        """Normalize by the moments of the batch. ``mean`` and ``var``, if given, are updated with weight ``factor``."""
        cudnn = torch.backends.cudnn.enabled
        single = len(span.segments) == 1
        weight, bias = self.affine_bank(span.segments[0].affine) if single else (None, None)
        if mean is None and weight is None and x.dtype.itemsize < 4:
            # The kernel computes in the widest type of its arguments; these two only make that float32.
            mean, var = (x.new_full(x.shape[1:2], value, dtype=torch.float32) for value in (0.0, 1.0))
        out = torch.batch_norm(x, weight, bias, mean, var, True, factor, self.eps, cudnn)
        if single:
            return out
        banks = [self.affine_bank(segment.affine) for segment in span.segments]
        weight_N, bias_N = functional.affine_rows(banks, [segment.rows for segment in span.segments], x.dim())
        if weight_N is None:
            return out
        if bias_N is None:
            return (out * weight_N).to(x.dtype)
        return torch.addcmul(bias_N, out, weight_N).to(x.dtype)

    def _in_one_piece(self, x: Tensor, segments: Sequence[Segment], spans: Sequence[Span], mode: Mode) -> Tensor:
        """Normalize all segments at once, in a form that a compiler fuses with the operations around it."""
        banks = zip(*(self.affine_bank(segment.affine) for segment in segments))
        weight, bias = (None if values[0] is None else torch.stack(values) for values in banks)
        out, mean, var = normalize_parts(x, len(spans), len(segments), weight, bias, self.eps)
        if mode == "batch" and self.track_running_stats and not self.recomputing():
            for number, span in enumerate(spans):
                count = mean.new_full((1,), span.rows * x[0, 0].numel())
                self._update(span.feeds, mean[number], var[number], count)
        return out

    _version = 2  # like the built-in norm: older state dicts have no num_batches_tracked

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args: Any, **options: Any) -> None:
        if (local_metadata.get("version") or 0) < 2 and self.track_running_stats:
            for bank, (*_, name) in self._statistics_names.items():
                count = self.statistics_bank(bank)[2]
                state_dict.setdefault(prefix + name, torch.tensor(0) if count.is_meta else count)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args, **options)

    # Explicit moments, for groups and for perturbed, crossed, synchronized and mixture statistics.

    def _stored_moments(self, segments: Sequence[Segment]) -> Moments:
        banks = self.plan.statistics_banks if self._mixes else {segment.normalized_by for segment in segments}
        moments: Moments = {}
        for bank in banks:
            mean, var, _ = self.statistics_bank(bank)
            dtype = functional.accumulate_dtype(mean)
            moments[bank] = mean.to(dtype, copy=True)[None], var.to(dtype, copy=True)[None]  # updates change the bank
        return moments

    def _batch_moments(self, parts: Sequence[Tensor], segments: Sequence[Segment], mode: Mode) -> Moments:
        """Moments of the samples of each bank, ``(groups, channels)`` each; updates the bank in mode ``batch``."""
        groups, plan = self.state.groups, self.plan
        self._validate_samples(segments)
        for segment in segments:
            if segment.rows % groups:
                message = f"{{field}} must divide each domain's share of the batch, {segment.rows} samples"
                raise RouteError("not_divisible", message, field="groups", got=groups)
        synchronized = self.synchronized
        local: Counted = {}
        for bank in plan.statistics_banks:
            own = [functional.grouped(part, groups) for part, segment in zip(parts, segments) if segment.feeds == bank]
            if own:
                x_GNC = own[0] if len(own) == 1 else torch.cat(own, 1)
                count = x_GNC[0].numel() // self.shape[0]
                if not synchronized:
                    self._validate_count(x_GNC.shape[1], x_GNC[0], bank)
                mean, var = functional.moments(x_GNC)
                local[bank] = mean, var, mean.new_full((groups, 1), count)
            elif synchronized:
                zero = parts[0].new_zeros((groups, self.shape[0]), dtype=functional.accumulate_dtype(parts[0]))
                local[bank] = zero, zero, zero[:, :1]
        if synchronized:
            local = self._pool_over_ranks(local)
        if mode == "batch" and self.track_running_stats and not self.recomputing():
            for bank, moments in local.items():  # detached: a recomputation skips this and must save the same tensors
                self._update(bank, *functional.pool_moments(*(value.detach() for value in moments)))
        return {bank: (mean, var) for bank, (mean, var, _) in local.items()}

    def _pool_over_ranks(self, local: Counted) -> Counted:
        """Moments over all ranks by one collective for all banks; gradients flow back to every rank's samples."""
        channels = self.shape[0]
        packed_KG = torch.stack([torch.cat(values, 1) for values in local.values()])
        ranks = all_gather_rows(packed_KG, self.process_group)
        mean, var, count = functional.pool_moments(*ranks.split([channels, channels, 1], -1))
        return {bank: (mean[k], var[k], count[k]) for k, bank in enumerate(local)}

    def _validate_samples(self, segments: Sequence[Segment]) -> None:
        """Raise if the batch has no samples for a statistics bank that normalizes."""
        plan = self.plan
        needed = plan.statistics_banks if self._mixes else tuple(dict.fromkeys(s.normalized_by for s in segments))
        present = {segment.feeds for segment in segments}
        if self.synchronized and self.state.route is not None:  # a domain's samples may all be on other ranks
            present |= {plan.banks(domain, forwarded=True)[1] for domain, _ in self.state.forwarded}
            with_forwarded = bool(self.state.forwarded)
            present |= {plan.banks(domain, with_forwarded=with_forwarded)[1] for domain, _ in self.state.route}
        missing = [bank for bank in needed if bank not in present]
        if missing:
            kind, forwarded = ("forwarded ", f", forwarded={plan.example_route}") if plan.crosses else ("", "")
            message = f"{plan.name} uses the batch statistics of {', '.join(missing)}, which has no {kind}samples here"
            hint = f"concatenate under `with advnorm.route(model, {plan.example_route}{forwarded}):`, or {_USE_STORED}"
            raise RouteError("missing_samples", message, field="route", hint=hint)

    def _mean_and_invstd(self, bank: str, moments: Moments, *, constant: bool = False) -> tuple[Tensor, Tensor]:
        """Mean and inverse standard deviation of a bank, with the scope's perturbation (paper B, eq. 3)."""
        mean, var = (value.detach() for value in moments[bank]) if constant else moments[bank]
        invstd = (var + self.eps).rsqrt()
        if self.state.perturbation is not None and bank in self.state.perturbation:
            delta_mean, delta_std = self.state.perturbation[bank]
            return (1 + delta_mean) * mean, (1 + delta_std) * invstd
        return mean, invstd

    def _normalize(self, x: Tensor, segment: Segment, moments: Moments) -> Tensor:
        own = segment.normalized_by == segment.feeds
        mean, invstd = self._mean_and_invstd(
            segment.normalized_by, moments, constant=not (own or self.plan.other_gradient)
        )
        z = functional.standardize(functional.grouped(x, mean.shape[0]), mean, invstd)
        return self._scaled(z.flatten(0, 1), segment, x.dtype)

    def _mixture(self, parts: Sequence[Tensor], segments: Sequence[Segment], moments: Moments) -> Tensor:
        banks = self.plan.statistics_banks
        mean_K, invstd_K = zip(*(self._mean_and_invstd(bank, moments) for bank in banks))
        mean_KGC, invstd_KGC = torch.stack(mean_K), torch.stack(invstd_K)
        outputs, likelihoods = [], []
        for x, segment in zip(parts, segments):
            x_GNC = functional.grouped(x, mean_KGC.shape[1])
            z, log_posterior = functional.mixture_standardize(x_GNC, mean_KGC, invstd_KGC)
            outputs.append(self._scaled(z.flatten(0, 1), segment, x.dtype))
            likelihoods.append(-log_posterior[banks.index(segment.feeds)].reshape(segment.rows, -1))
        if self.state.likelihoods is not None and not self.recomputing():
            if self.state.route is None:
                message = "the likelihood needs the domain of each sample"
                raise RouteError("missing_route", message, field="route", hint="open `with advnorm.route(model, ...):`")
            self.state.likelihoods.append(concatenate(likelihoods))
        return concatenate(outputs)

    def _scaled(self, z: Tensor, segment: Segment, dtype: torch.dtype) -> Tensor:
        return functional.scaled(z, *self.affine_bank(segment.affine)).to(dtype)

    # Updates of the banks.

    @property
    def synchronized(self) -> bool:
        """Whether batch moments are computed over several ranks."""
        return self.sync and not self.state.local and world_size(self.process_group) > 1

    def _validate_count(self, rows: int, x: Tensor, bank: str) -> None:
        if rows * math.prod(x.shape[2:]) <= 1:
            message = f"bank {bank!r} has one value per channel in an input of shape {tuple(x.shape)} and needs more"
            hint = f"give each domain (and group) two samples or more, drop_last=True in the loader, or {_USE_STORED}"
            raise RouteError("too_few_samples", message, field=bank, hint=hint)

    def _next_factor(self, bank: str) -> Any:
        """Count the batch and return the weight of its moments; momentum None gives a cumulative average."""
        count = self.statistics_bank(bank)[2]
        count.add_(1)
        if self.momentum is not None:
            return self.momentum
        return 1.0 / count.double() if torch.compiler.is_compiling() else 1.0 / float(count)

    @torch.no_grad()
    def _update(self, bank: str, mean: Tensor, var: Tensor, count: Tensor) -> None:
        """Exponential or cumulative average. The stored variance is unbiased, like that of the built-in norm."""
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


def _setting_problems(shape: tuple[Any, ...], plan: Plan, dim: Any, **settings: Any) -> list[Problem]:
    _, problems = convert_options("", RoutedNorm, settings)
    if dim not in (None, 1, 2, 3):
        message = "{field} must be the number of spatial dimensions, 1, 2 or 3"
        problems.append(Problem(code="out_of_range", message=message, field="dim", got=dim))
    if not shape or not all(ACCEPTS[int](size) and 1 <= size < MOST for size in shape):
        message = f"{{field}} must be integers from 1 to {MOST - 1:,}"
        problems.append(Problem(code="out_of_range", message=message, field="num_features", got=shape))
    if not problems and plan.statistics == "group" and shape[0] % settings["num_groups"]:
        message = f"{{field}} must divide the {shape[0]} channels"
        problems.append(Problem("not_divisible", message, "num_groups", got=settings["num_groups"]))
    return problems


def _names(banks: Sequence[str], *names: str) -> dict[str, tuple[str, ...]]:
    """Tensor names of each bank: those of the built-in norm, with the bank's name appended if there are several."""
    return {bank: tuple(f"{name}_{bank}" if len(banks) > 1 else name for name in names) for bank in banks}
