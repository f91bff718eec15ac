"""Hybrid PGD training in plain PyTorch: the loops that the benchmark of training compares with."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from advnorm._core.precision import choose_kernels, float32_as
from advnorm.attacks import PGD
from advnorm.config import AttackConfig, Config, Named
from advnorm.config.fields import PrecisionName
from advnorm.data import ImageData
from advnorm.models import create_model
from advnorm.surgery import strip
from advnorm.training.build import data_properties, network_options, resolve_auto
from advnorm.training.compilation import CompiledFunction, Log, allow_variants
from advnorm.training.ranks import Ranks
from advnorm.training.step_program import autocast

#: Hybrid training (paper A, eq. 2), as the plain loops do it and as the benchmark measures it by default.
HYBRID = Config(
    model=Named("resnet18"),
    norm="dual_bn",
    data=Named("synthetic"),
    objective=Named("hybrid"),
    eps="16/255",
    attack=AttackConfig(steps=10, step_size="2/255"),
    augment="crop_flip",
    lr=0.01,
    nesterov=True,
    epochs=10_000,
    held_out=0,
    validate_every=0,
)
#: Settings that the plain loops follow, or that cost them nothing.
_FOLLOWED = (
    "model", "norm", "norm_options", "data", "augment", "eps", "batch_size", "lr", "momentum", "nesterov",
    "weight_decay", "precision", "channels_last", "compile", "deterministic", "seed", "name",
)  # fmt: skip


def has_plain_loop(config: Config) -> bool:
    """Whether the plain loops train like this configuration, except for the norm and the augmentation."""
    attack = ("steps", "step_size", "start")
    starts = config.attack.start in ("uniform", "clean")
    return starts and _equal(config, HYBRID, (*_FOLLOWED, "attack")) and _equal(config.attack, HYBRID.attack, attack)


def _equal(settings: Config | AttackConfig, others: Config | AttackConfig, but: Sequence[str]) -> bool:
    names = [field.name for field in fields(settings) if field.name not in but]
    return all(getattr(settings, name) == getattr(others, name) for name in names)


class PlainLoop:
    """The loop of most public code: float32 with TF32, eager.

    ``careful``: the strongest loop that a careful user writes. It has bf16 autocast with losses in float32,
    channels-last, no gradients of the weights in the attack, and a fused optimizer. Precision and memory format are
    those of the configuration, so that the CPU uses float32. ``compiled``: the network is compiled, once for the attack
    and once for training. All loops let cuDNN choose its fastest kernels, keep the images on the device as floats, do
    not augment them, and never wait for the device.
    """

    def __init__(
        self, config: Config, data: ImageData, ranks: Ranks, log: Log, *, careful: bool = False, compiled: bool = False
    ) -> None:
        config, device = resolve_auto(config, ranks.device), ranks.device
        attack = config.build_attack()
        assert isinstance(attack, PGD)
        self.pgd, self.careful, self.device = attack, careful, device
        self.precision: PrecisionName = config.precision if careful else "tf32"
        self.rows = config.batch_size // ranks.world
        self.layout = torch.channels_last if careful and config.channels_last is True else torch.contiguous_format
        torch.manual_seed(config.seed)
        own_norms = create_model(config.model.name, norm=None, **network_options(config, data_properties(data)))
        self.model = strip(own_norms).to(device)
        if self.layout == torch.channels_last:
            self.model.to(memory_format=self.layout)  # pyright: ignore[reportCallIssue]
        self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.SGD(
            self.trained,
            lr=config.lr,
            momentum=config.momentum,
            nesterov=config.nesterov,
            weight_decay=config.weight_decay,
            fused=True if careful and device.type == "cuda" else None,
        )
        self.training: Any = self.model if ranks.world == 1 else DistributedDataParallel(self.model)
        self.attacked: Any = self.model
        if compiled:
            self.training = CompiledFunction(self.training, "the training network of the plain loop", log)
            self.attacked = CompiledFunction(self.attacked, "the attacked network of the plain loop", log)
        images = data.images[: 16 * config.batch_size].to(device)
        images = images.float() / 255 if images.dtype == torch.uint8 else images.float()
        self.images = images.contiguous(memory_format=self.layout)
        self.labels = data.labels[: len(images)].to(device)
        torch.manual_seed(config.seed + ranks.rank)  # each process draws images of its own

    def run(self, steps: int) -> None:
        """Train with random batches."""
        with self.scope():
            for _ in range(steps):
                chosen = torch.randint(len(self.images), (self.rows,), device=self.device)
                self.step(self.images[chosen].contiguous(memory_format=self.layout), self.labels[chosen])

    @contextmanager
    def scope(self) -> Any:
        """Scope of the training: the precision of products in float32, and the choice of kernels."""
        with ExitStack() as stack:
            stack.enter_context(allow_variants())
            stack.enter_context(float32_as("ieee" if self.precision == "float32" else "tf32", self.device))
            stack.enter_context(choose_kernels(deterministic=False))
            yield

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """Train with a batch; return its loss."""
        x_adv = self.attack(x, y)
        logits = self.forward(self.training, torch.cat([x, x_adv]))
        loss = F.cross_entropy(logits, torch.cat([y, y]))  # the mean of both halves, which have the same size
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def attack(self, x: Tensor, y: Tensor) -> Tensor:
        """PGD on the running statistics."""
        eps = self.pgd.threat.eps
        low, high = (x - eps).clamp_(min=0), (x + eps).clamp_(max=1)
        x_adv = x
        if self.pgd.start == "uniform":
            x_adv = torch.clamp(x + torch.empty_like(x).uniform_(-eps, eps), low, high)
        self.model.eval()
        self._train_weights(not self.careful)
        for _ in range(self.pgd.steps):
            x_adv = x_adv.detach().requires_grad_()
            loss = F.cross_entropy(self.forward(self.attacked, x_adv), y)
            (gradient,) = torch.autograd.grad(loss, x_adv)
            x_adv = torch.clamp(x_adv.detach() + self.pgd.step * gradient.sign(), low, high)
        self._train_weights(True)
        self.model.train()
        return x_adv

    def forward(self, network: Any, x: Tensor) -> Tensor:
        """Logits in float32."""
        with autocast(self.precision, self.device):
            return network(x).float()

    def _train_weights(self, flag: bool) -> None:
        for parameter in self.trained:
            parameter.requires_grad_(flag)
