"""Common parts of benchmarks: their conditions, and timing of alternatives in alternating order.

Other load on the machine affects all alternatives equally.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch

from advnorm._core.errors import Problem
from advnorm._core.provenance import own_version

R = TypeVar("R")
K = TypeVar("K")


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
    return [
        Problem("out_of_range", f"{{field}} must be at least {minimum}", name, got=value)
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


def peak_flops(device: torch.device) -> float:
    """Measure the operations per second of a large matrix product: bf16 on a GPU, float32 on the CPU."""
    size, dtype, rounds = (8192, torch.bfloat16, 20) if device.type == "cuda" else (1024, torch.float32, 3)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))

    def multiply() -> None:
        for _ in range(rounds):
            torch.mm(a, b)

    multiply()
    return rounds * 2 * size**3 / timed(multiply, device)[1]


def alternate(
    functions: Mapping[K, Callable[[], object]],
    *,
    rounds: int,
    device: torch.device,
    warmup: int = 2,
    on_round: Callable[[], object] = lambda: None,
) -> dict[K, list[float]]:
    """Time every function once per round, in alternating order, and return the seconds of each."""
    for function in functions.values():
        for _ in range(warmup):
            timed(function, device)
    times: dict[K, list[float]] = {name: [] for name in functions}
    order = list(functions)
    for _ in range(rounds):
        for name in order:
            times[name].append(timed(functions[name], device)[1])
        order.reverse()
        on_round()
    return times


def compare(times: Sequence[float], reference: Sequence[float]) -> Timing:
    """Compare the times of an alternative with those of a reference in the same rounds."""
    ratios = sorted(own / other for own, other in zip(times, reference, strict=True))
    quarter = len(ratios) // 4
    return Timing(
        seconds=statistics.median(times),
        ratio=statistics.median(ratios),
        spread=ratios[-1 - quarter] - ratios[quarter],
    )
