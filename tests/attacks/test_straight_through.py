"""BPDA: forward passes keep every bit, and the backward pass finds a direction."""

import pytest
import torch
from torch import nn

from advnorm import attacks
from advnorm.attacks.search import CandidateGrid
from advnorm.attacks.straight_through import StraightPredict, StraightThrough, straight_through
from advnorm.attacks.victim import VictimModel
from advnorm.threat import ThreatModel
from support.attack_contract import assert_inside, assert_same, pictures, snapshot


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def in_place(x):
    x = x.mul(8)
    x.round_()
    return x.div_(8)


def by_numpy(x):
    return torch.from_numpy((x.detach().numpy() * 8).round() / 8)


#: Functions of images that have no gradient, or none almost everywhere.
OBSTACLES = {
    "round": lambda x: (x * 8).round() / 8,
    "floor": lambda x: torch.floor(x * 8) / 8,
    "detach": lambda x: 2 * x.detach(),
    "integers": lambda x: (x * 255).to(torch.uint8).float() / 255,
    "long": lambda x: (x * 255).long().unsqueeze(1).squeeze(1).double().float() / 255,
    "division of integers": lambda x: (x * 255 + 0.5).int() / 255,
    "bits": lambda x: ((x * 255).long() & 0xF0).float() / 255,
    "table": lambda x: torch.linspace(0, 1, 9)[(x * 8).long()],
    "buckets": lambda x: torch.bucketize(x, torch.linspace(0, 1, 9)) / 8,
    "floor division": lambda x: x // 0.125 / 8,
    "remainder": lambda x: x - x % 0.125,
    "in place": in_place,
    "floor division in place": lambda x: (x * 8).floor_divide_(1) / 8,
    "comparison": lambda x: (x > 0.5).float(),
    "product with a boolean": lambda x: (x > 0.5) * 1.0,
    "sum of booleans": lambda x: torch.stack([x > level for level in (0.25, 0.5, 0.75)]).sum(0) / 3,
    "either": lambda x: (~((x <= 0.4) & (x <= 0.6))).float(),
    "both": lambda x: torch.logical_or(x > 0.4, x > 0.6).float(),
    "masked fill": lambda x: x.detach().masked_fill(x < 0.5, 0.0),
    "less": lambda x: torch.le(x, 0.5).flatten(1).view(x.shape).to(torch.float32),
    "where": lambda x: torch.where(x > 0.5, x.detach() * 0 + 1, x.detach() * 0),
    "tanh": lambda x: torch.tanh(1e6 * (x - 0.5)),
    "sigmoid": lambda x: torch.sigmoid(1e6 * (x - 0.5)),
    "softmax": lambda x: (1e6 * x.flatten(1)).softmax(1).view(x.shape),
    "numpy": by_numpy,
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_an_obstacle_keeps_its_values_and_gets_a_gradient(name):
    x = pictures()[0].clamp(0.01, 0.99)
    function = OBSTACLES[name]
    if name == "numpy":  # only a module can be replaced as a whole
        function = Function(function)
    plain = function(x)
    point = x.clone().requires_grad_()
    with StraightThrough() as scope:
        value = function(point)
    assert torch.equal(value, plain) and value.dtype == plain.dtype and scope.replaced >= 1
    (gradient,) = torch.autograd.grad(value.sum() if name != "softmax" else value[:, 0].sum(), point)
    assert (gradient != 0).double().mean() > (0.99 if name != "softmax" else 0.5)


@pytest.mark.parametrize(
    ("compare", "sign"),
    [
        (lambda x: x > 0.5, 1),
        (lambda x: x >= 0.5, 1),
        (lambda x: torch.greater(x, 0.5), 1),
        (lambda x: x < 0.5, -1),
        (lambda x: x.le(0.5), -1),
        (lambda x: torch.less_equal(x, 0.5), -1),
    ],
)
def test_a_comparison_has_the_slope_of_a_sigmoid(compare, sign):
    x = torch.linspace(0.1, 0.9, 8).requires_grad_()
    with StraightThrough():
        numbers = compare(x).float()
        chosen = torch.where(compare(x), 3.0, 1.0)
        chosen_by_method = torch.full_like(x, 3.0).where(compare(x), torch.ones(()))
    assert torch.equal(numbers, compare(x.detach()).float())
    share = torch.sigmoid(10 * (x.detach() - 0.5))
    slope = sign * 10 * share * (1 - share)
    for value, height in ((numbers, 1), (chosen, 2), (chosen_by_method, 2)):
        torch.testing.assert_close(torch.autograd.grad(value.sum(), x, retain_graph=True)[0], height * slope)


def test_usual_networks_are_unchanged():
    x, y = pictures()
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)).eval()
    gradients = []
    for predict in (model, StraightPredict(model, x)):
        point = x.clone().requires_grad_()
        gradients.append(torch.autograd.grad(nn.functional.cross_entropy(predict(point), y), point)[0])
    assert torch.equal(*gradients) and predict.replaced == 0


def test_a_given_surrogate_replaces_the_gradient_of_a_module():
    model = nn.Sequential(Function(lambda x: x**2), nn.Flatten())
    x = torch.full((1, 1, 2, 2), 0.3, requires_grad=True)
    with straight_through(model, {"0": lambda x: 7 * x}):
        value = model(x)
    assert torch.equal(value, model(x.detach()))
    assert torch.equal(torch.autograd.grad(value.sum(), x)[0], torch.full_like(x, 7))
    with pytest.raises(AttributeError), straight_through(model, {"quantize": nn.Identity()}):
        pass


def test_a_module_that_stops_most_of_the_gradient_is_found():
    class Sparse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            return gradient * (torch.arange(gradient[0].numel()).view(gradient[0].shape) % 8 == 0)

    x = pictures()[0]
    predict = StraightPredict(nn.Sequential(Function(Sparse.apply), nn.Flatten()), x)
    point = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(predict(point).sum(), point)
    assert (gradient == 1).all() and predict.replaced == 1


@pytest.mark.parametrize("name", ["apgd-bpda", "apgd-eot-samples2-bpda", "apgd-smooth-samples2-bpda"])
def test_attacks_beat_a_model_without_gradients_and_keep_the_contract(name):
    torch.manual_seed(0)
    linear = nn.Linear(192, 10)
    model = nn.Sequential(Function(by_numpy), nn.Flatten(), linear)
    x = pictures(24)[0]
    y = model(x).argmax(1)
    attack = attacks.get(f"{name}-steps20", threat=ThreatModel(eps=0.15))
    before = snapshot(model)
    x_adv = attack(model, x, y)
    assert_same(before, snapshot(model))
    assert_inside(attack.threat, x_adv, x)
    assert torch.equal(x_adv, attack(model, x, y))
    assert (model(x_adv).argmax(1) == y).double().mean() < 0.1
    assert not torch.nn.modules.module._global_forward_hooks


def test_a_patient_grid_keeps_the_lowest_mean_margin_until_the_end():
    """One lucky draw of a randomized model does not end its search."""
    calls = []

    def always_wrong(x):
        calls.append(len(x))
        return torch.tensor([[0.0, 1.0]]).repeat(len(x), 1)

    x, y = torch.full((2, 1, 2, 2), 0.5), torch.zeros(2, dtype=torch.long)
    grid = CandidateGrid(VictimModel(always_wrong), ThreatModel(eps=0.3), x, y, patient=True)
    for margin, shift in ((-0.1, 0.1), (-0.5, 0.2), (-0.2, 0.3)):
        grid.offer(x + shift, torch.full((2,), margin))
        assert grid.verify() is None and not calls
    found = grid.finish()
    assert found.fooled.all() and torch.equal(found.x_adv, x + 0.2)


def test_smoothing_sees_the_slope_behind_a_wave():
    class Wave(nn.Module):
        def forward(self, x):
            x = x + 0.005 * torch.sin(200 * torch.pi * x)
            return torch.stack([x.flatten(1).mean(1), 0.4 * torch.ones(len(x))], 1)

    generator = torch.Generator().manual_seed(0)
    x = 0.5 + 0.1 * torch.rand((30, 1, 4, 4), generator=generator)
    y = torch.zeros(30, dtype=torch.long)
    plain, smooth = (
        (Wave()(attacks.get(name, threat=ThreatModel(eps=0.2))(Wave(), x, y)).argmax(1) == y).double().mean().item()
        for name in ("pgd10-cw", "apgd-smooth-steps20")
    )
    assert smooth <= 0.1 < plain
