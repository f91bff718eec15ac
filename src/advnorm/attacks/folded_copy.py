"""A fast copy of a network for attacks: bfloat16, channels-last, norms and activations folded into convolutions.

The copy of a network in training is updated by ``refresh()``, which reads the current weights and statistics.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Node, Proxy, Tracer

from advnorm._core.errors import ConfigError, first_line
from advnorm.attacks.model_access import extract_logits

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
    """``relu(conv(x) + z)``, one cuDNN kernel on a GPU; gradients for x and z only."""
    settings: Any = (stride, padding, dilation, groups)
    if not x.is_cuda or torch.backends.cudnn.deterministic:  # which the kernels below ignore
        return _conv_relu(x, z, weight, bias, *settings)
    if z is None:
        return torch.cudnn_convolution_relu(x, weight, bias, *settings)
    return torch.cudnn_convolution_add_relu(x, weight, z, 1.0, bias, *settings)


def _conv_relu(x: Tensor, z: Tensor | None, weight: Tensor, bias: Tensor | None, *settings: Any) -> Tensor:
    out = torch.conv2d(x, weight, bias, *settings)
    return (out if z is None else out + z).relu()


def _save_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, z, weight, _, *ctx.settings = inputs
    ctx.shortcut = z is not None
    ctx.save_for_backward(x, weight, output)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, out = ctx.saved_tensors
    stride, padding, dilation, groups = ctx.settings
    grad = aten.threshold_backward(grad, out, 0)
    wanted = (True, False, False)  # for x only
    of_x = aten.convolution_backward(grad, x, weight, None, stride, padding, dilation, False, [0, 0], groups, wanted)[0]
    return of_x, grad if ctx.shortcut else None, *(None,) * 6


conv_relu.register_fake(_conv_relu)
conv_relu.register_autograd(_gradients, setup_context=_save_context)


class FoldedConv(nn.Module):
    """A convolution with the norm after it (running statistics), shortcut and ReLU, in as few passes as possible."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, conv: nn.Conv2d, norm: nn.BatchNorm2d | None = None, *, relu: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self._sources = (conv, norm)  # a tuple, so that they do not become submodules
        self.relu, self.groups = relu, conv.groups
        self.stride, self.padding, self.dilation = list(conv.stride), list(map(int, conv.padding)), list(conv.dilation)
        # Tensor cores read 8 channels at once: pad the channels of images.
        self.added = -conv.in_channels % 8 if conv.groups == 1 else 0
        out, inside, *kernel = conv.weight.shape
        weight = torch.zeros((out, inside + self.added, *kernel), dtype=dtype, device=conv.weight.device)
        bias = None if norm is None and conv.bias is None else torch.zeros_like(weight[:, 0, 0, 0])
        self.register_buffer("weight", weight.contiguous(memory_format=torch.channels_last), persistent=False)
        self.register_buffer("bias", bias, persistent=False)

    @torch.no_grad()
    def refresh(self) -> None:
        """Fold the current weights and statistics: ``γ / √(σ² + ε) · w``, and ``β - γ μ / √(σ² + ε)`` for the bias."""
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
        if z is not None and z.shape != self._output_shape(x):  # the kernel does not broadcast
            return _conv_relu(x, z, self.weight, self.bias, *settings)
        return conv_relu(x, z, self.weight, self.bias, *settings)

    def _output_shape(self, x: Tensor) -> tuple[int, ...]:
        out, _, *kernel = self.weight.shape
        sides = zip(x.shape[2:], kernel, self.stride, self.padding, self.dilation)
        return len(x), out, *((n + 2 * pad - gap * (k - 1) - 1) // by + 1 for n, k, by, pad, gap in sides)


class CastLinear(nn.Module):
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


class FoldedCopy(nn.Module):
    """Images to float32 logits by a copy of a traced network, with the weights of the last refresh."""

    def __init__(self, network: GraphModule) -> None:
        super().__init__()
        self.network = network
        self._parts = [part for part in network.modules() if isinstance(part, FoldedConv | CastLinear)]
        self.refresh()

    @property
    def folded(self) -> int:
        """Number of norms that were folded into convolutions."""
        return sum(isinstance(part, FoldedConv) and part._sources[1] is not None for part in self._parts)

    def refresh(self) -> None:
        """Read the current weights and statistics of the network."""
        for part in self._parts:
            part.refresh()

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        # Without the weight cache, since a network in training changes the weights that the copy shares.
        with torch.autocast(x.device.type, torch.bfloat16, cache_enabled=False):
            return extract_logits(self.network(x), len(x)).float()


def make_folded_copy(
    network: nn.Module,
    *,
    activations: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    following: bool = False,
    on_failure: Callable[[str], object] = lambda reason: None,
) -> FoldedCopy | None:
    """Return a fast copy of a plain network in eval mode, or None if the network cannot be traced.

    ``activations``: also fold ReLUs and the sums before them. ``following``: the network is being trained, so a tensor
    that the trace would freeze prevents the copy. ``on_failure`` is called with the reason if there is no copy.
    """
    try:
        # Inside another module the network gets one argument, so that optional arguments keep their defaults.
        copy = _trace(root := nn.Sequential(network), following=following)
    except Exception as error:  # tracing can fail in any way
        on_failure(first_line(error))
        return None
    folding = _Folding(copy, dict(root.named_modules()), dtype)
    if activations:
        folding.fold_activations()
    folding.fold_norms()
    folding.cast_linears()
    copy.recompile()
    copy.delete_all_unused_submodules()
    return FoldedCopy(copy)


class _Convolution(NamedTuple):
    """A convolution, the norm after it, its input, and its nodes, listed from last to first."""

    conv: nn.Conv2d
    norm: nn.BatchNorm2d | None
    x: Node
    nodes: list[Node]


class _Folding:
    """Replaces nodes of a traced network by folded parts."""

    def __init__(self, copy: GraphModule, modules: Mapping[str, nn.Module], dtype: torch.dtype) -> None:
        self.copy, self.graph, self.modules, self.dtype = copy, copy.graph, modules, dtype

    def fold_activations(self) -> None:
        """Fold each ReLU, and a sum before it, into the convolution in front, if nothing else reads its output."""
        for node in list(self.graph.nodes):
            source: Any = self._relu_input(node)
            if source is None or not _read_once(source):
                continue
            parts: list[Any] = [source]
            if source.op == "call_function" and source.target in SUMS and not source.kwargs:
                parts = list(source.args)
            if not all(isinstance(part, Node) for part in parts) or len(set(parts)) < len(parts):
                continue
            # ``a += b`` changes a: other readers of a read the sum.
            for part in parts[:1] if source.target is operator.iadd else parts:
                if _read_once(part) and (found := self._convolution(part)) is not None:
                    rest = [other for other in parts if other is not part]
                    self._fold(found, [node, *([source] if rest else [])], *rest, relu=True)
                    break

    def fold_norms(self) -> None:
        """Fold norms into their convolutions, then copy the convolutions without one."""
        for kind in (nn.BatchNorm2d, nn.Conv2d):
            for node in list(self.graph.nodes):
                if self._module(node, kind) is not None and (found := self._convolution(node)) is not None:
                    self._fold(found, [], relu=False)

    def cast_linears(self) -> None:
        for node in list(self.graph.nodes):
            linear = self._module(node, nn.Linear)
            if linear is not None:
                self._replace([node], CastLinear(linear, dtype=self.dtype), *node.args)

    def _module(self, node: Any, kind: type) -> Any:
        """The module that a node calls with one tensor, if it has exactly this type and no hooks."""
        if not isinstance(node, Node) or node.op != "call_module" or len(node.args) != 1 or node.kwargs:
            return None
        module = self.modules.get(str(node.target))
        return module if module is not None and type(module) is kind and not _hooked(module) else None

    def _relu_input(self, node: Node) -> Node | None:
        """The input of a ReLU node, or None."""
        is_relu = self._module(node, nn.ReLU) is not None or (node.op == "call_function" and node.target in RELUS)
        return node.args[0] if is_relu and node.args and isinstance(node.args[0], Node) else None

    def _convolution(self, node: Any) -> _Convolution | None:
        """The convolution whose output, normalized if a norm follows, is this node."""
        norm: Any = self._module(node, nn.BatchNorm2d)
        inner: Any = node if norm is None else node.args[0]
        conv = self._module(inner, nn.Conv2d)
        if conv is None or isinstance(conv.padding, str) or conv.padding_mode != "zeros":
            return None
        if norm is None:
            return _Convolution(conv, None, inner.args[0], [node])
        if norm.training or norm.running_mean is None or not _read_once(inner):
            return None
        return _Convolution(conv, norm, inner.args[0], [node, inner])

    def _fold(self, found: _Convolution, after: Sequence[Node], *inputs: Node, relu: bool) -> None:
        part = FoldedConv(found.conv, found.norm, relu=relu, dtype=self.dtype)
        self._replace([*after, *found.nodes], part, found.x, *inputs)

    def _replace(self, nodes: Sequence[Node], part: nn.Module, *inputs: Any) -> None:
        """Replace nodes, listed from last to first, by one module."""
        name = f"fast_{nodes[0].name}"
        self.copy.add_submodule(name, part)
        with self.graph.inserting_before(nodes[0]):
            nodes[0].replace_all_uses_with(self.graph.call_module(name, inputs))
        for node in nodes:
            self.graph.erase_node(node)


def _read_once(node: Node) -> bool:
    return len(node.users) == 1


# -- the trace ---------------------------------------------------------------------------------------------------------

RELUS, SUMS = (F.relu, torch.relu), (operator.add, torch.add, operator.iadd)
#: In-place operators such as ``a += b``.
IN_PLACE = tuple(getattr(operator, name) for name in ("iadd", "isub", "imul", "itruediv", "ipow", "imatmul"))
#: Attributes with the hooks of a module.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class _Proxy(Proxy):
    """Records in-place operations too; torch's own proxy turns ``a += b`` into ``a + b``."""


for _function in IN_PLACE:
    setattr(
        _Proxy,
        f"__{_function.__name__}__",
        lambda self, other, _function=_function: self.tracer.create_proxy(
            "call_function", _function, (self, other), {}
        ),
    )


class _Tracer(Tracer):
    proxy_buffer_attributes = True  # values computed from statistics are computed in every forward

    def proxy(self, node: Node) -> Proxy:
        return _Proxy(node, self)


def _trace(root: nn.Module, *, following: bool) -> GraphModule:
    """Trace a network into built-in modules and functions; raise if the trace would compute something else."""
    tracer = _Tracer()
    for name, module in root.named_modules():
        if _hooked(module) and not tracer.is_leaf_module(module, name):
            message = f"a {type(module).__name__} has hooks, which a trace would run once"
            raise ConfigError("not_supported", message, field="network")
    graph = tracer.trace(root)
    own = dict([*root.named_parameters(), *root.named_buffers()])
    fixed = [str(node.target) for node in graph.nodes if node.op == "get_attr" and node.target not in own]
    if following and fixed:
        message = f"a trace would freeze {fixed[0].removeprefix('0.')}, a tensor that is neither parameter nor buffer"
        raise ConfigError("not_supported", message, field="network")
    return GraphModule(root, graph)


def _hooked(module: nn.Module) -> bool:
    return any(getattr(module, name) for name in HOOKS)
