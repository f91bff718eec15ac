"""Re-estimate a statistics bank from given inputs under a given affine bank (paper A, table 5; paper D, table 7)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from advnorm._core.distributed import all_gather_rows
from advnorm._core.errors import ConfigError, Description
from advnorm._core.modes import evaluating, running_eagerly
from advnorm._core.settings import Setting, convert
from advnorm._core.wrappers import device_of, dtype_of
from advnorm.norms import functional
from advnorm.norms.norm_layers import batch_norms
from advnorm.norms.routed_norm import RoutedNorm
from advnorm.norms.scopes import Scope, pair_banks

Data = Tensor | Iterable[Any]
BatchSize = Annotated[int, Setting("Largest number of images of a batch.", "[1, inf)")]
PooledMoments = dict[str, tuple[Tensor, Tensor, Tensor]]


@torch.no_grad()
def recalibrate(
    model: nn.Module, data: Data, *, route: str | None = None, into: str | None = None, batch_size: int = 256
) -> int:
    """Replace the statistics of a bank by the moments of ``data`` under the affine bank of ``route``.

    In the notation of paper A, ``recalibrate(model, clean_images, route="adv")`` stores NS with superscript adv (the
    affine bank) and subscript clean (the images). ``data`` is a tensor of images, which is split into equally large
    batches of at most ``batch_size``, or an iterable of batches: tensors, or tuples and mappings whose first entry is
    the images. The forward uses the moments of each batch; the bank receives the pooled mean and unbiased variance of
    all samples. ``into`` names the domain whose bank is written; the default is the bank that normalizes ``route``.
    Nothing else changes, and the bank changes only after the last batch. With ``sync`` each rank passes its share of
    the data. Returns the number of samples. Mixture norms use all banks at once and are not supported: for them, call
    ``norm.reset_running_stats()``, set ``momentum`` to None and run concatenated batches in mode ``batch``.
    """
    batch_size = convert("batch_size", BatchSize, batch_size)
    norms = batch_norms(model)
    route = _resolve_route(norms, route)
    with pair_banks(model, statistics=into or route, affine=route):
        pooled, samples, batches = _collect_moments(model, norms, _batches(data, batch_size))
    for name, norm in norms.items():
        if name in pooled and norm.synchronized:
            packed = all_gather_rows(torch.cat(pooled[name], 1), norm.process_group)
            channels = norm.shape[0]
            pooled[name] = functional.pool_moments(*packed.split([channels, channels, 1], -1))
    for name, values in pooled.items():
        if not all(bool(value.isfinite().all()) for value in values):
            message = f"the input of {name} has no finite mean and variance; no bank was changed"
            raise ConfigError("not_finite", message, field="data", hint="check images and weights for NaN")
    for name, (mean, var, count) in pooled.items():
        norm = norms[name]
        plan = norm.plan
        bank = plan.normalized_by[plan.index(route)] if into is None else plan.feeds[plan.index(into)]
        running_mean, running_var, seen = norm.statistics_bank(bank)
        running_mean.copy_(mean[0])
        running_var.copy_((var * count / (count - 1).clamp(min=1))[0])
        seen.fill_(batches)
    return samples


def _resolve_route(norms: Mapping[str, RoutedNorm], route: str | None) -> str:
    """The route, or the first domain of norms that need none; raises for norms that cannot be recalibrated."""
    if route is not None and not isinstance(route, str):
        raise ConfigError("wrong_type", "{field} must be one domain", field="route", got=route)
    untracked = [name for name, norm in norms.items() if not norm.track_running_stats]
    if untracked:
        raise ConfigError("not_supported", f"these norms have no running statistics: {', '.join(untracked)}", "model")
    plans = [norm.plan for norm in norms.values()]
    routed = next((plan for plan in plans if plan.routed), None)
    if route is None and routed is not None:
        raise ConfigError("missing_route", f"{{field}} must be one of {', '.join(routed.domains)}", field="route")
    return plans[0].domains[0] if route is None else route


def _collect_moments(
    model: nn.Module, norms: Mapping[str, RoutedNorm], data: Iterable[Tensor]
) -> tuple[PooledMoments, int, int]:
    """Run the batches through the model; return the moments of each norm's input, and how many images and batches."""
    # The number of batches may differ between ranks, so that each rank computes its own moments.
    fields = {"mode": "batch_frozen", "groups": 1, "perturbation": None, "likelihoods": None, "local": True}
    pooled: PooledMoments = {}
    hooks = [norm.register_forward_pre_hook(partial(_pool, pooled, name)) for name, norm in norms.items()]
    device, dtype = device_of(model), dtype_of(model)
    samples = batches = 0
    try:
        with evaluating(model), running_eagerly(), Scope(model, fields):
            for images in data:
                samples, batches = samples + len(images), batches + 1
                model(images.to(device, dtype))
    finally:
        for hook in hooks:
            hook.remove()
    if not samples:
        raise ConfigError("empty", "{field} has no images", field="data", hint="an iterator may be used up already")
    if not pooled:
        raise ConfigError("empty", "no norm ran in the forward of the model", field="model")
    return pooled, samples, batches


def _pool(pooled: PooledMoments, name: str, norm: RoutedNorm, inputs: tuple[Tensor, ...]) -> None:
    """Forward pre-hook that pools the moments of a norm's input in float64."""
    x = inputs[0]
    mean, var = (value.double() for value in functional.moments(functional.grouped(x, 1)))
    add_moments(pooled, name, mean, var, count=x.numel() // norm.shape[0])


def add_moments(pooled: PooledMoments, name: str, mean: Tensor, var: Tensor, *, count: int) -> None:
    """Pool the moments of ``count`` values per channel, each ``(1, channels)``, with those that ``name`` has so far."""
    found = mean, var, mean.new_full((1, 1), count)
    if name in pooled:
        mean, var, total = functional.pool_moments(*(torch.cat(values) for values in zip(pooled[name], found)))
        found = mean[None], var[None], total[None]
    pooled[name] = found


def _batches(data: Data, batch_size: int) -> Iterable[Tensor]:
    if isinstance(data, Tensor) and len(data):  # equally large, because a small last batch would have other moments
        data = data.tensor_split(-(-len(data) // batch_size))
    for batch in data if isinstance(data, Iterable) else [data]:
        if isinstance(batch, Mapping):
            batch = next(iter(batch.values()))
        elif isinstance(batch, tuple | list):
            batch = batch[0]
        if not isinstance(batch, Tensor) or not batch.is_floating_point():
            kind = str(batch.dtype) if isinstance(batch, Tensor) else type(batch).__name__
            message = "{field} must be batches of images as float tensors"
            raise ConfigError("wrong_type", message, field="data", got=Description(kind))
        yield batch
