"""The copy to climb on computes what the network computes, with norms and activations inside the convolutions."""

import pytest
import torch
from torch import nn

from advnorm import create_model, route, strip
from advnorm.attacks.fast_copy import FastConv, fast_copy

X = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def branch(name, **options):
    torch.manual_seed(0)
    model = create_model(name, width=0.125, norm="dual_bn", **options)
    with route(model, "adv"):
        model(X)
        model(X + 1)
    return model.eval()


def gradient_of(network, x):
    """Of a sum in which every logit counts differently."""
    x = x.detach().requires_grad_()
    logits = network(x)
    weights = torch.arange(1.0, 1 + logits.shape[1])
    return torch.autograd.grad((logits.softmax(1) * weights).sum(), x)[0]


def same(copy, plain, *, tolerance):
    expected, gradient = plain(X), gradient_of(plain, X)
    torch.testing.assert_close(copy(X), expected, rtol=tolerance, atol=tolerance * expected.abs().max().item())
    bound = 10 * tolerance * gradient.abs().max().item()
    torch.testing.assert_close(gradient_of(copy, X), gradient, rtol=10 * tolerance, atol=bound)


@pytest.mark.parametrize(
    ("name", "norms", "fused"),
    [("resnet18", 0, 17), ("resnet50", 0, 49), ("vgg11", 0, 8), ("preact_resnet18", 8, 8), ("resnet20", 0, 19)],
)
def test_norms_and_activations_go_into_the_convolutions(name, norms, fused):
    plain = strip(branch(name), "adv")
    with torch.autocast("cpu", enabled=False):
        for activations in (False, True):
            # In float32, so that nothing but the order of sums differs.
            copy = fast_copy(plain, activations=activations, dtype=torch.float32)
            assert sum(isinstance(m, nn.BatchNorm2d) for m in copy.modules()) == norms
            assert sum(isinstance(m, FastConv) and m.relu for m in copy.modules()) == (fused if activations else 0)
            assert copy.folded + norms == sum(isinstance(m, nn.BatchNorm2d) for m in plain.modules())
            same(copy.network, plain, tolerance=1e-4)


def test_in_half_precision_it_is_near():
    plain = strip(branch("resnet18"), "adv")
    logits = fast_copy(plain)(X)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, plain(X), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("options", [{"stride": 2, "padding": 1}, {"padding": 2, "dilation": 2, "groups": 2}])
@pytest.mark.parametrize("shortcut", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_fused_activation_has_the_gradients_of_its_parts(options, shortcut, bias):
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 6, 3, bias=bias, **options).double()
    fast = FastConv(conv, relu=True, dtype=torch.float64)
    fast.refresh()
    x = torch.randn(2, 4, 7, 7, dtype=torch.float64, requires_grad=True)
    inputs = (x, torch.randn_like(conv(x)).requires_grad_()) if shortcut else (x,)
    assert torch.autograd.gradcheck(fast, inputs)
    torch.testing.assert_close(fast(*inputs), (conv(x) + inputs[1] if shortcut else conv(x)).relu())


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_folded_norm_is_the_norm(affine, bias):
    torch.manual_seed(0)
    conv, norm = nn.Conv2d(3, 6, 3, bias=bias).double(), nn.BatchNorm2d(6, affine=affine, eps=0.1).double()
    for value in (*norm.parameters(), norm.running_mean, norm.running_var):
        nn.init.uniform_(value, 0.5, 2)
    norm.eval()
    fast = FastConv(conv, norm, relu=False, dtype=torch.float64)
    fast.refresh()
    torch.testing.assert_close(fast(X.double()), norm(conv(X.double())))


def test_a_copy_of_a_linked_network_follows_it():
    model = branch("resnet18")
    linked = strip(model, "adv", linked=True)
    copy = fast_copy(linked, dtype=torch.float32)
    before = strip(model, "adv")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train()
    with route(model, {"clean": 2, "adv": 2}):
        model(X).square().mean().backward()
    optimizer.step()
    model.eval()
    same(copy.network, before, tolerance=1e-4)  # as it was at the last refresh
    copy.refresh()
    after = strip(model, "adv")
    assert not torch.allclose(after(X), before(X), rtol=0.01)
    same(copy.network, after, tolerance=1e-4)
    same(linked, after, tolerance=1e-6)


def test_a_compiled_copy_follows_too():
    model = branch("small_cnn")
    copy = fast_copy(strip(model, "adv", linked=True))
    compiled = torch.compile(copy, dynamic=False)
    gradient_of(compiled, X)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    copy.refresh()
    torch.testing.assert_close(gradient_of(compiled, X), gradient_of(copy, X), rtol=0.05, atol=1e-3)
    torch.testing.assert_close(compiled(X), strip(model, "adv")(X), rtol=0.05, atol=0.05)


def test_what_has_hooks_or_other_activations_stays_as_it_is():
    plain = strip(branch("resnet18", activation="silu"), "adv")
    copy = fast_copy(plain, dtype=torch.float32)
    assert not any(isinstance(m, FastConv) and m.relu for m in copy.modules())
    same(copy.network, plain, tolerance=1e-4)
    plain = strip(branch("resnet18"), "adv")
    plain.bn1.register_forward_hook(lambda module, args, out: out + 1)
    same(fast_copy(plain, dtype=torch.float32).network, plain, tolerance=1e-4)


def test_a_model_that_cannot_be_traced_has_no_copy():
    class Branching(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    assert fast_copy(Branching()) is None
