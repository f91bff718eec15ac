"""Re-estimate a statistics bank from given inputs under a given affine bank (paper A, table 5; paper D, table 7)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from advnorm._core.distributed import all_gather_rows
from advnorm._core.errors import ConfigError
from advnorm._core.modes import evaluating, hooks_run
from advnorm._core.wrappers import device_of, dtype_of
from advnorm.norms import functional
from advnorm.norms.plan import Plan
from advnorm.norms.routed import RoutedNorm
from advnorm.norms.routing import Scope, pair, routed_modules

Data = Tensor | Iterable[Any]


@torch.no_grad()
def recalibrate(
    model: nn.Module, data: Data, *, route: str | None = None, into: str | None = None, batch_size: int = 256
) -> int:
    """Replace the statistics of a bank by the moments of ``data`` under the affine bank of ``route``.

    In the notation of paper A, ``recalibrate(model, clean_images, route="adv")`` stores NS with superscript adv (the
    affine bank in force) and subscript clean (the images). ``data`` is a tensor of images, which is cut into equally
    large batches of at most ``batch_size``, or an iterable of batches: tensors, or tuples and mappings whose first
    entry is the images. The forward uses each batch's own moments; the bank receives the pooled mean and unbiased
    variance of all samples. ``into`` names the domain whose bank is written; by default the bank that normalizes
    ``route``. Other banks, parameters, flags and the random state stay as they are, and the bank changes only after the
    last batch went through. With ``sync`` each rank gives its share of the data.
    Returns the number of samples.
    """
    norms = {
        n: m for n, m in routed_modules(model).items() if isinstance(m, RoutedNorm) and m.plan.statistics == "batch"
    }
    if not norms:
        raise ConfigError("the model has no batch-fed routed norm; convert it with advnorm.convert_norm(model, 'bn')")
    if route is not None and not isinstance(route, str):
        raise ConfigError(f"recalibrate takes one domain as its route, got {route!r}; call it once for each")
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ConfigError(f"batch_size must be an integer of at least 1, got {batch_size!r}")
    mixtures = [name or "the norm" for name, norm in norms.items() if norm.plan.mixture]
    if mixtures:
        raise ConfigError(
            f"mixture norms use all banks at once: {', '.join(mixtures)}; feed them by forwards of concatenated "
            "batches in mode 'batch', after norm.reset_running_stats() and with momentum None"
        )
    if route is None:
        routed = next((norm.plan for norm in norms.values() if norm.plan.routed), None)
        if routed is not None:
            raise ConfigError(f"say under which affine bank: route= one of {', '.join(routed.domains)}")
        route = next(iter(norms.values())).plan.domains[0]
    chosen = pair(model, statistics=into or route, affine=route)
    # Each rank walks through its own batches, as many as it has.
    plainly = Scope(model, {"mode": "batch_frozen", "groups": 1, "delta": None, "collected": None, "alone": True})
    untracked = [name for name, norm in norms.items() if not norm.track_running_stats]
    if untracked:
        raise ConfigError(f"these norms keep no running statistics: {', '.join(untracked)}")
    pooled: dict[str, tuple[Tensor, Tensor, Tensor]] = {}

    def pool(name: str, norm: RoutedNorm, x: Tensor) -> None:
        mean, var = (value.double() for value in functional.moments(functional.grouped(x, 1)))
        count = mean.new_full((1, 1), x.numel() // norm.shape[0])
        if name in pooled:
            before = pooled[name]
            both = [torch.cat(values) for values in zip(before, (mean, var, count))]
            mean, var, count = (value[None] for value in functional.pool_moments(*both))
        pooled[name] = mean, var, count

    def hook(name: str, norm: RoutedNorm) -> Callable[..., None]:
        return lambda _module, args: pool(name, norm, args[0])

    handles = [norm.register_forward_pre_hook(hook(name, norm)) for name, norm in norms.items()]
    device = device_of(model)
    dtype = dtype_of(model)
    samples = batches = 0
    try:
        with evaluating(model), hooks_run(), chosen, plainly:
            for images in _batches(data, batch_size):
                samples, batches = samples + len(images), batches + 1
                model(images.to(device, dtype))
    finally:
        for handle in handles:
            handle.remove()
    if not samples:
        raise ConfigError("recalibrate got no data: an iterator that was used up already, or an empty data set")
    if not pooled:
        raise ConfigError("none of the model's norms ran in its forward; recalibrate the model that they are used in")
    for name, norm in norms.items():
        if name in pooled and norm.synchronized:
            packed = all_gather_rows(torch.cat(pooled[name], 1), norm.process_group)
            channels = norm.shape[0]
            pooled[name] = functional.pool_moments(*packed.split([channels, channels, 1], -1))
    bad = [name for name, values in pooled.items() if not all(bool(value.isfinite().all()) for value in values)]
    if bad:
        raise ConfigError(
            f"what reaches {bad[0]} has no finite mean and variance, and nothing was changed; check the images and the "
            "model's weights for NaN"
        )
    for name, (mean, var, count) in pooled.items():
        norm = norms[name]
        running_mean, running_var, seen = norm.statistics_bank(_bank(norm.plan, route, into))
        running_mean.copy_(mean[0])
        running_var.copy_((var * count / (count - 1).clamp(min=1))[0])
        seen.fill_(batches)
    return samples


def _bank(plan: Plan, route: str, into: str | None) -> str:
    return plan.normalized_by[plan.index(route)] if into is None else plan.feeds[plan.index(into)]


def _batches(data: Data, batch_size: int) -> Iterable[Tensor]:
    if not isinstance(data, Iterable):
        raise ConfigError(f"recalibrate takes images, or an iterable of batches, got {type(data).__name__}")
    if isinstance(data, Tensor) and len(data):  # equally large: a last batch of few has moments unlike the others
        data = data.tensor_split(-(-len(data) // batch_size))
    for batch in data:
        if isinstance(batch, Mapping):
            batch = next(iter(batch.values()))
        elif isinstance(batch, tuple | list):
            batch = batch[0]
        if not isinstance(batch, Tensor) or not batch.is_floating_point():
            kind = batch.dtype if isinstance(batch, Tensor) else type(batch).__name__
            raise ConfigError(f"recalibrate needs batches of images as float tensors, got {kind}")
        yield batch
