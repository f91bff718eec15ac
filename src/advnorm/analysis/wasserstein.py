"""Distances between layers whose channels are independent Gaussians (paper C, eq. 7)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from advnorm.analysis.banks import AffineBank, Gaussian

#: What a norm adds to a variance by default; a relative distance divides by at least its square root.
EPS = 1e-5


class Distance(NamedTuple):
    """The two parts of a squared 2-Wasserstein distance: of the means and of the deviations, summed over channels."""

    mean: float
    std: float

    RECORD = ("mean", "std", "total")

    @property
    def total(self) -> float:
        return self.mean + self.std


#: Distances by layer.
Distances = dict[str, Distance]


def wasserstein(first: Gaussian | AffineBank, second: Gaussian | AffineBank, *, relative: bool = False) -> Distance:
    """Return ``Σ_c (μ₁ - μ₂)² + (σ₁ - σ₂)²`` of two diagonal Gaussians (paper C, eq. 7).

    ``relative``: each channel in units of its own deviation, the root mean square of both. A batch norm does not depend
    on the scale of the weights before it, but the absolute distance does.
    """
    unit = ((first[1].square() + second[1].square()) / 2 + EPS).sqrt() if relative else torch.ones(())
    parts = ((one - other) / unit for one, other in zip(first, second))
    return Distance(*(part.square().sum().item() for part in parts))


def layer_distances(
    first: Mapping[str, Gaussian] | Mapping[str, AffineBank],
    second: Mapping[str, Gaussian] | Mapping[str, AffineBank],
    *,
    relative: bool = False,
) -> Distances:
    """Return the distance at every layer that both have."""
    return {name: wasserstein(first[name], second[name], relative=relative) for name in first if name in second}


def sum_distances(layers: Distances) -> float:
    """Return the distance summed over all layers (paper C, table 2)."""
    return sum(distance.total for distance in layers.values())
