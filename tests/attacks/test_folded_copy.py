"""The folded copy computes what the network computes, with norms and activations inside the convolutions."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from advnorm import create_model, route, strip
from advnorm.attacks.folded_copy import FoldedConv, make_folded_copy

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
            copy = make_folded_copy(plain, activations=activations, dtype=torch.float32)
            assert sum(isinstance(m, nn.BatchNorm2d) for m in copy.modules()) == norms
            assert sum(isinstance(m, FoldedConv) and m.relu for m in copy.modules()) == (fused if activations else 0)
            assert copy.folded + norms == sum(isinstance(m, nn.BatchNorm2d) for m in plain.modules())
            same(copy.network, plain, tolerance=1e-4)


def test_in_half_precision_it_is_near():
    plain = strip(branch("resnet18"), "adv")
    logits = make_folded_copy(plain)(X)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, plain(X), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("options", [{"stride": 2, "padding": 1}, {"padding": 2, "dilation": 2, "groups": 2}])
@pytest.mark.parametrize("shortcut", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_fused_activation_has_the_gradients_of_its_parts(options, shortcut, bias):
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 6, 3, bias=bias, **options).double()
    fast = FoldedConv(conv, relu=True, dtype=torch.float64)
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
    fast = FoldedConv(conv, norm, relu=False, dtype=torch.float64)
    fast.refresh()
    torch.testing.assert_close(fast(X.double()), norm(conv(X.double())))


def test_a_copy_of_a_linked_network_follows_it():
    model = branch("resnet18")
    linked = strip(model, "adv", linked=True)
    copy = make_folded_copy(linked, dtype=torch.float32)
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


@pytest.mark.slow
def test_a_compiled_copy_follows_too():
    model = branch("small_cnn")
    copy = make_folded_copy(strip(model, "adv", linked=True))
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
    copy = make_folded_copy(plain, dtype=torch.float32)
    assert not any(isinstance(m, FoldedConv) and m.relu for m in copy.modules())
    same(copy.network, plain, tolerance=1e-4)
    plain = strip(branch("resnet18"), "adv")
    plain.bn1.register_forward_hook(lambda module, args, out: out + 1)
    same(make_folded_copy(plain, dtype=torch.float32).network, plain, tolerance=1e-4)


def test_a_model_that_cannot_be_traced_has_no_copy():
    class Branching(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    assert make_folded_copy(Branching()) is None


# -- networks that are written in other ways ---------------------------------------------------------------------------


class OwnNorm(nn.Module):
    """A batch norm of one's own: with stored statistics, which training feeds."""

    def __init__(self, channels):
        super().__init__()
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("var", torch.ones(channels))

    def forward(self, x):
        scale = (self.var + 1e-5).rsqrt()
        return (x - self.mean[:, None, None]) * scale[:, None, None]


class Written(nn.Module):
    """Parts to write a network of; the tests write it."""

    def __init__(self, write, **parts):
        super().__init__()
        self.a, self.na = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.b, self.nb = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.relu, self.in_place = nn.ReLU(), nn.ReLU(inplace=True)
        self.fc = nn.Linear(8, 5)
        for name, part in parts.items():
            setattr(self, name, part)
        self.write = write

    def forward(self, x):
        return self.fc(self.write(self, x).mean((2, 3)))


def sum_in_place(net, x):
    out = net.na(net.a(x))
    out += net.a(x)
    return F.relu(out)


def sum_in_place_under_another_name(net, x):
    out = net.na(net.a(x))
    other = out
    other += net.a(x)
    return net.relu(other) * out


def sum_into_the_shortcut(net, x):
    shortcut = net.na(net.a(x))
    kept = shortcut
    shortcut += net.nb(net.a(x))
    return net.relu(shortcut) + kept


def output_used_twice(net, x):
    h = net.na(net.a(x))
    return net.in_place(h) + net.b(h)


def functional(net, x):
    h = F.relu(net.na(net.a(x)), inplace=True)
    return torch.relu(torch.add(net.nb(net.b(h)), h))


def scaled_sum(net, x):
    h = net.relu(net.na(net.a(x)))
    return net.relu(torch.add(net.nb(net.b(h)), h, alpha=3))


def sum_with_itself(net, x):
    h = net.na(net.a(x))
    return net.relu(h + h)


def sum_with_a_parameter(net, x):
    return net.relu(net.na(net.a(x)) + net.shift)


def sum_with_its_mean(net, x):
    h = net.relu(net.na(net.a(x)))
    return net.relu(net.nb(net.b(h)) + h.mean((2, 3), keepdim=True))


def sum_of_a_small_one(net, x):
    h = net.relu(net.na(net.a(x)))
    return net.relu(net.nb(net.b(h.mean((2, 3), keepdim=True))) + h)


def sum_with_a_number(net, x):
    return net.relu(net.na(net.a(x)) + 0.1)


def named_arguments(net, x):
    return net.relu(input=net.na(input=net.a(input=x)))


def shared(net, x):
    h = net.relu(net.nb(net.b(net.relu(net.na(net.a(x))))))
    return net.relu(net.na(net.b(h)) + net.nb(net.b(h)))


def chain(net, x):
    return net.relu(net.nb(net.b(net.relu(net.na(net.a(x))))))


def tied(net, x):
    return net.relu(net.nb(net.c(chain(net, x))))


def own_norm(net, x):
    return net.relu(net.own(net.a(x)))


def several_outputs_of_one_convolution(net, x):
    h = net.a(x)
    return net.relu(net.na(h)) + net.relu(net.nb(h)) + net.relu(h)


def dropped(net, x):
    return F.dropout(net.relu(net.na(net.a(F.dropout(x, training=net.training)))), training=net.training)


WRITTEN = {
    write.__name__: (write, {})
    for write in (
        sum_in_place, sum_in_place_under_another_name, sum_into_the_shortcut, output_used_twice, functional, scaled_sum,
        sum_with_itself, sum_with_its_mean, sum_of_a_small_one, sum_with_a_number, named_arguments, shared, chain,
        several_outputs_of_one_convolution, dropped,
    )
}  # fmt: skip
WRITTEN |= {
    "sum_with_a_parameter": (sum_with_a_parameter, {"shift": nn.Parameter(torch.zeros(8, 1, 1))}),
    "own_norm": (own_norm, {"own": OwnNorm(8)}),
    "tied": (tied, {"c": nn.Conv2d(8, 8, 3, padding=1)}),
    "parametrized": (chain, {"b": nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 8, 3, padding=1))}),
    "reflected": (chain, {"b": nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect")}),
    "same size": (chain, {"b": nn.Conv2d(8, 8, 3, padding="same", dilation=2)}),
    "grouped": (chain, {"b": nn.Conv2d(8, 8, (3, 1), padding=(2, 0), dilation=(2, 1), stride=(1, 2), groups=4)}),
    "mean of all batches": (chain, {"na": nn.BatchNorm2d(8, momentum=None, eps=0.1, affine=False)}),
    "statistics of the batch": (chain, {"nb": nn.BatchNorm2d(8, track_running_stats=False)}),
    "another norm": (chain, {"nb": nn.GroupNorm(2, 8)}),
}


def shaken(network, seed):
    """Other parameters and statistics."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in (*network.parameters(), *network.buffers()):
            if value.is_floating_point():
                value.copy_(0.2 + torch.rand(value.shape, generator=generator) - (0.6 if value.dim() > 1 else 0))
    return network.requires_grad_(False)


def written(name):
    write, parts = WRITTEN[name]
    network = Written(write, **copy.deepcopy(parts)).eval()
    if name == "tied":
        network.nb.weight, network.c.weight = network.na.weight, network.b.weight
    return shaken(network, 0)


@pytest.mark.parametrize("name", WRITTEN)
def test_however_a_network_is_written_the_copy_computes_and_follows_it(name):
    network = written(name)
    copied = make_folded_copy(network, dtype=torch.float32, following=True)
    same(copied.network, network, tolerance=1e-4)
    shaken(network, 1)
    copied.refresh()
    same(copied.network, network, tolerance=1e-4)


def test_the_usual_operations_of_residual_networks_are_folded():
    """``F.relu(bn(conv))`` and ``out += shortcut``, as in most public code."""

    def block(net, x):
        x = F.relu(net.na(net.a(x)))
        out = net.nb(net.b(x))
        out += x
        return F.relu(out)

    copied = make_folded_copy(shaken(Written(block).eval(), 0), following=True)
    assert copied.folded == 2 and sum(isinstance(m, FoldedConv) and m.relu for m in copied.modules()) == 2
    assert not any(isinstance(m, nn.BatchNorm2d) for m in copied.modules())


class Called(nn.Module):
    """A network that takes options and returns a mapping."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 7, 2, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.register_buffer("mean", torch.tensor([0.4, 0.5, 0.6]))
        self.fc = nn.Linear(8, 5)

    def forward(self, x, features=False):
        x = self.stem((x - self.mean.view(1, 3, 1, 1)) / 0.25).mean((2, 3))
        return x if features else {"logits": self.fc(x)}


def test_a_network_with_options_that_returns_a_mapping_has_a_copy():
    network = shaken(Called().eval(), 0)
    copied = make_folded_copy(network, following=True)
    assert copied.folded == 1
    expected = network(X)["logits"]
    torch.testing.assert_close(copied(X), expected, rtol=0.05, atol=0.05 * expected.abs().max().item())


def kept(network, **options):
    """The copy, and why there is none."""
    reasons = []
    return make_folded_copy(network, dtype=torch.float32, on_failure=reasons.append, **options), reasons


@pytest.mark.parametrize("where", ["the network", "a block"])
@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"])
def test_hooks_on_what_a_trace_takes_apart_stand_against_a_copy(where, kind):
    network = shaken(nn.Sequential(Written(chain)).eval(), 0)
    seen = []
    getattr(network if where == "the network" else network[0], kind)(lambda *given: seen.append(given))
    copied, reasons = kept(network)
    assert copied is None and "has hooks" in reasons[0] and not seen


def test_a_layer_whose_gradient_a_hook_changes_keeps_it():
    network = shaken(Written(chain).eval(), 0)
    network.b.register_full_backward_hook(lambda module, grads, _: tuple(g if g is None else 3 * g for g in grads))
    same(kept(network)[0].network, network, tolerance=1e-4)


def test_a_tensor_that_the_trace_would_freeze_prevents_a_copy_of_a_network_in_training():
    def moved(net, x):
        return chain(net, x - net.centre)

    network = shaken(Written(moved, centre=torch.tensor(0.1)).eval(), 0)
    copied, reasons = kept(network, following=True)
    assert copied is None and "centre" in reasons[0]
    same(kept(network)[0].network, network, tolerance=1e-4)  # of a network that stays as it is

    def noisy(net, x):
        return chain(net, x + torch.rand(3, 1, 1))  # a trace would take what it drew for a constant

    assert kept(shaken(Written(noisy).eval(), 0), following=True)[0] is None


def test_a_decision_by_a_statistic_is_not_taken_for_good():
    def deciding(net, x):
        return chain(net, x) if net.na.running_mean.sum() > 0 else net.a(x)

    copied, reasons = kept(shaken(Written(deciding).eval(), 0))
    assert copied is None and "control flow" in reasons[0]


# -- on a GPU ----------------------------------------------------------------------------------------------------------

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
FUSED = [pytest.param(shortcut, marks=on_gpu) for shortcut in (False, True)]


def convolved(shortcut, dtype):
    torch.manual_seed(0)
    conv = nn.Conv2d(64, 64, 3, padding=1, device="cuda")
    fast = FoldedConv(conv, relu=True, dtype=dtype)
    fast.refresh()
    x = torch.randn(32, 64, 16, 16, device="cuda", dtype=dtype).contiguous(memory_format=torch.channels_last)
    return fast, (x, torch.randn_like(x)) if shortcut else (x,)


@pytest.mark.parametrize("shortcut", FUSED)
def test_a_fused_kernel_reads_no_memory_that_no_one_wrote(shortcut):
    fast, inputs = convolved(shortcut, torch.bfloat16)
    expected = torch.conv2d(inputs[0].float(), fast.weight.float(), fast.bias.float(), padding=1)
    expected = (expected + inputs[1].float() if shortcut else expected).relu()
    for _ in range(20):
        waste = [torch.full_like(inputs[0], torch.nan) for _ in range(20)]
        del waste  # the allocator hands this memory out again
        torch.testing.assert_close(fast(*inputs).float(), expected, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("shortcut", FUSED)
def test_kernels_that_may_differ_from_run_to_run_are_not_used_where_bits_count(shortcut, monkeypatch):
    fast, inputs = convolved(shortcut, torch.float32)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    expected = torch.conv2d(inputs[0], fast.weight, fast.bias, padding=1)
    assert torch.equal(fast(*inputs), (expected + inputs[1] if shortcut else expected).relu())
