"""Images, models and assertions for the attack contract: inside ball and box, and the model unchanged bit for bit."""

from __future__ import annotations

import dataclasses
import random
from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import advnorm
from advnorm import attacks
from advnorm._core.seeding import ImageNoise
from advnorm.attacks import Attack
from advnorm.threat import ThreatModel

ORDER = {"Linf": torch.inf, "L2": 2, "L1": 1}
LINF = ThreatModel(norm="Linf", eps="8/255")
#: At most this much, so that an attack is quick without leaving out any of its parts; and restarts for all.
QUICK = {"steps": 3, "queries": 12, "targets": 2, "samples": 3}
NAMES = attacks.list_attacks()
#: Options that change what a search does, and not only how long.
COMBINED = ["apgd-eot-bpda", "apgd-smooth-targets9-bpda", "fab-t-minimal"]
WITHOUT_MODEL = {"noise-uniform", "noise-gaussian", "noise-binary"}


def quick(name: str, threat: ThreatModel = LINF, **settings: Any) -> Attack:
    attack = attacks.get(name, threat=threat, **settings)
    fields = {field.name for field in dataclasses.fields(attack)}
    small = {key: min(getattr(attack, key), most) for key, most in QUICK.items() if key in fields}
    if "restarts" in fields and name not in WITHOUT_MODEL and name != "fgsm":
        small["restarts"] = 2
    return dataclasses.replace(attack, **small)


def pictures(count: int = 6, seed: int = 0, size: int = 8) -> tuple[Tensor, Tensor]:
    """Images with pixels at 0 and 1 among them, and labels."""
    noise = ImageNoise(seed, torch.arange(count)).fold("pictures")
    x = (1.4 * noise.uniform((3, size, size), "x") - 0.2).clamp(0, 1)
    return x, noise.integers(10, (), "y")


def routed_model() -> nn.Module:
    torch.manual_seed(0)
    model = advnorm.create_model("small_cnn", num_classes=10, norm="dual_bn")
    x, _ = pictures(32, seed=9)
    for domain, shift in (("clean", 0.0), ("adv", 0.3)):  # branches that differ
        with advnorm.route(model, domain), torch.no_grad():
            model(x + shift)
    return model


def plain_model() -> nn.Sequential:
    """In train mode, with dropout, one norm frozen by its owner and one convolution without gradients."""
    torch.manual_seed(1)
    model = nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(3, 8, 3, padding=1),
            bn1=nn.BatchNorm2d(8),
            act1=nn.ReLU(),
            drop=nn.Dropout(0.5),
            conv2=nn.Conv2d(8, 8, 3, stride=2, padding=1),
            frozen=nn.BatchNorm2d(8),
            act2=nn.ReLU(),
            flat=nn.Flatten(),
            fc=nn.Linear(128, 10),
        )
    )
    x, y = pictures(32, seed=9)
    nn.functional.cross_entropy(model(x), y).backward()  # moves the statistics and leaves gradients behind
    model.frozen.eval()
    model.conv1.requires_grad_(False)
    return model


MODELS = {"routed": (routed_model, "adv"), "plain": (plain_model, None)}


def snapshot(model: nn.Module) -> dict[str, Any]:
    """All that an attack must not change, with version counters, so that not even an equal value is written."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        "identity": {name: id(t) for name, t in tensors.items()},
        "version": {name: t._version for name, t in tensors.items()},
        "bits": {name: t.detach().clone() for name, t in tensors.items()},
        "requires_grad": {name: p.requires_grad for name, p in model.named_parameters()},
        "grad": {
            name: (id(p.grad), None if p.grad is None else p.grad.clone()) for name, p in model.named_parameters()
        },
        "attributes": {
            name: {k: v for k, v in vars(m).items() if not k.startswith("_") and not isinstance(v, Tensor)}
            for name, m in model.named_modules()
        },
        "random": (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()),  # noqa: NPY002
        "grad_mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
    }


def assert_same(before: Any, after: Any, where: str = "") -> None:
    assert type(before) is type(after), where
    if isinstance(before, dict):
        assert before.keys() == after.keys(), where
        for key in before:
            assert_same(before[key], after[key], f"{where}/{key}")
    elif isinstance(before, tuple):
        assert len(before) == len(after), where
        for position, (a, b) in enumerate(zip(before, after)):
            assert_same(a, b, f"{where}/{position}")
    elif isinstance(before, Tensor):
        assert torch.equal(before, after), where
    elif isinstance(before, np.ndarray):
        assert (before == after).all(), where
    else:
        assert before == after, where


def assert_inside(threat: ThreatModel, x_adv: Tensor, x: Tensor) -> None:
    assert x_adv.dtype == torch.float32 and x_adv.shape == x.shape and x_adv.device == x.device
    assert not x_adv.requires_grad and x_adv.grad_fn is None and not x_adv.is_inference()
    assert x_adv.min() >= 0 and x_adv.max() <= 1
    rows = (x_adv - x).flatten(1)
    assert torch.linalg.vector_norm(rows, ORDER[threat.norm], dim=1).max().item() <= threat.eps
    assert threat.distance(x_adv, x).max().item() <= threat.eps


SMALL = nn.Sequential(nn.Flatten(), nn.Linear(192, 10))
with torch.no_grad():
    SMALL[1].weight.copy_(ImageNoise(0, torch.tensor([0])).normal((10, 192))[0])
    SMALL[1].bias.zero_()


class Returns(nn.Module):
    """A model whose output is wrapped."""

    def __init__(self, wrap) -> None:
        super().__init__()
        self.model, self.wrap = SMALL, wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.model(x))
