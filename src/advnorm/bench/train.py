"""Speed and memory of adversarial training: the steps of ``advnorm train`` against a plain PyTorch loop."""

from __future__ import annotations

import gc
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from advnorm._core.errors import Problem, raise_problems, unknown_name
from advnorm._core.precision import choose_kernels, float32_as
from advnorm._core.provenance import environment
from advnorm._core.records import write_json
from advnorm.bench.profile import step_parts
from advnorm.bench.timing import MeasuredConditions, minimum_problems, side_by_side, timed
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

#: ``plain`` is the loop of most public code, in float32 with TF32. The others are the steps of ``advnorm train``.
TrainMode = Literal["plain", "eager", "compiled"]
#: Runs a number of training steps.
Steps = Callable[[int], None]
#: Images of an epoch: the training set of CIFAR-10.
EPOCH = 50_000
#: Steps during which networks are compiled, attacks captured and kernels chosen.
START_UP = 6


@dataclass(frozen=True, kw_only=True)
class TrainRow:
    """One mode of one case."""

    model: str
    batch_size: int  # of all processes together
    attack_steps: int
    processes: int
    mode: TrainMode
    images_per_second: float
    epoch_seconds: float  # of 50,000 images
    tflops: float  # of all processes together
    peak_tflops: float  # of a large bf16 product (CPU: float32) in each process, all at the same time
    share_of_peak: float  # of all processes
    memory: int | None  # bytes of the first process on its GPU during training, including its data set
    start_up_seconds: float  # construction and the first steps
    speedup: float | None  # over the plain loop
    spread: float  # of the ratio to the plain loop or the first mode: half the interquartile range, relative
    parts: dict[str, float] | None = None  # milliseconds of a step by kind of operation, if requested


@dataclass(frozen=True, kw_only=True)
class TrainBenchmark(MeasuredConditions):
    """Conditions and results of one run; ``notes`` lists fallbacks of the training."""

    norm: str
    objective: str
    eps: str
    data: str
    steps: int
    rows: tuple[TrainRow, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _TrainCase:
    """What each process times."""

    configs: Sequence[Config]
    modes: Sequence[TrainMode]
    steps: int
    parts: bool
    data_dir: Path | str | None

    def load_data(self) -> ImageData:
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
    modes: Sequence[TrainMode] | None = None,
    processes: Sequence[int] | None = None,
    eps: str = "16/255",
    data_dir: Path | str | None = None,
    device: str | None = None,
    steps: int | None = None,
    parts: bool = False,
    on_row: Callable[[str], object] = lambda row: None,
) -> TrainBenchmark:
    """Time the steps of hybrid training (paper A, eq. 2) for every model, batch size and number of attack steps.

    ``data_dir`` is the folder of CIFAR-10; without it the images are synthetic. The modes of a case alternate, ten
    steps each. The plain loop trains a single batch norm. ``processes``: each number divides the same batch, with a GPU
    per process, or all processes on the cores of the CPU. Several processes are spawned, so the calling program needs
    ``if __name__ == "__main__":``. Under ``torchrun`` every process calls this function. ``parts``: profile one more
    step of each mode.
    """
    with placed(device) as ranks:
        on_gpu = ranks.device.type == "cuda"
        batch_sizes = ((128, 512) if on_gpu else (16,)) if batch_sizes is None else batch_sizes
        chosen: Sequence[TrainMode] = (
            (get_args(TrainMode) if on_gpu else ("plain", "eager")) if modes is None else modes
        )
        counts = tuple(processes or (ranks.world,))
        steps = (50 if on_gpu else 3) if steps is None else steps
        raise_problems(_problems(chosen, counts, batch_sizes, steps, ranks), "bad benchmark")
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
        case = _TrainCase(configs, tuple(chosen), steps, parts, data_dir)
        data = case.load_data()
        measured = []
        for count in counts:
            if count == ranks.world:
                measured.append(_measure(case, data, ranks, on_row))
            else:
                on_row(f"in {count} processes")
                measured.append(_measure_spawned(count, case, ranks.device.type))
    return TrainBenchmark(
        norm=norm,
        objective="hybrid",
        eps=eps,
        data=data.name,
        device=environment(ranks.device)["device"],
        steps=steps,
        rows=tuple(row for rows, _ in measured for row in rows),
        notes=tuple(dict.fromkeys(note for _, notes in measured for note in notes)),
    )


def _problems(
    modes: Sequence[str], counts: Sequence[int], batch_sizes: Sequence[int], steps: int, ranks: Ranks
) -> list[Problem]:
    known = get_args(TrainMode)
    problems = [unknown_name("mode", mode, known) for mode in modes if mode not in known]
    problems += minimum_problems(1, steps=steps, processes=min(counts))
    messages = [
        f"{count} processes cannot divide a batch of {size}"
        for count in counts
        for size in batch_sizes
        if count > 0 and size % count
    ]
    gpus = torch.cuda.device_count()
    if ranks.world > 1 and counts != (ranks.world,):
        messages.append(f"torchrun started {ranks.world} processes; leave processes out")
    elif ranks.device.type == "cuda" and max(counts) > gpus:
        messages.append(f"{max(counts)} processes need {max(counts)} GPUs, found {gpus}")
    return problems + [Problem(code="conflict", message=message, field="processes") for message in messages]


# -- processes ---------------------------------------------------------------------------------------------------------

#: The rows, and the fallbacks of the training.
Measured = tuple[list[TrainRow], list[str]]


def _measure(
    case: _TrainCase, data: ImageData, ranks: Ranks, on_row: Callable[[str], object] = lambda row: None
) -> Measured:
    """Measure all configurations in this process group."""
    peak, notes = _peak_flops(ranks.device), []
    rows = [_measure_modes(config, case, data, ranks, peak, notes, on_row) for config in case.configs]
    return [*itertools.chain(*rows)], notes


def _measure_spawned(count: int, case: _TrainCase, device: str) -> Measured:
    """Measure all configurations in ``count`` new processes, which share the threads of this one."""
    with TemporaryDirectory() as folder:
        threads = max(1, torch.get_num_threads() // count)
        arguments = (count, Path(folder), threads, device, case)
        torch.multiprocessing.spawn(_process, arguments, nprocs=count)  # pyright: ignore[reportPrivateImportUsage]
        rows, notes = json.loads((Path(folder) / "measured.json").read_text())["measured"]
        return [TrainRow(**row) for row in rows], notes


def _process(rank: int, count: int, folder: Path, threads: int, device: str, case: _TrainCase) -> None:
    torch.set_num_threads(threads)
    where = torch.device(device, rank) if device == "cuda" else torch.device(device)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder / 'init'}", rank=rank, world_size=count)
    try:
        with placed(where) as ranks:
            rows, notes = _measure(case, case.load_data(), ranks)
        if ranks.lead:
            write_json(folder / "measured.json", {"measured": [[asdict(row) for row in rows], notes]})
    finally:
        dist.destroy_process_group()


# -- one configuration -------------------------------------------------------------------------------------------------


def _measure_modes(
    config: Config,
    case: _TrainCase,
    data: ImageData,
    ranks: Ranks,
    peak: float,
    notes: list[str],
    on_row: Callable[[str], object],
) -> list[TrainRow]:
    device, steps, name, count = ranks.device, case.steps, config.model.name, config.attack.steps
    turn = min(steps, 10 if device.type == "cuda" else 1)
    torch._dynamo.reset()  # pyright: ignore  # the compiler stops compiling after several networks in one process
    trainings: dict[TrainMode, Steps] = {}
    start_up: dict[TrainMode, tuple[float, int | None]] = {}
    for mode in case.modes:
        on_row(f"{name}, batch {config.batch_size}, {count} attack steps, {ranks.world} process(es): {mode}")
        if mode == "plain":
            build = partial(_plain_steps, config, data, ranks)
        else:
            build = partial(_engine_steps, replace(config, compile=mode == "compiled"), data, ranks, notes)
        trainings[mode], start_up[mode] = _start(build, device)
    runners = {mode: partial(run, turn) for mode, run in trainings.items()}
    reference = "plain" if "plain" in trainings else case.modes[0]
    timings = side_by_side(runners, reference=reference, rounds=max(1, steps // turn), device=device, warmup=0)
    # Training uses clean and adversarial images.
    forward = forward_flops(config.model.name, tuple(data.image_shape), data.num_classes)
    flops = forward * (ATTACK_PASSES * count + 2 * TRAINING_PASSES)
    rates = {mode: turn * config.batch_size / timing.seconds for mode, timing in timings.items()}
    return [
        TrainRow(
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
            parts=step_parts(partial(trainings[mode], 1), device, timings[mode].seconds / turn) if case.parts else None,
        )
        for mode in trainings
    ]


def _start(build: Callable[[], Steps], device: torch.device) -> tuple[Steps, tuple[float, int | None]]:
    """Return a training, with the seconds until everything is compiled and captured, and its memory from then on."""
    on_gpu, before = device.type == "cuda", 0
    if on_gpu:
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(device)

    def start() -> Steps:
        run = build()
        run(START_UP if on_gpu else 1)
        return run

    run, seconds = timed(start, device)
    if not on_gpu:
        return run, (seconds, None)
    # Reserved memory, not allocated memory: the memory of graphs is neither free nor counted as allocated.
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    timed(partial(run, 2), device)
    return run, (seconds, torch.cuda.max_memory_reserved(device) - before)


def _engine_steps(config: Config, data: ImageData, ranks: Ranks, notes: list[str]) -> Steps:
    """The training of ``advnorm train``."""
    journal = Journal(Path("bench"), active=False)
    journal.log = lambda message: notes.append(message)
    loop = TrainingLoop(Run(Path("bench")), config, data, ranks, journal, workers=None)
    loop.prepare(0)
    batches = itertools.chain.from_iterable(loop.loader.epoch(epoch, 0) for epoch in itertools.count())

    def run(steps: int) -> None:
        with loop.program.scope():
            for batch in itertools.islice(batches, steps):
                loop.train_step(batch)

    return run


def _plain_steps(config: Config, data: ImageData, ranks: Ranks) -> Steps:
    """Hybrid training of a built-in batch norm in the way of most public code: float32 with TF32, eager."""
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
        with float32_as("tf32", device), choose_kernels(deterministic=False):
            for _ in range(steps):
                step()

    return run


def _peak_flops(device: torch.device) -> float:
    """Measure the operations per second of a large matrix product: bf16 on a GPU, float32 on the CPU."""
    size, dtype, rounds = (8192, torch.bfloat16, 20) if device.type == "cuda" else (1024, torch.float32, 3)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))

    def multiply() -> None:
        for _ in range(rounds):
            torch.mm(a, b)

    multiply()
    return rounds * 2 * size**3 / timed(multiply, device)[1]
