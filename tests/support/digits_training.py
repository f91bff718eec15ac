"""Small networks trained on the embedded digits in seconds, for effects that only a trained network shows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import advnorm
from advnorm.data.digits import digits
from advnorm.objectives import Objective, Standard

BATCH = 64


def train(epochs: int, *, seed: int, wrap: Callable[[Objective], Objective] = lambda objective: objective) -> nn.Module:
    """A network with one BN after standard training inside a wrapper: SGD, one cycle."""
    torch.manual_seed(seed)
    x, y = digits("train")
    model = advnorm.create_model("small_cnn", num_classes=10, norm="bn", in_channels=1, normalize=False)
    objective, steps = wrap(Standard(model)), len(x) // BATCH
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=epochs * steps)
    for epoch in range(epochs):
        for rows in torch.randperm(len(x))[: steps * BATCH].split(BATCH):
            optimizer.zero_grad()
            objective(x[rows], y[rows], index=rows + epoch * len(x)).loss.backward()
            optimizer.step()
            schedule.step()
    return model.eval()


def batches(split: str) -> list[tuple[Tensor, Tensor]]:
    """Whole batches of a split."""
    pairs = zip(*(value.split(BATCH) for value in digits(split)))
    return [(x, y) for x, y in pairs if len(x) == BATCH]


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return float((model(x).argmax(1) == y).float().mean())
