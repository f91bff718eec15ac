"""The attacked model splits forwards and gradients into batches that fit into memory."""

from __future__ import annotations

import torch
from torch import Tensor

from advnorm._core.memory import AdaptiveBatchSize
from advnorm.attacks.victim import VictimModel


def test_a_victim_splits_forwards_and_gradients(linf):
    x, y = linf.first(20)
    whole, parts = VictimModel(linf.model), VictimModel(linf.model, memory=AdaptiveBatchSize(7))

    def value(logits: Tensor, part: slice) -> Tensor:
        return logits[torch.arange(len(logits)), y[part]]

    assert torch.allclose(whole.strict_logits(x), parts.strict_logits(x), atol=1e-5)
    for a, b in zip(whole.gradient(x, value), parts.gradient(x, value)):
        assert torch.allclose(a, b, atol=1e-5)
    for a, b in zip(whole.jacobian(x), parts.jacobian(x)):
        assert torch.allclose(a, b, atol=1e-5)
    assert (whole.forwards, whole.backwards) == (60, 20 + 200)


def test_the_jacobian_holds_the_gradient_of_each_logit(linf):
    x, _ = linf.first(3)
    expected = torch.stack([torch.autograd.functional.jacobian(lambda v: linf.model(v[None])[0], image) for image in x])
    assert torch.allclose(VictimModel(linf.model).jacobian(x)[1], expected, atol=1e-5)
