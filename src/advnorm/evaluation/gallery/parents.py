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
from advnorm.evaluation.gallery.defences import KWTA, RandomResize, SteepTanh, Thermometer, replace_activations
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

    def standard(self, model: nn.Module, **options: Any) -> nn.Module:
        return self.fit(model, lambda x, y, _: F.cross_entropy(model(x), y), **options)

    def objective(self, objective: Any, **options: Any) -> nn.Module:
        return self.fit(objective.model, lambda x, y, index: objective(x, y, index=index).loss, **options)


Recipe = Callable[[Parents], nn.Module]
PARENTS: Registry[Recipe] = Registry("parent")
parent = PARENTS.register


@parent("undefended")
def undefended(p: Parents) -> nn.Module:
    return p.standard(p.network(), epochs=max(p.scale.epochs * 2 // 3, 1))


@parent("undefended_wide")
def undefended_wide(p: Parents) -> nn.Module:
    return p.standard(p.network(width=2.0))


@parent("undefended_ln")
def undefended_ln(p: Parents) -> nn.Module:
    return p.standard(p.network(norm="ln"))


@parent("noise_trained")
def noise_trained(p: Parents) -> nn.Module:
    model = p.network()
    return p.fit(model, lambda x, y, _: F.cross_entropy(model(x + 0.3 * p.scale.eps * torch.randn_like(x)), y))


@parent("pgd_at")
def pgd_at(p: Parents) -> nn.Module:
    return p.objective(Classical(p.network(), p.pgd()))


@parent("pgd_at_wide")
def pgd_at_wide(p: Parents) -> nn.Module:
    return p.objective(Classical(p.network(width=2.0), p.pgd()))


@parent("pgd_at_small_eps")
def pgd_at_small_eps(p: Parents) -> nn.Module:
    return p.objective(Classical(p.network(), p.pgd(p.scale.small_eps)))


@parent("pgd_at_l2")
def pgd_at_l2(p: Parents) -> nn.Module:
    return p.objective(Classical(p.network(), p.pgd(p.scale.l2_eps, "L2")))


@parent("pgd_at_gn")
def pgd_at_gn(p: Parents) -> nn.Module:
    return p.objective(Classical(p.network(norm="gn"), p.pgd()), epochs=3 * p.scale.epochs)


@parent("trades")
def trades(p: Parents) -> nn.Module:
    return p.objective(TRADES(p.network(), p.pgd()))


@parent("awp")
def awp(p: Parents) -> nn.Module:
    return p.objective(AWP(Classical(p.network(), p.pgd())))


@parent("kl")
def kl(p: Parents) -> nn.Module:
    return p.objective(KL(p.network(), p.pgd(), kl_weight=3.0), epochs=2 * p.scale.epochs)


@parent("hybrid_dual")
def hybrid_dual(p: Parents) -> nn.Module:
    return p.objective(Hybrid(p.network(norm="dual_bn"), p.pgd()))


@parent("hybrid_single")
def hybrid_single(p: Parents) -> nn.Module:
    return p.objective(Hybrid(p.network(), p.pgd(p.scale.large_eps)), epochs=p.scale.epochs * 5 // 3)


@parent("fgsm_at")
def fgsm_at(p: Parents) -> nn.Module:
    """One-step training from the clean image, which overfits to that step (Wong et al. 2020)."""
    attack = FGSM(threat=ThreatModel(eps=p.scale.large_eps))
    return p.objective(Classical(p.network(width=2.0), attack), epochs=5 * p.scale.epochs)


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


@parent("dropout_trained")
def dropout_trained(p: Parents) -> nn.Module:
    model = p.network(width=2.0)
    return p.fit(model, lambda x, y, _: F.cross_entropy(model(F.dropout(x, 0.3)), y))


@parent("noise_trained_strongly")
def noise_trained_strongly(p: Parents) -> nn.Module:
    model = p.network(width=2.0)
    return p.fit(model, lambda x, y, _: F.cross_entropy(model(x + p.scale.eps * torch.randn_like(x)), y))


@parent("random_resize")
def random_resize(p: Parents) -> nn.Module:
    model, resize = p.network(width=2.0), RandomResize()
    return p.fit(model, lambda x, y, _: F.cross_entropy(model(resize(x)), y), epochs=3 * p.scale.epochs)


@parent("thermometer")
def thermometer(p: Parents) -> nn.Module:
    levels = 16
    network = p.network(in_channels=levels * p.train_data[0].shape[1], normalize=False)
    return p.standard(nn.Sequential(Thermometer(levels).to(p.device), network))


@parent("kwta")
def kwta(p: Parents) -> nn.Module:
    return p.standard(replace_activations(p.network(width=2.0), lambda: KWTA(0.05)), epochs=2 * p.scale.epochs)


@parent("saturating")
def saturating(p: Parents) -> nn.Module:
    return p.standard(replace_activations(p.network(), lambda: SteepTanh(3.0)))
