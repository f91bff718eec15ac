"""The measurement of configurations that take turns: speed, memory, start-up, and ratios within a turn."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from advnorm.bench.plain_loops import has_plain_loop
from advnorm.bench.profile import step_parts
from advnorm.bench.start_up import first_step_seconds
from advnorm.bench.timing import alternate, compare, timed
from advnorm.bench.train_plan import TrainPlan, count_flops
from advnorm.bench.training_modes import REFERENCES, Steps, TrainMode, build_training
from advnorm.config import Config
from advnorm.data import ImageData
from advnorm.objectives import OBJECTIVES
from advnorm.training.compilation import Log
from advnorm.training.cost import passes
from advnorm.training.ranks import Ranks

#: Images of an epoch: the training set of CIFAR-10.
EPOCH = 50_000
#: Steps during which networks are compiled, attacks captured and kernels chosen.
START_UP = 6


@dataclass(frozen=True, kw_only=True)
class TrainRow:
    """One mode of one case."""

    model: str
    batch_size: int  # of all processes together
    attack_steps: int | None
    image_size: int
    processes: int
    settings: dict[str, Any] = field(default_factory=dict)  # others in which the cases differ
    mode: TrainMode
    images_per_second: float
    epoch_seconds: float  # of 50,000 images
    tflops: float  # of all processes together
    peak_tflops: float  # of a large bf16 product (CPU: float32) in each process, all at the same time
    share_of_peak: float  # of all processes
    memory: int | None  # bytes of the first process on its GPU during training, including its data set
    start_up_seconds: float  # construction and the first steps, in the process of the benchmark
    first_step: dict[str, float] | None = None  # seconds of a fresh process with a cold and a warm cache, if requested
    speedups: dict[str, float] = field(default_factory=dict)  # over each reference that trains the same
    spread: float  # of the ratio to the first mode: half the interquartile range, relative
    cost: float | None = None  # time relative to the first case that takes turns with this one, in the same mode
    parts: dict[str, float] | None = None  # milliseconds of a step by kind of operation, if requested


@dataclass(frozen=True)
class TrainGroup:
    """Configurations that take turns: the references once, and the steps of ``advnorm train`` for each of them."""

    configs: Sequence[Config]
    plan: TrainPlan
    data: ImageData
    ranks: Ranks
    peak: float

    def measure(self, log: Log, on_row: Callable[[str], object]) -> list[TrainRow]:
        """Build all trainings, time them in turns, and return a row for each."""
        torch._dynamo.reset()  # pyright: ignore  # the compiler stops compiling after several networks in one process
        device, steps = self.ranks.device, self.plan.steps
        turn = min(steps, 10 if device.type == "cuda" else 1)
        trainings: dict[tuple[TrainMode, Config], Steps] = {}
        started: dict[tuple[TrainMode, Config], dict[str, Any]] = {}
        for mode, config in self._cases():
            on_row(f"{self._label(config)}: {mode}")
            first = None
            if self.plan.start_up and self.ranks.world == 1:
                first = first_step_seconds(mode, config, device, self.plan.data_dir)
            build = partial(build_training, mode, config, self.data, self.ranks, log)
            trainings[mode, config], started[mode, config] = _start(build, device)
            started[mode, config]["first_step"] = first
        runners = {case: partial(run, turn) for case, run in trainings.items()}
        times = alternate(runners, rounds=max(1, steps // turn), device=device, warmup=0)
        return [
            TrainRow(
                **self._conditions(mode, config),
                **self._speed(config, turn * config.batch_size / statistics.median(times[mode, config])),
                **self._ratios(mode, config, times),
                **started[mode, config],
                parts=self._parts(run, statistics.median(times[mode, config]) / turn),
            )
            for (mode, config), run in trainings.items()
        ]

    def _cases(self) -> list[tuple[TrainMode, Config]]:
        plain = next(filter(has_plain_loop, self.configs), None)
        return [
            (mode, config)
            for config in self.configs
            for mode in self.plan.modes
            if config is plain or mode not in REFERENCES
        ]

    def _label(self, config: Config) -> str:
        others = ", ".join(f"{name} {value}" for name, value in self.plan.settings[config].items())
        sizes = f"batch {config.batch_size}, {_attack_steps(config)} attack steps, {self.data.image_shape[-1]} pixels"
        return f"{config.model.name}, {sizes}, {self.ranks.world} process(es){others and ', '}{others}"

    def _conditions(self, mode: TrainMode, config: Config) -> dict[str, Any]:
        settings = self.plan.settings[config]
        own = {"norm": "own"} if mode in REFERENCES and "norm" in settings else {}
        return {
            "model": config.model.name,
            "batch_size": config.batch_size,
            "attack_steps": _attack_steps(config),
            "image_size": self.data.image_shape[-1],
            "processes": self.ranks.world,
            "settings": settings | own,
            "mode": mode,
        }

    def _speed(self, config: Config, rate: float) -> dict[str, Any]:
        flops = rate * passes(config) * count_flops(config, self.data)
        return {
            "images_per_second": rate,
            "epoch_seconds": EPOCH / rate,
            "tflops": flops / 1e12,
            "peak_tflops": self.peak / 1e12,
            "share_of_peak": flops / (self.peak * self.ranks.world),
        }

    def _ratios(
        self, mode: TrainMode, config: Config, times: Mapping[tuple[TrainMode, Config], Sequence[float]]
    ) -> dict[str, Any]:
        """Ratios to the references, to the first mode, and to the first configuration, each within a turn."""
        own = times[mode, config]
        references = [case for case in times if case[0] in REFERENCES] if has_plain_loop(config) else []
        first = compare(own, next(iter(times.values())))
        base = times[mode, self.configs[0]] if mode not in REFERENCES and len(self.configs) > 1 else None
        return {
            "speedups": {case[0]: 1 / compare(own, times[case]).ratio for case in references},
            "spread": first.spread / 2 / first.ratio,
            "cost": None if base is None else compare(own, base).ratio,
        }

    def _parts(self, run: Steps, seconds: float) -> dict[str, float] | None:
        return step_parts(partial(run, 1), self.ranks.device, seconds) if self.plan.parts else None


def _attack_steps(config: Config) -> int | None:
    """Steps of the attack; None if there is no attack, or one without steps."""
    needs_attack = OBJECTIVES.get(config.objective.name).needs_attack
    return getattr(config.build_attack(), "steps", None) if needs_attack else None


def _start(build: Callable[[], Steps], device: torch.device) -> tuple[Steps, dict[str, Any]]:
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
        return run, {"start_up_seconds": seconds, "memory": None}
    # Reserved memory, not allocated memory: the memory of graphs is neither free nor counted as allocated.
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    timed(partial(run, 2), device)
    return run, {"start_up_seconds": seconds, "memory": torch.cuda.max_memory_reserved(device) - before}
