"""Agreement of the quick estimate with AutoAttack, network by network, and the passes of both."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from advnorm._core.devices import resolve_device
from advnorm._core.provenance import environment
from advnorm.attacks import AutoAttack, CascadeResult, Quick
from advnorm.attacks.surrogate import Precision
from advnorm.bench.passes import StagePasses, passes_by_stage, total_passes
from advnorm.bench.timing import MeasuredConditions, timed
from advnorm.config import AttackConfig, Config, Named
from advnorm.evaluation.model_branches import branches
from advnorm.evaluation.target import EvaluationTarget, open_run
from advnorm.threat import ThreatModel
from advnorm.training import train

PGD_AT = Config(
    data=Named("digits", test_share=0.5),
    objective=Named("classical"),
    eps=0.2,
    attack=AttackConfig(steps=5),
    epochs=20,
    batch_size=64,
    lr=0.2,
    schedule="one_cycle",
    validate_every=0,
)
#: Trainings on digits: undefended, robust, and falsely robust ones.
TRAININGS = {
    "undefended": replace(PGD_AT, objective=Named("standard"), eps=0.1, epochs=8),
    "PGD-AT": PGD_AT,
    "PGD-AT, large eps": replace(PGD_AT, eps=0.3),
    "PGD-AT, L2": replace(PGD_AT, threat="L2", eps=0.8),
    "TRADES": replace(PGD_AT, objective=Named("trades")),
    "hybrid, single BN": replace(PGD_AT, objective=Named("hybrid"), eps=0.35),
    "hybrid, single BN, KL": replace(PGD_AT, objective=Named("kl"), eps=0.35),
    "hybrid, dual BN": replace(PGD_AT, objective=Named("hybrid"), norm="dual_bn", eps=0.35),
    "one-step AT": replace(PGD_AT, eps=0.35, attack=AttackConfig(steps=1, step_size=0.4375)),
}
#: The network whose logits are also evaluated 1,000 times larger, where the gradient of the cross-entropy vanishes.
SCALED, SCALE = "PGD-AT", 1000.0


@dataclass(frozen=True, kw_only=True, eq=False)
class BenchmarkedNetwork:
    """A network, one of its branches, and the images and threat model of its evaluation."""

    name: str
    model: nn.Module
    route: str | None
    threat: ThreatModel
    images: Tensor
    labels: Tensor

    @property
    def device(self) -> torch.device:
        return next((parameter.device for parameter in self.model.parameters()), resolve_device("cpu"))


@dataclass(frozen=True, kw_only=True)
class QuickRow:
    """Accuracy of one network; passes by stage and seconds of each attack. ``quick`` runs first, without a warm-up."""

    network: str
    threat: str
    images: int
    clean: float
    quick: float
    autoattack: float
    differing: int  # images on which the two attacks disagree
    quick_passes: dict[str, StagePasses]
    autoattack_passes: dict[str, StagePasses]
    quick_seconds: float
    autoattack_seconds: float

    @property
    def points(self) -> float:
        """Difference of the accuracies in points."""
        return 100 * (self.quick - self.autoattack)

    @property
    def ratio(self) -> float:
        """Passes of the quick estimate as a share of AutoAttack's."""
        return total_passes(self.quick_passes) / total_passes(self.autoattack_passes)


@dataclass(frozen=True, kw_only=True)
class QuickBenchmark(MeasuredConditions):
    """Conditions and results of one run."""

    networks: str
    precision: str
    seed: int
    rows: list[QuickRow]


class _Scaled(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return SCALE * self.model(x)


def train_networks(seeds: Sequence[int], images: int | None) -> Iterator[BenchmarkedNetwork]:
    """Train small networks on digits on the CPU, a few seconds each, and yield every branch."""
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            for name, config in TRAININGS.items():
                label = f"{name}, seed {seed}"
                run = train(replace(config, seed=seed, name=f"run{len(label)}"), out=Path(folder) / label, device="cpu")
                target = open_run(run, checkpoint="last", device="cpu")
                yield from _branches(label, target, images)
                if name == SCALED:
                    target = replace(target, model=_Scaled(target.model))
                    yield from _branches(f"{name}, logits × {SCALE:g}, seed {seed}", target, images)


def open_networks(
    runs: Sequence[Path | str],
    images: int | None,
    *,
    data_dir: Path | str | None = None,
    device: str | torch.device | None = None,
) -> Iterator[BenchmarkedNetwork]:
    """Yield every branch of training runs."""
    for target in [open_run(run, data_dir=data_dir, device=device) for run in runs]:
        yield from _branches(target.name, target, images)


def _branches(name: str, target: EvaluationTarget, images: int | None) -> Iterator[BenchmarkedNetwork]:
    for route in branches(target.model) or (None,):
        yield BenchmarkedNetwork(
            name=name if route is None else f"{name}, {route} branch",
            model=target.model,
            route=route,
            threat=target.threat,
            images=target.images[:images],
            labels=target.labels[:images],
        )


def bench_quick(
    networks: Iterable[BenchmarkedNetwork],
    *,
    name: str,
    precision: Precision = "float32",
    seed: int = 0,
    on_row: Callable[[str], object] = lambda row: None,
    on_result: Callable[[QuickBenchmark], object] = lambda result: None,
) -> QuickBenchmark:
    """Evaluate networks by the quick estimate and by the standard AutoAttack, with the same precision of the search.

    ``on_row`` gets the name and progress of the current row, ``on_result`` the results after each row.
    """
    Quick(threat=ThreatModel(eps=0.1), precision=precision)  # validates it before a network is trained
    result = None
    for network in networks:
        settings = {"threat": network.threat, "route": network.route, "precision": precision, "seed": seed}

        def evaluate(attack: Quick | AutoAttack, network: BenchmarkedNetwork = network) -> tuple[CascadeResult, float]:
            def progress(done: int, total: int) -> None:
                on_row(f"{network.name}, {attack.title}: {100 * done // total} %")

            shown, data = replace(attack, progress=progress), (network.images, network.labels)
            return timed(lambda: shown.evaluate(network.model, *data, bar=False), network.device)

        (quick, quick_seconds), (full, full_seconds) = evaluate(Quick(**settings)), evaluate(AutoAttack(**settings))
        if result is None:
            device = environment(network.device)["device"]
            result = QuickBenchmark(device=device, networks=name, precision=precision, seed=seed, rows=[])
        result.rows.append(
            QuickRow(
                network=network.name,
                threat=str(network.threat),
                images=len(network.labels),
                clean=full.clean_accuracy,
                quick=quick.robust_accuracy,
                autoattack=full.robust_accuracy,
                differing=int((quick.robust != full.robust).sum()),
                quick_passes=passes_by_stage(quick),
                autoattack_passes=passes_by_stage(full),
                quick_seconds=quick_seconds,
                autoattack_seconds=full_seconds,
            )
        )
        on_result(result)
    assert result is not None
    return result
