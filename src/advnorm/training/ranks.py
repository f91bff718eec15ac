"""The processes of a training: rank, device, and agreement."""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from advnorm._core.devices import resolve_device
from advnorm._core.distributed import rank, world_size
from advnorm._core.errors import AdvnormError


class TrainingError(AdvnormError, RuntimeError):
    """A training that cannot continue; the last checkpoint is intact."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The rank and device of this process; with one process no call communicates."""

    device: torch.device
    rank: int = 0
    world: int = 1

    @property
    def lead(self) -> bool:
        """Whether this process writes and shows."""
        return self.rank == 0

    def agreed(self, value: int) -> int:
        """The largest value of all processes. Waits for all of them."""
        if self.world == 1:
            return value
        flag = torch.tensor(value, device=self.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return int(flag)

    def lead_does(self, action: Callable[[], object]) -> None:
        """Run an action in the first process; the others wait for it and fail with it."""
        error = None
        if self.lead:
            try:
                action()
            except Exception as raised:
                error = raised
        if self.agreed(int(error is not None)):
            raise error or TrainingError("first_process_failed", "the first process failed", hint="see its message")

    def gathered(self, values: Tensor) -> Tensor:
        """The values of every process: shape ``(world, *values.shape)``."""
        rows = values.new_zeros((self.world, *values.shape))
        rows[self.rank] = values
        if self.world > 1:
            dist.all_reduce(rows)
        return rows

    def as_lead(self, tensors: list[Tensor]) -> None:
        """Copy the first process's values into the tensors of the others."""
        for tensor in tensors if self.world > 1 else ():
            dist.broadcast(tensor, 0)


@contextmanager
def placed(device: str | torch.device | None) -> Iterator[Ranks]:
    """Scope: this process on its device, under torchrun in a process group; the caller's random state is restored.

    The group lasts as long as the process: a new group for each training can meet the store of the last one and hang.
    """
    place = resolve_device(device)
    with ExitStack() as stack:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
            dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
            atexit.register(_leave)
        if place.type == "cuda":
            stack.enter_context(torch.cuda.device(place))
        stack.enter_context(torch.random.fork_rng([place] if place.type == "cuda" else []))
        yield Ranks(device=place, rank=rank(), world=world_size())


def _leave() -> None:
    if dist.is_initialized():
        # Gloo's threads need the interpreter to free the last collective, and abort a process that ends before that.
        time.sleep(0.2)
        dist.destroy_process_group()
