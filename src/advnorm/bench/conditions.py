"""What every benchmark records besides its rows."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from advnorm._core.errors import Problem
from advnorm._core.provenance import own_version


@dataclass(frozen=True, kw_only=True)
class MeasuredConditions:
    """Device and version of torch; a benchmark adds its own conditions and rows."""

    device: str
    torch: str = torch.__version__

    def record(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {**asdict(self), **own_version()}


def device_name(device: torch.device) -> str:
    """Return the name of a GPU, or ``cpu``."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def minimum_problems(minimum: int, **values: int) -> list[Problem]:
    """Return a problem for each value below the minimum."""
    message = f"{{field}} must be at least {minimum}"
    return [
        Problem(code="out_of_range", message=message, field=name, got=value)
        for name, value in values.items()
        if value < minimum
    ]
