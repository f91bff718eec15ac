"""The oracles themselves: against torch's own layers, against NumPy, and by finite differences."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from support.objective_oracles import (
    CONCATENATED,
    Network,
    convolution,
    crafted,
    cross_entropy,
    forwards,
    images,
    kl,
    mixed,
    pairing,
    tiny,
)

X, Y = images(5)


def logits(seed: int) -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3


def test_the_convolution_by_hand_is_torchs():
    model = tiny()
    x = X.double()
    expected = F.conv2d(x, model.conv1.weight, model.conv1.bias)
    torch.testing.assert_close(convolution(x, model.conv1.weight, model.conv1.bias), expected)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_losses_by_hand_are_those_of_numpy_and_torch(smoothing):
    a, b = logits(0), logits(1)
    torch.testing.assert_close(
        cross_entropy(a, Y, smoothing), F.cross_entropy(a, Y, reduction="none", label_smoothing=smoothing)
    )
    p, q = (np.exp(z.numpy()) / np.exp(z.numpy()).sum(1, keepdims=True) for z in (a, b))
    np.testing.assert_allclose(kl(a, b).numpy(), (p * np.log(p / q)).sum(1))
    np.testing.assert_allclose(pairing(a, b).numpy(), ((a - b).numpy() ** 2).mean(1))


def test_a_mean_with_all_clean_images_is_the_papers_equation():
    clean, adv = logits(2)[:, 0], logits(3)[:, 0]
    torch.testing.assert_close(mixed(clean, adv, 0.3), 0.3 * clean.mean() + 0.7 * adv.mean())


@pytest.mark.parametrize("layout", ["sequential", "concatenated"])
def test_the_network_by_hand_is_the_built_in_one(layout):
    model = tiny(plain=True)
    network = Network(model)
    found = forwards(network, X, crafted(X), layout=layout)
    if layout == "concatenated":
        clean, adv = model(torch.cat([X, crafted(X)])).chunk(2)
    else:
        clean, adv = model(X), model(crafted(X))
    torch.testing.assert_close(found, {"clean": clean, "adv": adv}, rtol=1e-10, atol=1e-12)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(network.buffers[name].to(buffer.dtype), buffer, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("norm", CONCATENATED)
def test_gradients_of_the_oracle_are_finite_differences(norm):
    network = Network(tiny(norm, dual_head=True))

    def loss() -> torch.Tensor:
        network.likelihoods.clear()
        out = forwards(network, X, crafted(X))
        total = mixed(cross_entropy(out["clean"], Y), cross_entropy(out["adv"], Y), 0.3)
        total = total + 2 * kl(out["clean"], out["adv"]).mean() + 0.1 * pairing(out["clean"], out["adv"]).mean()
        return total + 0.01 * sum(network.likelihoods, torch.zeros(()))

    loss().backward()
    checked = 0
    for name, value in network.parameters.items():
        flat = value.detach().view(-1)
        for i in {0, len(flat) // 2}:
            original, step = flat[i].item(), 1e-6
            values = []
            for sign in (1, -1):
                flat[i] = original + sign * step
                values.append(loss().item())
            flat[i] = original
            slope = (values[0] - values[1]) / (2 * step)
            assert slope == pytest.approx(network.gradients[name].view(-1)[i].item(), rel=1e-5, abs=1e-7), name
            checked += 1
    assert checked >= 16


def test_the_crafted_images_are_images_of_another_distribution():
    x_adv = crafted(X)
    assert x_adv.min() >= 0 and x_adv.max() <= 1
    assert (x_adv.mean() - X.mean()).abs() > 0.05 and x_adv.std() < 0.8 * X.std()
    assert torch.equal(crafted(X[2:3]), x_adv[2:3])
