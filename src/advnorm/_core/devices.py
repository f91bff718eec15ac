"""Choice of the device to compute on, and of the number of CPU threads."""

from __future__ import annotations

import os
from typing import Annotated

import torch

from advnorm._core.errors import ConfigError
from advnorm._core.records import digest
from advnorm._core.settings import Setting, convert

Threads = Annotated[int, Setting("Number of CPU threads.", "[1, 256]")]  # torch crashes with many thousands


def set_threads(count: int) -> None:
    """Set the number of CPU threads of this process, and of processes that it starts."""
    torch.set_num_threads(convert("threads", Threads, count))
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(count)


def resolve_device(device: str | torch.device | None = None) -> torch.device:
    """Return an available device; by default CUDA if available, else the CPU.

    Under torchrun every process gets the GPU of its local rank.
    """
    try:
        wanted = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device is None else device)
    except (RuntimeError, TypeError, ValueError, OverflowError):
        wanted = None
    if wanted is None or wanted.type not in ("cpu", "cuda"):
        raise ConfigError("no_device", "{field} must be 'cpu' or 'cuda'", field="device", got=device)
    if wanted.type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = wanted.index
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        index = int(os.environ.get("LOCAL_RANK", "0"))
    if index is None:  # asking for the current device would initialize CUDA, which a parent of workers must not do
        index = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
    if index >= count:
        available = f"{{field}} 'cuda:{index}' is not available: found {count} CUDA devices"
        raise ConfigError("no_device", available, field="device", hint="use 'cpu', another index or fewer processes")
    return torch.device("cuda", index)


def identify_device(device: torch.device) -> str | None:
    """Return a text that only processes on the same GPU have in common; None for the CPU."""
    if device.type != "cuda":
        return None
    return digest(str(torch.cuda.get_device_properties(device).uuid))[:12]
