"""Small training loops for tests of the step program."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from advnorm import Config
from advnorm.data import load
from advnorm.data.loader import Batch
from advnorm.objectives.execution import Craft
from advnorm.training.journal import Journal
from advnorm.training.loop import TrainingLoop
from advnorm.training.ranks import Ranks
from advnorm.training.run_folder import Run
from advnorm.training.step_program import autocast

SETTINGS = {
    "model": "small_cnn",
    "data": {"name": "synthetic", "size": 256},
    "norm": "dual_bn",
    "objective": "hybrid",
    "eps": "8/255",
    "attack": {"steps": 3, "step_size": "4/255"},
    "batch_size": 32,
    "lr": 1e-9,  # a step that learned would carry differences of rounding on
    "held_out": 0,
    "validate_every": 0,
}
CASES = {
    "hybrid": {},
    "single": {"norm": "bn"},
    "shared statistics": {"norm": "dual_affine_bn"},
    "shared affine": {"norm": "dual_stats_bn"},
    "heads": {"dual_head": True},
    "sequential": {"objective": {"name": "hybrid", "layout": "sequential"}},
    "half": {"objective": {"name": "hybrid", "clean_share": 0.5}},
    "classical": {"objective": "classical"},
    "trades": {"objective": "trades", "norm": "bn"},
    "trades in branches": {"objective": "trades"},
    "kl": {"objective": "kl", "norm": "bn"},
    "alp": {"objective": "alp", "norm": "bn"},
    "crossed": {"objective": "cross", "norm": "cross_bn"},
    "mixture": {"norm": "gmm_bn"},
    "likelihood": {"norm": "gmm_bn", "objective": {"name": "hybrid", "likelihood_weight": 1e-3}},
    "sandwich": {"norm": "sandwich_bn"},
    "groups": {"norm": "gn"},
    "standard": {"objective": "standard", "norm": "bn"},
    "shortcuts": {"model": {"name": "resnet20", "width": 0.5}},
    "preact": {"model": {"name": "preact_resnet18", "width": 0.125}},
    "averaged": {"ema": 0.9},
    "clipped": {"grad_clip": 0.1},
}


def loop_of(tmp_path: Path, device: str = "cpu", **settings) -> TrainingLoop:
    config = Config.from_dict({**SETTINGS, **settings})
    data = load(config.data.name, "train", **config.data.options)
    journal = Journal(tmp_path, active=True)
    loop = TrainingLoop(Run(tmp_path), config, data, Ranks(device=torch.device(device)), journal, workers=0)
    loop.prepare(0)
    return loop


def steps(loop: TrainingLoop, count: int) -> list[float]:
    """The losses of the first ``count`` steps."""
    losses = []
    with loop.program.scope():
        for place, batch in enumerate(loop.loader.epoch(0, 0)):
            if place < count:
                before = loop.state.sums.get("loss", torch.zeros(())).item()
                loop.train_step(batch)
                losses.append(loop.state.sums["loss"].item() - before)
    return losses


def statistics_of(loop: TrainingLoop) -> dict[str, torch.Tensor]:
    return {name: value.double().cpu() for name, value in loop.model.named_buffers()}


def first_batch(loop: TrainingLoop) -> Batch:
    return next(iter(loop.loader.epoch(0, 0)))


def adversarial(loop: TrainingLoop, craft: Craft | None = None) -> torch.Tensor:
    """The first batch attacked: by ``craft``, or as the loop's program does."""
    batch, inner = first_batch(loop), loop.objective.innermost
    craft = craft or loop.program.execution.craft or partial(inner.craft, execution=loop.program.execution)
    with autocast(loop.config.precision, loop.ranks.device):
        return craft(batch.x, batch.y, batch.index)


def gradients_of(loop: TrainingLoop) -> dict[str, torch.Tensor]:
    named = loop.model.named_parameters()
    return {name: value.grad.double().cpu() for name, value in named if value.grad is not None}


def snapshot(loop: TrainingLoop) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in loop.model.state_dict().items()}
