"""The fast copy for searching computes what the model computes; on a GPU it is also faster."""

import pytest
import torch
from torch import nn

from advnorm import create_model, route, strip
from advnorm.attacks.stand_in import _Fused, fast_stand_in, folded, with_fused_activations
from advnorm.norms import routed_modules

X = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def branch(name, **options):
    model = create_model(name, width=0.125, norm="dual_bn", **options)
    with route(model, "adv"):
        model(X)
        model(X + 1)
    return model.eval()


@pytest.mark.parametrize(
    ("name", "norms", "fused"),
    [("resnet18", 0, 17), ("resnet50", 0, 49), ("vgg11", 0, 8), ("preact_resnet18", 8, 8), ("resnet20", 0, 19)],
)
def test_norms_and_activations_go_into_the_convolutions(name, norms, fused):
    plain = strip(branch(name), "adv")
    small = folded(plain)
    assert sum(isinstance(m, nn.BatchNorm2d) for m in small.modules()) == norms
    fast = with_fused_activations(small)
    assert sum(isinstance(m, _Fused) for m in fast.modules()) == fused
    for network in (small, fast):
        torch.testing.assert_close(network(X), plain(X), rtol=1e-4, atol=1e-4)


def test_other_activations_stay_as_they_are():
    plain = strip(branch("resnet18", activation="silu"), "adv")
    fast = with_fused_activations(folded(plain))
    assert not any(isinstance(m, _Fused) for m in fast.modules())
    torch.testing.assert_close(fast(X), plain(X), rtol=1e-4, atol=1e-4)


def test_a_model_that_cannot_be_traced_stays_as_it_is():
    class Branching(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    model = Branching()
    assert folded(model) is model and with_fused_activations(model) is model


def test_there_is_none_without_a_gpu_or_stored_statistics():
    model = branch("small_cnn")
    assert fast_stand_in(model, route="adv", statistics="running") is None or torch.cuda.is_available()
    assert fast_stand_in(model, route="adv", statistics="batch_frozen") is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["resnet18", "preact_resnet18", "vgg11"])
def test_on_a_gpu_it_agrees_for_every_size_and_for_gradients(name):
    model = branch(name).cuda()
    fast = fast_stand_in(model, route="adv", statistics="running")
    plain = strip(model, "adv")
    for rows in (1, 3, 40, 40, 40, 40, 33, 300, 300, 300, 1100):
        x = X.repeat(300, 1, 1, 1)[:rows].cuda()
        with torch.no_grad():
            expected = plain(x)
            torch.testing.assert_close(fast(x), expected, rtol=0.1, atol=0.1 * expected.abs().max().item())
    x = X.cuda().requires_grad_()
    (gradient,) = torch.autograd.grad(fast(x).sum(), x)
    (expected,) = torch.autograd.grad(plain(x).sum(), x)
    assert torch.nn.functional.cosine_similarity(gradient.flatten(), expected.flatten(), dim=0) > 0.95
    assert all(module.state.route is None for module in routed_modules(model).values())
