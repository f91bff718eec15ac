"""Random noise as an attack: the effect of a perturbation that ignores the model (paper D, B.4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

import torch
from torch import Tensor

from advnorm._core.seeding import ImageNoise
from advnorm._core.settings import Setting
from advnorm.attacks.base import Attack, Restarts
from advnorm.attacks.losses import cross_entropy
from advnorm.attacks.model_access import Predict
from advnorm.attacks.names import count_options, register_attack
from advnorm.attacks.pgd import WorstCase
from advnorm.threat import per_image

Kind = Literal["uniform", "gaussian", "binary"]


@dataclass(frozen=True, kw_only=True)
class RandomNoise(Attack):
    """Noise inside the ball. Linf: U[-ε, ε], N(0, (ε/2)²) clipped at ±ε, or ±ε.

    L2 and L1: uniform in the ball, or Gaussian or ±1 noise scaled to length eps.
    """

    needs_gradients = False

    kind: Annotated[Kind, Setting("Distribution; `binary` is a random corner of the Linf ball.")] = "uniform"
    restarts: Restarts = 1

    def perturb(self, predict: Predict, x: Tensor, y: Tensor, noise: ImageNoise) -> Tensor:
        noise = noise.fold(self.kind)
        if self.restarts == 1:
            return self._draw(x, noise.fold(0))
        worst = WorstCase(y)
        for restart in range(self.restarts):
            x_adv = self._draw(x, noise.fold(restart))
            with torch.no_grad():
                logits = predict(x_adv)
            worst.offer(x_adv, logits, cross_entropy(logits, y))
            if self.progress is not None:
                self.progress(restart + 1, self.restarts)
        assert worst.x is not None
        return worst.x

    def _draw(self, x: Tensor, noise: ImageNoise) -> Tensor:
        if self.kind == "uniform":
            return self.threat.random_start(x, noise)
        shape = x.shape[1:]
        delta = noise.normal(shape) / 2 if self.kind == "gaussian" else noise.signs(shape)
        if self.threat.norm != "Linf":
            length = self.threat.distance(delta, torch.zeros_like(delta)).float()
            delta = delta / per_image(length, delta)
        return self.threat.project(x + self.threat.eps * delta, x)


for _kind in get_args(Kind):
    _settings, _options, _summary = {"kind": _kind}, count_options("restarts"), f"{_kind} noise in the ball"
    register_attack(f"noise-{_kind}", settings=_settings, options=_options, summary=_summary, paper="D")(RandomNoise)
