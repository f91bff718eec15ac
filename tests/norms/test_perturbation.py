"""Perturbed statistics and groups (paper B)."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from advnorm.norms import make_norm, route, routed_modules, statistics, zero_perturbation
from support.crossing import crossing
from support.norm_cases import (
    BANKED_VARIANTS,
    TIGHT,
    compare,
    each_banked_variant,
    each_variant,
    images,
    network,
    random_deltas,
)
from support.norm_oracles import MODES, along, batch, build, changed, randomized, shares, snapshot


def test_a_perturbation_reaches_the_norms_it_names_in_whatever_order_they_are_held():
    inner, shared = make_norm("bn", 2), make_norm("bn", 2)
    block = nn.ModuleDict(
        {"a": nn.ModuleDict({"late": inner, "shared": shared}), "shared": shared, "z": make_norm("bn", 2)}
    )
    names = list(routed_modules(block))
    x = torch.randn(4, 2, 2, 2)
    plain = {name: norm(x) for name, norm in routed_modules(block).items()}
    for chosen in names:
        delta = zero_perturbation(block, requires_grad=False)
        delta = {
            name: {k: (m, s + 0.5 * (name == chosen)) for k, (m, s) in banks.items()} for name, banks in delta.items()
        }
        with statistics(block, perturbation=delta):
            for name, norm in routed_modules(block).items():
                factor = 1.5 if name == chosen else 1.0
                torch.testing.assert_close(norm(x), factor * plain[name])


def test_a_perturbation_fits_a_compiled_or_wrapped_model():
    model = network("dual_bn").eval()
    delta = zero_perturbation(model).map(lambda d: d.detach() + 0.1)
    x = images({"adv": 4})
    outputs = []
    for wrapped in (model, torch.compile(model, backend="eager"), nn.DataParallel(model)):
        with route(wrapped, "adv"), statistics(wrapped, perturbation=delta), torch.no_grad():
            outputs.append(model(x))
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


def test_a_perturbation_is_where_the_model_is_also_for_norms_without_a_tensor():
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 4, 1), make_norm("dual_bn", 4, affine=False, track_running_stats=False))
    assert {tensor.device.type for tensor in zero_perturbation(model).tensors} == {"meta"}


def test_a_perturbation_may_name_some_banks_and_leaves_the_others_as_they_are():
    norm = randomized(make_norm("dual_bn", 3).double())
    x, counts = images({"clean": 4, "adv": 3}), {"clean": 4, "adv": 3}
    delta = (torch.full((3,), 0.5, dtype=torch.float64),) * 2
    with route(norm, counts), statistics(norm, mode="batch_frozen"):
        plain = norm(x)
        with statistics(norm, perturbation={"": {"adv": delta}}):
            moved = norm(x)
    torch.testing.assert_close(moved[:4], plain[:4])
    assert not torch.isclose(moved[4:], plain[4:]).all()


def test_the_perturbation_of_bfloat16_banks_is_in_float32():
    assert {delta.dtype for delta in zero_perturbation(make_norm("dual_bn", 3).bfloat16()).tensors} == {torch.float32}


def test_a_perturbation_takes_part_in_gradients_only_when_asked():
    assert not any(delta.requires_grad for delta in zero_perturbation(make_norm("bn", 3), requires_grad=False).tensors)


def test_a_sign_step_is_detached_even_from_gradients_with_a_graph():
    norm = make_norm("bn", 3).double()
    zero = zero_perturbation(norm)
    with statistics(norm, perturbation=zero):
        loss = norm(images({"all": 4})).pow(3).sum()
    worst = zero.sign_step(torch.autograd.grad(loss, zero.tensors, create_graph=True), radius=0.1)
    assert not any(delta.requires_grad for delta in worst.tensors)


@pytest.mark.parametrize("mode", MODES)
@each_banked_variant
def test_perturbed_statistics_equal_equation_3_with_gradients_to_the_perturbation(name, options, mode):
    norm = randomized(build(name, **options).double())
    compare(name, norm, batch(shares(name)), shares(name), mode=mode, deltas=random_deltas(norm), **options)


@pytest.mark.parametrize("mode", MODES)
@each_banked_variant
def test_at_zero_a_perturbation_changes_nothing_and_has_the_oracles_gradient(name, options, mode):
    """B, eq. 4 and algorithm 1, line 3: one backward pass at θ = 0 gives both gradients."""
    norm, counts = randomized(build(name, **options).double()), shares(name)
    zero = zero_perturbation(norm)
    compare(name, copy.deepcopy(norm), batch(counts), counts, mode=mode, deltas=dict(zero[""]), **options)
    plain, perturbed = copy.deepcopy(norm), copy.deepcopy(norm)
    x = batch(counts)
    with along(plain, counts), statistics(plain, mode=mode):
        y_plain = plain(x)
    with along(perturbed, counts), statistics(perturbed, mode=mode, perturbation=zero_perturbation(perturbed)):
        y_perturbed = perturbed(x)
    torch.testing.assert_close(y_plain, y_perturbed, **TIGHT)
    for key, value in plain.named_buffers():
        torch.testing.assert_close(value, perturbed.get_buffer(key), **TIGHT)


@pytest.mark.parametrize("mode", MODES)
def test_the_formula_of_equation_3_in_numpy(mode):
    norm = randomized(make_norm("bn", 4).double())
    x = batch({"all": 6})
    (delta_mean, delta_std), *_ = random_deltas(norm).values()
    x0, dm, ds = x.numpy(), delta_mean.detach().numpy(), delta_std.detach().numpy()
    mean, var = x0.mean((0, 2, 3)), x0.var((0, 2, 3))
    if mode == "running":
        mean, var = norm.running_mean.numpy().copy(), norm.running_var.numpy().copy()
    lift = (slice(None), None, None)
    gamma, beta = norm.weight.detach().numpy(), norm.bias.detach().numpy()
    scaled = (x0 - ((1 + dm) * mean)[lift]) / np.sqrt(var + norm.eps)[lift]
    expected = (gamma * (1 + ds))[lift] * scaled + beta[lift]
    with statistics(norm, mode=mode, perturbation={"": {"shared": (delta_mean, delta_std)}}):
        np.testing.assert_allclose(norm(x).detach().numpy(), expected, rtol=1e-10)


@pytest.mark.parametrize(
    ("variant", "mode", "perturbed", "groups"),
    crossing(list(BANKED_VARIANTS.values()), MODES, [False, True], [2, 3], keep=2),
)
def test_groups_are_the_nths_of_every_domain_and_update_by_pooled_moments(variant, mode, perturbed, groups):
    name, options = variant
    norm, counts = randomized(build(name, **options).double()), shares(name, unit=groups)
    deltas = random_deltas(norm) if perturbed else None
    compare(name, norm, batch(counts), counts, mode=mode, groups=groups, deltas=deltas, **options)


@pytest.mark.parametrize("name", ["bn", "dual_affine_bn"])
def test_norms_with_one_mixed_bank_form_the_same_groups(name):
    """Statistics per n-th of each domain's samples: whether the affine parameters are shared does not matter."""
    norm = make_norm(name, 4).double()  # weight 1, bias 0
    counts = {"clean": 4, "adv": 2}
    x = batch(counts)
    with route(norm, counts), statistics(norm, mode="batch_frozen", groups=2):
        y = norm(x)
    for rows in ([0, 1, 4], [2, 3, 5]):
        torch.testing.assert_close(y[rows], nn.BatchNorm2d(4).double()(x[rows]), **TIGHT)


def test_groups_without_a_route_equal_a_builtin_norm_per_group_and_one_update_of_the_whole_batch():
    norm = make_norm("bn", 4).double()
    x = batch({"all": 6})
    with statistics(norm, groups=3):
        y = norm(x)
    torch.testing.assert_close(y, torch.cat([nn.BatchNorm2d(4).double()(part) for part in x.chunk(3)]), **TIGHT)
    whole = nn.BatchNorm2d(4).double()
    whole(x)
    for key, value in whole.state_dict().items():
        torch.testing.assert_close(norm.state_dict()[key], value, **TIGHT)


@each_variant
def test_per_sample_norms_ignore_groups_and_perturbation_and_batch_norms_ignore_groups_when_running(name, options):
    norm, counts = randomized(build(name, **options).double()), shares(name)
    x = batch(counts)
    with along(norm, counts), statistics(norm, mode="running"):
        y = norm(x)
        with statistics(norm, groups=7):  # does not divide: no batch statistic is cut, so nothing to reject
            assert torch.equal(norm(x), y)


def test_algorithm_1_increases_the_loss_by_the_sign_of_the_gradient():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), make_norm("dual_bn", 4), nn.ReLU(), make_norm("dual_bn", 4)).double()
    randomized(model)
    x, counts = batch({"clean": 4, "adv": 4}, channels=3, spatial=(4, 4)), {"clean": 4, "adv": 4}
    zero = zero_perturbation(model)
    assert [t.shape for t in zero.tensors] == [(4,)] * 8
    assert all(t.requires_grad and not t.any() for t in zero.tensors)
    before = snapshot(model)

    def loss(perturbation) -> Tensor:
        with route(model, counts), statistics(model, mode="batch_frozen", perturbation=perturbation):
            return model(x).square().mean()

    gradients = torch.autograd.grad(loss(zero), zero.tensors)
    worst = zero.sign_step(gradients, radius=1e-3)
    for tensor, gradient in zip(worst.tensors, gradients):
        assert torch.equal(tensor, 1e-3 * gradient.sign())
        assert not tensor.requires_grad
    best = worst.map(torch.neg)
    assert loss(best) < loss(zero) < loss(worst)
    first_order = 1e-3 * sum(gradient.abs().sum() for gradient in gradients)
    assert (loss(worst) - loss(best)).item() == pytest.approx(2 * first_order.item(), rel=1e-3)
    assert changed(model, before) == set()


def test_a_perturbation_takes_none_for_a_bank_that_took_no_part():
    norm = make_norm("dual_bn", 4).double()
    zero = zero_perturbation(norm)
    with route(norm, "adv"), statistics(norm, perturbation=zero):
        y = norm(batch({"adv": 4}))
    gradients = torch.autograd.grad((y**3).sum(), zero.tensors, allow_unused=True)
    worst = zero.sign_step(gradients, radius=0.5)
    assert [g is None for g in gradients] == [True, True, False, False]
    assert all(not t.any() for t in worst[""]["clean"])
    assert all((t.abs() == 0.5).all() for t in worst[""]["adv"])


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("name", ["dual_bn", "dual_affine_bn", "gmm_bn"])
def test_gradcheck_of_perturbations_and_groups(name, groups):
    norm, counts = randomized(build(name, 2).double()), {"clean": 4, "adv": 4}
    deltas = random_deltas(norm)
    x = batch(counts, channels=2, spatial=(2, 1)).requires_grad_()

    def function(x: Tensor, *_deltas: Tensor) -> Tensor:
        with route(norm, counts), statistics(norm, mode="batch_frozen", groups=groups, perturbation={"": deltas}):
            return norm(x)

    assert torch.autograd.gradcheck(function, (x, *(t for pair in deltas.values() for t in pair)))
