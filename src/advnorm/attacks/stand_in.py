"""A fast copy of a model for searching: bfloat16, channels-last, norms folded, forwards replayed as CUDA graphs.

What it finds counts only after a strict float32 forward of the model itself, so the copy may be a little off.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.fx.experimental.optimization import fuse

from advnorm._core.errors import AdvnormError
from advnorm.attacks.base import Predict, logits_of
from advnorm.norms import Mode, routed_modules
from advnorm.surgery import strip

#: A forward of one size is captured when it comes back for the third time: capturing costs as much as a few forwards.
CAPTURE_AFTER = 2
#: Sizes that are captured: multiples of these steps up to these rows. Larger ones keep the device busy as they are.
BUCKETS = ((256, 32), (1024, 64))


def fast_stand_in(model: nn.Module, *, route: str | None, statistics: Mode) -> Predict | None:
    """Images to float32 logits by a fast bfloat16 copy of a model on a CUDA device; None where none can be made.

    The copy is of the branch ``route``, or of the one that an enclosing scope has set, with stored statistics.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if device.type != "cuda" or statistics != "running":
        return None
    states = {module.state.route for module in routed_modules(model).values()}
    if route is None and len(states) == 1:
        (segments,) = states
        if segments is not None and len(segments) == 1 and segments[0][1] is None:
            route = segments[0][0]
    try:
        copy = strip(model, route).eval().requires_grad_(False)
    except (AdvnormError, RuntimeError, TypeError):  # a route over several domains, or a model that cannot be copied
        return None
    copy = _folded(copy)
    for module in copy.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.to(dtype=torch.bfloat16, memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]

    def forward(x: Tensor) -> Tensor:
        if x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        with torch.autocast("cuda", torch.bfloat16):
            return logits_of(copy(x), len(x)).float()

    return _Replayed(forward)


def _folded(model: nn.Module) -> nn.Module:
    """Batch norms folded into the convolutions before them, where the model can be traced."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return fuse(model)
    except Exception:  # tracing fails in as many ways as there are models; the copy then stays as it is
        return model


class _Replayed:
    """Forwards without gradients, each size captured once and replayed: small batches spend their time on launches."""

    def __init__(self, forward: Predict) -> None:
        self._forward = forward
        self._seen: Counter[tuple[int, ...]] = Counter()
        self._graphs: dict[tuple[int, ...], Callable[[Tensor], Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._works = True

    def __call__(self, x: Tensor) -> Tensor:
        rows = _bucket(len(x))
        if rows is None or not self._works or (torch.is_grad_enabled() and x.requires_grad):
            return self._forward(x)
        key = (rows, *x.shape[1:])
        self._seen[key] += 1
        if self._seen[key] <= CAPTURE_AFTER:
            return self._forward(x)
        if key not in self._graphs:
            try:
                self._graphs[key] = self._captured(x, rows)
            except RuntimeError:  # something in the model waits for the device
                self._works = False
                return self._forward(x)
        return self._graphs[key](x)

    def _captured(self, x: Tensor, rows: int) -> Callable[[Tensor], Tensor]:
        inputs = x.new_zeros((rows, *x.shape[1:]))
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(stream):
            self._forward(inputs)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.no_grad(), torch.cuda.graph(graph, pool=self._pool):
            outputs = self._forward(inputs)

        def replay(x: Tensor) -> Tensor:
            inputs[: len(x)].copy_(x)
            graph.replay()
            return outputs[: len(x)].clone()

        return replay


def _bucket(rows: int) -> int | None:
    for limit, step in BUCKETS:
        if rows <= limit:
            return -(-rows // step) * step
    return None
