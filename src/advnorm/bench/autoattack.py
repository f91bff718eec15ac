"""AutoAttack against the official code: the same images, the same network, one run."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from advnorm._core.errors import ConfigError
from advnorm._core.modes import evaluating
from advnorm.attacks.autoattack import AutoAttack
from advnorm.threat import ThreatModel

OFFICIAL = "pyautoattack"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One implementation's answer: seconds, robust accuracy, and how it compares with the reference."""

    seconds: float
    clean: float
    robust: float
    speedup: float | None = None
    agreement: float | None = None


@dataclass(frozen=True, kw_only=True)
class AutoAttackBenchmark:
    """Conditions and results of one run; the first row is the reference."""

    model: str
    threat: str
    images: int
    device: str
    torch: str
    seed: int
    reference: str
    rows: dict[str, Row]
    notes: tuple[str, ...]

    def record(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        return asdict(self)


def bench_autoattack(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: ThreatModel,
    *,
    name: str,
    precisions: Sequence[str] = ("float32", "tf32", "bf16"),
    official: bool = True,
    official_batch: int = 500,
    seed: int = 0,
    on_row: Callable[[str], object] = lambda row: None,
) -> AutoAttackBenchmark:
    """Time our standard AutoAttack in several precisions, and the official one where it is installed."""
    here = importlib.util.find_spec(OFFICIAL) is not None
    notes = [] if here or not official else [f"{OFFICIAL} is not installed: ratios are to our strict float32 run"]
    runs: dict[str, Callable[[], Tensor]] = {}
    if official and here:
        runs[f"{OFFICIAL} (official code)"] = lambda: _official(model, x, y, threat, official_batch, seed)
    for precision in precisions:
        attack = AutoAttack(threat=threat, precision=precision, seed=seed)  # pyright: ignore[reportArgumentType]
        runs[f"advnorm {precision}"] = lambda attack=attack: attack.evaluate(model, x, y, bar=False).robust
    if not runs:
        raise ConfigError("nothing to measure; give at least one precision")
    with torch.no_grad(), evaluating(model):
        clean = torch.cat([model(part).argmax(1) for part in x.split(500)]) == y
    rows: dict[str, Row] = {}
    reference: tuple[str, Tensor, float] | None = None
    for label, run in runs.items():
        on_row(label)
        _synchronize(x.device)
        started = time.perf_counter()
        robust = run().cpu()
        _synchronize(x.device)
        seconds = time.perf_counter() - started
        reference = reference or (label, robust, seconds)
        rows[label] = Row(
            seconds=seconds,
            clean=clean.double().mean().item(),
            robust=robust.double().mean().item(),
            speedup=reference[2] / seconds,
            agreement=(robust == reference[1]).double().mean().item(),
        )
    assert reference is not None
    return AutoAttackBenchmark(
        model=name,
        threat=str(threat),
        images=len(x),
        device=torch.cuda.get_device_name(x.device) if x.is_cuda else "cpu",
        torch=torch.__version__,
        seed=seed,
        reference=reference[0],
        rows=rows,
        notes=tuple(notes),
    )


def _official(model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, batch: int, seed: int) -> Tensor:
    """The verdicts of the official code, run as its documentation says: model in eval mode, its own defaults."""
    from pyautoattack import AutoAttack as OfficialAutoAttack  # pyright: ignore[reportMissingImports]

    with evaluating(model):
        attack = OfficialAutoAttack(model, norm=threat.norm, eps=threat.eps, seed=seed, device=x.device)
        x_adv = attack.run_standard_evaluation(x, y, batch_size=batch)
        with torch.no_grad():
            return torch.cat([model(part).argmax(1) for part in x_adv.split(batch)]) == y


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
