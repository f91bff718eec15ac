"""The state of a training: everything that a step changes and that a checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from advnorm.models.weights import restore_model
from advnorm.training import checkpoint
from advnorm.training.averaging import EMA
from advnorm.training.journal import Clock, MetricsMark
from advnorm.training.ranks import Ranks
from advnorm.training.sharding import full_tensor, shard_state


class CheckpointMeta(TypedDict):
    """The entries of a checkpoint besides its tensors."""

    step: int
    optimizer: dict[str, Any]
    best: dict[str, Any] | None
    sums: list[str]
    pieces: list[dict[str, Any]]
    clock: dict[str, float | None]
    metrics: MetricsMark


class TrainingState:
    """Model, optimizer, moving average, counters, and the sums of the current epoch."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, ema: EMA | None, ranks: Ranks) -> None:
        self.model, self.optimizer, self.ema, self._ranks = model, optimizer, ema, ranks
        self.names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        self.clock = Clock(ranks.device)
        self.step = 0
        self.sums: dict[str, Tensor] = {}  # losses and accuracies of this epoch, in this process
        self.best: dict[str, Any] | None = None  # the metrics of the best epoch
        self.pieces: list[dict[str, Any]] = []  # environments of the run, each with its first step

    def collect(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything that a resumed run needs, as tensors and as JSON data."""
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        state, optimizer = checkpoint.flatten_optimizer(self.optimizer, self.names)
        tensors |= state
        meta: dict[str, Any] = {"step": self.step, "optimizer": optimizer, "best": self.best}
        if self.ema is not None:
            tensors |= {f"ema.{name}": value for name, value in self.ema.average.items()}
            meta["ema_updates"] = self.ema.updates
        if self.sums:
            tensors["sums"] = self._ranks.gathered(torch.stack(list(self.sums.values())))
        meta |= {"sums": list(self.sums), "pieces": self.pieces}
        tensors = {name: full_tensor(value) for name, value in tensors.items()}
        return tensors, meta | {"clock": {name: getattr(self.clock, name) for name in Clock.KEPT}}

    def restore(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], source: str) -> None:
        """Take over what :meth:`collect` returned; ``source`` names the checkpoint in errors."""
        restore_model(self.model, shard_state(checkpoint.select(tensors, "model."), self.model), source)
        checkpoint.restore_optimizer(self.optimizer, self.names, tensors, meta["optimizer"])
        if self.ema is not None:
            self.ema.restore(checkpoint.select(tensors, "ema."), meta["ema_updates"])
        if meta["sums"]:
            rows = tensors["sums"].to(self._ranks.device)
            # Another number of processes than before shares the sums equally.
            row = rows[self._ranks.rank] if len(rows) == self._ranks.world else rows.mean(0)
            self.sums = dict(zip(meta["sums"], row.clone()))
        self.step, self.best, self.pieces = meta["step"], meta["best"], meta["pieces"]
        for name, value in meta["clock"].items():
            setattr(self.clock, name, value)

    def is_finite(self) -> bool:
        """Whether every loss and tensor is finite in this process. Waits for the device."""
        floats = [value for value in self.collect()[0].values() if value.is_floating_point()]
        return bool(torch.stack([value.isfinite().all().to(self._ranks.device) for value in floats]).all())

    def begin_piece(self, environment: Mapping[str, Any]) -> None:
        """Note the environment from this step on if it differs from the last one."""
        here = {**environment, "processes": self._ranks.world}
        if not self.pieces or {**self.pieces[-1], "from_step": 0} != {**here, "from_step": 0}:
            self.pieces = [*self.pieces, {"from_step": self.step, **here}]

    @torch.no_grad()
    def add(self, values: Mapping[str, Tensor]) -> None:
        """Add a step's losses and accuracies to the sums, on the device."""
        if not self.sums:
            self.sums = {name: torch.zeros((), dtype=torch.float64, device=self._ranks.device) for name in values}
        for name, value in values.items():
            self.sums[name] += value
