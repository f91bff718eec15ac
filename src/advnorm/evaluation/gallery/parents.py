"""Networks that the specimens of the gallery are made of: trained once each, by the objectives of this library."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import advnorm.data as data_sets
from advnorm._core.registry import Registry
from advnorm.attacks import FGSM, PGD
from advnorm.data.gather import gather
from advnorm.evaluation.gallery.defences import (
    KWTA,
    Change,
    SteepTanh,
    Thermometer,
    noise,
    random_resize,
    replace_activations,
)
from advnorm.models import create_model
from advnorm.objectives import AWP, KL, TRADES, Classical, Hybrid
from advnorm.threat import ThreatModel

#: A loss of a batch: images, labels and the rows of the images.
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The data of a gallery and the sizes that fit them."""

    data: str
    model: str
    eps: float
    #: At this radius hybrid training with a single batch norm is falsely robust (papers A and C).
    large_eps: float
    small_eps: float
    l2_eps: float
    epochs: int
    batch_size: int
    learning_rate: float


SCALES = {
    "digits": Scale(
        data="digits",
        model="small_cnn",
        eps=0.2,
        large_eps=0.3,
        small_eps=0.1,
        l2_eps=0.8,
        epochs=6,
        batch_size=128,
        learning_rate=0.2,
    ),
    "cifar10": Scale(
        data="cifar10",
        model="resnet18",
        eps=8 / 255,
        large_eps=16 / 255,
        small_eps=4 / 255,
        l2_eps=0.5,
        epochs=10,
        batch_size=512,
        learning_rate=0.2,
    ),
}


class Parents:
    """Trains each parent on first use, with random numbers that follow from the seed and its name alone."""

    def __init__(
        self, scale: Scale = SCALES["digits"], seed: int = 0, data_dir: Path | str | None = None, device: str = "cpu"
    ) -> None:
        self.scale, self.seed, self.data_dir, self.device = scale, seed, data_dir, torch.device(device)
        self._trained: dict[str, nn.Module] = {}

    @cached_property
    def train_data(self) -> tuple[Tensor, Tensor]:
        return self._load("train")

    @cached_property
    def test_data(self) -> tuple[Tensor, Tensor]:
        return self._load("test")

    def _load(self, split: str) -> tuple[Tensor, Tensor]:
        return gather(data_sets.load(self.scale.data, split, self.data_dir))

    def get(self, name: str) -> nn.Module:
        """Return a trained parent. Specimens copy what they change."""
        if name not in self._trained:
            with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
                torch.manual_seed(self.seed)
                self._trained[name] = PARENTS.get(name)(self).eval().requires_grad_(False)
        return self._trained[name]

    def network(self, **options: Any) -> nn.Module:
        """Return an untrained network."""
        channels: dict[str, Any] = {"in_channels": self.train_data[0].shape[1]}
        return create_model(self.scale.model, num_classes=10, **(channels | options)).to(self.device)

    def pgd(self, eps: float | None = None, norm: Any = "Linf", steps: int = 5) -> PGD:
        return PGD(threat=ThreatModel(norm=norm, eps=self.scale.eps if eps is None else eps), steps=steps)

    def fit(self, model: nn.Module, loss: Loss, *, epochs: int | None = None, peak: float | None = None) -> nn.Module:
        """Train by SGD with one cycle of the learning rate."""
        x, y = self.train_data
        size, scale = self.scale.batch_size, self.scale
        batches, epochs = len(x) // size, epochs or scale.epochs
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
        peak = scale.learning_rate if peak is None else peak
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=peak, total_steps=epochs * batches)
        model.train()
        precision = torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()
        for epoch in range(epochs):
            for rows in torch.randperm(len(x)).split(size)[:batches]:
                optimizer.zero_grad()
                index = (rows + epoch * len(x)).to(self.device)
                with precision:
                    value = loss(x[rows].to(self.device), y[rows].to(self.device), index)
                value.backward()
                optimizer.step()
                schedule.step()
        return model

    def standard(
        self,
        model: nn.Module,
        change: Change = lambda x: x,
        label: Change = lambda y: y,
        smoothing: float = 0.0,
        **options: Any,
    ) -> nn.Module:
        """Train on clean images, or on changed ones."""
        return self.fit(
            model, lambda x, y, _: F.cross_entropy(model(change(x)), label(y), label_smoothing=smoothing), **options
        )

    def objective(self, objective: Any, **options: Any) -> nn.Module:
        return self.fit(objective.model, lambda x, y, index: objective(x, y, index=index).loss, **options)


Recipe = Callable[[Parents], nn.Module]
PARENTS: Registry[Recipe] = Registry("parent")
parent = PARENTS.register


@parent("gradient_regularized")
def gradient_regularized(p: Parents) -> nn.Module:
    """The gradient of the loss is penalized at the training images alone (Ross & Doshi-Velez 2018)."""
    model = p.network(activation="silu")

    def loss(x: Tensor, y: Tensor, _: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        value = F.cross_entropy(model(x), y, reduction="none")
        (slope,) = torch.autograd.grad(value.sum(), x, create_graph=True)
        return value.mean() + slope.flatten(1).abs().sum(1).mean() * p.scale.eps

    return p.fit(model, loss, epochs=4 * p.scale.epochs)


@parent("distilled")
def distilled(p: Parents) -> nn.Module:
    """Trained on the probabilities of a teacher; both have their logits divided by the temperature in training."""
    model, teacher = p.network(), p.get("undefended_wide")
    return p.fit(model, lambda x, y, _: F.cross_entropy(model(x), teacher(x).softmax(1)))


@parent("thermometer")
def thermometer(p: Parents) -> nn.Module:
    levels = 16
    network = p.network(in_channels=levels * p.train_data[0].shape[1], normalize=False)
    return p.standard(nn.Sequential(Thermometer(levels).to(p.device), network))


_RECIPES: dict[str, Recipe] = {
    "undefended": lambda p: p.standard(p.network(), epochs=max(p.scale.epochs * 2 // 3, 1)),
    "undefended_wide": lambda p: p.standard(p.network(width=2.0)),
    "undefended_ln": lambda p: p.standard(p.network(norm="ln")),
    "noise_trained": lambda p: p.standard(p.network(), noise(0.3 * p.scale.eps)),
    "noise_trained_strongly": lambda p: p.standard(p.network(width=2.0), noise(p.scale.eps)),
    "dropout_trained": lambda p: p.standard(p.network(width=2.0), lambda x: F.dropout(x, 0.3)),
    "random_resize": lambda p: p.standard(p.network(width=2.0), random_resize, epochs=3 * p.scale.epochs),
    "pgd_at": lambda p: p.objective(Classical(p.network(), p.pgd())),
    "pgd_at_wide": lambda p: p.objective(Classical(p.network(width=2.0), p.pgd())),
    "pgd_at_small_eps": lambda p: p.objective(Classical(p.network(), p.pgd(p.scale.small_eps))),
    "pgd_at_l2": lambda p: p.objective(Classical(p.network(), p.pgd(p.scale.l2_eps, "L2"))),
    "pgd_at_gn": lambda p: p.objective(Classical(p.network(norm="gn"), p.pgd()), epochs=3 * p.scale.epochs),
    "trades": lambda p: p.objective(TRADES(p.network(), p.pgd())),
    "awp": lambda p: p.objective(AWP(Classical(p.network(), p.pgd()))),
    "kl": lambda p: p.objective(KL(p.network(), p.pgd(), kl_weight=3.0), epochs=2 * p.scale.epochs),
    "hybrid_dual": lambda p: p.objective(Hybrid(p.network(norm="dual_bn"), p.pgd())),
    "hybrid_single": lambda p: p.objective(
        Hybrid(p.network(), p.pgd(p.scale.large_eps)), epochs=p.scale.epochs * 5 // 3
    ),
    # One step from the clean image, to which the training overfits (Wong et al. 2020).
    "fgsm_at": lambda p: p.objective(
        Classical(p.network(width=2.0), FGSM(threat=ThreatModel(eps=p.scale.large_eps))), epochs=5 * p.scale.epochs
    ),
    "kwta": lambda p: p.standard(
        replace_activations(p.network(width=2.0), lambda: KWTA(0.05)), epochs=2 * p.scale.epochs
    ),
    "saturating": lambda p: p.standard(replace_activations(p.network(), lambda: SteepTanh(3.0))),
}
for _name, _recipe in _RECIPES.items():
    PARENTS.add(_name, _recipe)
