"""Small networks on real digits, trained once per session: sound, undefended, and falsely robust."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import advnorm
from advnorm.attacks import PGD
from advnorm.data import digits


def train(*, norm: str = "bn", eps: float = 0.0, clean: bool = False, epochs: int = 6) -> nn.Module:
    """Plainly (eps 0), on PGD images, or with ``clean`` on both, concatenated: hybrid training (paper A, eq. 2)."""
    torch.manual_seed(0)
    model = advnorm.create_model("small_cnn", in_channels=1, norm=norm)
    x, y = digits("train")
    attack = PGD(threat=advnorm.ThreatModel(eps=eps), steps=5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
    batches = len(x) // 128
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=epochs * batches)
    model.train()
    for _ in range(epochs):
        for chosen in torch.randperm(len(x)).split(128)[:batches]:
            images, labels = x[chosen], y[chosen]
            if not eps:
                loss = F.cross_entropy(model(images), labels)
            elif not clean:
                loss = F.cross_entropy(model(attack(model, images, labels, index=chosen)), labels)
            else:
                with advnorm.route(model, "adv"):
                    adversarial = attack(model, images, labels, index=chosen)
                with advnorm.route(model, {"clean": 128, "adv": 128}):
                    loss = F.cross_entropy(model(torch.cat([images, adversarial])), labels.repeat(2))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return model


@pytest.fixture(scope="session")
def sound() -> nn.Module:
    """Trained on PGD images at eps 0.2."""
    return train(eps=0.2)


@pytest.fixture(scope="session")
def undefended() -> nn.Module:
    return train(epochs=4)


@pytest.fixture(scope="session")
def hybrid() -> nn.Module:
    """Single BN, trained on clean and adversarial images at eps 0.3: PGD-10 24 %, worst case 3 %."""
    return train(eps=0.3, clean=True, epochs=10)


@pytest.fixture(scope="session")
def dual() -> nn.Module:
    """Two branches."""
    return train(norm="dual_bn", eps=0.2, clean=True, epochs=5)


@pytest.fixture(scope="session")
def data() -> tuple[torch.Tensor, torch.Tensor]:
    return digits("test")
