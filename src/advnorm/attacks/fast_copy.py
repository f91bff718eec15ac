"""A copy of a network to climb on: bfloat16, channels-last, norms and activations inside the convolutions.

Made of a network whose tensors it shares, it follows a training: ``refresh()`` takes weights and statistics anew.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Node, Proxy, Tracer

from advnorm._core.errors import ConfigError, first_line
from advnorm.attacks.base import logits_of

aten: Any = torch.ops.aten

# -- a convolution with what follows it --------------------------------------------------------------------------------


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
    if not x.is_cuda or torch.backends.cudnn.deterministic:  # which the kernels below do not heed
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
        self.stride, self.padding, self.dilation = list(conv.stride), list(map(int, conv.padding)), list(conv.dilation)
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
        weight = self.weight[:, : conv.weight.shape[1]]
        if norm is None:
            weight.copy_(conv.weight)
            if self.bias is not None:
                self.bias.copy_(conv.bias)  # pyright: ignore[reportArgumentType]
            return
        # Every kernel counts: this runs before every attack, for every convolution.
        assert norm.running_mean is not None and norm.running_var is not None and self.bias is not None
        scale = (norm.running_var + norm.eps).rsqrt()
        scale = scale if norm.weight is None else scale.mul_(norm.weight)
        torch.mul(conv.weight, scale[:, None, None, None], out=weight)
        mean = norm.running_mean if conv.bias is None else norm.running_mean - conv.bias
        if norm.bias is None:
            torch.mul(-scale, mean, out=self.bias)
        else:
            torch.addcmul(norm.bias, scale, mean, value=-1, out=self.bias)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        dtype = self.weight.dtype
        x, z = x.to(dtype), None if z is None else z.to(dtype)
        if self.added:
            x = F.pad(x, (0, 0, 0, 0, 0, self.added))
            x = x.contiguous(memory_format=torch.channels_last) if x.is_cuda else x
        settings: Any = (self.stride, self.padding, self.dilation, self.groups)
        if not self.relu:
            return torch.conv2d(x, self.weight, self.bias, *settings)
        if z is not None and z.shape != self._shape(x):  # a kernel broadcasts nothing
            return _conv_relu(x, z, self.weight, self.bias, *settings)
        return conv_relu(x, z, self.weight, self.bias, *settings)

    def _shape(self, x: Tensor) -> tuple[int, ...]:
        """Of the output for ``x``."""
        out, _, *kernel = self.weight.shape
        sides = zip(x.shape[2:], kernel, self.stride, self.padding, self.dilation)
        return len(x), out, *((n + 2 * pad - gap * (k - 1) - 1) // by + 1 for n, k, by, pad, gap in sides)


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


# -- the network -------------------------------------------------------------------------------------------------------


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


def fast_copy(
    network: nn.Module,
    *,
    activations: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    following: bool = False,
    on_refusal: Callable[[str], object] = lambda reason: None,
) -> FastCopy | None:
    """The copy of a plain network in eval mode, which stays as it is; None where it cannot be traced.

    ``activations``: whether ReLUs and the sums before them go into the convolutions too. ``following``: the network is
    being trained, so that a tensor which the trace would keep as it is now stands against a copy. ``on_refusal`` is
    told why there is none.
    """
    try:
        # Called by another module it gets its image alone: an optional argument is what it is by default.
        copy = _traced(root := nn.Sequential(network), following=following)
    except Exception as error:  # tracing fails in as many ways as there are models
        on_refusal(first_line(error))
        return None
    graph, modules = copy.graph, dict(root.named_modules())

    def module_of(node: Any, kind: type) -> Any:
        """The module that a node calls with one tensor, if it is a plain one of this kind without hooks."""
        if not isinstance(node, Node) or node.op != "call_module" or len(node.args) != 1 or node.kwargs:
            return None
        module = modules.get(str(node.target))
        return module if module is not None and type(module) is kind and not _hooked(module) else None

    def alone(node: Any) -> bool:
        return len(node.users) == 1

    def conv_of(node: Any) -> nn.Conv2d | None:
        conv = module_of(node, nn.Conv2d)
        return None if conv is None or isinstance(conv.padding, str) or conv.padding_mode != "zeros" else conv

    def replace(nodes: Sequence[Node], part: nn.Module, *inputs: Any) -> None:
        """Put a part in place of some nodes, the last one first."""
        name = f"fast_{nodes[0].name}"
        copy.add_submodule(name, part)
        with graph.inserting_before(nodes[0]):
            nodes[0].replace_all_uses_with(graph.call_module(name, inputs))
        for node in nodes:
            graph.erase_node(node)

    def convolution(node: Any) -> tuple[nn.Conv2d, nn.BatchNorm2d | None, Node, list[Node]] | None:
        """A convolution, the norm after it, its input, and the nodes it consists of, the last one first."""
        norm: Any = module_of(node, nn.BatchNorm2d)
        inner: Any = node.args[0] if norm is not None else node
        conv = conv_of(inner)
        if conv is None or (norm is not None and (norm.training or norm.running_mean is None or not alone(inner))):
            return None
        return conv, norm, inner.args[0], [node, inner] if norm is not None else [node]

    for node in list(graph.nodes):
        source: Any = _activated(node, module_of)
        if not activations or source is None or not alone(source):
            continue
        parts: list[Any] = [source]
        if source.op == "call_function" and source.target in SUMS and not source.kwargs:
            parts = list(source.args)
        if not all(isinstance(part, Node) for part in parts) or len(set(parts)) < len(parts):
            continue
        # ``a += b`` changes a: what else reads it afterwards reads the sum.
        candidates = parts[:1] if source.target is operator.iadd else parts
        found = next((part for part in candidates if convolution(part) is not None and alone(part)), None)
        if found is None:
            continue
        conv, norm, x, inner = convolution(found)  # pyright: ignore[reportGeneralTypeIssues]
        rest = [part for part in parts if part is not found]
        nodes = [node, *([source] if rest else []), *inner]
        replace(nodes, FastConv(conv, norm, relu=True, dtype=dtype), x, *rest)
    for kind in (nn.BatchNorm2d, nn.Conv2d):  # norms first, with their convolutions
        for node in list(graph.nodes):
            if module_of(node, kind) is not None and (found := convolution(node)) is not None:
                conv, norm, x, nodes = found
                replace(nodes, FastConv(conv, norm, relu=False, dtype=dtype), x)
    for node in list(graph.nodes):
        linear = module_of(node, nn.Linear)
        if linear is not None:
            replace([node], FastLinear(linear, dtype=dtype), *node.args)
    copy.recompile()
    copy.delete_all_unused_submodules()
    return FastCopy(copy)


# -- the trace ---------------------------------------------------------------------------------------------------------

RELUS, SUMS = (F.relu, torch.relu), (operator.add, torch.add, operator.iadd)
#: What Python calls for ``a += b`` and its like.
IN_PLACE = tuple(getattr(operator, name) for name in ("iadd", "isub", "imul", "itruediv", "ipow", "imatmul"))
#: What users hang on a module to see or change what it computes.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class _Proxy(Proxy):
    """Operations on a tensor, those in place too: torch's own proxy makes ``a + b`` of ``a += b``."""


for _function in IN_PLACE:
    setattr(
        _Proxy,
        f"__{_function.__name__}__",
        lambda self, other, _function=_function: self.tracer.create_proxy(
            "call_function", _function, (self, other), {}
        ),
    )


class _Tracer(Tracer):
    proxy_buffer_attributes = True  # what is computed from statistics is computed anew in every forward

    def proxy(self, node: Node) -> Proxy:
        return _Proxy(node, self)


def _traced(root: nn.Module, *, following: bool) -> GraphModule:
    """A network as a graph of built-in modules and functions; raises where that would compute something else."""
    tracer = _Tracer()
    for name, module in root.named_modules():
        if _hooked(module) and not tracer.is_leaf_module(module, name):
            raise ConfigError(f"a {type(module).__name__} has hooks, which a trace runs once")
    graph = tracer.trace(root)
    own = dict([*root.named_parameters(), *root.named_buffers()])
    fixed = [str(node.target) for node in graph.nodes if node.op == "get_attr" and node.target not in own]
    if following and fixed:
        name = fixed[0].removeprefix("0.")
        raise ConfigError(f"a trace keeps a tensor as it is that is no parameter and no buffer: {name}")
    return GraphModule(root, graph)


def _hooked(module: nn.Module) -> bool:
    return any(getattr(module, name) for name in HOOKS)


def _activated(node: Node, module_of: Callable[[Any, type], Any]) -> Node | None:
    """What a ReLU is taken of, if the node is one."""
    is_relu = module_of(node, nn.ReLU) is not None or (node.op == "call_function" and node.target in RELUS)
    return node.args[0] if is_relu and node.args and isinstance(node.args[0], Node) else None
