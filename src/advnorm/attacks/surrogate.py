"""Fast surrogates of a model for the search: lower precision, and a folded copy that is replayed as CUDA graphs.

A candidate counts only after a strict float32 forward of the model itself, so a surrogate may be slightly wrong.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Annotated, Any, Literal, get_args

import torch
from torch import Tensor, nn

from advnorm._core.errors import AdvnormError
from advnorm._core.precision import ContextFactory, float32_as
from advnorm._core.settings import Setting
from advnorm._core.wrappers import device_of
from advnorm.attacks.folded_copy import make_folded_copy
from advnorm.attacks.model_access import Predict, extract_logits, pad_rows, padded_size
from advnorm.attacks.names import NameOption
from advnorm.norms import Mode, routed_modules
from advnorm.surgery import strip

Precision = Literal["float32", "tf32", "bf16"]
SearchPrecision = Annotated[Precision, Setting("Precision of the search; a float32 forward decides.")]
#: Precisions of the search as options of a name: ``autoattack-bf16``.
PRECISION_OPTIONS = {precision: NameOption(setting="precision", value=precision) for precision in get_args(Precision)}

#: A batch size is captured at its third use: a capture costs as much as a few forwards.
CAPTURE_AFTER = 2
#: Batches are padded to a multiple of this.
STEP = 16
#: Larger batches are not captured: they keep the device busy anyway.
MOST_ROWS = 1024


def search_surrogate(
    precision: Precision,
    predict: Predict,
    device: torch.device,
    model: nn.Module | None = None,
    route: str | None = None,
    statistics: Mode = "running",
) -> tuple[Predict | None, ContextFactory]:
    """Return the surrogate for a precision, None for ``predict`` itself, and the scope to run it in.

    ``model`` with its ``route`` and ``statistics``: the model behind ``predict``, for a faster surrogate.
    """
    if precision == "float32":
        return None, nullcontext
    if precision == "tf32":
        return predict, partial(float32_as, "tf32", device)
    plain = _autocast_bfloat16(predict)
    fast = None
    if model is not None:
        fast = make_surrogate(model, route=route, statistics=statistics, otherwise=plain)
    return fast or plain, nullcontext


def _autocast_bfloat16(predict: Predict) -> Predict:
    """Run the model under autocast, or unchanged if it fails there (parameters in another half precision)."""
    works = True

    def forward(x: Tensor) -> Tensor:
        nonlocal works
        if x.dim() == 4 and x.is_cuda:
            x = x.contiguous(memory_format=torch.channels_last)
        if works:
            try:
                with torch.autocast(x.device.type, torch.bfloat16):
                    return predict(x).float()
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:
                works = False
        return predict(x)

    return forward


def make_surrogate(
    model: nn.Module, *, route: str | None, statistics: Mode, otherwise: Predict | None = None
) -> CapturedSurrogate | None:
    """Return a bfloat16 copy of a model on a CUDA device that maps images to float32 logits; None if impossible.

    The copy contains the branch ``route``, or the branch that an enclosing scope selects, with its stored statistics.
    Inside a scope that perturbs or pairs statistics there is no copy. ``otherwise`` is used if the copy fails.
    """
    if device_of(model).type != "cuda" or statistics != "running":
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
    fast, forward = make_folded_copy(network), make_folded_copy(network, activations=False)
    ways = [fast, forward] if fast and forward else [_cast_weights(network)]  # the network cannot be traced
    return CapturedSurrogate(*ways, *([] if otherwise is None else [otherwise]))


def _cast_weights(network: nn.Module) -> Predict:
    """The network's own forward with bfloat16 weights."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.to(dtype=torch.bfloat16, memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]

    def forward(x: Tensor) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x
        with torch.autocast("cuda", torch.bfloat16):
            return extract_logits(network(x), len(x)).float()

    return forward


class CapturedSurrogate:
    """Images to logits, with gradients if required. Each batch size is captured once and replayed as a CUDA graph.

    ``ways`` are implementations of the same function, the fastest first. The next one is used if one fails on this
    device, or if the fastest that works disagrees with it.
    """

    def __init__(self, *ways: Predict) -> None:
        #: The implementation without replays, for rare batch sizes.
        self.eager = ways[0]
        self._ways = ways
        self._checked = False
        self._seen: Counter[tuple[int, ...]] = Counter()
        self._captured: dict[tuple[int, ...], _Captured] = {}
        self._memory = _CaptureMemory()
        self._works = True

    def __call__(self, x: Tensor) -> Tensor:
        if not self._checked:
            self._check(x)
        gradient = torch.is_grad_enabled() and x.requires_grad
        rows = padded_size(len(x), STEP)
        key = (gradient, rows, *x.shape[1:])
        self._seen[key] += 1
        if self._works and rows <= MOST_ROWS and self._seen[key] > CAPTURE_AFTER and key not in self._captured:
            try:
                self._captured[key] = _Captured(self.eager, x, rows, self._memory, gradient=gradient)
            except RuntimeError:  # the model synchronizes the device, or memory is too small
                self._works = False
                self._captured.clear()
        if key in self._captured:
            return _Replay.apply(x, self._captured[key])  # pyright: ignore[reportReturnType]
        return self.eager(pad_rows(x, rows))[: len(x)]

    def _check(self, x: Tensor) -> None:
        """Select the fastest implementation that works and agrees with the next one, to the precision of bfloat16."""
        answers: list[tuple[Predict, Tensor]] = []
        with torch.no_grad():
            for way in self._ways:
                try:
                    answers.append((way, way(x)))
                except torch.OutOfMemoryError:
                    raise
                except RuntimeError:  # no kernel for this device, shape or precision
                    continue
        self._checked = True
        if len(answers) < 2:
            self.eager = answers[0][0] if answers else self._ways[-1]
            return
        (fast, found), (slower, expected) = answers[:2]
        known = expected.isfinite()  # an excluded class has a logit of -inf
        gap, size = (value[known].abs().amax() for value in (found - expected, expected))
        self.eager = fast if bool(gap <= 0.05 * size + 0.05) else slower


class _CaptureMemory:
    """Memory that all captures share. It holds the activations of the latest forward only."""

    def __init__(self) -> None:
        self.pool, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        self.latest: object = None


class _Captured:
    """The forward and gradient of one batch size as CUDA graphs, which read and write their own tensors."""

    def __init__(self, forward: Predict, x: Tensor, rows: int, memory: _CaptureMemory, *, gradient: bool) -> None:
        self._memory = memory
        self._x = x.new_zeros((rows, *x.shape[1:])).requires_grad_(gradient)
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        outer, stream = torch.cuda.current_stream(), memory.stream
        stream.wait_stream(outer)
        with torch.set_grad_enabled(gradient), torch.cuda.stream(stream):
            with _no_synchronization():  # a first run outside the capture, which a synchronization would break
                logits = forward(self._x)
                self._cotangent = torch.zeros_like(logits, requires_grad=False)
                if gradient:
                    torch.autograd.grad(logits, self._x, self._cotangent)
            del logits
            with torch.cuda.graph(self._forward, pool=memory.pool, stream=stream):
                logits = forward(self._x)
            if gradient:
                # The activations are kept: a Jacobian takes many gradients of one forward.
                with torch.cuda.graph(self._backward, pool=memory.pool, stream=stream):
                    (self._grad,) = torch.autograd.grad(logits, self._x, self._cotangent, retain_graph=True)
        outer.wait_stream(stream)
        self._logits = logits.detach()

    def forward(self, x: Tensor) -> tuple[Tensor, object]:
        """Return the logits and a token for :meth:`gradient`."""
        with torch.no_grad():
            self._x[: len(x)].copy_(x)
        self._forward.replay()
        self._memory.latest = token = object()
        return self._logits[: len(x)].clone(), token

    def gradient(self, x: Tensor, cotangent: Tensor, token: object) -> Tensor:
        """Return the gradient of a forward at ``x``; repeat the forward if another one came in between."""
        if self._memory.latest is not token:
            self.forward(x)
        self._cotangent[: len(x)].copy_(cotangent)
        self._backward.replay()
        return self._grad[: len(x)].clone()


@contextmanager
def _no_synchronization() -> Iterator[None]:
    """Scope: an operation that synchronizes the device raises RuntimeError."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it does not find everything; a capture fails too
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class _Replay(torch.autograd.Function):
    """A captured forward and its gradient as one autograd operation."""

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
