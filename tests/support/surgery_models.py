"""Models for the tests of surgery."""

from __future__ import annotations

import torch
from torch import nn

from advnorm.norms import routed_modules

OPTIONS = {"multi_bn": {"domains": ("a", "b", "c")}}

X = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(3))

X8 = torch.rand(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def trained(model, *shape):
    """A model whose statistics and affine parameters are not those of a fresh one."""
    generator = torch.Generator().manual_seed(1)
    model.train()
    for _ in range(3):
        model(torch.rand(shape, generator=generator) * 2)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) and module.affine:
                module.weight.uniform_(0.5, 1.5, generator=generator)
                module.bias.uniform_(-0.5, 0.5, generator=generator)
    return model.eval()


def disturb(model):
    """Make every bank of a routed model different from the others."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for module in routed_modules(model).values():
            for name, value in [*module.named_parameters(), *module.named_buffers()]:
                if value.is_floating_point():
                    noise = torch.rand(value.shape, generator=generator)
                    value.copy_(0.5 + noise if "var" in name else value + 0.3 * noise)
    return model


def tiny(dim=2, classes=4):
    conv, norm = getattr(nn, f"Conv{dim}d"), getattr(nn, f"BatchNorm{dim}d")
    return nn.Sequential(
        conv(3, 8, 3, padding=1), norm(8), nn.ReLU(), conv(8, 8, 3), norm(8), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4)
    )


def logits(model, x):
    out = model(x)
    return out if isinstance(out, torch.Tensor) else out.logits


def net():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))
