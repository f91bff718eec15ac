"""The mathematics of the norms as pure functions: moments, perturbed standardization, Gaussian posteriors.

Shapes are in the names: ``x_GNC`` is ``(groups, samples per group, channels, *spatial)``, ``mean_GC`` is
``(groups, channels)``. Moments are at least float32, whatever the precision of the input.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from advnorm._core.precision import at_least_float32

#: Weight and bias of an affine mapping; None is left out.
Affine = tuple[Tensor | None, Tensor | None]


def accumulate_dtype(x: Tensor) -> torch.dtype:
    """Float32, or float64 for float64 inputs: a half-precision mean is too coarse to normalize with."""
    return torch.promote_types(x.dtype, torch.float32)


def grouped(x: Tensor, groups: int) -> Tensor:
    """View of ``x`` with the batch dimension split into ``groups`` consecutive parts."""
    return x.unflatten(0, (groups, x.shape[0] // groups))


def channelwise(value_GC: Tensor, ndim: int) -> Tensor:
    """Reshape ``(groups, channels)`` so that it broadcasts against ``x_GNC`` with ``ndim`` dimensions."""
    return value_GC.reshape(value_GC.shape[0], 1, value_GC.shape[1], *(1,) * (ndim - 3))


def moments(x_GNC: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance per group and channel (paper C, eq. 8 and 9; paper A, eq. 3)."""
    dims = [1, *range(3, x_GNC.ndim)]
    var_GC, mean_GC = torch.var_mean(at_least_float32(x_GNC), dim=dims, correction=0)
    return mean_GC, var_GC


def pool_moments(mean_K: Tensor, var_K: Tensor, count_K: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Moments of the union of K sets of samples from the moments of the sets (law of total variance)."""
    count = count_K.sum(0)
    share_K = count_K / count.clamp(min=1)
    mean = (share_K * mean_K).sum(0)
    var = (share_K * (var_K + (mean_K - mean).square())).sum(0)
    return mean, var, count


def standardize(x_GNC: Tensor, mean_GC: Tensor, invstd_GC: Tensor) -> Tensor:
    """``(x - μ) / σ`` with given statistics, in the precision of the statistics."""
    return (x_GNC - channelwise(mean_GC, x_GNC.ndim)) * channelwise(invstd_GC, x_GNC.ndim)


def scaled(z: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """``w ⊙ z + b`` per channel, the second dimension; ``None`` is left out (paper C, eq. 20)."""
    shape = (-1, *(1,) * (z.dim() - 2))
    if weight is not None:
        z = z * weight.view(shape)
    return z if bias is None else z + bias.view(shape)


def compose_affine(first: Affine, second: Affine) -> Affine:
    """Weight and bias of ``γ₂ (γ₁ z + β₁) + β₂``: ``γ₂ γ₁`` and ``γ₂ β₁ + β₂`` (Gong et al. 2021)."""
    (weight_1, bias_1), (weight_2, bias_2) = first, second
    if weight_1 is None or weight_2 is None:
        return None, None
    return weight_2 * weight_1, None if bias_1 is None or bias_2 is None else torch.addcmul(bias_2, weight_2, bias_1)


def affine_rows(banks: Sequence[Affine], rows: Sequence[int], ndim: int) -> Affine:
    """Weight and bias of each row of a batch, ``(rows, channels, 1, ...)``, from the bank and length of each part."""
    found: list[Tensor | None] = []
    for values in zip(*banks):
        if values[0] is None:
            found.append(None)
        else:
            expanded = [value.expand(count, -1) for value, count in zip(values, rows)]
            found.append(torch.cat(expanded)[(..., *(None,) * (ndim - 2))])
    return found[0], found[1]


def sample_rms_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """``w ⊙ x / √(mean(x²) + ε) + b``, with the mean over all channels and positions of a sample."""
    return scaled(F.rms_norm(x, x.shape[1:], None, eps), weight, bias).to(x.dtype)


def log_density(z_GNC: Tensor, invstd_GC: Tensor) -> Tensor:
    """Log density of a diagonal Gaussian at every position, all channels together (paper C, eq. 16).

    Takes the standardized ``z = (x - μ) / σ`` and returns ``(groups, samples, *spatial)``.
    """
    constant_G = (invstd_GC.log() - 0.5 * math.log(2 * math.pi)).sum(1)
    return constant_G.reshape(-1, *(1,) * (z_GNC.ndim - 2)) - 0.5 * z_GNC.square().sum(2)


def mixture_standardize(x_GNC: Tensor, mean_KGC: Tensor, invstd_KGC: Tensor) -> tuple[Tensor, Tensor]:
    """Posterior-weighted standardization under K equally likely Gaussians (paper C, eq. 10 to 16).

    Returns the normalized input and the log posterior ``(K, groups, samples, *spatial)``. Everything stays in log
    space, so that hundreds of channels neither under- nor overflow.
    """
    z_K = [standardize(x_GNC, mean_GC, invstd_GC) for mean_GC, invstd_GC in zip(mean_KGC, invstd_KGC)]
    density = torch.stack([log_density(z, invstd_GC) for z, invstd_GC in zip(z_K, invstd_KGC)])
    log_posterior = density.log_softmax(0)
    normalized = torch.zeros_like(z_K[0])
    for z, weight in zip(z_K, log_posterior.exp()):
        normalized = normalized + weight.unsqueeze(2) * z
    return normalized, log_posterior
