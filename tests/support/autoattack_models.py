"""A quick AutoAttack and models with changed inputs, outputs or precision."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from advnorm.attacks.autoattack import AutoAttack, CascadeResult
from advnorm.attacks.autoattack.attack import VERSIONS
from advnorm.threat import ThreatModel

STANDARD = VERSIONS["standard"]
#: Every part of the cascade, in little time.
QUICK = {"steps": 10, "targets": 3, "queries": 60}


def quick(threat: ThreatModel, **settings) -> AutoAttack:
    return AutoAttack(threat=threat, **{**QUICK, **settings})


def same(a: CascadeResult, b: CascadeResult) -> bool:
    return torch.equal(a.fooled_by, b.fooled_by) and torch.equal(a.x_adv, b.x_adv)


class Double(nn.Module):
    """Computes in float64, so that the float32 logits do not depend on the size and order of the batch."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x.double()).float()


class Wrapped(nn.Module):
    """A model with something done to its input or output."""

    def __init__(self, model: nn.Module, before=lambda x: x, after=lambda logits: logits) -> None:
        super().__init__()
        self.model, self.before, self.after = model, before, after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.model(self.before(x)))


class Watched(nn.Module):
    """Records the precision of each forward, with and without gradients."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.seen: set[tuple[bool, str, bool]] = set()

    def forward(self, x: Tensor) -> Tensor:
        precision = torch.backends.cuda.matmul.fp32_precision
        self.seen.add((torch.is_grad_enabled() and x.requires_grad, precision, torch.is_autocast_enabled("cpu")))
        return self.model(x)


def overflowing(model: nn.Module, where) -> Wrapped:
    """A stand-in whose logits are no numbers for some images."""
    return Wrapped(nn.Identity(), after=lambda x: torch.where(where(x)[:, None], torch.nan, model(x)))
