"""The time from the start of a process to the end of its first training step, without and with cached compilations."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from advnorm._core.records import write_json
from advnorm.bench.timing import synchronize
from advnorm.bench.training_modes import TrainMode, build_training, load_images
from advnorm.config import Config
from advnorm.training.ranks import enter_ranks

#: States of the compiler's cache.
CACHES = ("cold", "warm")
#: Variables of the folders in which PyTorch caches compiled code.
_FOLDERS = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


def first_step_seconds(
    mode: TrainMode, config: Config, device: torch.device, data_dir: Path | str | None
) -> dict[str, float]:
    """Return seconds from the start of a fresh process to the end of its first step: imports, data, compilation, step.

    ``cold``: the compiler's cache is empty. ``warm``: it has what the cold process compiled.
    """
    with TemporaryDirectory() as folder, _compiler_cache(Path(folder)):
        seconds = {}
        for cache in CACHES:
            result = Path(folder, f"{cache}.json")
            arguments = (time.time(), result, mode, config, str(device), torch.get_num_threads(), data_dir)
            torch.multiprocessing.spawn(_first_step, arguments)  # pyright: ignore[reportPrivateImportUsage]
            seconds[cache] = json.loads(result.read_text())["seconds"]
        return seconds


@contextmanager
def _compiler_cache(folder: Path) -> Iterator[None]:
    """Scope: new processes cache compiled code in this folder."""
    before = {name: os.environ.get(name) for name in _FOLDERS}
    os.environ.update({name: str(folder / part) for name, part in _FOLDERS.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _first_step(
    _rank: int,
    launched: float,
    result: Path,
    mode: TrainMode,
    config: Config,
    device: str,
    threads: int,
    data_dir: Path | str | None,
) -> None:
    torch.set_num_threads(threads)
    with enter_ranks(device) as ranks:
        run = build_training(mode, config, load_images(config, data_dir), ranks, lambda _: None)
        run(1)
        synchronize(ranks.device)
    write_json(result, {"seconds": time.time() - launched})
