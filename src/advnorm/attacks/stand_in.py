"""A fast copy of a model for searching: bfloat16, channels-last, norms folded, forwards replayed as CUDA graphs.

What it finds counts only after a strict float32 forward of the model itself, so the copy may be a little off.
"""

from __future__ import annotations

import operator
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
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
    copy = folded(copy)
    for module in copy.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.to(dtype=torch.bfloat16, memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]

    def forward(x: Tensor, network: nn.Module = copy) -> Tensor:
        if x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        with torch.autocast("cuda", torch.bfloat16):
            return logits_of(network(x), len(x)).float()

    return _Replayed(forward, partial(forward, network=with_fused_activations(copy)))


def folded(model: nn.Module) -> nn.Module:
    """Batch norms folded into the convolutions before them, where the model can be traced."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return fuse(model)  # a traced copy
    except Exception:  # tracing fails in as many ways as there are models; the copy then stays as it is
        return model


class _Fused(nn.Module):
    """``relu(conv(x) + z)`` in one kernel, without gradients: bias, sum and ReLU need no pass over memory each."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        c, x = self.conv, x.to(self.conv.weight.dtype)
        if not x.is_cuda:
            out = c(x)
            return (out if z is None else out + z).relu()
        settings: Any = (c.stride, c.padding, c.dilation, c.groups)
        if z is None:
            return torch.cudnn_convolution_relu(x, c.weight, c.bias, *settings)
        return torch.cudnn_convolution_add_relu(x, c.weight, z.to(x.dtype), 1.0, c.bias, *settings)


def with_fused_activations(model: nn.Module) -> nn.Module:
    """The traced model with ``relu(conv)`` and ``relu(conv + shortcut)`` as single modules; others as they are."""
    if not isinstance(model, GraphModule):
        return model
    modules = dict(model.named_modules())
    graph = Graph()
    graph.output(graph.graph_copy(model.graph, {}))

    def conv_of(node: Any) -> nn.Conv2d | None:
        module = modules.get(str(node.target)) if isinstance(node, Node) and node.op == "call_module" else None
        plain = type(module) is nn.Conv2d and not isinstance(module.padding, str) and module.padding_mode == "zeros"
        return module if plain and len(node.users) == 1 else None  # pyright: ignore[reportReturnType]

    fused = GraphModule(model, graph)
    for node in list(graph.nodes):
        if node.op != "call_module" or type(modules.get(str(node.target))) is not nn.ReLU:
            continue
        source: Any = node.args[0]
        convs, rest = [source], ()
        if source.op == "call_function" and source.target in (operator.add, torch.add) and len(source.users) == 1:
            convs = list(source.args)
        chosen = next((conv for conv in convs if conv_of(conv) is not None), None)
        if chosen is None or len(convs) > 2 or not all(isinstance(conv, Node) for conv in convs):
            continue
        rest = tuple(other for other in convs if other is not chosen)
        name = f"fused_{node.name}"
        conv = conv_of(chosen)
        assert conv is not None
        fused.add_submodule(name, _Fused(conv))
        with graph.inserting_before(node):
            node.replace_all_uses_with(graph.call_module(name, (chosen.args[0], *rest)))
        for dead in dict.fromkeys((node, source, chosen)):
            graph.erase_node(dead)
    fused.recompile()
    return fused


class _Replayed:
    """Forwards without gradients, each size captured once and replayed: small batches spend their time on launches.

    ``forward`` serves gradients, and everything where ``fast`` does not give the same answer on this device.
    """

    def __init__(self, forward: Predict, fast: Predict) -> None:
        self._forward, self._fast = forward, fast
        self._checked = False
        self._seen: Counter[tuple[int, ...]] = Counter()
        self._graphs: dict[tuple[int, ...], Callable[[Tensor], Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._works = True

    def __call__(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and x.requires_grad:
            return self._forward(x)
        if not self._checked:
            self._check(x)
        rows = _bucket(len(x))
        if rows is None or not self._works:
            return self._fast(x)
        key = (rows, *x.shape[1:])
        self._seen[key] += 1
        if self._seen[key] <= CAPTURE_AFTER:
            return self._fast(x)
        if key not in self._graphs:
            try:
                self._graphs[key] = self._captured(x, rows)
            except RuntimeError:  # something in the model waits for the device
                self._works = False
                return self._fast(x)
        return self._graphs[key](x)

    def _check(self, x: Tensor) -> None:
        """Keep the fast way only where it works and agrees, to the precision of bfloat16."""
        self._checked = True
        with torch.no_grad():
            expected = self._forward(x)
            try:
                gap = (self._fast(x) - expected).abs().max()
                agrees = bool(gap <= 0.05 * expected.abs().max() + 0.05)
            except RuntimeError:  # no such kernel for this device, shape or precision
                agrees = False
        if not agrees:
            self._fast = self._forward

    def _captured(self, x: Tensor, rows: int) -> Callable[[Tensor], Tensor]:
        inputs = x.new_zeros((rows, *x.shape[1:]))
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(stream):
            self._fast(inputs)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.no_grad(), torch.cuda.graph(graph, pool=self._pool):
            outputs = self._fast(inputs)

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
