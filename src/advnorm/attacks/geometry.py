"""Norms and fast projections of attack searches."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from advnorm.threat import ORDERS, Norm, ThreatModel, per_image

#: The dual of each norm.
DUAL: Mapping[Norm, Norm] = {"Linf": "L1", "L2": "L2", "L1": "Linf"}


def threat_norm(rows: Tensor, threat: ThreatModel, *, dual: bool = False) -> Tensor:
    """The threat's norm, or its dual norm, of each row of ``(..., features)``."""
    norm = DUAL[threat.norm] if dual else threat.norm
    return torch.linalg.vector_norm(rows, ORDERS[norm], dim=-1)


def fast_projection(threat: ThreatModel, x: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a fast projection onto ball and box for a search; verification projects its candidates exactly.

    L2: onto the ball, then the box. L1: onto their intersection, which makes L1 attacks strong.
    """
    if threat.norm == "Linf":
        return threat.projection(x)
    eps = threat.inner_radius(x[0].numel())
    if threat.norm == "L1":
        return lambda point: project_l1_and_box(x, point, eps)

    def project(point: Tensor) -> Tensor:
        delta = point - x
        length = threat_norm(delta.flatten(1), threat).clamp_min(torch.finfo(delta.dtype).tiny)
        return (x + delta * per_image((eps / length).clamp_max(1), x)).clamp(0, 1)

    return project


def project_l1_and_box(x: Tensor, point: Tensor, eps: float) -> Tensor:
    """The point of ``{||p - x||_1 <= eps} ∩ [0, 1]^d`` nearest to ``point`` in L2 (Croce & Hein 2021, prop. 2.1).

    It moves from x by ``min(max(|δ_i| - λ, 0), room_i)`` towards the point, with the least λ >= 0 that satisfies the
    constraint: bisection down to a linear piece, then the exact solution.
    """
    delta = (point - x).flatten(1)
    size = delta.abs()
    room = torch.where(delta > 0, 1 - x.flatten(1), x.flatten(1))
    low = torch.zeros_like(size[:, :1])
    high = size.amax(1, keepdim=True)
    for _ in range(24):
        middle = (low + high) / 2
        outside = torch.minimum((size - middle).clamp_min(0), room).sum(1, keepdim=True) > eps
        low, high = torch.where(outside, middle, low), torch.where(outside, high, middle)
    sloping = (size > low) & (size - room < low)
    full = torch.where(size - room >= low, room, 0).sum(1, keepdim=True)
    shrink = (full + torch.where(sloping, size, 0).sum(1, keepdim=True) - eps) / sloping.sum(1, keepdim=True)
    # Only rows that need shrinking; between low and high the sum is linear, up to rounding.
    shrink = torch.where((low > 0) & shrink.isfinite(), torch.minimum(torch.maximum(shrink, low), high), high)
    inside = torch.minimum(size, room).sum(1, keepdim=True) <= eps
    moved = torch.minimum((size - torch.where(inside, 0, shrink)).clamp_min(0), room)
    return (x + (moved * delta.sign()).view(x.shape)).clamp(0, 1)
