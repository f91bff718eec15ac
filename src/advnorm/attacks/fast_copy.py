"""A copy of a network to climb on: bfloat16, channels-last, norms and activations inside the convolutions.

Made of a network whose tensors it shares, it follows a training: ``refresh()`` takes weights and statistics anew.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node, symbolic_trace

from advnorm.attacks.base import logits_of

aten: Any = torch.ops.aten


@torch.library.custom_op(
    "advnorm::conv_relu",
    mutates_args=(),
    schema="(Tensor x, Tensor? z, Tensor weight, Tensor? bias, int[] stride, int[] padding, int[] dilation, int groups)"
    " -> Tensor",
)
def conv_relu(
    x: Tensor,
    z: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """``relu(conv(x) + z)``, by one kernel of cuDNN on a GPU; gradients for x and z alone."""
    settings: Any = (stride, padding, dilation, groups)
    if not x.is_cuda:
        return _conv_relu(x, z, weight, bias, *settings)
    if z is None:
        return torch.cudnn_convolution_relu(x, weight, bias, *settings)
    return torch.cudnn_convolution_add_relu(x, weight, z, 1.0, bias, *settings)


def _conv_relu(x: Tensor, z: Tensor | None, weight: Tensor, bias: Tensor | None, *settings: Any) -> Tensor:
    out = torch.conv2d(x, weight, bias, *settings)
    return (out if z is None else out + z).relu()


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, z, weight, _, *ctx.settings = inputs
    ctx.shortcut = z is not None
    ctx.save_for_backward(x, weight, output)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, out = ctx.saved_tensors
    stride, padding, dilation, groups = ctx.settings
    grad = aten.threshold_backward(grad, out, 0)
    asked = (True, False, False)  # of x alone
    of_x = aten.convolution_backward(grad, x, weight, None, stride, padding, dilation, False, [0, 0], groups, asked)[0]
    return of_x, grad if ctx.shortcut else None, *(None,) * 6


conv_relu.register_fake(_conv_relu)
conv_relu.register_autograd(_gradients, setup_context=_keep)


class FastConv(nn.Module):
    """A convolution, the norm after it with stored statistics, a shortcut and the ReLU, in as few passes as may be."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, conv: nn.Conv2d, norm: nn.BatchNorm2d | None = None, *, relu: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self._sources = (conv, norm)  # a tuple, since they are no parts of it
        self.relu, self.groups = relu, conv.groups
        self.stride, self.padding, self.dilation = map(list, (conv.stride, conv.padding, conv.dilation))  # pyright: ignore
        # Tensor cores read 8 channels at once: images get empty ones.
        self.added = -conv.in_channels % 8 if conv.groups == 1 else 0
        out, inside, *kernel = conv.weight.shape
        weight = torch.zeros((out, inside + self.added, *kernel), dtype=dtype, device=conv.weight.device)
        bias = None if norm is None and conv.bias is None else torch.zeros_like(weight[:, 0, 0, 0])
        self.register_buffer("weight", weight.contiguous(memory_format=torch.channels_last), persistent=False)
        self.register_buffer("bias", bias, persistent=False)

    @torch.no_grad()
    def refresh(self) -> None:
        """Take weights and statistics anew: ``γ / √(σ² + ε) · w``, and ``β - γ μ / √(σ² + ε)`` for the bias."""
        conv, norm = self._sources
        weight, bias = conv.weight, conv.bias
        if norm is not None:
            assert norm.running_mean is not None and norm.running_var is not None
            scale = (norm.running_var + norm.eps).rsqrt()
            scale = scale if norm.weight is None else scale * norm.weight
            shift = scale * ((0 if bias is None else bias) - norm.running_mean)
            weight, bias = weight * scale[:, None, None, None], shift if norm.bias is None else shift + norm.bias
        self.weight[:, : weight.shape[1]].copy_(weight)
        if bias is not None:
            assert self.bias is not None
            self.bias.copy_(bias)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        dtype = self.weight.dtype
        x, z = x.to(dtype), None if z is None else z.to(dtype)
        if self.added:
            x = F.pad(x, (0, 0, 0, 0, 0, self.added))
            x = x.contiguous(memory_format=torch.channels_last) if x.is_cuda else x
        settings: Any = (self.stride, self.padding, self.dilation, self.groups)
        if self.relu:
            return conv_relu(x, z, self.weight, self.bias, *settings)
        out = torch.conv2d(x, self.weight, self.bias, *settings)
        return out if z is None else out + z


class FastLinear(nn.Module):
    """A linear layer in another precision."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear, *, dtype: torch.dtype) -> None:
        super().__init__()
        self._sources = (linear,)
        self.register_buffer("weight", torch.empty_like(linear.weight, dtype=dtype), persistent=False)
        bias = None if linear.bias is None else torch.empty_like(linear.bias, dtype=dtype)
        self.register_buffer("bias", bias, persistent=False)

    @torch.no_grad()
    def refresh(self) -> None:
        (linear,) = self._sources
        self.weight.copy_(linear.weight)
        if self.bias is not None:
            self.bias.copy_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)


class FastCopy(nn.Module):
    """Images to float32 logits by the copy of a traced network, with weights as they were at the last refresh."""

    def __init__(self, network: GraphModule) -> None:
        super().__init__()
        self.network = network
        self._parts = [part for part in network.modules() if isinstance(part, FastConv | FastLinear)]
        self.refresh()

    @property
    def folded(self) -> int:
        """How many norms went into convolutions."""
        return sum(isinstance(part, FastConv) and part._sources[1] is not None for part in self._parts)

    def refresh(self) -> None:
        """Take weights and statistics of the network anew, as it is now."""
        for part in self._parts:
            part.refresh()

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        # Without the cache of weights: what the copy shares with a network in training changes.
        with torch.autocast(x.device.type, torch.bfloat16, cache_enabled=False):
            return logits_of(self.network(x), len(x)).float()


def fast_copy(network: nn.Module, *, activations: bool = True, dtype: torch.dtype = torch.bfloat16) -> FastCopy | None:
    """The copy of a plain network in eval mode, which stays as it is; None where it cannot be traced.

    ``activations``: whether ReLUs and the sums before them go into the convolutions too.
    """
    try:
        traced = symbolic_trace(network)
    except Exception:  # tracing fails in as many ways as there are models
        return None
    modules = dict(traced.named_modules())
    graph = Graph()
    graph.output(graph.graph_copy(traced.graph, {}))
    copy = GraphModule(traced, graph)

    def module_of(node: Any, kind: type) -> Any:
        """The module that a node calls, if it is a plain one of this kind without hooks."""
        module = modules.get(str(node.target)) if isinstance(node, Node) and node.op == "call_module" else None
        hooked = module is not None and (module._forward_hooks or module._forward_pre_hooks)
        return module if type(module) is kind and not hooked else None

    def alone(node: Any) -> bool:
        return len(node.users) == 1

    def conv_of(node: Any) -> nn.Conv2d | None:
        conv = module_of(node, nn.Conv2d)
        return None if conv is None or isinstance(conv.padding, str) or conv.padding_mode != "zeros" else conv

    def replace(node: Node, dead: Sequence[Node], part: nn.Module, *inputs: Any) -> None:
        name = f"fast_{node.name}"
        copy.add_submodule(name, part)
        with graph.inserting_before(node):
            node.replace_all_uses_with(graph.call_module(name, inputs))
        for old in dict.fromkeys((node, *dead)):
            graph.erase_node(old)

    def convolution(node: Any) -> tuple[nn.Conv2d, nn.BatchNorm2d | None, Node, list[Node]] | None:
        """A convolution, the norm after it, its input, and the nodes it consists of, the last one first."""
        if not isinstance(node, Node):
            return None
        norm: Any = module_of(node, nn.BatchNorm2d)
        inner: Any = node.args[0] if norm is not None else node
        if norm is not None and (norm.training or norm.running_mean is None or not alone(inner)):
            return None
        conv = conv_of(inner)
        return None if conv is None else (conv, norm, inner.args[0], list(dict.fromkeys((node, inner))))

    for node in list(graph.nodes):
        if not activations or module_of(node, nn.ReLU) is None:
            continue
        source: Any = node.args[0]
        parts: list[Any] = [source]
        if source.op == "call_function" and source.target in (operator.add, torch.add) and not source.kwargs:
            parts = list(source.args)
        found = next((part for part in parts if convolution(part) is not None and alone(part)), None)
        if found is None or not alone(source) or not all(isinstance(part, Node) for part in parts):
            continue
        conv, norm, x, dead = convolution(found)  # pyright: ignore[reportGeneralTypeIssues]
        rest = [part for part in parts if part is not found]
        dead = [source, *dead] if rest else dead
        replace(node, dead, FastConv(conv, norm, relu=True, dtype=dtype), x, *rest)
    for kind in (nn.BatchNorm2d, nn.Conv2d):  # norms first, with their convolutions
        for node in list(graph.nodes):
            if module_of(node, kind) is not None and (found := convolution(node)) is not None:
                conv, norm, x, dead = found
                replace(node, dead, FastConv(conv, norm, relu=False, dtype=dtype), x)
    for node in list(graph.nodes):
        linear = module_of(node, nn.Linear)
        if linear is not None:
            replace(node, (), FastLinear(linear, dtype=dtype), *node.args)
    copy.recompile()
    copy.delete_all_unused_submodules()
    return FastCopy(copy)
