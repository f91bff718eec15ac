"""What adversarial training costs: the engine's steps against a plain PyTorch loop, in one run."""

from __future__ import annotations

import gc
import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from advnorm._core.errors import did_you_mean, raise_all
from advnorm._core.precision import float32_as, kernels
from advnorm._core.provenance import own_version
from advnorm._core.records import write_json
from advnorm.bench.profile import step_parts
from advnorm.bench.timing import side_by_side, synchronize
from advnorm.config import AttackConfig, Config, Named
from advnorm.data import ImageData, load
from advnorm.models import create_model
from advnorm.surgery import strip
from advnorm.threat import ThreatModel
from advnorm.training.cost import ATTACK_PASSES, TRAINING_PASSES, forward_flops
from advnorm.training.journal import Journal
from advnorm.training.loop import TrainingLoop
from advnorm.training.ranks import Ranks, placed
from advnorm.training.run import Run

#: A loop as most public code has it, float32 with TF32 products; the engine as it is; the engine compiled.
Mode = Literal["plain", "eager", "compiled"]
#: So many steps of a training.
Steps = Callable[[int], None]
#: Images of the epoch that the table speaks of: CIFAR-10's training set.
EPOCH = 50_000
#: Steps in which networks are compiled, attacks captured and kernels chosen.
START_UP = 6


@dataclass(frozen=True, kw_only=True)
class Row:
    """One mode of one case."""

    model: str
    batch_size: int  # of all processes together
    attack_steps: int
    processes: int
    mode: Mode
    images_per_second: float
    epoch_seconds: float  # of 50,000 images
    tflops: float  # of all processes together
    peak_tflops: float  # of a large bf16 product (CPU: float32) in one process, with as many beside it
    share_of_peak: float  # of all processes
    memory: int | None  # bytes that the first process holds on its GPU while it trains, its data set included
    start_up_seconds: float  # of making everything, and the first steps
    speedup: float | None  # over the plain loop
    spread: float  # of the ratio to the plain loop, or else to the first mode: half its interquartile range, relative
    parts: dict[str, float] | None = None  # milliseconds of a step by what is done, where it was asked for


@dataclass(frozen=True, kw_only=True)
class TrainBenchmark:
    """Conditions and results of one run; ``notes`` say what the engine did not do as it is meant to."""

    norm: str
    objective: str
    eps: str
    data: str
    device: str
    torch: str
    steps: int
    rows: tuple[Row, ...]
    notes: tuple[str, ...]

    def record(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        return {**asdict(self), **own_version()}


@dataclass(frozen=True)
class _Plan:
    """What is timed, in whatever number of processes."""

    configs: Sequence[Config]
    modes: Sequence[Mode]
    steps: int
    parts: bool
    data_dir: Path | str | None

    def data(self) -> ImageData:
        if self.data_dir is not None:
            data = load("cifar10", "train", self.data_dir)
        else:
            data = load("synthetic", "train", size=max([2048, *(4 * config.batch_size for config in self.configs)]))
        assert isinstance(data, ImageData)
        return data


def bench_train(
    *,
    models: Sequence[str] = ("resnet18",),
    norm: str = "dual_bn",
    batch_sizes: Sequence[int] | None = None,
    attack_steps: Sequence[int] = (10,),
    modes: Sequence[Mode] | None = None,
    processes: Sequence[int] | None = None,
    eps: str = "16/255",
    data_dir: Path | str | None = None,
    device: str | None = None,
    steps: int | None = None,
    parts: bool = False,
    on_row: Callable[[str], object] = lambda row: None,
) -> TrainBenchmark:
    """Time hybrid training (paper A, eq. 2) by steps of the engine: every model with every batch and attack.

    Images are CIFAR-10's where ``data_dir`` has them, else synthetic ones of that size. The modes of a case take turns,
    ten steps each. The plain loop trains a single batch norm: a routed one is not its business. Every number of
    ``processes`` divides the same batch, each process on a GPU of its own, or all of them on the cores of the CPU; a
    program that asks for several does so under ``if __name__ == "__main__":``, because they are spawned. Under
    ``torchrun`` every process calls this, and theirs is the number. ``parts``: one more step of each is profiled.
    """
    with placed(device) as ranks:
        on_gpu = ranks.device.type == "cuda"
        batch_sizes = ((128, 512) if on_gpu else (16,)) if batch_sizes is None else batch_sizes
        chosen: Sequence[Mode] = (get_args(Mode) if on_gpu else ("plain", "eager")) if modes is None else modes
        counts = tuple(processes or (ranks.world,))
        steps = (50 if on_gpu else 3) if steps is None else steps
        _check(chosen, counts, batch_sizes, steps, ranks)
        configs = [
            Config(
                model=Named(model),
                norm=norm,
                objective=Named("hybrid"),
                eps=eps,
                attack=AttackConfig(steps=count, step_size="2/255"),
                batch_size=batch_size,
                augment="crop_flip",
                lr=0.01,
                nesterov=True,
                epochs=10_000,
                held_out=0,
                validate_every=0,
            )
            for model, batch_size, count in itertools.product(models, batch_sizes, attack_steps)
        ]
        plan = _Plan(configs, tuple(chosen), steps, parts, data_dir)
        data = plan.data()
        measured = []
        for count in counts:
            if count == ranks.world:
                measured.append(_measured(plan, data, ranks, on_row))
            else:
                on_row(f"in {count} processes")
                measured.append(_launched(count, plan, ranks.device.type))
    return TrainBenchmark(
        norm=norm,
        objective="hybrid",
        eps=eps,
        data=data.name,
        device=torch.cuda.get_device_name(ranks.device) if on_gpu else "cpu",
        torch=torch.__version__,
        steps=steps,
        rows=tuple(row for rows, _ in measured for row in rows),
        notes=tuple(dict.fromkeys(note for _, notes in measured for note in notes)),
    )


def _check(modes: Sequence[str], counts: Sequence[int], batch_sizes: Sequence[int], steps: int, ranks: Ranks) -> None:
    problems = [
        f"unknown mode {mode!r}{did_you_mean(mode, get_args(Mode))}" for mode in modes if mode not in get_args(Mode)
    ]
    named = [("steps", steps), *(("processes", count) for count in counts)]
    problems += [f"{name} must be at least 1, got {value}" for name, value in named if value < 1]
    problems += [
        f"a batch of {size} cannot be divided among {count} processes; take a multiple"
        for count in counts
        for size in batch_sizes
        if count > 0 and size % count
    ]
    if ranks.world > 1 and counts != (ranks.world,):
        problems.append(f"torchrun started {ranks.world} processes; leave processes out, or start without it")
    elif ranks.device.type == "cuda" and max(counts) > torch.cuda.device_count():
        problems.append(f"{max(counts)} processes need as many GPUs, and there are {torch.cuda.device_count()}")
    raise_all(problems, "bad benchmark")


# -- a number of processes ---------------------------------------------------------------------------------------------

#: The rows, and what the engine said.
Measured = tuple[list[Row], list[str]]


def _measured(
    plan: _Plan, data: ImageData, ranks: Ranks, on_row: Callable[[str], object] = lambda row: None
) -> Measured:
    """All cases, in this process and those beside it."""
    peak, rows, told = _peak(ranks.device), [], []
    for config in plan.configs:
        rows += _case(config, plan, data, ranks, peak, told, on_row)
    return rows, told


def _launched(count: int, plan: _Plan, device: str) -> Measured:
    """All cases in so many processes, which share this one's threads."""
    with TemporaryDirectory() as folder:
        threads = max(1, torch.get_num_threads() // count)
        given = (count, Path(folder), threads, device, plan)
        torch.multiprocessing.spawn(_process, given, nprocs=count)  # pyright: ignore[reportPrivateImportUsage]
        rows, told = json.loads((Path(folder) / "measured.json").read_text())["measured"]
        return [Row(**row) for row in rows], told


def _process(rank: int, count: int, folder: Path, threads: int, device: str, plan: _Plan) -> None:
    torch.set_num_threads(threads)
    where = torch.device(device, rank) if device == "cuda" else torch.device(device)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder / 'init'}", rank=rank, world_size=count)
    try:
        with placed(where) as ranks:
            rows, told = _measured(plan, plan.data(), ranks)
        if ranks.lead:
            write_json(folder / "measured.json", {"measured": [[asdict(row) for row in rows], told]})
    finally:
        dist.destroy_process_group()


# -- a case ------------------------------------------------------------------------------------------------------------


def _case(
    config: Config,
    plan: _Plan,
    data: ImageData,
    ranks: Ranks,
    peak: float,
    told: list[str],
    on_row: Callable[[str], object],
) -> list[Row]:
    device, modes, steps = ranks.device, plan.modes, plan.steps
    name, count = config.model.name, config.attack.steps
    turn = min(steps, 10 if device.type == "cuda" else 1)
    torch._dynamo.reset()  # pyright: ignore  # else the compiler gives up after so many networks in one process
    trainings: dict[str, Steps] = {}
    start_up: dict[str, tuple[float, int | None]] = {}
    for mode in modes:
        on_row(f"{name}, batch {config.batch_size}, {count} attack steps, {ranks.world} process(es): {mode}")
        if mode == "plain":
            make = partial(_plain, config, data, ranks)
        else:
            make = partial(_engine, replace(config, compile=mode == "compiled"), data, ranks, told)
        run, seconds, memory = _started(make, device)
        trainings[mode], start_up[mode] = run, (seconds, memory)
    runners = {mode: partial(run, turn) for mode, run in trainings.items()}
    reference = "plain" if "plain" in modes else modes[0]
    timings = side_by_side(runners, reference=reference, rounds=max(1, steps // turn), device=device, warmup=0)
    # Clean and adversarial images are trained on.
    forward = forward_flops(config.model.name, tuple(data.image_shape), data.num_classes)
    flops = forward * (ATTACK_PASSES * count + 2 * TRAINING_PASSES)
    rates = {mode: turn * config.batch_size / timing.seconds for mode, timing in timings.items()}
    return [
        Row(
            model=name,
            batch_size=config.batch_size,
            attack_steps=count,
            processes=ranks.world,
            mode=mode,
            images_per_second=rates[mode],
            epoch_seconds=EPOCH / rates[mode],
            tflops=rates[mode] * flops / 1e12,
            peak_tflops=peak / 1e12,
            share_of_peak=rates[mode] * flops / (peak * ranks.world),
            start_up_seconds=start_up[mode][0],
            memory=start_up[mode][1],
            speedup=1 / timings[mode].ratio if reference == "plain" else None,
            spread=timings[mode].spread / 2 / timings[mode].ratio,
            parts=step_parts(partial(trainings[mode], 1), device, timings[mode].seconds / turn) if plan.parts else None,
        )
        for mode in dict.fromkeys(modes)
    ]


def _started(make: Callable[[], Steps], device: torch.device) -> tuple[Steps, float, int | None]:
    """A training, the seconds until everything is compiled, captured and chosen, and the memory it then holds."""
    on_gpu, before = device.type == "cuda", 0
    if on_gpu:
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(device)
    started = time.perf_counter()
    run = make()
    run(START_UP if on_gpu else 1)
    synchronize(device)
    seconds = time.perf_counter() - started
    if not on_gpu:
        return run, seconds, None
    # Of what is reserved, not allocated: what graphs work in is neither free nor counted as allocated.
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    run(2)
    synchronize(device)
    return run, seconds, torch.cuda.max_memory_reserved(device) - before


class _Told(Journal):
    """What the engine says, in a list."""

    def __init__(self, told: list[str]) -> None:
        super().__init__(Path("bench"), active=False)
        self._told = told

    def log(self, message: str) -> None:
        self._told.append(message)


def _engine(config: Config, data: ImageData, ranks: Ranks, told: list[str]) -> Steps:
    """The engine, as ``advnorm train`` runs it."""
    loop = TrainingLoop(Run(Path("bench")), config, data, ranks, _Told(told), workers=None)
    loop.prepare(0)
    batches = itertools.chain.from_iterable(loop.loader.epoch(epoch, 0) for epoch in itertools.count())

    def run(steps: int) -> None:
        with loop.program.scope():
            for batch in itertools.islice(batches, steps):
                loop.train_step(batch)

    return run


def _plain(config: Config, data: ImageData, ranks: Ranks) -> Steps:
    """Hybrid training of a built-in batch norm as most public code has it: float32 with TF32, eager, no frills."""
    torch.manual_seed(0)
    device, rows = ranks.device, config.batch_size // ranks.world
    model = strip(create_model(config.model.name, norm="bn", num_classes=data.num_classes)).to(device)
    wrapped = model if ranks.world == 1 else DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=0.9, nesterov=True, weight_decay=5e-4)
    eps = ThreatModel(eps=config.eps).eps
    images, labels = data.images[: 16 * config.batch_size].to(device).float() / 255, data.labels.to(device)

    def attack(x: Tensor, y: Tensor) -> Tensor:
        model.eval()
        x_adv = (x + torch.empty_like(x).uniform_(-eps, eps)).clamp(0, 1)
        for _ in range(config.attack.steps):
            x_adv.requires_grad_()
            (gradient,) = torch.autograd.grad(F.cross_entropy(model(x_adv), y), x_adv)
            x_adv = x_adv.detach() + 2 / 255 * gradient.sign()
            x_adv = torch.min(torch.max(x_adv, x - eps), x + eps).clamp(0, 1)
        model.train()
        return x_adv.detach()

    def step() -> None:
        chosen = torch.randint(len(images), (rows,), device=device)
        x, y = images[chosen], labels[chosen]
        x_adv = attack(x, y)
        clean, adv = wrapped(torch.cat([x, x_adv])).chunk(2)
        loss = (F.cross_entropy(clean, y) + F.cross_entropy(adv, y)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def run(steps: int) -> None:
        with float32_as("tf32", device), kernels(deterministic=False):
            for _ in range(steps):
                step()

    return run


def _peak(device: torch.device) -> float:
    """Operations a second of a large matrix product: bf16 on a GPU, float32 on the CPU."""
    size, dtype, rounds = (8192, torch.bfloat16, 20) if device.type == "cuda" else (1024, torch.float32, 3)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))

    def multiply(times: int) -> None:
        for _ in range(times):
            torch.mm(a, b)

    multiply(3)
    synchronize(device)
    started = time.perf_counter()
    multiply(rounds)
    synchronize(device)
    return rounds * 2 * size**3 / (time.perf_counter() - started)
