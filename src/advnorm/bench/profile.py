"""The time of a training step by kind of GPU kernel or CPU operation."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch
from torch.profiler import ProfilerActivity, profile

from advnorm.bench.timing import synchronize

#: Kinds of kernels and operations by a pattern of their names; the first match counts.
KINDS: Mapping[str, str] = {
    "copies": r"memcpy|memset|CatArray|aten::(copy_|clone|cat|fill_|zero_)$",
    "compiled sums": r"^triton_(red|per)",
    "compiled elementwise": r"^triton_poi",
    "optimizer": r"multi_tensor|fused_?(sgd|adam)|_foreach",
    "convolutions, gradient of weights": r"wgrad",
    "convolutions, gradient of images": r"dgrad",
    "convolutions, backward": r"conv\w*_backward",  # on the CPU both gradients are one operation
    "convolutions, forward": r"fprop|fwd|conv",
    "matrix products": r"gemm|nvjet|cutlass|addmm|aten::mm",
    "sums": r"reduce|batch_norm|bn_|softmax|nll|aten::(sum|mean|var|std)",
    "elementwise": r"elementwise|aten::",
}
OTHERS, IDLE = "others", "none of them"


def step_parts(step: Callable[[], object], device: torch.device, seconds: float) -> dict[str, float]:
    """Return the milliseconds of one step by kind, the longest first.

    ``none of them`` is the rest of ``seconds``, the time of the step. Kernels that run in parallel count twice.
    """
    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as recorded:
        step()
        synchronize(device)
    parts: dict[str, float] = {}
    for event in recorded.key_averages():
        spent = event.self_device_time_total if device.type == "cuda" else event.self_cpu_time_total
        if spent:
            kind = kind_of(event.key)
            parts[kind] = parts.get(kind, 0.0) + spent / 1e3
    parts[IDLE] = max(0.0, 1e3 * seconds - sum(parts.values()))
    return dict(sorted(parts.items(), key=lambda item: -item[1]))


def kind_of(name: str) -> str:
    """Return the kind of a kernel or operation."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), OTHERS)
