"""Backward passes through functions that have none: BPDA, the backward pass differentiable approximation.

Source: Athalye et al. 2018, "Obfuscated gradients give a false sense of security", section 4.1. The forward pass keeps
every bit. In the backward pass a function without a useful gradient is replaced by a smooth one:

| function | backward pass |
|---|---|
| round, floor, ceil, trunc, sign, bucketize, detach; also in place | the identity |
| floor division | division |
| remainder | half the identity, so that `x - x % step` keeps a gradient |
| conversion to integers, calculation with them, and back | the same calculation without the conversion |
| comparison, converted to numbers | a sigmoid of the difference |
| where and masked_fill with a comparison | both sides, weighted by a sigmoid of the difference |
| tanh, sigmoid, softmax | the same of an argument divided so that it does not saturate |
| a module without a gradient, whose output has the shape of its input | the identity |
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from advnorm.attacks.model_access import Predict
from advnorm.threat import per_image

#: A differentiable function that stands for a module in the backward pass.
Surrogate = Callable[[Tensor], Tensor]
#: A module that passes a smaller share of the gradient's entries is replaced.
PASSED_SHARE = 0.75
#: Slope of the sigmoid that stands for a comparison.
SLOPE = 10.0


def _functions(*names: str) -> set[Any]:
    return {getattr(owner, name) for name in names for owner in (torch, Tensor) if hasattr(owner, name)}


_ROUNDING = ("round", "floor", "ceil", "trunc", "fix", "sign", "sgn")
_IDENTITY = _functions(*_ROUNDING, "bucketize", "detach") | {Tensor.data.__get__}  # pyright: ignore[reportAttributeAccessIssue]
#: Functions that change their argument, and those that return a new tensor.
_IN_PLACE = {
    getattr(owner, f"{name}_"): getattr(owner, name)
    for name in (*_ROUNDING, "floor_divide", "remainder", "fmod", "frac")
    for owner in (torch, Tensor)
    if hasattr(owner, f"{name}_")
} | {Tensor.__ifloordiv__: Tensor.floor_divide, Tensor.__imod__: Tensor.remainder}
_FLOOR_DIVISIONS = _functions("floor_divide", "__floordiv__")
_REMAINDERS = _functions("remainder", "fmod", "frac", "__mod__")
_COMPARISONS = {
    **dict.fromkeys(_functions("gt", "ge", "greater", "greater_equal", "__gt__", "__ge__"), 1.0),
    **dict.fromkeys(_functions("lt", "le", "less", "less_equal", "__lt__", "__le__"), -1.0),
}
_CONVERSIONS = _functions("to", "type", "float", "double", "half", "bfloat16", "int", "long", "short", "byte", "bool")
#: Of booleans, as functions of the shares that stand for them.
_LOGIC: dict[Any, Callable[..., Tensor]] = {
    **dict.fromkeys(_functions("logical_and", "bitwise_and", "__and__", "__rand__"), lambda a, b: a * b),
    **dict.fromkeys(_functions("logical_or", "bitwise_or", "__or__", "__ror__"), lambda a, b: a + b - a * b),
    **dict.fromkeys(_functions("logical_not", "bitwise_not", "__invert__"), lambda a: 1 - a),
}
#: Places of the condition and of both sides among the arguments.
_CHOICES = {torch.where: (0, 1, 2), Tensor.where: (1, 0, 2)} | dict.fromkeys(_functions("masked_fill"), (1, 2, 0))
_SATURATING = _functions("tanh", "sigmoid") | {torch.special.expit, nn.functional.tanh, nn.functional.sigmoid}
_SOFTMAX = _functions("softmax") | {nn.functional.softmax, torch.special.softmax}
_LEAVES_TORCH = {Tensor.numpy, Tensor.__array__}


class Replace(torch.autograd.Function):
    """The value of one tensor with the gradient of another one of the same shape."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, surrogate: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, gradients[0]


class StraightThrough(TorchFunctionMode):
    """Scope in which a forward pass builds a graph with useful gradients; ``replaced`` counts what was replaced.

    ``surrogates``: the function that stands for a module in the backward pass. Modules without any gradient are
    replaced by the identity if the shapes agree.
    """

    def __init__(self, surrogates: Mapping[nn.Module, Surrogate] | None = None) -> None:
        super().__init__()
        self.surrogates = dict(surrogates or {})
        self.replaced = 0
        self._smooth: dict[int, tuple[Any, Tensor]] = {}  # of integers and booleans, by the identity of the tensor
        self._hook: Any = None

    def __enter__(self) -> StraightThrough:
        self._hook = register_module_forward_hook(self._after_module)  # pyright: ignore[reportArgumentType]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._hook.remove()
        self._smooth.clear()
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not torch.is_grad_enabled() or not args:
            return func(*args, **kwargs)
        first = args[0]
        if func in _LEAVES_TORCH and isinstance(first, Tensor):
            return func(first.detach(), *args[1:], **kwargs)
        if func in _IN_PLACE and isinstance(first, Tensor) and first.requires_grad and not first.is_leaf:
            return first.copy_(self.__torch_function__(_IN_PLACE[func], types, args, kwargs))
        value = func(*args, **kwargs)
        if not isinstance(value, Tensor):
            return value
        smooth = self._smooth_value(func, args, kwargs, value)
        if smooth is None or not smooth.requires_grad or smooth.shape != value.shape:
            return value
        if not value.is_floating_point():
            key = id(value)
            self._smooth[key] = weakref.ref(value), smooth
            return value
        return self._replace(value, smooth)

    def _smooth_value(self, func: Any, args: Any, kwargs: Any, value: Tensor) -> Tensor | None:
        """The value that stands for this call in the backward pass; None if the call stays."""
        if func in _CHOICES and len(args) == 3:
            condition, yes, no = (args[place] for place in _CHOICES[func])
            share = self._smooth_of(condition)
            return None if share is None else share * yes + (1 - share) * no
        found: list[Tensor] = []  # what stands for integers and booleans among the arguments
        if self._smooth:
            args, kwargs = tree_map(lambda argument: self._substitute(argument, found), (args, kwargs))
        first = args[0]
        if isinstance(first, Tensor) and first.is_floating_point() and first.requires_grad:
            if func in _IDENTITY or (func in _CONVERSIONS and (found or not value.is_floating_point())):
                return first
            if func in _FLOOR_DIVISIONS:
                return first / args[1]
            if func in _REMAINDERS:
                return first / 2
            if func in _SATURATING:
                size = first.detach().abs().flatten(1).amax(1) if first.dim() > 1 else first.detach().abs()
                scale = per_image((size / 2).clamp_min(1), first)
                return func(first / scale) if bool((scale > 1).any()) else None
            if func in _SOFTMAX:
                scale = ((first.amax(-1) - first.amin(-1)).detach() / 8).clamp_min(1)[..., None]
                return func(first / scale, *args[1:], **kwargs) if bool((scale > 1).any()) else None
        if func in _COMPARISONS and len(args) > 1:
            other = args[1]
            if any(isinstance(side, Tensor) and side.requires_grad for side in (first, other)):
                return torch.sigmoid(SLOPE * _COMPARISONS[func] * (first - other))
        if not found:
            return None
        try:
            return _LOGIC[func](*args) if value.dtype == torch.bool and func in _LOGIC else func(*args, **kwargs)
        except (RuntimeError, TypeError, IndexError):  # bits and indices need integers
            return found[0]

    def _substitute(self, argument: Any, found: list[Tensor]) -> Any:
        smooth = self._smooth_of(argument)
        if smooth is None:
            return argument
        found.append(smooth)
        return smooth

    def _smooth_of(self, value: Any) -> Tensor | None:
        reference, smooth = self._smooth.get(id(value), (lambda: None, None))
        return smooth if reference() is value else None

    def _replace(self, value: Tensor, smooth: Tensor) -> Tensor:
        self.replaced += 1
        with torch.no_grad():  # some functions, such as floor division, raise in their backward pass
            value = value.detach()
        return Replace.apply(value, smooth)  # pyright: ignore[reportReturnType]

    def _after_module(self, module: nn.Module, inputs: Any, output: Any) -> Tensor | None:
        if not (torch.is_grad_enabled() and len(inputs) == 1 and isinstance(inputs[0], Tensor)):
            return None
        x = inputs[0]
        if not (isinstance(output, Tensor) and x.requires_grad and output.is_floating_point()):
            return None
        if module in self.surrogates:
            return self._replace(output, self.surrogates[module](x))
        return self._replace(output, x) if not output.requires_grad and output.shape == x.shape else None


@contextmanager
def straight_through(model: nn.Module, surrogates: Mapping[str, Surrogate]) -> Iterator[StraightThrough]:
    """Scope in which the named modules of a model have the gradient of their surrogates, and obstacles are replaced."""
    with StraightThrough({model.get_submodule(name): surrogate for name, surrogate in surrogates.items()}) as scope:
        yield scope


def find_blocking_modules(predict: Predict, shape: tuple[int, ...], like: Tensor) -> dict[nn.Module, Surrogate]:
    """Return modules that stop a part of the gradient, with the identity as their surrogate.

    Examined are modules without children that are not PyTorch's own and keep the shape. The images are noise, so that
    the result does not depend on a batch.
    """
    found: dict[nn.Module, Surrogate] = {}

    def examine(module: nn.Module, inputs: Any, output: Any) -> None:
        x = inputs[0] if len(inputs) == 1 else None
        own = type(module).__module__.startswith("torch.nn.") or any(True for _ in module.children())
        if own or not (isinstance(x, Tensor) and isinstance(output, Tensor) and x.requires_grad):
            return
        if output.requires_grad and output.shape == x.shape and output.is_floating_point():
            weight = torch.linspace(1, 2, output.numel(), device=x.device, dtype=x.dtype).view_as(output)
            (gradient,) = torch.autograd.grad((output * weight).sum(), x, retain_graph=True)
            if (gradient != 0).double().mean() < PASSED_SHARE:
                found[module] = _identity

    noise = torch.rand((4, *shape), generator=torch.Generator().manual_seed(0)).to(like)
    handle = register_module_forward_hook(examine)
    try:
        with torch.enable_grad():
            predict(noise.requires_grad_())
    finally:
        handle.remove()
    return found


def _identity(x: Tensor) -> Tensor:
    return x


class StraightPredict:
    """``predict`` with useful gradients for images of the shape of ``x``; its values are unchanged.

    ``replaced`` counts the calls whose gradient was replaced.
    """

    def __init__(self, predict: Predict, x: Tensor) -> None:
        self.predict, self.replaced = predict, 0
        self._x = x[:1].detach()
        self._surrogates: dict[nn.Module, Surrogate] | None = None

    def __call__(self, points: Tensor) -> Tensor:
        if self._surrogates is None:
            with StraightThrough():
                self._surrogates = find_blocking_modules(self.predict, tuple(self._x.shape[1:]), self._x)
        with StraightThrough(self._surrogates) as scope:
            logits = self.predict(points)
        self.replaced += scope.replaced
        return logits
