"""CUDA graphs of the attack and of the training step: hundreds of kernel launches in one replay."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from advnorm._core.errors import first_line
from advnorm.objectives import CraftedBatch, Execution, Objective, ObjectiveOutput
from advnorm.objectives.execution import Craft
from advnorm.training.compilation import Log
from advnorm.training.tensor_locations import TensorLocations

R = TypeVar("R")

#: Runs of an attack or a step before its capture: the first compiles, the second lets the libraries settle.
WARM_UP = 2
#: Other threads may call CUDA during a capture: one may be pinning the memory of the next batch.
CAPTURE_MODE = "thread_local"


class Replays(Generic[R]):
    """A captured function for each key, of which the last one is kept.

    A graph reads the tensors of ``model`` at fixed addresses, so that a model that replaces them has no graph.
    """

    def __init__(self, label: str, log: Log, model: nn.Module, *, works: bool = True) -> None:
        self._label, self._log, self._model = label, log, model
        self._locations: TensorLocations | None = None
        self._key: Any = None
        self._seen = 0
        self.replay: R | None = None
        self.works = works

    def get(self, key: Any, capture: Callable[[], R]) -> R | None:
        """The replay for a key; None during its warm-up and if it cannot be captured."""
        if not self.works:
            return None
        if key != self._key:
            self._key, self._seen, self.replay = key, 0, None
        self._seen += 1
        if self.replay is not None and self._locations is not None:
            self._give_up(self._locations.change())
        elif self._seen > WARM_UP:
            self._locations = TensorLocations(self._model)
            try:
                self.replay = capture()
            except RuntimeError as error:
                self._give_up(first_line(error))
            else:
                self._give_up(self._locations.change())
            if not self.works:
                self._locations.restore()  # a tensor that a capture assigned was never computed
        return self.replay

    def _give_up(self, problem: str | None) -> None:
        if problem is not None:
            self.works, self.replay = False, None
            self._log(f"{self._label} cannot be captured as a CUDA graph and runs without: {problem}")


class CapturedAttack:
    """Craft adversarial images by graph replay, with a graph for each attack and batch shape.

    A replay reads the current parameters and statistics.
    """

    def __init__(self, objective: Objective, craft: Craft, log: Log) -> None:
        self._objective, self._craft = objective, craft
        self.replays: Replays[Craft] = Replays("the attack", log, objective.model)

    def __call__(self, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        attack = self._objective.attack
        if getattr(attack, "statistics", None) == "batch":
            return self._craft(x, y, index)
        key = (attack, x.shape, x.stride(), self._objective.training)
        replay = self.replays.get(key, partial(self._capture, x, y, index))
        return (replay or self._craft)(x, y, index)

    def _capture(self, *inputs: Tensor) -> Craft:
        static = [value.clone() for value in inputs]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._craft(*static)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode=CAPTURE_MODE):
            outputs = self._craft(*static)

        def replay(*inputs: Tensor) -> Tensor:
            for place, value in zip(static, inputs):
                place.copy_(value)
            graph.replay()
            return outputs.clone()

        return replay


class CapturedStep:
    """Loss and gradients of a crafted batch by graph replay.

    The first steps run without a graph. The next replay overwrites the gradients and the output of the last one.
    """

    def __init__(
        self,
        objective: Objective,
        execution: Execution,
        forward_scope: Callable[[], AbstractContextManager[Any]],
        device: torch.device,
        log: Log,
    ) -> None:
        self._objective, self._execution, self._forward_scope = objective, execution, forward_scope
        self.replays: Replays[Callable[[CraftedBatch], ObjectiveOutput]] = Replays(
            "the training step", log, objective.model, works=device.type == "cuda"
        )

    def __call__(self, batch: CraftedBatch) -> ObjectiveOutput:
        """Set the gradient of every parameter and update the statistics once."""
        shapes = [value if value is None else (value.shape, value.stride()) for value in batch]
        replay = self.replays.get((shapes, self._objective.loss_variant), partial(self._capture, batch))
        if replay is not None:
            return replay(batch)
        if not self.replays.works:
            return self._run(batch)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # gradients are accumulated on the stream on which they were created
            output = self._run(batch)
        torch.cuda.current_stream().wait_stream(stream)
        return output

    def _run(self, batch: CraftedBatch) -> ObjectiveOutput:
        for parameter in self._objective.parameters():
            parameter.grad = None
        with self._forward_scope():
            output = self._objective.compute_loss(batch, self._execution)
        output.loss.backward()
        return output.detached()

    def _capture(self, batch: CraftedBatch) -> Callable[[CraftedBatch], ObjectiveOutput]:
        static = batch.map(Tensor.clone)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode=CAPTURE_MODE):
            output = self._run(static)
        gradients = [(parameter, parameter.grad) for parameter in self._objective.parameters()]

        def replay(batch: CraftedBatch) -> ObjectiveOutput:
            for place, value in zip(static, batch):
                if place is not None and value is not None:
                    place.copy_(value)
            for parameter, gradient in gradients:
                parameter.grad = gradient
            graph.replay()
            return output

        return replay
