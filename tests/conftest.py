"""Settings of the whole suite: one thread per worker, a fixed seed, and no state shared between tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from advnorm._core.torchvision_operators import prepare_torchvision

pytest_plugins = ["support.networks", "support.printed_tables"]
torch.set_num_threads(1)
prepare_torchvision()  # tests and pages import timm, torchvision and transformers themselves
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # shells start background jobs like this
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.pop("ADVNORM_DATA", None)
os.environ.pop("COLUMNS", None)  # a console made at import would keep this width


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def launch() -> Callable[..., list[str]]:
    """Run Python with each list of arguments at the same time; return the output of each. No process may fail."""

    def run(*arguments: Sequence[object], timeout: float = 180) -> list[str]:
        importable = os.pathsep.join(filter(None, sys.path))  # the same import path
        environment = {**os.environ, "PYTHONPATH": importable, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        processes = [
            subprocess.Popen(
                [sys.executable, *map(str, words)],
                env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for words in arguments
        ]  # fmt: skip
        try:
            printed = [process.communicate(timeout=timeout)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        assert all(process.returncode == 0 for process in processes), "\n".join(printed)
        return printed

    return run


@pytest.fixture(scope="session")
def launch_ranks(launch, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], list[dict[str, Any]]]:
    """Run ``python SCRIPT RANK WORLD INIT_FILE OUT_FILE`` for every rank; return the file of each."""

    def run(script: str, world: int) -> list[dict[str, Any]]:
        folder: Path = tmp_path_factory.mktemp("ranks")
        outputs = [folder / f"rank{rank}.pt" for rank in range(world)]
        launch(*([script, rank, world, folder / "init", output] for rank, output in enumerate(outputs)))
        return [torch.load(output, weights_only=False) for output in outputs]

    return run
