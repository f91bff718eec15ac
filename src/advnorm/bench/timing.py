"""What benchmarks share: their conditions, and timing of alternatives in alternating order.

Other load on the machine affects all alternatives equally.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch

from advnorm._core.errors import Problem
from advnorm._core.provenance import own_version

R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class MeasuredConditions:
    """Device and version of torch; a benchmark adds its own conditions and rows."""

    device: str
    torch: str = torch.__version__

    def record(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {**asdict(self), **own_version()}


def minimum_problems(minimum: int, **values: int) -> list[Problem]:
    """Return a problem for each value below the minimum."""
    message = f"{{field}} must be at least {minimum}"
    return [
        Problem(code="out_of_range", message=message, field=name, got=value)
        for name, value in values.items()
        if value < minimum
    ]


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Median seconds of one call, and the median ratio to the reference in the same round with its spread."""

    seconds: float
    ratio: float
    spread: float


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(function: Callable[[], R], device: torch.device) -> tuple[R, float]:
    """Return the result of a call and its seconds."""
    synchronize(device)
    start = time.perf_counter()
    result = function()
    synchronize(device)
    return result, time.perf_counter() - start


def side_by_side(
    functions: Mapping[str, Callable[[], object]],
    *,
    reference: str,
    rounds: int,
    device: torch.device,
    warmup: int = 2,
    on_round: Callable[[], object] = lambda: None,
) -> dict[str, Timing]:
    """Time every function once per round, in alternating order; ratios to ``reference`` are taken within a round."""
    for function in functions.values():
        for _ in range(warmup):
            timed(function, device)
    times: dict[str, list[float]] = {name: [] for name in functions}
    order = list(functions)
    for _ in range(rounds):
        for name in order:
            times[name].append(timed(functions[name], device)[1])
        order.reverse()
        on_round()
    result = {}
    for name, values in times.items():
        ratios = sorted(own / plain for own, plain in zip(values, times[reference]))
        quarter = len(ratios) // 4
        result[name] = Timing(
            seconds=statistics.median(values),
            ratio=statistics.median(ratios),
            spread=ratios[-1 - quarter] - ratios[quarter],
        )
    return result
