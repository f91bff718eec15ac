"""The processes of a training: rank, device and communication."""

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
from advnorm._core.errors import AdvnormError, ConfigError


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
        """Whether this is the first process, which writes files and prints."""
        return self.rank == 0

    def maximum(self, value: int) -> int:
        """Return the largest value of all processes, after waiting for all of them."""
        if self.world == 1:
            return value
        flag = torch.tensor(value, device=self.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return int(flag)

    def any(self, flag: bool) -> bool:
        """Whether the flag is true in any process, after waiting for all of them."""
        return bool(self.maximum(int(flag)))

    def run_on_lead(self, action: Callable[[], object]) -> None:
        """Run an action in the first process; the others wait for it and fail with it."""
        error = None
        if self.lead:
            try:
                action()
            except Exception as raised:
                error = raised
        if self.any(error is not None):
            raise error or TrainingError("first_process_failed", "the first process failed", hint="see its message")

    def gathered(self, values: Tensor) -> Tensor:
        """The values of every process: shape ``(world, *values.shape)``."""
        rows = values.new_zeros((self.world, *values.shape))
        rows[self.rank] = values
        if self.world > 1:
            dist.all_reduce(rows)
        return rows

    def broadcast_from_lead(self, tensors: list[Tensor]) -> None:
        """Copy the values of the first process into the tensors of the others."""
        for tensor in tensors if self.world > 1 else ():
            dist.broadcast(tensor, 0)


@contextmanager
def enter_ranks(device: str | torch.device | None) -> Iterator[Ranks]:
    """Scope: make the device current and, under torchrun, join the process group. Restores the caller's random state.

    The group lasts as long as the process: a new group for each training can meet the store of the last one and hang.
    """
    device = resolve_device(device)
    with ExitStack() as stack:
        if not dist.is_initialized() and _launched_processes() > 1:
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
            atexit.register(leave_ranks)
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        yield Ranks(device=device, rank=rank(), world=world_size())


def _launched_processes() -> int:
    """Number of processes that torchrun started together with this one, from its environment."""
    count, hint = os.environ.get("WORLD_SIZE", "1"), "start the command with torchrun, or unset WORLD_SIZE"
    if not count.isdecimal():
        raise ConfigError("wrong_type", "{field} must be a number of processes", "WORLD_SIZE", got=count, hint=hint)
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if int(count) > 1 and missing:
        words = f"WORLD_SIZE is {count}, but {' and '.join(missing)} are missing in the environment"
        raise ConfigError("missing_option", words, field="WORLD_SIZE", hint=hint)
    return int(count)


def leave_ranks() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        # Gloo's threads need the interpreter to free the last collective, and abort a process that ends before that.
        time.sleep(0.2)
        dist.destroy_process_group()
