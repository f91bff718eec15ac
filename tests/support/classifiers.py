"""Tiny classifiers of digits that count their forwards, mask their gradients or need batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import advnorm


class CountingLinear(nn.Module):
    """A linear classifier of 8x8 images that counts its forwards; ``answer`` changes its logits."""

    def __init__(self, answer: Callable[[Tensor], Any] | None = None, classes: int = 10) -> None:
        super().__init__()
        self.fc = nn.Linear(64, classes)
        self.forwards = 0
        self.answer = answer

    def forward(self, x):
        self.forwards += 1
        logits = self.fc(x.flatten(1))
        return logits if self.answer is None else self.answer(logits)


class Masked(nn.Module):
    """A model behind functions that hide its gradients or change its outputs."""

    def __init__(self, model: nn.Module, before=lambda x: x, after=lambda z: z) -> None:
        super().__init__()
        self.model, self.before, self.after = model, before, after

    def forward(self, x):
        return self.after(self.model(self.before(x)))


def perceptron(norm: str | None = None) -> nn.Module:
    """A network whose norm sees one value per channel of an image, so that a single image has no batch statistics."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
    if norm:
        advnorm.convert_norm(model, norm)
    return model


def first(data: tuple[Tensor, Tensor], count: int = 40) -> tuple[Tensor, Tensor]:
    """The first images and labels."""
    return data[0][:count], data[1][:count]
