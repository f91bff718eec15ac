"""The training step as an object: eager, compiled, or captured as CUDA graphs.

The variants compute the same numbers up to rounding. If a model does not support a faster variant, the step runs
without it, and the log gives the reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from advnorm._core.precision import choose_kernels, float32_as
from advnorm.config.fields import PrecisionName
from advnorm.objectives import Execution, Objective, ObjectiveOutput
from advnorm.objectives.second_pass import SecondPass
from advnorm.training.attack_on_copy import make_attack_on_copy
from advnorm.training.bank_usage import leaves_banks_unused
from advnorm.training.compilation import CompiledFunction, Log, allow_variants
from advnorm.training.cuda_graphs import CapturedAttack, CapturedStep
from advnorm.training.ranks import Ranks
from advnorm.training.sharding import gather_parameters, reduce_next_backward


def autocast(precision: PrecisionName, device: torch.device) -> AbstractContextManager[Any]:
    """Scope of a forward: autocast to bf16 if that is the precision.

    Without autocast's cache of weights. The cache is cleared only when the outermost scope ends, so that inside another
    autocast every step would use the weights of the first step.
    """
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False)


class StepProgram:
    """Computes the loss of a batch and the gradients of the parameters; this one eagerly.

    With several processes the objective runs inside DDP. ``sync_buffers``: rank 0's statistics are sent to the others
    before each step. ``accumulate``: the number of equal parts that a batch is trained in; the gradient is their mean.
    All parts are attacked before the first one updates the statistics. ``sharded``: the model is sharded instead.
    """

    def __init__(
        self,
        objective: Objective,
        ranks: Ranks,
        *,
        precision: PrecisionName = "float32",
        deterministic: bool = False,
        sync_buffers: bool = True,
        accumulate: int = 1,
        sharded: bool = False,
    ) -> None:
        self.objective, self.device, self.accumulate, self.sharded = objective, ranks.device, accumulate, sharded
        self.precision: PrecisionName = precision
        self.deterministic = deterministic
        self.execution = Execution()
        self._module: nn.Module = objective
        self._sync_buffers = (
            partial(ranks.broadcast_from_lead, list(objective.buffers())) if sharded and sync_buffers else None
        )
        if ranks.world > 1 and not sharded:
            new = "forward_sync_buffers" in signature(DistributedDataParallel).parameters  # torch 2.13
            buffers: dict[str, Any] = {"forward_sync_buffers" if new else "broadcast_buffers": sync_buffers}
            self._module = DistributedDataParallel(
                objective,
                device_ids=[ranks.device.index] if ranks.device.type == "cuda" else None,
                find_unused_parameters=leaves_banks_unused(objective),
                **buffers,
            )

    def __call__(self, x: Tensor, y: Tensor, index: Tensor) -> ObjectiveOutput:
        """Craft the batch, compute its loss, set the gradient of every parameter and update the statistics."""
        if self.accumulate > 1 or self.sharded:
            return self._accumulate(x, y, index)
        with autocast(self.precision, self.device):
            output: ObjectiveOutput = self._module(x, y, index=index, execution=self.execution)
        for parameter in self.objective.parameters():
            parameter.grad = None
        output.loss.backward()
        return output

    def _accumulate(self, x: Tensor, y: Tensor, index: Tensor) -> ObjectiveOutput:
        """Compute the parts of a batch one after another; processes reduce the gradients after the last one."""
        for parameter in self.objective.parameters():  # before a sharded model is gathered
            parameter.grad = None
        if self._sync_buffers is not None:
            self._sync_buffers()
        gather_parameters(self.objective.model)
        with autocast(self.precision, self.device):
            parts = [
                self.objective.craft_batch(*part, execution=self.execution)
                for part in zip(*(value.chunk(self.accumulate) for value in (x, y, index)))
            ]
        outputs: list[ObjectiveOutput] = []
        for number, part in enumerate(parts, 1):
            execution = dataclasses.replace(self.execution, craft=lambda *_, crafted=part.x_adv: crafted)  # pyright: ignore
            with ExitStack() as stack:
                if number == len(parts):
                    reduce_next_backward(self.objective.model)
                elif isinstance(self._module, DistributedDataParallel):
                    stack.enter_context(self._module.no_sync())
                with autocast(self.precision, self.device):
                    output = self._module(part.x, part.y, index=part.index, execution=execution)
                (output.loss / len(parts)).backward()
            outputs.append(output.detached())
        return _joined(outputs)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Scope of everything that is computed: the precision of float32 products and the choice of kernels."""
        with ExitStack() as stack:
            if self.precision != "bf16":
                stack.enter_context(float32_as("tf32" if self.precision == "tf32" else "ieee", self.device))
            if self.device.type == "cuda":
                stack.enter_context(choose_kernels(deterministic=self.deterministic))
            yield

    @property
    def runs_compiled(self) -> bool:
        """Whether the network's forwards are compiled, as far as they have been tried."""
        return False


class CompiledProgram(StepProgram):
    """A step whose network is compiled.

    In bf16 the attack uses a folded copy of its branch. On CUDA the attack is replayed as a graph.
    """

    def __init__(self, objective: Objective, ranks: Ranks, log: Log, **settings: Any) -> None:
        super().__init__(objective, ranks, **settings)
        inner = objective.innermost
        self._network = CompiledFunction(inner.run_model, "the network", log)
        execution = Execution(network=self._network)
        craft = make_attack_on_copy(inner, execution, log) if self.precision == "bf16" else None
        if self.device.type == "cuda" and objective.attack is not None:
            craft = CapturedAttack(inner, craft or partial(inner.craft, execution=execution), log)
        self.execution = dataclasses.replace(execution, craft=craft)

    @contextmanager
    def scope(self) -> Iterator[None]:
        with allow_variants(), super().scope():
            yield

    @property
    def runs_compiled(self) -> bool:
        return self._network.works


class CapturedProgram(CompiledProgram):
    """A compiled step whose loss and gradients are replayed as a CUDA graph, in one process."""

    def __init__(self, objective: Objective, ranks: Ranks, log: Log, **settings: Any) -> None:
        super().__init__(objective, ranks, log, **settings)
        forward_scope = partial(autocast, self.precision, self.device)
        self.captured = CapturedStep(objective, self.execution, forward_scope, self.device, log)

    def __call__(self, x: Tensor, y: Tensor, index: Tensor) -> ObjectiveOutput:
        with autocast(self.precision, self.device):
            batch = self.objective.craft_batch(x, y, index, self.execution)
        return self.captured(batch)


def _joined(outputs: Sequence[ObjectiveOutput]) -> ObjectiveOutput:
    """The output of a batch from those of its equal parts."""
    first = outputs[0]
    return ObjectiveOutput(
        torch.stack([output.loss for output in outputs]).mean(),
        {domain: torch.cat([output.logits[domain] for output in outputs]) for domain in first.logits},
        {name: torch.stack([output.terms[name] for output in outputs]).mean() for name in first.terms},
        {domain: torch.cat([output.labels[domain] for output in outputs]) for domain in first.labels},
    )


def make_step_program(objective: Objective, ranks: Ranks, log: Log, *, compiled: bool, **settings: Any) -> StepProgram:
    """Choose the fastest variant that the device and the objective allow; ``settings`` are those of StepProgram."""
    if not compiled:
        return StepProgram(objective, ranks, **settings)
    one_step = ranks.world == 1 and settings.get("accumulate", 1) == 1
    if ranks.device.type == "cuda" and one_step and _is_replayable(objective):
        return CapturedProgram(objective, ranks, log, **settings)
    return CompiledProgram(objective, ranks, log, **settings)


def _is_replayable(objective: Objective) -> bool:
    """Whether all random numbers of a step follow from image identities; a regularizer draws new noise."""
    inner = objective.objective if isinstance(objective, SecondPass) else objective
    return inner is inner.innermost
