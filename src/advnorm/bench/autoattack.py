"""AutoAttack against the official code: the same images, the same network, one run."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from advnorm._core.errors import ConfigError
from advnorm._core.modes import evaluating
from advnorm._core.provenance import own_version
from advnorm.attacks import PGD
from advnorm.attacks.autoattack import AutoAttack
from advnorm.attacks.base import Progress
from advnorm.bench.timing import synchronize
from advnorm.data import cifar10, digits
from advnorm.models import create_model
from advnorm.threat import ThreatModel

OFFICIAL = "pyautoattack"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One implementation's answer: seconds, robust accuracy, and how it compares with the reference."""

    seconds: float
    clean: float
    robust: float
    speedup: float
    agreement: float
    stages: dict[str, float]


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
        return {**asdict(self), **own_version()}


def subject(
    weights: Path | str | None,
    data_dir: Path | str | None,
    *,
    images: int,
    eps: str | None,
    seed: int,
    precisions: Sequence[str] = (),
) -> tuple[nn.Module, Tensor, Tensor, ThreatModel, str]:
    """Network, images, labels, threat and a name: a given CIFAR-10 ResNet-18, or a small network trained on digits.

    ``precisions`` that are not known are refused before it is trained or loaded.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    threat = ThreatModel(eps=eps or ("40/255" if weights is None else "8/255"))
    for precision in precisions:
        _attack(threat, precision, seed)
    if weights is None:
        x, y = (value[:images].to(device) for value in digits("test"))
        return _small(threat, seed).to(device), x, y, threat, "small_cnn on digits, PGD-trained"
    if data_dir is None:
        raise ConfigError(
            "--weights needs the CIFAR-10 test images: add --data-dir with the folder of the binary files"
        )
    if not Path(weights).is_file():
        raise ConfigError(f"there is no file {weights}; make one with benchmarks/adversarial_resnet18.py")
    x, y = (value[:images].to(device) for value in cifar10(data_dir, "test"))
    model = create_model("resnet18", norm="bn").to(device)
    model.load_state_dict(load_file(weights, device=str(device)))
    return model.eval(), x.float() / 255, y, threat, f"ResNet-18 ({Path(weights).name}{_trained(weights)})"


def _trained(weights: Path | str) -> str:
    """How long, where the file says so: networks of one name are many."""
    with safe_open(weights, "pt") as file:
        epochs = (file.metadata() or {}).get("epochs")
    return f", {epochs} epochs" if epochs else ""


def _small(threat: ThreatModel, seed: int) -> nn.Module:
    """A network that resists a little: PGD-10 adversarial training on digits, some seconds on a CPU."""
    x, y = digits("train")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = create_model("small_cnn", in_channels=1)
        attack = PGD(threat=threat, steps=10, step_size=threat.eps / 4, seed=seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
        for _ in range(6):
            for chosen in torch.randperm(len(x)).split(128):
                adversarial = attack(model, x[chosen], y[chosen], index=chosen)
                loss = F.cross_entropy(model(adversarial), y[chosen])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return model.eval()


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
    on_result: Callable[[AutoAttackBenchmark], object] = lambda result: None,
) -> AutoAttackBenchmark:
    """Time our standard AutoAttack in several precisions, and the official one where it is installed.

    ``on_row`` is told what is being measured and how far it is, ``on_result`` gets the results after each row.
    """
    here = importlib.util.find_spec(OFFICIAL) is not None
    notes = [] if here or not official else [f"{OFFICIAL} is not installed: ratios are to our strict float32 run"]
    runs: dict[str, Callable[[], tuple[Tensor, dict[str, float]]]] = {}
    if official and here:
        runs[f"{OFFICIAL} (official code)"] = lambda: (_official(model, x, y, threat, official_batch, seed), {})
    for precision in precisions:
        label = f"advnorm {precision}"
        attack = replace(_attack(threat, precision, seed), progress=_percent(label, on_row))
        runs[label] = lambda attack=attack: _ours(attack, model, x, y)
    if not runs:
        raise ConfigError("nothing to measure; give at least one precision")
    with torch.no_grad(), evaluating(model):
        clean = torch.cat([model(part).argmax(1) for part in x.split(500)]) == y
    _warm_up(model, x[:official_batch], y[:official_batch])
    rows: dict[str, Row] = {}
    reference: tuple[str, Tensor, float] | None = None
    result: AutoAttackBenchmark | None = None
    for label, run in runs.items():
        on_row(label)
        synchronize(x.device)
        started = time.perf_counter()
        robust, stages = run()
        robust = robust.cpu()
        synchronize(x.device)
        seconds = time.perf_counter() - started
        reference = reference or (label, robust, seconds)
        rows[label] = Row(
            seconds=seconds,
            clean=clean.double().mean().item(),
            robust=robust.double().mean().item(),
            speedup=reference[2] / seconds,
            agreement=(robust == reference[1]).double().mean().item(),
            stages=stages,
        )
        result = AutoAttackBenchmark(
            model=name,
            threat=str(threat),
            images=len(x),
            device=torch.cuda.get_device_name(x.device) if x.is_cuda else "cpu",
            torch=torch.__version__,
            seed=seed,
            reference=reference[0],
            rows=dict(rows),
            notes=tuple(notes),
        )
        on_result(result)
    assert result is not None
    return result


def _percent(label: str, tell: Callable[[str], object]) -> Progress:
    """Tells how far an attack is, once for each percent."""
    told = -1

    def progress(done: int, total: int) -> None:
        nonlocal told
        if (percent := 100 * done // total) != told:
            told = percent
            tell(f"{label}: {percent} %")

    return progress


def _attack(threat: ThreatModel, precision: str, seed: int) -> AutoAttack:
    return AutoAttack(threat=threat, precision=precision, seed=seed)  # pyright: ignore[reportArgumentType]


def _warm_up(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Forwards and gradients before anything is timed: the first ones load libraries, which none shall pay for."""
    for enabled in (False, True):
        with evaluating(model), torch.autocast(x.device.type, torch.bfloat16, enabled=enabled):
            points = x.detach().requires_grad_()
            torch.autograd.grad(F.cross_entropy(model(points).float(), y), points)


def _ours(attack: AutoAttack, model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, float]]:
    result = attack.evaluate(model, x, y, bar=False)
    return result.robust, result.seconds


def _official(model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, batch: int, seed: int) -> Tensor:
    """The verdicts of the official code, run as its documentation says: model in eval mode, its own defaults."""
    from pyautoattack import AutoAttack as OfficialAutoAttack  # pyright: ignore[reportMissingImports]

    with evaluating(model):
        attack = OfficialAutoAttack(model, norm=threat.norm, eps=threat.eps, seed=seed, device=x.device)
        x_adv, _ = attack.run_standard_evaluation(x, y, batch_size=batch)
        with torch.no_grad():
            return torch.cat([model(part).argmax(1) for part in x_adv.split(batch)]) == y
