"""Small networks, adversarially trained in seconds, on which attacks find different things but seldom by chance."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from advnorm._core.seeding import ImageNoise
from advnorm.attacks import PGD
from advnorm.attacks.model_access import predicting
from advnorm.threat import ThreatModel


@dataclass(frozen=True)
class Trained:
    """A network, the threat model of its evaluation, and 797 images that it has not seen."""

    model: nn.Sequential
    threat: ThreatModel
    x: Tensor
    y: Tensor

    def first(self, count: int) -> tuple[Tensor, Tensor]:
        return self.x[:count], self.y[:count]

    def with_classes(self, classes: int) -> Trained:
        """The first classes alone."""
        model = copy.deepcopy(self.model)
        last = model[-1]
        last.weight, last.bias = (nn.Parameter(p[:classes].detach()) for p in (last.weight, last.bias))
        rows = self.y < classes
        return Trained(model, self.threat, self.x[rows], self.y[rows])


def digits() -> tuple[Tensor, Tensor]:
    """Digits with a black border, half of them with little contrast: those fall to a small eps, the others do not.

    The network reads all but the last row and column, where Square's authors never put a square.
    """
    data = load_digits()
    x = F.pad(torch.tensor(data.images, dtype=torch.float32)[:, None] / 16, (1, 1, 1, 1))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], torch.tensor(data.target)[order]
    x[::2] *= 0.15
    return x, y


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2), nn.GELU(), nn.Flatten(), nn.Linear(256, 64), nn.GELU(), nn.Linear(64, 10)
    )


def train(threat: ThreatModel, evaluated: ThreatModel, epochs: int = 30) -> Trained:
    x, y = digits()
    unseen = x[1000:], y[1000:]
    x, y = x[:1000], y[:1000]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = network()
    attack = PGD(threat=threat, steps=5, step_size=0.4 * threat.eps, start="clean")
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=10 * epochs)
    for epoch in range(epochs):
        order = torch.randperm(1000, generator=torch.Generator().manual_seed(epoch))
        for rows in order.split(100):
            with predicting(model) as predict:
                x_adv = attack.perturb(predict, x[rows], y[rows], ImageNoise(0, rows))
            optimizer.zero_grad()
            F.cross_entropy(model(x_adv), y[rows]).backward()
            optimizer.step()
            schedule.step()
    return Trained(model.eval(), evaluated, *unseen)


@pytest.fixture(scope="session")
def linf() -> Trained:
    return train(ThreatModel(eps=0.2), ThreatModel(eps=0.085))


@pytest.fixture(scope="session")
def l2() -> Trained:
    return train(ThreatModel(norm="L2", eps=0.7), ThreatModel(norm="L2", eps=0.4))


@pytest.fixture(scope="session")
def trained(linf: Trained, l2: Trained) -> dict[str, Trained]:
    """By norm; L1 is evaluated on the network that was trained for L2."""
    l1 = Trained(l2.model, ThreatModel(norm="L1", eps=1.2), l2.x, l2.y)
    return {"Linf": linf, "L2": l2, "L1": l1}
