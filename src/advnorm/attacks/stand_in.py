"""A fast copy of a model for searching, replayed as CUDA graphs.

What it finds counts only after a strict float32 forward of the model itself, so the copy may be a little off.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from advnorm._core.errors import AdvnormError
from advnorm.attacks.base import Predict, logits_of
from advnorm.attacks.fast_copy import fast_copy
from advnorm.attacks.search import bucket, filled
from advnorm.norms import Mode, routed_modules
from advnorm.surgery import strip

#: A size is captured when it comes back for the third time: capturing costs as much as a few forwards.
CAPTURE_AFTER = 2
#: Rows are filled up to a multiple of this.
STEP = 16
#: More rows are not captured: they keep the device busy as they are.
MOST_ROWS = 1024


def fast_stand_in(
    model: nn.Module, *, route: str | None, statistics: Mode, otherwise: Predict | None = None
) -> StandIn | None:
    """Images to float32 logits by a fast bfloat16 copy of a model on a CUDA device; None where none can be made.

    The copy is of the branch ``route``, or of the one that an enclosing scope has set, with stored statistics as they
    are: inside of a scope that perturbs or pairs them there is none. ``otherwise`` serves where the copy does not work.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if device.type != "cuda" or statistics != "running":
        return None
    if any(module.state.perturbation or module.state.pair for module in routed_modules(model).values()):
        return None
    states = {module.state.route for module in routed_modules(model).values()}
    if route is None and len(states) == 1:
        (segments,) = states
        if segments is not None and len(segments) == 1 and segments[0][1] is None:
            route = segments[0][0]
    try:
        network = strip(model, route).eval().requires_grad_(False)
    except (AdvnormError, RuntimeError, TypeError):  # a route over several domains, or a model that cannot be copied
        return None
    fast, forward = fast_copy(network), fast_copy(network, activations=False)
    ways = [fast, forward] if fast and forward else [_as_it_is(network)]  # of a network that cannot be traced
    return StandIn(*ways, *([] if otherwise is None else [otherwise]))


def _as_it_is(network: nn.Module) -> Predict:
    """The network's own forward with bfloat16 weights."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.to(dtype=torch.bfloat16, memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]

    def forward(x: Tensor) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x
        with torch.autocast("cuda", torch.bfloat16):
            return logits_of(network(x), len(x)).float()

    return forward


class StandIn:
    """Images to logits, with gradients where asked for, each size captured once and replayed: launches cost nothing.

    ``ways``: the fastest first; the next serves where one does not work on this device, or where the fastest that does
    gives another answer.
    """

    def __init__(self, *ways: Predict) -> None:
        #: Without replays, as it is for sizes that come seldom.
        self.eager = ways[0]
        self._ways = ways
        self._checked = False
        self._seen: Counter[tuple[int, ...]] = Counter()
        self._captured: dict[tuple[int, ...], _Captured] = {}
        self._memory = _Memory()
        self._works = True

    def __call__(self, x: Tensor) -> Tensor:
        if not self._checked:
            self._check(x)
        gradient = torch.is_grad_enabled() and x.requires_grad
        rows = bucket(len(x), STEP)
        key = (gradient, rows, *x.shape[1:])
        self._seen[key] += 1
        if self._works and rows <= MOST_ROWS and self._seen[key] > CAPTURE_AFTER and key not in self._captured:
            try:
                self._captured[key] = _Captured(self.eager, x, rows, self._memory, gradient=gradient)
            except RuntimeError:  # something in the model waits for the device, or memory does not suffice
                self._works = False
                self._captured.clear()
        if key in self._captured:
            return _Replay.apply(x, self._captured[key])  # pyright: ignore[reportReturnType]
        return self.eager(filled(x, rows))[: len(x)]

    def _check(self, x: Tensor) -> None:
        """Keep the fast way only where it works and agrees, to the precision of bfloat16."""
        answers: list[tuple[Predict, Tensor]] = []
        with torch.no_grad():
            for way in self._ways:
                try:
                    answers.append((way, way(x)))
                except torch.OutOfMemoryError:
                    raise
                except RuntimeError:  # no such kernel for this device, shape or precision
                    continue
        self._checked = True
        if len(answers) < 2:
            self.eager = answers[0][0] if answers else self._ways[-1]
            return
        (fast, found), (slower, expected) = answers[:2]
        known = expected.isfinite()  # a class that is left out has a logit of -inf
        gap, size = (value[known].abs().amax() for value in (found - expected, expected))
        self.eager = fast if bool(gap <= 0.05 * size + 0.05) else slower


class _Memory:
    """What a stand-in's captures share: their activations lie in one place, which belongs to the latest forward."""

    def __init__(self) -> None:
        self.pool, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        self.latest: object = None


class _Captured:
    """The forward of one size, and its gradient, as CUDA graphs that read and write tensors of their own."""

    def __init__(self, forward: Predict, x: Tensor, rows: int, memory: _Memory, *, gradient: bool) -> None:
        self._memory = memory
        self._x = x.new_zeros((rows, *x.shape[1:])).requires_grad_(gradient)
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        outer, stream = torch.cuda.current_stream(), memory.stream
        stream.wait_stream(outer)
        with torch.set_grad_enabled(gradient), torch.cuda.stream(stream):
            with _no_waiting():  # a first time outside of a capture, which a wait would spoil
                logits = forward(self._x)
                self._cotangent = torch.zeros_like(logits, requires_grad=False)
                if gradient:
                    torch.autograd.grad(logits, self._x, self._cotangent)
            del logits
            with torch.cuda.graph(self._forward, pool=memory.pool, stream=stream):
                logits = forward(self._x)
            if gradient:
                # The activations stay where they are, for a Jacobian's many gradients of one forward.
                with torch.cuda.graph(self._backward, pool=memory.pool, stream=stream):
                    (self._grad,) = torch.autograd.grad(logits, self._x, self._cotangent, retain_graph=True)
        outer.wait_stream(stream)
        self._logits = logits.detach()

    def forward(self, x: Tensor) -> tuple[Tensor, object]:
        """Logits, and a token for the gradient."""
        with torch.no_grad():
            self._x[: len(x)].copy_(x)
        self._forward.replay()
        self._memory.latest = token = object()
        return self._logits[: len(x)].clone(), token

    def gradient(self, x: Tensor, cotangent: Tensor, token: object) -> Tensor:
        """The gradient of a forward at ``x``, which is repeated where another one came in between."""
        if self._memory.latest is not token:
            self.forward(x)
        self._cotangent[: len(x)].copy_(cotangent)
        self._backward.replay()
        return self._grad[: len(x)].clone()


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Scope: what would wait for the device raises RuntimeError."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it does not find everything, which is fine: a capture fails too
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class _Replay(torch.autograd.Function):
    """A captured forward and its gradient as one operation of autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, captured: _Captured) -> Tensor:
        logits, ctx.token = captured.forward(x)
        ctx.captured = captured
        ctx.save_for_backward(x)
        return logits

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return ctx.captured.gradient(x, grads[0], ctx.token), None
