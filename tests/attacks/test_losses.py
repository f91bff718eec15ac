"""Losses of confident networks: gradients against formulas in float64, and their effect on FGSM and PGD (trap 25)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from advnorm.attacks import APGD, FGSM, PGD
from advnorm.attacks.losses import LOSSES, cross_entropy, kl_to_clean, misclassified, published_cross_entropy
from advnorm.threat import ThreatModel
from support.confident import DEVICES, confident_network, exact_direction, margins

CLASSES = 10


@pytest.fixture(scope="module")
def logits() -> tuple[Tensor, Tensor]:
    """Logits whose label wins by 0 to 80."""
    generator = torch.Generator().manual_seed(0)
    z = 3 * torch.randn(400, CLASSES, generator=generator)
    y = torch.randint(CLASSES, (400,), generator=generator)
    return z.scatter(1, y[:, None], z.amax(1, keepdim=True) + torch.linspace(0, 70, 400)[:, None]), y


def gradient(loss, z: Tensor) -> Tensor:
    z = z.clone().requires_grad_()
    return torch.autograd.grad(loss(z).sum(), z)[0]


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float(((found.double() - expected).norm(dim=1) / expected.norm(dim=1)).max())


def by_formula(z: Tensor, y: Tensor) -> Tensor:
    """``(1 - p_y) (softmax over the other classes - e_y)``, without a difference of nearly equal numbers."""
    z = z.double()
    others = z.scatter(1, y[:, None], -torch.inf)
    share = torch.sigmoid(others.logsumexp(1) - z.gather(1, y[:, None])[:, 0])
    return share[:, None] * (others.softmax(1) - F.one_hot(y, CLASSES))


def test_the_gradient_of_cross_entropy_keeps_its_direction_for_confident_logits(logits):
    z, y = logits
    assert relative_error(gradient(lambda z: cross_entropy(z, y), z), by_formula(z, y)) < 1e-5
    assert relative_error(gradient(lambda z: published_cross_entropy(z, y), z), by_formula(z, y)) > 0.5


def test_cross_entropy_is_that_of_torch_in_value_and_gradient():
    generator = torch.Generator().manual_seed(1)
    z = 4 * torch.randn(300, CLASSES, generator=generator, dtype=torch.float64)
    y = torch.randint(CLASSES, (300,), generator=generator)
    torch.testing.assert_close(cross_entropy(z, y), F.cross_entropy(z, y, reduction="none"), rtol=1e-12, atol=1e-13)
    found, expected = (gradient(lambda z, f=f: f(z, y), z) for f in (cross_entropy, published_cross_entropy))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-13)
    assert torch.autograd.gradcheck(lambda z: cross_entropy(z, y[:5]), z[:5].clone().requires_grad_())


def test_the_gradient_of_the_divergence_keeps_its_direction_for_confident_logits(logits):
    """It is ``p(adv) - p(clean)``, whose largest component is minus the sum of the others."""
    z, y = logits
    clean = z + 0.5 * torch.randn(z.shape, generator=torch.Generator().manual_seed(2))
    difference = (z.double().softmax(1) - clean.double().softmax(1)).scatter(1, y[:, None], 0)
    expected = difference.scatter(1, y[:, None], -difference.sum(1, keepdim=True))
    rows = clean.argmax(1) == y
    found = gradient(lambda z: kl_to_clean(z, clean.log_softmax(1)), z)
    assert rows.sum() > 390 and relative_error(found[rows], expected[rows]) < 1e-3
    usual = gradient(
        lambda z: F.kl_div(z.log_softmax(1), clean.log_softmax(1), reduction="none", log_target=True).sum(1), z
    )
    assert relative_error(usual[rows], expected[rows]) > 0.5


@pytest.mark.parametrize("device", DEVICES)
def test_fgsm_on_a_confident_network_takes_the_step_of_the_exact_gradient(device):
    model, x, y = confident_network(device)
    assert margins(model, x, y).median() > 20
    eps = 0.2
    found = FGSM(threat=ThreatModel(eps=eps))(model, x, y)
    expected = (x + eps * exact_direction(model, x, y).sign().float()).clamp(0, 1)
    different = (found - expected).abs() > 1e-5
    assert different.double().mean() < 1e-3  # components of the gradient near zero
    robust, exact = ((model(images).argmax(1) == y).double().mean() for images in (found, expected))
    assert abs(robust - exact) <= 1 / len(y)


@pytest.mark.parametrize("device", DEVICES)
def test_pgd_on_a_confident_network_leaves_what_the_exact_gradient_leaves(device):
    model, x, y = confident_network(device)
    threat, step = ThreatModel(eps=0.15), 0.0375
    found = PGD(threat=threat, steps=10, step_size=step, start="clean")(model, x, y)
    expected = x
    for _ in range(10):
        expected = threat.project(expected + step * exact_direction(model, expected, y).sign().float(), x)
    robust, exact = ((model(images).argmax(1) == y).double().mean() for images in (found, expected))
    assert abs(robust - exact) <= 2 / len(y)
    assert (found - expected).abs().gt(1e-5).double().mean() < 0.01


def test_autoattack_keeps_the_published_cross_entropy(logits):
    z, y = logits
    value = APGD(threat=ThreatModel(eps=0.1), loss="ce")._value(CLASSES)
    assert torch.equal(value(z, y, y), F.cross_entropy(z, y, reduction="none"))
    assert LOSSES["ce"].untargeted is cross_entropy


def test_a_nan_logit_counts_as_a_misclassification():
    """PyTorch's argmax returns the class of a NaN, which may be the label."""
    z = torch.tensor([[torch.nan, 0.0], [0.0, torch.nan], [1.0, 0.0], [0.0, 1.0]])
    assert misclassified(z, torch.zeros(4, dtype=torch.long)).tolist() == [True, True, False, True]
