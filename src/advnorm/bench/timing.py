"""Timing of alternatives in alternating order, so that other load on the machine affects all of them equally."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

R = TypeVar("R")


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
