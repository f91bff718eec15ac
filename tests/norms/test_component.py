"""A fixed component of a mixture norm: one Gaussian alone, whatever the input looks like."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import advnorm
from advnorm._core.errors import ConfigError
from advnorm.norms import component, make_norm, mixture_norms, pair, route, statistics
from support.norm_oracles import MODES, batch, changed, randomized, snapshot

COUNTS = {"clean": 5, "adv": 3}


def network() -> nn.Module:
    return randomized(advnorm.create_model("small_cnn", in_channels=1, norm="gmm_bn")).eval()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("domain", COUNTS)
def test_a_component_is_batch_norm_with_its_bank_alone(domain, mode):
    norm = randomized(make_norm("gmm_bn", 4).double())
    x, before = batch(COUNTS), snapshot(norm)
    bank = {name: before[f"running_{name}_{domain}"].clone() for name in ("mean", "var")}
    cotangent = torch.linspace(-1, 2, x.numel(), dtype=x.dtype).view_as(x)

    inputs = x.clone().requires_grad_()
    # The route of the samples plays no part.
    with route(norm, COUNTS), component(norm, domain), statistics(norm, mode=mode):
        out = norm(inputs)
    gradients = torch.autograd.grad(out, [inputs, norm.weight, norm.bias], cotangent)

    mirror = x.clone().requires_grad_()
    affine = [p.detach().clone().requires_grad_() for p in (norm.weight, norm.bias)]
    stored = (bank["mean"], bank["var"]) if mode != "batch_frozen" else (None, None)
    expected = F.batch_norm(mirror, *stored, *affine, training=mode != "running", eps=norm.eps)
    torch.testing.assert_close(out, expected)
    for ours, theirs in zip(gradients, torch.autograd.grad(expected, [mirror, *affine], cotangent)):
        torch.testing.assert_close(ours, theirs)

    fed = {f"{name}_{domain}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert set(changed(norm, before)) == (fed if mode == "batch" else set())
    for name, value in bank.items():
        torch.testing.assert_close(getattr(norm, f"running_{name}_{domain}"), value)


def test_a_component_nests_ends_and_needs_no_route():
    norm, x = randomized(make_norm("gmm_bn", 4).double()).eval(), batch({"all": 4})
    mixed = norm(x)
    with component(norm, "clean"):
        outer = norm(x)
        with component(norm, "adv"):
            inner = norm(x)
        assert torch.equal(norm(x), outer)
    assert torch.equal(norm(x), mixed)
    assert not any(torch.equal(a, b) for a, b in ((mixed, outer), (mixed, inner), (outer, inner)))


def test_a_component_is_what_remains_when_one_gaussian_is_out_of_reach():
    norm, x = randomized(make_norm("gmm_bn", 4).double()).eval(), batch({"all": 4})
    with component(norm, "adv"):
        alone = norm(x)
    norm.running_mean_clean += 1e3  # its posterior is 0 everywhere
    torch.testing.assert_close(norm(x), alone)


def test_perturbed_statistics_and_groups_hold_for_a_component_too():
    norm, x = randomized(make_norm("gmm_bn", 4).double()), batch({"all": 4})
    delta = {"": {"adv": (torch.full((4,), 0.1, dtype=torch.float64), torch.full((4,), 0.2, dtype=torch.float64))}}
    with component(norm, "adv"), statistics(norm, mode="running", perturbation=delta):
        found = norm(x)
    mean, std = 1.1 * norm.running_mean_adv, (norm.running_var_adv + norm.eps).sqrt() / 1.2
    shape = (1, -1, 1, 1)
    expected = (x - mean.view(shape)) / std.view(shape) * norm.weight.view(shape) + norm.bias.view(shape)
    torch.testing.assert_close(found, expected)
    with component(norm, "adv"), statistics(norm, mode="batch_frozen", groups=2):
        halves = norm(x)
    for half, rows in zip(halves.split(2), x.split(2)):
        torch.testing.assert_close(half, F.batch_norm(rows, None, None, norm.weight, norm.bias, True, eps=norm.eps))


def test_a_component_is_one_graph_that_equals_eager():
    torch._dynamo.reset()
    model, x = network(), torch.rand(3, 1, 8, 8)
    run = torch.compile(model, fullgraph=True, backend="eager")
    for domain in ("clean", "adv", "clean"):
        with component(model, domain):
            torch.testing.assert_close(run(x), model(x))
    torch.testing.assert_close(run(x), model(x))


def test_an_attack_goes_through_the_component_and_strip_takes_it_out():
    model, x, y = network(), torch.rand(6, 1, 8, 8), torch.arange(6)
    attack = advnorm.attacks.PGD(threat=advnorm.ThreatModel(eps=0.2), steps=3, route="clean")
    plain = advnorm.strip(model, component="adv")
    assert sum(isinstance(module, nn.BatchNorm2d) for module in plain.modules()) == len(mixture_norms(model)) == 3
    with component(model, "adv"):
        torch.testing.assert_close(model(x), plain(x))
        attacked = attack(model, x, y)
        torch.testing.assert_close(attacked, advnorm.attacks.PGD(threat=attack.threat, steps=3)(plain, x, y))
        torch.testing.assert_close(advnorm.strip(model)(x), plain(x))
    assert not torch.allclose(attacked, attack(model, x, y))
    torch.testing.assert_close(advnorm.strip(model, route="adv")(x), model(x))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: component(make_norm("gmm_bn", 4), "avd"), "did you mean 'adv'"),
        (lambda: component(make_norm("dual_bn", 4), "adv"), "no mixture norm.*advnorm.route"),
        (lambda: component(nn.Linear(2, 2), "adv"), "no routed norms"),
        (lambda: pair(make_norm("gmm_bn", 4), statistics="clean", affine="adv"), "advnorm.component"),
        (lambda: advnorm.strip(network(), component="avd"), "unknown component 'avd', did you mean 'adv'"),
        (lambda: advnorm.strip(nn.Linear(2, 2), component="adv"), "no mixture norm"),
    ],
)
def test_a_component_that_cannot_be_fixed_is_explained(call, message):
    with pytest.raises(ConfigError, match=message):
        call()
