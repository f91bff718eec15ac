"""A wrapper for models that expect normalized images."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn

from advnorm._core.errors import ConfigError, Problem, raise_problems
from advnorm.models.layers import InputNorm


class Normalized(nn.Module):
    """``model((x - mean) / std)``: takes images in [0, 1], where eps and the box of an attack are defined.

    ``mean`` and ``std``: a number, or one per channel. The names in the state dict are those of ``model`` with the
    prefix ``model.``.
    """

    def __init__(self, model: nn.Module, mean: float | Sequence[float], std: float | Sequence[float]) -> None:
        super().__init__()
        raise_problems(channel_problems("mean", mean) + channel_problems("std", std), "bad normalization")
        means, stds = channel_values(mean), channel_values(std)
        if len({1, len(means), len(stds)}) > 2:
            message = f"mean has {len(means)} values and std has {len(stds)}"
            raise ConfigError("wrong_shape", message, field="std", hint="give one per channel")
        self.input_norm = InputNorm(means, stds)
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        channels = max(len(self.input_norm.mean), len(self.input_norm.std))
        if channels > 1 and x.shape[1] != channels:
            message = f"mean and std have {channels} values, and the images have {x.shape[1]} channels"
            raise ConfigError("wrong_shape", message, field="mean", hint="give one number, or one per channel")
        return self.model(self.input_norm(x))


def channel_values(value: float | Sequence[float]) -> tuple[float, ...]:
    """Mean or standard deviation per channel; a number stands for all channels."""
    return (float(value),) if isinstance(value, int | float) else tuple(float(v) for v in value)


def channel_problems(field: str, value: float | Sequence[float]) -> list[Problem]:
    """The problem of a mean or standard deviation that is not finite, or of a std that is not above 0."""
    try:
        values = channel_values(value)
    except (TypeError, ValueError):
        values = ()
    if values and all(math.isfinite(v) and (v > 0 or field == "mean") for v in values):
        return []
    message = f"{{field}} must be a finite number{' above 0' if field == 'std' else ''}, or one per channel"
    return [Problem(code="out_of_range", message=message, field=field, got=value)]
