"""How a training computes: its precision, the network compiled, the attack's loop replayed as one CUDA graph.

Compiling and capturing do not change what is computed; where a model does not allow it, training goes on without, and
says so.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from advnorm.objectives import Objective

Precision = Literal["float32", "tf32", "bf16"]

#: Variants of one network: a route, a statistics mode and a batch size each. PyTorch's own limit is 8 per process.
VARIANTS = 64
#: Runs of an attack before it is captured: the first compiles, the second lets the libraries settle.
WARM_UP = 2


class Say(Protocol):
    def __call__(self, message: str) -> None: ...


def forwards(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """Scope of a forward: autocast to bf16, or nothing.

    Without autocast's cache of weights, which is emptied only when the outermost scope ends: inside another autocast
    every step would go on with the first step's weights.
    """
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False)


def room_for_variants() -> AbstractContextManager[Any]:
    """Scope: as many variants of one network as a training has; then torch's own limit again."""
    limit = max(torch._dynamo.config.recompile_limit, VARIANTS)  # pyright: ignore
    return torch._dynamo.config.patch(recompile_limit=limit)  # pyright: ignore


def compile_network(objective: Objective, say: Say) -> None:
    """Let the objective's forwards, in the attack and in training, go through a compiled network."""
    eager = objective.through
    compiled: Callable[[Tensor], Any] = torch.compile(eager, dynamic=False)

    def through(x: Tensor) -> Any:
        nonlocal compiled
        if compiled is eager:
            return eager(x)
        try:
            return compiled(x)
        except torch._dynamo.exc.TorchDynamoException as error:  # pyright: ignore
            say(f"the network cannot be compiled and runs as it is: {str(error).splitlines()[0]}")
            compiled = eager
            return eager(x)

    objective.through = through


def capture_attack(objective: Objective, say: Say) -> None:
    """Replay the objective's attack as a CUDA graph: ten steps are hundreds of launches, which a small batch waits for.

    Parameters and statistics are read where they are, so that a replay sees their present values.
    """
    objective.adversarial = CapturedAttack(objective, objective.adversarial, say)  # pyright: ignore


class CapturedAttack:
    """``adversarial(x, y, index)`` by graph replay, a graph for each attack and batch shape; the last one is kept."""

    def __init__(self, objective: Objective, adversarial: Callable[[Tensor, Tensor, Tensor], Tensor], say: Say) -> None:
        self._objective, self._adversarial, self._say = objective, adversarial, say
        self._key: Any = None
        self._seen = 0
        self._replay: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
        self._works = True

    def __call__(self, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        key = (self._objective.attack, x.shape, x.stride(), self._objective.training)
        if not self._works or getattr(self._objective.attack, "statistics", None) == "batch":
            return self._adversarial(x, y, index)
        if key != self._key:
            self._key, self._seen, self._replay = key, 0, None
        self._seen += 1
        if self._seen <= WARM_UP:
            return self._adversarial(x, y, index)
        if self._replay is None:
            try:
                self._replay = self._captured(x, y, index)
            except RuntimeError as error:
                self._works = False
                self._say(f"the attack cannot be captured as a CUDA graph and runs as it is: {error}")
                return self._adversarial(x, y, index)
        return self._replay(x, y, index)

    def _captured(self, *inputs: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        static = [value.clone() for value in inputs]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._adversarial(*static)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = self._adversarial(*static)

        def replay(*inputs: Tensor) -> Tensor:
            for place, value in zip(static, inputs):
                place.copy_(value)
            graph.replay()
            return outputs.clone()

        return replay
