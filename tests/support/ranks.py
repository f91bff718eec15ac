"""The ranks of distributed tests: run the cases of one rank, and read what all ranks saw."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

#: Marks of a test of two processes.
two_processes = [
    pytest.mark.world_size(2),
    pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed"),
]


def join_ranks(rank: int, world: int, init_file: str) -> None:
    torch.set_num_threads(1)
    method, limit = f"file://{init_file}", timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=world, timeout=limit)


def run_cases(cases: Mapping[str, Callable[[], Any]], out_file: str) -> None:
    """Save the result of each case. A case that fails is stored as its error, so that the others still run."""
    results: dict[str, Any] = {}
    for key, work in cases.items():
        try:
            results[key] = work()
        except Exception as error:
            results[key] = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    torch.save(results, out_file)
    sys.stdout.flush()
    os._exit(0)  # without the farewell of reducers that a failure left in the middle of their work


def seen(ranks: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """What each rank saw in a case."""
    found = [results[key] for results in ranks]
    for rank, result in enumerate(found):
        assert "error" not in result, f"rank {rank}: {result['trace']}"
    return found
