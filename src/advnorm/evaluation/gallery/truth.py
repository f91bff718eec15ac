"""The accuracy that an attack by someone who knows the defence leaves."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from advnorm._core.errors import ConfigError
from advnorm.attacks import predicting
from advnorm.attacks.names import get as get_attack
from advnorm.threat import ThreatModel

#: Attacks of the expert, on the model that the expert attacks and on the specimen itself.
ATTACKS = ("apgd-t-restarts2", "apgd-margin-t-restarts2", "pgd100-worst")
#: Forwards of a randomized model whose majority decides.
DRAWS = 25


def known_accuracy(model: nn.Module, expert: nn.Module | None, x: Tensor, y: Tensor, threat: ThreatModel) -> float:
    """Return the accuracy of ``model`` under long attacks that are computed on it and on the ``expert``'s model."""
    robust = _correct(model, x, y)
    for source in (model,) if expert is None else (expert, model):
        for name in ATTACKS:
            rows = robust.nonzero()[:, 0]
            if not len(rows):
                return 0.0
            try:
                x_adv = get_attack(name, threat=threat)(source, x[rows], y[rows], index=rows)
            except ConfigError:  # no gradient
                continue
            robust[rows] = _correct(model, x_adv, y[rows])
    return robust.double().mean().item()


def _correct(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with predicting(model) as predict, torch.no_grad():
        torch.manual_seed(0)  # the caller's generator is restored
        right = torch.stack([predict(x).argmax(1) == y for _ in range(DRAWS)])
    return right.double().mean(0) > 0.5
