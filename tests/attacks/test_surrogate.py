"""The fast copy for searching computes what the model computes; on a GPU it is also faster."""

import pytest
import torch
from torch import nn

from advnorm import ThreatModel, create_model, route, statistics, strip
from advnorm.attacks import AutoAttack, surrogate
from advnorm.attacks.surrogate import CAPTURE_AFTER, MOST_ROWS, CapturedSurrogate, make_surrogate
from advnorm.norms import routed_modules, zero_perturbation

X = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def branch(name, **options):
    model = create_model(name, width=0.125, norm="dual_bn", **options)
    with route(model, "adv"):
        model(X)
        model(X + 1)
    return model.eval()


def test_there_is_none_without_a_gpu_or_stored_statistics():
    model = branch("small_cnn")
    assert make_surrogate(model, route="adv", statistics="running") is None or torch.cuda.is_available()
    assert make_surrogate(model, route="adv", statistics="batch_frozen") is None


def fails(x):
    raise RuntimeError("no such kernel")


@pytest.mark.parametrize(
    ("ways", "kept"),
    [
        ((1.0, 1.001, 2.0), 0),
        ((1.0, 1.5, 2.0), 1),  # the fastest gives another answer
        ((fails, 1.5, 1.501), 1),
        ((fails, fails, 2.0), 2),
        ((1.0, fails, 1.5), 2),
    ],
)
def test_the_fastest_way_that_works_and_agrees_is_kept(monkeypatch, ways, kept):
    monkeypatch.setattr(surrogate, "_CaptureMemory", object)  # which lies on a GPU
    masked = torch.tensor([10.0, -torch.inf])
    ways = [way if callable(way) else (lambda x, way=way: x.flatten(1)[:, :1] * 0 + way * masked) for way in ways]
    fast = CapturedSurrogate(*ways)
    assert torch.equal(fast(X), ways[kept](X)) and fast.eager is ways[kept]


def test_if_no_implementation_works_the_last_one_raises(monkeypatch):
    monkeypatch.setattr(surrogate, "_CaptureMemory", object)
    with pytest.raises(RuntimeError, match="no such kernel"):
        CapturedSurrogate(fails, fails)(X)


class Whole(nn.Module):
    """Does not run under autocast."""

    def __init__(self):
        super().__init__()
        self.network = create_model("small_cnn")

    def forward(self, x):
        if torch.is_autocast_enabled(x.device.type):
            raise RuntimeError("mixed dtype")
        return self.network(x)


def test_a_model_that_does_not_run_in_bfloat16_is_searched_as_it_is():
    model = Whole().eval()
    y = model(X).argmax(1)
    settings = {"threat": ThreatModel(eps=0.05), "steps": 3, "queries": 5}
    fast, strict = (AutoAttack(precision=p, **settings).evaluate(model, X, y) for p in ("bf16", "float32"))
    assert torch.equal(fast.x_adv[~strict.robust], strict.x_adv[~strict.robust])


def gradient_of(network, x):
    """Of a sum in which every logit counts differently."""
    x = x.detach().requires_grad_()
    logits = network(x)
    weights = torch.arange(1.0, 1 + logits.shape[1], device=x.device)
    return torch.autograd.grad((logits.softmax(1) * weights).sum(), x)[0]


def replaying(model, *sizes):
    """A surrogate that has captured forwards and gradients of batches with these numbers of rows."""
    fast = make_surrogate(model, route="adv", statistics="running")
    for rows in sizes:
        x = torch.rand(rows, 3, 32, 32, device="cuda")
        for _ in range(CAPTURE_AFTER + 1):
            gradient_of(fast, x)
            with torch.no_grad():
                fast(x)
    assert len(fast._captured) == 2 * len(sizes)
    return fast


on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("name", ["resnet18", "preact_resnet18", "vgg11"])
def test_replays_compute_what_the_copy_computes(name):
    fast = replaying(branch(name).cuda(), 13, 40)
    for rows in (9, 16, 33, 48, 10, 40):
        x = torch.rand(rows, 3, 32, 32, device="cuda")
        with torch.no_grad():
            expected = fast.eager(x)
            torch.testing.assert_close(fast(x), expected, rtol=0.05, atol=0.02 * expected.abs().max().item())
        expected, gradient = gradient_of(fast.eager, x), gradient_of(fast, x)
        assert gradient.shape == x.shape
        assert torch.nn.functional.cosine_similarity(gradient.flatten(1), expected.flatten(1)).min() > 0.98


@pytest.mark.gpu
@on_gpu
def test_a_gradient_belongs_to_its_own_forward_whatever_came_in_between():
    fast = replaying(branch("resnet18").cuda(), 16, 32)
    images = [torch.rand(rows, 3, 32, 32, device="cuda") for rows in (16, 16, 30)]
    points = [x.clone().requires_grad_() for x in images]
    logits = [fast(point) for point in points]
    with torch.no_grad():
        kept = [value.clone() for value in logits]
        fast(images[0])
    for x, point, value, before in zip(images, points, logits, kept):
        assert torch.equal(value.detach(), before)
        for column in (0, 1):  # two gradients of one forward, as for a Jacobian
            (gradient,) = torch.autograd.grad(value[:, column].sum(), point, retain_graph=True)
            alone = x.clone().requires_grad_()
            (expected,) = torch.autograd.grad(fast(alone)[:, column].sum(), alone)
            assert torch.nn.functional.cosine_similarity(gradient.flatten(1), expected.flatten(1)).min() > 0.999


@pytest.mark.gpu
@on_gpu
def test_perturbed_statistics_have_no_copy():
    model = branch("small_cnn").cuda()
    assert make_surrogate(model, route="adv", statistics="running") is not None
    with statistics(model, perturbation=zero_perturbation(model, requires_grad=False)):
        assert make_surrogate(model, route="adv", statistics="running") is None


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["resnet18", "preact_resnet18"])
def test_models_in_other_precisions_are_attacked_fast_too(name, dtype):
    model = strip(branch(name), "adv").cuda().to(dtype)
    x = X.cuda()
    y = model(x.to(dtype)).argmax(1)
    attack = AutoAttack(threat=ThreatModel(eps=0.05), precision="bf16", steps=5, queries=20)
    result = attack.evaluate(model, x, y)
    assert result.x_adv.isfinite().all() and result.stages[-1] == "float32"


@pytest.mark.gpu
@on_gpu
def test_what_cannot_be_captured_is_computed_as_it_is():
    class Waiting(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = branch("small_cnn")

        def forward(self, x):
            return self.network(x) * (1.0 if x.sum().item() > 0 else -1.0)

    fast = make_surrogate(Waiting().cuda(), route="adv", statistics="running")
    x = X.cuda()
    for _ in range(CAPTURE_AFTER + 3):
        torch.testing.assert_close(fast(x), fast.eager(x), rtol=0.05, atol=0.05)
    assert not fast._captured


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("name", ["resnet18", "preact_resnet18", "vgg11"])
def test_on_a_gpu_it_agrees_for_every_size_and_for_gradients(name):
    model = branch(name).cuda()
    fast = make_surrogate(model, route="adv", statistics="running")
    plain = strip(model, "adv")
    for rows in (1, 3, 40, 40, 40, 40, 33, 300, 300, 300, MOST_ROWS + 70):
        x = X.repeat(300, 1, 1, 1)[:rows].cuda()
        with torch.no_grad():
            expected = plain(x)
            torch.testing.assert_close(fast(x), expected, rtol=0.1, atol=0.1 * expected.abs().max().item())
    x = X.cuda().requires_grad_()
    (gradient,) = torch.autograd.grad(fast(x).sum(), x)
    (expected,) = torch.autograd.grad(plain(x).sum(), x)
    assert torch.nn.functional.cosine_similarity(gradient.flatten(), expected.flatten(), dim=0) > 0.95
    assert all(module.state.route is None for module in routed_modules(model).values())
