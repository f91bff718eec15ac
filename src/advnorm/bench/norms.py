"""What routing costs: routed networks against the plain one with built-in norms, in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from advnorm._core.devices import resolve_device
from advnorm._core.errors import did_you_mean, raise_all
from advnorm._core.precision import float32_as
from advnorm._core.provenance import own_version
from advnorm.bench.timing import Timing, side_by_side
from advnorm.models import create_model, list_models
from advnorm.norms import domains, list_norms, route, routed_modules
from advnorm.surgery import strip

Precision = Literal["float32", "tf32", "bf16"]
PLAIN = "plain nn.BatchNorm2d"

#: What the project promises of ``dual_bn``: at most these ratios to the plain network.
LIMITS = {"eval": 1.03, "train": 1.10}


@dataclass(frozen=True, kw_only=True)
class NormBenchmark:
    """Conditions and results of one run; ``rows[norm][phase]``."""

    model: str
    batch_size: int
    image_size: int
    device: str
    precision: str
    compiled: bool
    rounds: int
    threads: int
    torch: str
    rows: dict[str, dict[str, Timing]]

    def record(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        return {**asdict(self), **own_version()}


def bench_norms(
    norms: Sequence[str] = ("bn", "dual_bn"),
    *,
    model: str = "resnet18",
    batch_size: int | None = None,
    image_size: int = 32,
    device: str | None = None,
    precision: Precision = "float32",
    compiled: bool = False,
    rounds: int | None = None,
    threads: int = 1,
    on_round: Callable[[], object] = lambda: None,
) -> NormBenchmark:
    """Time evaluation through one branch and training on a concatenated batch, each against the plain network.

    Evaluation is one forward without gradients. Training is forward, cross-entropy and backward on a batch that is half
    clean, half adversarial for the routed networks; the plain network takes the same batch. ``threads`` of the CPU: one
    by default, since on a shared machine threads wait for each other longer than they work.
    """
    where = resolve_device(device)
    on_gpu = where.type == "cuda"
    batch_size = (512 if on_gpu else 32) if batch_size is None else batch_size
    rounds = (40 if on_gpu else 9) if rounds is None else rounds
    problems = [f"unknown norm {n!r}{did_you_mean(n, list_norms())}" for n in norms if n not in list_norms()]
    if model not in list_models():
        problems.append(f"unknown model {model!r}{did_you_mean(model, list_models())}")
    if batch_size < 6 or rounds < 1:
        problems.append(f"batch_size must be at least 6 and rounds at least 1, got {batch_size} and {rounds}")
    if threads < 1:
        problems.append(f"threads must be at least 1, got {threads}")
    if precision not in ("float32", "tf32", "bf16"):
        problems.append(f"unknown precision {precision!r}{did_you_mean(precision, ('float32', 'tf32', 'bf16'))}")
    raise_all(problems, "bad benchmark")

    generator = torch.Generator().manual_seed(0)
    images = torch.rand(batch_size, 3, image_size, image_size, generator=generator).to(where)
    labels = torch.randint(10, (batch_size,), generator=generator).to(where)
    if on_gpu:
        images = images.to(memory_format=torch.channels_last)
    with float32_as("tf32" if precision == "tf32" else "ieee", where), _threads(threads):
        evaluate, train = {}, {}
        for norm in (PLAIN, *norms):
            evaluate[norm], train[norm] = _phases(norm, model, images, labels, precision, compiled)
        run = {"reference": PLAIN, "rounds": rounds, "device": where, "on_round": on_round}
        with torch._dynamo.config.patch(recompile_limit=64):  # pyright: ignore  # all networks share one forward
            timings = {"eval": side_by_side(evaluate, **run), "train": side_by_side(train, **run)}
    return NormBenchmark(
        model=model,
        batch_size=batch_size,
        image_size=image_size,
        device=torch.cuda.get_device_name(where) if on_gpu else "cpu",
        precision=precision,
        compiled=compiled,
        rounds=rounds,
        threads=threads,
        torch=torch.__version__,
        rows={norm: {phase: timings[phase][norm] for phase in timings} for norm in evaluate},
    )


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _phases(
    norm: str, model: str, images: torch.Tensor, labels: torch.Tensor, precision: str, compiled: bool
) -> tuple[Callable[[], object], Callable[[], object]]:
    torch.manual_seed(0)
    network: nn.Module = create_model(model, norm="bn" if norm == PLAIN else norm)
    if norm == PLAIN:
        network = strip(network)
    network = network.to(images.device)
    if images.is_cuda:
        network = network.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    names = domains(network)
    counts = {name: len(part) for name, part in zip(names, labels.tensor_split(len(names) or 1))}
    crosses = any(module.plan.crosses for module in routed_modules(network).values())
    batch, forwarded = (torch.cat([images, images]), counts) if crosses else (images, None)
    forward = torch.compile(network, dynamic=False) if compiled else network

    def scope(target: Any, **options: Any) -> Any:
        return route(network, target, **options) if names else nullcontext()

    def autocast() -> Any:
        return torch.autocast(images.device.type, torch.bfloat16) if precision == "bf16" else nullcontext()

    def evaluate() -> None:
        network.eval()
        with torch.no_grad(), scope("adv"), autocast():
            forward(images)

    def train() -> None:
        network.train()
        with scope(counts, forwarded=forwarded), autocast():
            logits = forward(batch)[-len(labels) :]
        F.cross_entropy(logits.float(), labels).backward()
        network.zero_grad(set_to_none=True)

    return evaluate, train
