"""PGD whose steps shrink along a cosine, so that the last ones fine-tune."""

import math
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from advnorm.attacks import Attack, input_gradient, register_attack
from advnorm.config import Setting


@register_attack("cosine", steps=10, summary="PGD with steps that shrink along a cosine")
@dataclass(frozen=True, kw_only=True)
class CosinePGD(Attack):
    """``x ← P(x + α_t · sign(∇ loss))`` with ``α_t`` from eps down to 0."""

    steps: Annotated[int, Setting("Number of gradient steps.", "[1, inf)")] = 10

    def perturb(self, predict, x: Tensor, y: Tensor, noise) -> Tensor:
        x_adv = self.threat.random_start(x, noise)
        for step in range(self.steps):
            x_adv = x_adv.detach().requires_grad_()
            loss = F.cross_entropy(predict(x_adv), y, reduction="none")
            size = self.threat.eps * (1 + math.cos(math.pi * step / self.steps)) / 2
            ascent = size * torch.sign(input_gradient(loss, x_adv))
            x_adv = self.threat.project(x_adv.detach() + ascent, x)
        return x_adv
