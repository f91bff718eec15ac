"""A confident network, and its loss gradient by a formula that neither cancels nor underflows in float64."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

#: The devices on which the directions are compared with the formula.
DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
    ),
]


@cache
def confident_network(device: str = "cpu") -> tuple[nn.Sequential, Tensor, Tensor]:
    """A plainly trained network whose median margin is beyond 20, and 200 images that it classifies correctly."""
    data = load_digits()
    x, y = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16, torch.tensor(data.target)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.GELU(), nn.Flatten(), nn.Linear(1024, 32), nn.GELU(), nn.Linear(32, 10)
        )
        optimizer = torch.optim.Adam(model.parameters(), 3e-3)
        for _ in range(12):
            for rows in torch.randperm(1500).split(100):
                optimizer.zero_grad()
                F.cross_entropy(model(x[rows]), y[rows]).backward()
                optimizer.step()
    with torch.no_grad():
        model[-1].weight *= 4
        model[-1].bias *= 4
        right = model(x).argmax(1) == y
    return model.eval().requires_grad_(False).to(device), x[right][-200:].to(device), y[right][-200:].to(device)


def margins(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """``z_y - log Σ_{j≠y} exp(z_j)`` in float64."""
    logits = copy.deepcopy(model).double()(x.double())
    return logits.gather(1, y[:, None])[:, 0] - logits.scatter(1, y[:, None], -torch.inf).logsumexp(1)


def exact_direction(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The direction of each image's loss gradient in float64: that of ``-margin``, with which cross-entropy grows."""
    x = x.double().requires_grad_()
    (gradient,) = torch.autograd.grad(-margins(model, x, y).sum(), x)
    return F.normalize(gradient.flatten(1), dim=1).view(x.shape)
