"""Guarded access to a model under attack: predictions, logits and gradients with respect to the images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from advnorm._core.errors import ConfigError, Description, raise_problems, unknown_name
from advnorm._core.modes import evaluating
from advnorm._core.wrappers import dtype_of
from advnorm.norms import MODES, Mode, RoutedModule, Scope, routed_modules
from advnorm.norms import route as route_scope
from advnorm.norms.norm_layers import disable_updates, override
from advnorm.norms.routed_module import validate_module

#: Images to float32 logits ``(N, classes)``.
Predict = Callable[[Tensor], Tensor]


@contextmanager
def predicting(model: nn.Module, *, route: str | None = None, statistics: Mode = "running") -> Iterator[Predict]:
    """Scope for attacking or evaluating a model; yields ``predict``, which maps images to float32 logits.

    Inside the scope every module is in eval mode, parameters require no gradients, and gradients with respect to the
    images are enabled. Routed norms do not synchronize over ranks. On exit all flags and the global random state are
    restored; only ``statistics="batch"`` changes the running statistics.

    ``route``: the branch of a model with routed norms. By default an enclosing ``advnorm.route`` applies.
    ``statistics``: batch norms use the ``running`` statistics, or those of the ``batch``, which update the running ones
    unless ``batch_frozen``. A norm in eval mode inside a model in train mode was frozen by its owner and keeps its
    running statistics.
    """
    validate_module(model)
    if statistics not in MODES:
        raise_problems([unknown_name("statistics mode", statistics, MODES, field="statistics")])
    if isinstance(model, DistributedDataParallel):
        model = model.module  # an attack reduces nothing over ranks
    if route is not None and not routed_modules(model):
        message = f"{type(model).__name__} has no routed norms and takes no {{field}}"
        raise ConfigError("wrong_route", message, field="route", got=route, hint="leave route out")
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(_cuda_devices(model)))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        frozen = {module for module in model.modules() if model.training and not module.training}
        stack.enter_context(evaluating(model))
        if statistics != "running":
            for module in model.modules():
                if isinstance(module, _NormBase) and module not in frozen:
                    override(stack, module, "training", True)
                    if statistics != "batch":
                        disable_updates(stack, module)
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.is_leaf:
                override(stack, parameter, "requires_grad", False)
        if routed_modules(model):
            # A mixture norm collects its likelihood for the training pass, not for the attack's forwards.
            stack.enter_context(Scope(model, {"mode": statistics, "likelihoods": None, "local": True}))
            for module in frozen:
                if isinstance(module, RoutedModule):
                    stack.enter_context(Scope(module, {"mode": "running"}))
            if route is not None:
                stack.enter_context(route_scope(model, route))
        dtype = dtype_of(model)
        yield lambda x: extract_logits(model(x.to(dtype)), len(x)).float()


def _cuda_devices(model: nn.Module) -> list[int]:
    """The devices whose generators an attack may change. It must not start CUDA for a model on the CPU."""
    if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
        return []
    tensors = [*model.parameters(), *model.buffers()]
    return sorted({t.device.index for t in tensors if t.is_cuda} | {torch.cuda.current_device()})


def never_alone(predict: Predict) -> Predict:
    """Return ``predict`` with a copy beside an image that is alone in its batch, for norms with batch statistics.

    A norm that sees one value per channel has no statistics. If it sees more values, the copy does not change them.
    """
    return lambda x: predict(torch.cat([x, x]))[:1] if len(x) == 1 else predict(x)


def padded_size(rows: int, step: int) -> int:
    """Round a number of rows up to a multiple of ``step``, or to a power of two below it.

    cuDNN selects its kernels again for every size, which takes as long as many forwards.
    """
    return -(-rows // step) * step if rows > step else min(step, 1 << (rows - 1).bit_length())


def pad_rows(x: Tensor, rows: int) -> Tensor:
    """Pad a batch to ``rows`` images with copies of the first one."""
    return x if len(x) == rows else torch.cat([x, x[:1].detach().expand(rows - len(x), *x.shape[1:])])


def extract_logits(output: Any, batch: int) -> Tensor:
    """Return the logits in a model's output: a tensor, an object with ``.logits``, or a mapping with ``"logits"``."""
    logits = output
    if not isinstance(output, Tensor):
        logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        got, hint = Description(type(output).__name__), "wrap it in a module whose forward returns them"
        raise ConfigError("wrong_type", "the model must return {field}", field="logits", got=got, hint=hint)
    if logits.is_complex():
        got = Description(logits.dtype)
        raise ConfigError("wrong_dtype", "{field} must be real numbers", "logits", got=got, hint="return z.real")
    if logits.dim() != 2 or len(logits) != batch or logits.shape[1] < 2:
        message = f"{{field}} of {batch} images must have shape ({batch}, classes) with at least 2 classes"
        raise ConfigError("wrong_shape", message, field="logits", got=tuple(logits.shape))
    return logits


def input_gradient(value_N: Tensor, x: Tensor) -> Tensor:
    """Return the float32 gradient of each image's value with respect to that image.

    The values are summed, not averaged, so that the gradient does not depend on the batch size.
    """
    grad = None
    if value_N.requires_grad:
        (grad,) = torch.autograd.grad(value_N.sum(), x, allow_unused=True)
    if grad is None:
        message = "the {field} have no gradient with respect to the images (detach, no_grad, rounding or numpy?)"
        raise ConfigError("no_gradient", message, "logits", hint="use an attack without gradients, such as 'square'")
    return grad.detach()
