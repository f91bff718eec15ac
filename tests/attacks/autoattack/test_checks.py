"""Warnings about models for which AutoAttack is not reliable."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from support.autoattack_models import Wrapped, quick
from support.problems import raises_problem


def warnings(model: nn.Module, linf, count: int = 40, **settings) -> dict[str, str]:
    result = quick(linf.threat, **settings).evaluate(model, *linf.first(count))
    return {warning.name: warning.message for warning in result.warnings}


class WithGradients(nn.Module):
    """Purifies its input by a gradient step of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            point = x.detach().requires_grad_()
            (grad,) = torch.autograd.grad(self.model(point).logsumexp(1).sum(), point)
        return self.model(x + 0.001 * grad)


class Straight(torch.autograd.Function):
    """Rounds, with the gradient of rounding: zero."""

    @staticmethod
    def forward(ctx, x):
        return (x * 10).round() / 10

    @staticmethod
    def backward(ctx, grad):
        return torch.zeros_like(grad)


def test_a_sound_model_gets_no_warning(linf):
    assert warnings(linf.model, linf, targets=9) == {}


def test_unreliable_models_get_a_warning(linf):
    model = linf.model
    noisy = Wrapped(model, before=lambda x: x + 0.05 * torch.randn_like(x))
    assert "use version='rand'" in warnings(noisy, linf)["randomized"]
    assert set(warnings(noisy, linf, version="rand", samples=3)) == set()
    assert "version='standard'" in warnings(model, linf, version="rand", samples=3)["deterministic"]
    assert "without softmax" in warnings(Wrapped(model, after=lambda z: z.softmax(1)), linf)["probabilities"]
    assert "dynamic defence" in warnings(WithGradients(model), linf)["dynamic"]
    centred = Wrapped(model, before=lambda x: x - x.mean(0))
    assert "other images" in warnings(centred, linf)["batch-dependent"]


def test_masked_gradients_get_a_warning(linf):
    rounded = Wrapped(linf.model, before=Straight.apply)
    found = warnings(rounded, linf, count=100, queries=400)
    assert set(found) == {"zero-gradients", "square-better"} and "masked gradients" in found["square-better"]
    assert found == warnings(rounded, linf, count=100, queries=400, precision="tf32")
    assert "square-better" in warnings(rounded, linf, count=100, queries=400, precision="bf16")
    first = ("apgd-ce", "square", "apgd-t")  # as in `plus`, where attacks by gradients come after it too
    assert "square-better" in warnings(rounded, linf, count=100, queries=400, attacks=first)
    assert "square-better" not in warnings(rounded, linf, count=100, queries=400, attacks=("square", "apgd-ce"))
    saturated = Wrapped(linf.model, after=lambda z: (1e4 * z).softmax(1) * 20)
    assert "zero-gradients" in warnings(saturated, linf)


def test_on_a_model_without_gradients_only_square_runs(linf):
    detached = Wrapped(linf.model, after=lambda z: z.detach())
    result = quick(linf.threat, queries=200).evaluate(detached, *linf.first(60))
    assert result.stages == ("clean", "square") and [warning.name for warning in result.warnings] == ["no-gradients"]
    assert result.robust_accuracy < result.clean_accuracy
    with raises_problem("no_gradient", "logits"):
        quick(linf.threat, attacks=("apgd-ce",)).evaluate(detached, *linf.first(60))


@pytest.mark.parametrize("classes", [2, 3])
def test_few_classes_have_fewer_targets(linf, classes):
    few = linf.with_classes(classes)
    result = quick(linf.threat, targets=9).evaluate(few.model, few.x, few.y)
    (warning,) = result.warnings
    assert warning.name == "few-classes"
    assert f"apgd-t had {classes - 1} target classes instead of 9" in warning.message
    assert "apgd-t used the margin instead of the DLR loss" in warning.message
    assert 0 < result.robust_accuracy < result.clean_accuracy
