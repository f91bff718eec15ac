"""Speed and agreement of AutoAttack against the official code, on the same images and network."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn

from advnorm._core.devices import resolve_device
from advnorm._core.errors import ConfigError
from advnorm._core.modes import evaluating
from advnorm._core.provenance import environment
from advnorm._core.records import require_regular
from advnorm.attacks import PGD
from advnorm.attacks.autoattack import AutoAttack
from advnorm.bench.passes import StagePasses, passes_by_stage
from advnorm.bench.timing import MeasuredConditions, peak_flops, timed
from advnorm.data import cifar10, digits
from advnorm.models import create_model
from advnorm.models.weights import load_weights
from advnorm.threat import ThreatModel
from advnorm.training.cost import network_flops

OFFICIAL = "pyautoattack"
#: Batch size of the official code, and of every forward outside of the attacks.
OFFICIAL_BATCH = 500
#: Whether each image is robust, and the seconds and passes of the stages.
Outcome = tuple[Tensor, dict[str, float], dict[str, StagePasses]]


@dataclass(frozen=True, kw_only=True)
class AutoAttackRow:
    """One implementation: seconds, accuracies, and the comparison with the reference."""

    seconds: float
    clean: float
    robust: float
    speedup: float
    agreement: float  # share of images with the same result as the reference
    stages: dict[str, float]  # seconds
    passes: dict[str, StagePasses]  # empty for the official code, which does not count them


@dataclass(frozen=True, kw_only=True)
class AutoAttackBenchmark(MeasuredConditions):
    """Conditions and results of one run; the first row is the reference."""

    model: str
    threat: str
    images: int
    seed: int
    forward_flops: float  # operations of one image's forward
    peak_flops: float  # operations per second of a large matrix product
    reference: str
    rows: dict[str, AutoAttackRow]
    notes: tuple[str, ...]


def load_network(
    weights: Path | str | None,
    data_dir: Path | str | None,
    *,
    images: int,
    eps: str | None,
    seed: int,
    precisions: Sequence[str] = (),
) -> tuple[nn.Module, Tensor, Tensor, ThreatModel, str]:
    """Return network, images, labels, threat and a name: a CIFAR-10 ResNet-18, or a small network trained on digits.

    ``precisions`` are validated before the network is trained or loaded.
    """
    device = resolve_device()
    threat = ThreatModel(eps=("40/255" if weights is None else "8/255") if eps is None else eps)
    for precision in precisions:
        _build_attack(threat, precision, seed)
    if weights is None:
        x, y = (value[:images].to(device) for value in digits("test"))
        return _train_small(threat, seed).to(device), x, y, threat, "small_cnn on digits, PGD-trained"
    if data_dir is None:
        message, hint = "weights need the CIFAR-10 test images", "give the folder of the binary files as data_dir"
        raise ConfigError("missing_file", message, field="data_dir", hint=hint)
    require_regular(weights, "weights", "create it with benchmarks/adversarial_resnet18.py")
    x, y = (value[:images].to(device) for value in cifar10(data_dir, "test"))
    model = create_model("resnet18", norm="bn").to(device)
    load_weights(model, weights)
    return model.eval(), x.float() / 255, y, threat, f"ResNet-18 ({describe_weights(weights)})"


def describe_weights(path: Path | str) -> str:
    """Return the name of a file, with the epochs of training if it holds them: many networks share a file name."""
    if Path(path).suffix != ".safetensors":
        return Path(path).name
    with safe_open(path, "pt") as file:
        epochs = (file.metadata() or {}).get("epochs")
    return Path(path).name + (f", {epochs} epochs" if epochs else "")


def _train_small(threat: ThreatModel, seed: int) -> nn.Module:
    """Train a slightly robust network by PGD-10 on digits, in seconds on a CPU."""
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
    seed: int = 0,
    on_row: Callable[[str], object] = lambda row: None,
    on_result: Callable[[AutoAttackBenchmark], object] = lambda result: None,
) -> AutoAttackBenchmark:
    """Time the standard AutoAttack in several precisions, and the official code if it is installed.

    ``on_row`` gets the name and progress of the current row, ``on_result`` the results after each row.
    """
    installed = importlib.util.find_spec(OFFICIAL) is not None
    notes = [] if installed or not official else [f"{OFFICIAL} is not installed: ratios are to our float32 run"]

    def run_ours(precision: str) -> Outcome:
        def progress(done: int, total: int) -> None:
            on_row(f"advnorm {precision}: {100 * done // total} %")

        found = replace(_build_attack(threat, precision, seed), progress=progress).evaluate(model, x, y, bar=False)
        return found.robust, found.seconds, passes_by_stage(found)

    runs: dict[str, Callable[[], Outcome]] = {}
    if official and installed:
        runs[f"{OFFICIAL} (official code)"] = partial(_run_official, model, x, y, threat, seed)
    runs |= {f"advnorm {precision}": partial(run_ours, precision) for precision in precisions}
    with torch.no_grad(), evaluating(model):
        clean = torch.cat([model(part).argmax(1) for part in x.split(OFFICIAL_BATCH)]) == y
        flops = network_flops(model, x[:1])
    _warm_up(model, x[:OFFICIAL_BATCH], y[:OFFICIAL_BATCH])
    result = AutoAttackBenchmark(
        model=name,
        threat=str(threat),
        images=len(x),
        device=environment(x.device)["device"],
        seed=seed,
        forward_flops=flops,
        peak_flops=peak_flops(x.device),
        reference=next(iter(runs)),
        rows={},
        notes=tuple(notes),
    )
    reference: tuple[Tensor, float] | None = None
    for label, run in runs.items():
        on_row(label)
        (robust, stages, passes), seconds = timed(run, x.device)
        robust = robust.cpu()
        reference = reference or (robust, seconds)
        result.rows[label] = AutoAttackRow(
            seconds=seconds,
            clean=clean.double().mean().item(),
            robust=robust.double().mean().item(),
            speedup=reference[1] / seconds,
            agreement=(robust == reference[0]).double().mean().item(),
            stages=stages,
            passes=passes,
        )
        on_result(result)
    return result


def _build_attack(threat: ThreatModel, precision: str, seed: int) -> AutoAttack:
    return AutoAttack(threat=threat, precision=precision, seed=seed)  # pyright: ignore[reportArgumentType]


def _warm_up(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Run forwards and gradients before anything is timed: the first ones load libraries."""
    for enabled in (False, True):
        with evaluating(model), torch.autocast(x.device.type, torch.bfloat16, enabled=enabled):
            points = x.detach().requires_grad_()
            torch.autograd.grad(F.cross_entropy(model(points).float(), y), points)


def _run_official(model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, seed: int) -> Outcome:
    """Run the official code as documented: model in eval mode, default settings."""
    from pyautoattack import AutoAttack as OfficialAutoAttack  # pyright: ignore[reportMissingImports]

    with evaluating(model):
        attack = OfficialAutoAttack(model, norm=threat.norm, eps=threat.eps, seed=seed, device=x.device)
        x_adv, _ = attack.run_standard_evaluation(x, y, batch_size=OFFICIAL_BATCH)
        with torch.no_grad():
            return torch.cat([model(part).argmax(1) for part in x_adv.split(OFFICIAL_BATCH)]) == y, {}, {}
