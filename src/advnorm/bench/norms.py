"""The cost of routing: routed networks against the plain network with built-in norms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import nn

from advnorm._core.devices import resolve_device, set_threads
from advnorm._core.errors import raise_problems, unknown_name
from advnorm._core.precision import float32_as
from advnorm._core.provenance import environment
from advnorm.bench.timing import MeasuredConditions, Timing, alternate, compare, minimum_problems
from advnorm.models import create_model, list_models
from advnorm.norms import domains, list_norms, route, routed_modules
from advnorm.surgery import strip

Precision = Literal["float32", "tf32", "bf16"]
PLAIN = "plain nn.BatchNorm2d"

#: Largest ratios of ``dual_bn`` to the plain network that the project accepts.
LIMITS = {"eval": 1.03, "train": 1.10}


@dataclass(frozen=True, kw_only=True)
class NormBenchmark(MeasuredConditions):
    """Conditions and results of one run; ``rows[norm][phase]``, where a phase is ``eval`` or ``train``."""

    model: str
    batch_size: int
    image_size: int
    precision: str
    compiled: bool
    rounds: int
    threads: int
    rows: dict[str, dict[str, Timing]]


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
    clean, half adversarial for the routed networks; the plain network gets the same batch. ``threads``: CPU threads,
    one by default, because on a shared machine threads mostly wait for each other.
    """
    where = resolve_device(device)
    on_gpu = where.type == "cuda"
    batch_size = (512 if on_gpu else 32) if batch_size is None else batch_size
    rounds = (40 if on_gpu else 9) if rounds is None else rounds
    named = [*(("norm", norm, list_norms()) for norm in norms), ("model", model, list_models())]
    named.append(("precision", precision, list(get_args(Precision))))
    problems = [unknown_name(kind, name, known) for kind, name, known in named if name not in known]
    problems += minimum_problems(6, batch_size=batch_size) + minimum_problems(1, rounds=rounds, threads=threads)
    raise_problems(problems, "bad benchmark")

    generator = torch.Generator().manual_seed(0)
    images = torch.rand(batch_size, 3, image_size, image_size, generator=generator).to(where)
    labels = torch.randint(10, (batch_size,), generator=generator).to(where)
    if on_gpu:
        images = images.to(memory_format=torch.channels_last)
    with float32_as("tf32" if precision == "tf32" else "ieee", where), _threads(threads):
        evaluate, train = {}, {}
        for norm in (PLAIN, *norms):
            evaluate[norm], train[norm] = _build_phases(norm, model, images, labels, precision, compiled)
        with torch._dynamo.config.patch(recompile_limit=64):  # pyright: ignore  # all networks share one forward
            times = {
                phase: alternate(functions, rounds=rounds, device=where, on_round=on_round)
                for phase, functions in (("eval", evaluate), ("train", train))
            }
    return NormBenchmark(
        model=model,
        batch_size=batch_size,
        image_size=image_size,
        device=environment(where)["device"],
        precision=precision,
        compiled=compiled,
        rounds=rounds,
        threads=threads,
        rows={norm: {phase: compare(times[phase][norm], times[phase][PLAIN]) for phase in times} for norm in evaluate},
    )


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    set_threads(count)
    try:
        yield
    finally:
        set_threads(before)


def _build_phases(
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
