"""Speed and memory of adversarial training: the steps of ``advnorm train`` against plain PyTorch loops."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import torch
import torch.distributed as dist

from advnorm._core.devices import resolve_device
from advnorm._core.errors import raise_problems
from advnorm._core.provenance import environment
from advnorm._core.records import write_json
from advnorm.bench.growth import Law, fit_laws
from advnorm.bench.plain_loops import HYBRID
from advnorm.bench.timing import MeasuredConditions, peak_flops
from advnorm.bench.train_group import TrainGroup, TrainRow
from advnorm.bench.train_plan import TrainPlan, differences, group_configs, setting_problems, size_problems
from advnorm.bench.training_modes import TrainMode, with_enough_images
from advnorm.config import Config, Named
from advnorm.data import ImageData
from advnorm.training.ranks import Ranks, enter_ranks, leave_ranks


@dataclass(frozen=True, kw_only=True)
class TrainBenchmark(MeasuredConditions):
    """Conditions and results of one run; ``notes`` lists fallbacks of the training."""

    config: dict[str, Any]  # the first case; the rows have the settings in which others differ
    steps: int
    rows: tuple[TrainRow, ...]
    laws: tuple[Law, ...]
    notes: tuple[str, ...]


def default_config(device: str | None = None) -> Config:
    """Return the configuration that is measured by default on a device."""
    return replace(HYBRID, batch_size=512 if resolve_device(device).type == "cuda" else 16)


def bench_train(
    configs: Sequence[Config] | None = None,
    *,
    modes: Sequence[TrainMode] | None = None,
    processes: Sequence[int] | None = None,
    data_dir: Path | str | None = None,
    device: str | None = None,
    steps: int | None = None,
    parts: bool = False,
    start_up: bool = False,
    on_row: Callable[[str], object] = lambda row: None,
) -> TrainBenchmark:
    """Time the steps of each configuration; by default hybrid training (paper A, eq. 2) of a ResNet-18.

    The modes of a configuration alternate, ten steps each, and so do configurations that differ only in
    ``ALTERNATIVES``. The references train hybrid PGD with the network's own norms. ``data_dir``: folder of a data set
    that has files. ``processes``: each number divides the same batch, with a GPU per process, or all processes on the
    cores of the CPU. Several processes are spawned, so the calling program needs ``if __name__ == "__main__":``. Under
    ``torchrun`` every process calls this function. ``parts``: profile one more step of each mode. ``start_up``: also
    measure the first step of each mode in fresh processes, which are spawned too.
    """
    with enter_ranks(device) as ranks:
        on_gpu = ranks.device.type == "cuda"
        configs = [default_config(device)] if configs is None else configs
        known = get_args(TrainMode)
        defaults = known if on_gpu else tuple(mode for mode in known if "compiled" not in mode)
        chosen: Sequence[TrainMode] = defaults if modes is None else modes
        counts = tuple(processes or (ranks.world,))
        steps = (50 if on_gpu else 3) if steps is None else steps
        raise_problems(setting_problems(configs, chosen, counts, steps, ranks, data_dir), "bad benchmark")
        configs = [with_enough_images(config) for config in configs]
        groups, settings = group_configs(configs), differences(configs)
        plan = TrainPlan(groups, settings, tuple(chosen), steps, parts, start_up, data_dir)
        images = plan.load()
        problems = [problem for config in configs for problem in size_problems(config, images[config.data])]
        raise_problems(list(dict.fromkeys(problems)), "bad benchmark")
        measured = []
        for count in counts:
            if count == ranks.world:
                measured.append(_measure(plan, images, ranks, on_row))
            else:
                on_row(f"in {count} processes")
                measured.append(_measure_spawned(count, plan, ranks.device.type))
    rows = tuple(row for rows, _ in measured for row in rows)
    return TrainBenchmark(
        config=configs[0].to_dict(),
        device=environment(ranks.device)["device"],
        steps=steps,
        rows=rows,
        laws=tuple(fit_laws([asdict(row) for row in rows])),
        notes=tuple(dict.fromkeys(note for _, notes in measured for note in notes)),
    )


# -- processes ---------------------------------------------------------------------------------------------------------

#: The rows, and the fallbacks of the training.
Measured = tuple[list[TrainRow], list[str]]


def _measure(
    plan: TrainPlan, images: Mapping[Named, ImageData], ranks: Ranks, on_row: Callable[[str], object] = lambda row: None
) -> Measured:
    """Measure all configurations in this process group."""
    notes: list[str] = []
    peak = peak_flops(ranks.device)
    groups = [TrainGroup(group, plan, images[group[0].data], ranks, peak) for group in plan.groups]
    return [*itertools.chain.from_iterable(group.measure(notes.append, on_row) for group in groups)], notes


def _measure_spawned(count: int, plan: TrainPlan, device: str) -> Measured:
    """Measure all configurations in ``count`` new processes, which share the threads of this one."""
    with TemporaryDirectory() as folder:
        threads = max(1, torch.get_num_threads() // count)
        arguments = (count, Path(folder), threads, device, plan)
        torch.multiprocessing.spawn(_process, arguments, nprocs=count)  # pyright: ignore[reportPrivateImportUsage]
        rows, notes = json.loads((Path(folder) / "measured.json").read_text())["measured"]
        return [TrainRow(**row) for row in rows], notes


def _process(rank: int, count: int, folder: Path, threads: int, device: str, plan: TrainPlan) -> None:
    torch.set_num_threads(threads)
    where = torch.device(device, rank) if device == "cuda" else torch.device(device)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder / 'init'}", rank=rank, world_size=count)
    try:
        with enter_ranks(where) as ranks:
            rows, notes = _measure(plan, plan.load(), ranks)
        if ranks.lead:
            write_json(folder / "measured.json", {"measured": [[asdict(row) for row in rows], notes]})
    finally:
        leave_ranks()
