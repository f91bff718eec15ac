"""Sharded training (FSDP): each process keeps a part of every parameter, its gradient, optimizer state and average.

The network is one unit. A step gathers the parameters once, for the attack and the training pass together, and reduces
the gradients once. Sharding its blocks one by one would save more memory and gather every block in every step of the
attack.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from advnorm.training.ranks import Ranks


def shard_model(model: nn.Module, ranks: Ranks) -> None:
    """Shard the parameters of a model over all processes, in place. Names stay, buffers stay whole."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=init_device_mesh(ranks.device.type, (ranks.world,)), reshard_after_forward=False)


def _sharded(model: nn.Module) -> Any:
    """The model if it is sharded; None otherwise."""
    return model if hasattr(model, "set_reshard_after_backward") else None


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Scope: the parameters of a sharded model are whole, and its passes communicate nothing."""
    sharded = _sharded(model)
    if sharded is None:
        yield
        return
    gather_parameters(model)
    try:
        yield
    finally:
        reduce_next_backward(model)
        sharded.reshard()


def gather_parameters(model: nn.Module) -> None:
    """Make the parameters of a sharded model whole, until :func:`reduce_next_backward`.

    Before an attack freezes them: gathered inside of the attack, they would never require a gradient again.
    """
    sharded = _sharded(model)
    if sharded is not None:
        sharded.set_reshard_after_backward(False)
        sharded.set_requires_gradient_sync(False)
        sharded.unshard()


def reduce_next_backward(model: nn.Module) -> None:
    """Let the next backward of a sharded model reduce the gradients and keep this process's part of the parameters."""
    sharded = _sharded(model)
    if sharded is not None:
        sharded.set_reshard_after_backward(True)
        sharded.set_requires_gradient_sync(True)


def is_sharded(value: Tensor) -> bool:
    """Whether each process has a part of a tensor."""
    return hasattr(value, "device_mesh")


def full_tensor(value: Tensor) -> Tensor:
    """Return the whole of a sharded tensor; every process must call this. Other tensors are returned unchanged."""
    return value.full_tensor() if is_sharded(value) else value  # pyright: ignore[reportAttributeAccessIssue]


def shard_like(value: Tensor, target: Tensor) -> Tensor:
    """Shard a whole tensor like ``target``; every process has the whole tensor and keeps its part."""
    if not is_sharded(target) or is_sharded(value):
        return value
    from torch.distributed.tensor import distribute_tensor

    sharded: Any = target
    return distribute_tensor(value.to(target.device), sharded.device_mesh, sharded.placements, src_data_rank=None)


def shard_state(tensors: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Shard the tensors of a state dict like those of the model."""
    own = model.state_dict()
    return {name: shard_like(value, own[name]) if name in own else value for name, value in tensors.items()}


def local_tensors(tensors: list[Tensor]) -> list[Tensor]:
    """Return this process's part of sharded tensors and other tensors unchanged, for elementwise updates."""
    return [value.to_local() if is_sharded(value) else value for value in tensors]  # pyright: ignore
