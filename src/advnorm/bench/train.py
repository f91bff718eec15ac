"""What adversarial training costs: the engine's steps against a plain PyTorch loop, in one run."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from advnorm._core.errors import ConfigError, did_you_mean, raise_all
from advnorm._core.precision import float32_as
from advnorm.bench.timing import side_by_side, synchronize
from advnorm.data import ImageData, load
from advnorm.engine.config import AttackConfig, Config, Named
from advnorm.engine.journal import Journal
from advnorm.engine.ranks import Ranks
from advnorm.engine.run import Run
from advnorm.engine.train import Loop
from advnorm.models import create_model
from advnorm.surgery import strip
from advnorm.threat import ThreatModel

#: A loop as most public code has it, float32 with TF32 products; the engine as it is; the engine compiled.
Mode = Literal["plain", "eager", "compiled"]
#: Images of the epoch that the table speaks of: CIFAR-10's training set.
EPOCH = 50_000
#: Steps in which networks are compiled, attacks captured and kernels chosen.
START_UP = 6
#: Of a forward: an attack's step goes forward and back to the image, a training pass to the weights too.
ATTACK_PASSES, TRAINING_PASSES = 2, 3


@dataclass(frozen=True, kw_only=True)
class Row:
    """One mode of one case."""

    model: str
    batch_size: int
    attack_steps: int
    mode: Mode
    images_per_second: float
    epoch_seconds: float  # of 50,000 images
    tflops: float
    share_of_peak: float  # of a large bf16 product (CPU: float32) in the same run
    memory: int | None  # bytes on the GPU, at most
    start_up_seconds: float
    speedup: float | None  # over the plain loop
    spread: float  # of the time for a step, half the interquartile range over the median


@dataclass(frozen=True, kw_only=True)
class TrainBenchmark:
    """Conditions and results of one run."""

    norm: str
    objective: str
    eps: str
    data: str
    device: str
    torch: str
    steps: int
    peak_tflops: float
    rows: tuple[Row, ...]

    def record(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        return asdict(self)


def bench_train(
    *,
    models: Sequence[str] = ("resnet18",),
    norm: str = "dual_bn",
    batch_sizes: Sequence[int] | None = None,
    attack_steps: Sequence[int] = (10,),
    modes: Sequence[Mode] | None = None,
    eps: str = "16/255",
    data_dir: Path | str | None = None,
    device: str | None = None,
    steps: int | None = None,
    on_row: Callable[[str], object] = lambda row: None,
) -> TrainBenchmark:
    """Time hybrid training (paper A, eq. 2) by steps of the engine: every model with every batch and attack.

    Images are CIFAR-10's where ``data_dir`` has them, else synthetic ones of that size. The modes of a case take turns,
    ten steps each. The plain loop trains a single batch norm: a routed one is not its business.
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    on_gpu = where.type == "cuda"
    batch_sizes = ((128, 512) if on_gpu else (16,)) if batch_sizes is None else batch_sizes
    chosen: Sequence[Mode] = (get_args(Mode) if on_gpu else ("plain", "eager")) if modes is None else modes
    steps = (50 if on_gpu else 3) if steps is None else steps
    problems = [
        f"unknown mode {mode!r}{did_you_mean(mode, get_args(Mode))}" for mode in chosen if mode not in get_args(Mode)
    ]
    problems += [f"{name} must be at least 1, got {value}" for name, value in (("steps", steps),) if value < 1]
    raise_all(problems, "bad benchmark")
    if on_gpu and not torch.cuda.is_available():
        raise ConfigError("no CUDA device here; leave device out or use device='cpu'")
    data = load("cifar10", "train", data_dir) if data_dir is not None else load("synthetic", "train", size=2048)
    assert isinstance(data, ImageData)
    peak = _peak(where)
    rows: list[Row] = []
    for model, batch_size, count in itertools.product(models, batch_sizes, attack_steps):
        config = Config(
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
        rows += _case(config, data, where, chosen, steps, peak, on_row)
    return TrainBenchmark(
        norm=norm,
        objective="hybrid",
        eps=eps,
        data=data.name,
        device=torch.cuda.get_device_name(where) if on_gpu else "cpu",
        torch=torch.__version__,
        steps=steps,
        peak_tflops=peak / 1e12,
        rows=tuple(rows),
    )


def _case(
    config: Config,
    data: ImageData,
    device: torch.device,
    modes: Sequence[Mode],
    steps: int,
    peak: float,
    on_row: Callable[[str], object],
) -> Iterator[Row]:
    makers = {"plain": _plain, "eager": _engine, "compiled": _engine}
    turn = min(steps, 10 if device.type == "cuda" else 1)
    with ExitStack() as stack:
        runners: dict[str, Callable[[], None]] = {}
        start_up: dict[str, tuple[float, int | None]] = {}
        for mode in modes:
            on_row(f"{config.model.name}, batch {config.batch_size}, {config.attack.steps} attack steps: {mode}")
            step = stack.enter_context(makers[mode](config, data, device, mode))
            start_up[mode] = _started(step, device)
            runners[mode] = partial(_repeat, step, turn)
        reference = "plain" if "plain" in modes else modes[0]
        timings = side_by_side(runners, reference=reference, rounds=max(1, steps // turn), device=device, warmup=0)
    flops = _flops(config, data, device) * (
        ATTACK_PASSES * config.attack.steps + 2 * TRAINING_PASSES  # clean and adversarial images
    )
    for mode, timing in timings.items():
        rate = turn * config.batch_size / timing.seconds
        yield Row(
            model=config.model.name,
            batch_size=config.batch_size,
            attack_steps=config.attack.steps,
            mode=mode,  # pyright: ignore[reportArgumentType]
            images_per_second=rate,
            epoch_seconds=EPOCH / rate,
            tflops=rate * flops / 1e12,
            share_of_peak=rate * flops / peak,
            memory=start_up[mode][1],
            start_up_seconds=start_up[mode][0],
            speedup=1 / timing.ratio if reference == "plain" else None,
            spread=timing.spread / 2 / timing.ratio,
        )
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _repeat(step: Callable[[], None], count: int) -> None:
    for _ in range(count):
        step()


def _started(step: Callable[[], None], device: torch.device) -> tuple[float, int | None]:
    """Seconds until everything is compiled, captured and chosen, and the most memory that this took."""
    before = 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    synchronize(device)
    started = time.perf_counter()
    _repeat(step, START_UP if device.type == "cuda" else 1)
    synchronize(device)
    seconds = time.perf_counter() - started
    return seconds, torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else None


@contextmanager
def _engine(config: Config, data: ImageData, device: torch.device, mode: Mode) -> Iterator[Callable[[], None]]:
    """A step of the engine, as ``advnorm train`` makes it."""
    config = replace(config, compile=mode == "compiled")
    journal = Journal(Path("bench"), active=False)
    loop = Loop(Run(Path("bench")), config, data, Ranks(device=device), journal, workers=None)
    loop.prepare(0)
    batches = itertools.chain.from_iterable(loop.loader.epoch(epoch, 0) for epoch in itertools.count())

    def step() -> None:
        with loop.speed():
            loop.train_step(next(batches))

    yield step


@contextmanager
def _plain(config: Config, data: ImageData, device: torch.device, mode: Mode) -> Iterator[Callable[[], None]]:
    """Hybrid training of a built-in batch norm as most public code has it: float32 with TF32, eager, no frills."""
    torch.manual_seed(0)
    model = strip(create_model(config.model.name, norm="bn", num_classes=data.num_classes)).to(device)
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
        with float32_as("tf32", device):
            chosen = torch.randint(len(images), (config.batch_size,), device=device)
            x, y = images[chosen], labels[chosen]
            x_adv = attack(x, y)
            clean, adv = model(torch.cat([x, x_adv])).chunk(2)
            loss = (F.cross_entropy(clean, y) + F.cross_entropy(adv, y)) / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    yield step


def _flops(config: Config, data: ImageData, device: torch.device) -> float:
    """Of one image's forward."""
    model: nn.Module = strip(create_model(config.model.name, norm="bn", num_classes=data.num_classes)).to(device).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, *data.image_shape, device=device))
    return float(counter.get_total_flops())


def _peak(device: torch.device) -> float:
    """Operations a second of a large matrix product: bf16 on a GPU, float32 on the CPU."""
    size, dtype, rounds = (8192, torch.bfloat16, 20) if device.type == "cuda" else (1024, torch.float32, 3)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))

    def multiply() -> None:
        torch.mm(a, b)

    _repeat(multiply, 3)
    synchronize(device)
    started = time.perf_counter()
    _repeat(multiply, rounds)
    synchronize(device)
    return rounds * 2 * size**3 / (time.perf_counter() - started)
