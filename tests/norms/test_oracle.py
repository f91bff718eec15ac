"""Concatenated batches against the formulas of the papers: values, gradients and running statistics."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.gradcheck import GradcheckError

from advnorm.norms import RoutedNorm, list_norms, make_norm, route, statistics
from support.norm_cases import TIGHT, compare, each_banked_variant, each_variant
from support.norm_oracles import (
    FORWARDED,
    MODES,
    Oracle,
    along,
    batch,
    build,
    changed,
    parts_of,
    randomized,
    shares,
    snapshot,
    turned,
)


@pytest.mark.parametrize("mode", ["batch", "batch_frozen"])
def test_crossed_samples_without_forwarded_ones_give_each_other_their_moments(mode):
    norm = randomized(make_norm("cross_bn", 3).double())
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 3, 2, 2, generator=generator, dtype=torch.float64).mul(2).add(1).requires_grad_()
    parts = dict(zip(("clean", "adv"), x.split([4, 3])))
    with route(norm, {"clean": 4, "adv": 3}), statistics(norm, mode=mode):
        y = norm(x)
    expected = []
    for domain, other in (("clean", "adv"), ("adv", "clean")):
        mean, var = (f(parts[other], (0, 2, 3))[:, None, None] for f in (torch.mean, partial(torch.var, correction=0)))
        weight, bias = (before[f"{name}_{domain}"][:, None, None] for name in ("weight", "bias"))
        expected.append((parts[domain] - mean) / (var + norm.eps).sqrt() * weight + bias)
        moved = before[f"running_mean_{domain}"].lerp(parts[domain].detach().mean((0, 2, 3)), norm.momentum)
        kept = moved if mode == "batch" else before[f"running_mean_{domain}"]
        torch.testing.assert_close(norm.state_dict()[f"running_mean_{domain}"], kept, rtol=1e-12, atol=1e-12)
    expected = torch.cat(expected)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn(y.shape, generator=generator, dtype=torch.float64)
    found, known = (torch.autograd.grad((out * weights).sum(), x)[0] for out in (y, expected))
    torch.testing.assert_close(found, known, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("spatial", [(5,), (3, 2), (2, 1, 3)], ids=["1d", "2d", "3d"])
@each_variant
def test_a_concatenated_batch_equals_the_papers_formulas(name, options, spatial, mode):
    norm = randomized(build(name, dim=max(1, len(spatial)), **options).double())
    compare(name, norm, batch(shares(name), spatial=spatial), shares(name), mode=mode, **options)


@pytest.mark.parametrize("mode", MODES)
@each_banked_variant
def test_a_batch_of_vectors_equals_the_papers_formulas(name, options, mode):
    norm = randomized(build(name, dim=1, **options).double())
    compare(name, norm, batch(shares(name), spatial=()), shares(name), mode=mode, **options)


@pytest.mark.parametrize("extra", [{"momentum": None}, {"affine": False}, {"eps": 0.1, "momentum": 0.6}], ids=str)
@each_variant
def test_options_reach_every_bank(name, options, extra):
    norm = randomized(build(name, **options, **extra).double())
    for seed in range(3):  # several steps, so that a cumulative average has something to accumulate
        norm.zero_grad()
        compare(name, norm, batch(shares(name), seed=seed), shares(name), **options)


@each_variant
def test_the_order_of_the_route_is_the_order_of_the_concatenation(name, options):
    norm = randomized(build(name, **options).double())
    counts = turned(shares(name))
    compare(name, norm, batch(counts), counts, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", MODES)
@each_variant
def test_lower_precision_stays_close_to_float64(name, options, mode, dtype):
    norm = randomized(build(name, **options))
    tolerance = {"rtol": 1e-4, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 5e-2, "atol": 8e-2}
    compare(name, norm, batch(shares(name)).to(dtype), shares(name), mode=mode, tolerance=tolerance, **options)


@each_banked_variant
def test_running_statistics_of_bfloat16_activations_are_those_of_float32(name, options):
    """Only the output is rounded: a half-precision mean would be off in the third digit."""
    norm = randomized(build(name, **options))
    x = batch(shares(name), spatial=(6, 6)).bfloat16()
    twin = copy.deepcopy(norm)
    with along(norm, shares(name)), along(twin, shares(name)):
        norm(x)
        twin(x.float())
    for key, value in norm.named_buffers():
        torch.testing.assert_close(value, twin.get_buffer(key), rtol=1e-5, atol=1e-6)


@each_banked_variant
def test_a_large_offset_does_not_ruin_the_variance(name, options):
    """Mean 1000 and deviation 1 in float32: E[x²] - E[x]² would lose four digits, the two-pass variance does not."""
    norm = randomized(build(name, **options))
    x = (batch(shares(name)) + 1000).float()
    oracle = Oracle(name, norm)
    with along(norm, shares(name)):
        y = norm(x)
    torch.testing.assert_close(y.double(), oracle.forward(x.double(), shares(name)), rtol=1e-2, atol=1e-2)
    for key, value in norm.named_buffers():
        torch.testing.assert_close(value.double(), oracle.buffers[key].double(), rtol=1e-4, atol=1e-4, msg=key)


@pytest.mark.parametrize("name", ["dual_bn", "triple_bn", "multi_bn"])
def test_own_banks_equal_one_builtin_norm_per_domain_over_training_and_evaluation(name):
    norm, counts = randomized(build(name).double()), shares(name)
    twins = {domain: nn.BatchNorm2d(4).double() for domain in counts}
    for domain, twin in twins.items():
        twin.load_state_dict({key: norm.state_dict()[f"{key}_{domain}"] for key in twin.state_dict()})
    for training in (True, True, True, False):
        norm.train(training)
        norm.zero_grad()
        x = torch.randn(sum(counts.values()), 4, 3, 2, dtype=torch.float64, requires_grad=True)
        pieces = [piece.detach().clone().requires_grad_() for piece in x.split(list(counts.values()))]
        weights = torch.randn_like(x)
        with route(norm, counts):
            y = norm(x)
        expected = torch.cat([twins[d].train(training)(piece) for d, piece in zip(counts, pieces)])
        torch.testing.assert_close(y, expected, **TIGHT)
        (y * weights).sum().backward()
        for twin in twins.values():
            twin.zero_grad()
        (expected * weights).sum().backward()
        assert x.grad is not None
        torch.testing.assert_close(x.grad, torch.cat([piece.grad for piece in pieces]), **TIGHT)
        for domain, twin in twins.items():
            for key, value in twin.state_dict().items():
                torch.testing.assert_close(norm.state_dict()[f"{key}_{domain}"], value, **TIGHT)
            for key, value in twin.named_parameters():
                torch.testing.assert_close(norm.get_parameter(f"{key}_{domain}").grad, value.grad, **TIGHT)


def test_setup1_equals_a_builtin_norm_without_affine_then_two_affine_maps():
    norm = randomized(make_norm("dual_affine_bn", 4).double())
    plain = nn.BatchNorm2d(4, affine=False).double()
    plain.load_state_dict({key: norm.state_dict()[key] for key in plain.state_dict()})
    x = batch({"clean": 5, "adv": 3})
    with route(norm, {"clean": 5, "adv": 3}):
        y = norm(x)
    z = plain(x)
    for domain, rows in (("clean", slice(0, 5)), ("adv", slice(5, 8))):
        weight, bias = (getattr(norm, f"{key}_{domain}").view(4, 1, 1) for key in ("weight", "bias"))
        torch.testing.assert_close(y[rows], z[rows] * weight + bias, **TIGHT)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(norm.state_dict()[key], value, **TIGHT)


def test_cross_bn_in_running_mode_equals_a_builtin_norm_with_the_others_statistics_and_the_own_affine():
    norm = randomized(make_norm("cross_bn", 4).double()).eval()
    x = batch({"all": 6})
    for own, other in (("clean", "adv"), ("adv", "clean")):
        plain = nn.BatchNorm2d(4).double().eval()
        state = norm.state_dict()
        names = {k: f"{k}_{own}" if k in ("weight", "bias") else f"{k}_{other}" for k in plain.state_dict()}
        plain.load_state_dict({key: state[value] for key, value in names.items()})
        with route(norm, own):
            torch.testing.assert_close(norm(x), plain(x), **TIGHT)


CROSSED = {"clean*": 4, "adv*": 6, "clean": 5, "adv": 3}

ROWS = {"clean*": slice(0, 4), "adv*": slice(4, 10), "clean": slice(10, 15), "adv": slice(15, 18)}


def cross_in_numpy(x: np.ndarray, x_statistics: np.ndarray, norm: RoutedNorm) -> np.ndarray:
    """A, sec. 3: BN_clean has the moments of the forwarded clean samples and the affine map of the adversarial branch.

    Forwarded clean and all adversarial samples go through BN_clean, the others through BN_adv. ``x_statistics`` are
    what the crossed samples take their statistics from: ``x`` itself, or what stays when ``x`` is moved.
    """
    state = {key: value.detach().numpy() for key, value in norm.state_dict().items()}
    outputs = []
    for part, source, branch in (
        ("clean*", x[ROWS["clean*"]], "adv"),
        ("adv*", x[ROWS["adv*"]], "clean"),
        ("clean", x_statistics[ROWS["adv*"]], "clean"),
        ("adv", x_statistics[ROWS["clean*"]], "adv"),
    ):
        mean, var = source.mean((0, 2, 3)), source.var((0, 2, 3))
        z = (x[ROWS[part]] - mean[:, None, None]) / np.sqrt(var + norm.eps)[:, None, None]
        outputs.append(z * state[f"weight_{branch}"][:, None, None] + state[f"bias_{branch}"][:, None, None])
    return np.concatenate(outputs)


def central_difference(function: Callable[[np.ndarray], float], x: np.ndarray, step: float = 1e-6) -> np.ndarray:
    gradient = np.zeros_like(x)
    for index in np.ndindex(x.shape):
        for sign in (1, -1):
            moved = x.copy()
            moved[index] += sign * step
            gradient[index] += sign * function(moved) / (2 * step)
    return gradient


@pytest.mark.parametrize("other_gradient", [False, True])
def test_cross_gradients_flow_through_the_other_statistics_or_are_constants(other_gradient):
    norm = randomized(make_norm("cross_bn", 2, other_gradient=other_gradient).double())
    x = batch(CROSSED, channels=2).requires_grad_()
    weights = np.random.default_rng(0).normal(size=x.shape)
    with along(norm, CROSSED):
        y = norm(x)
    (y * torch.from_numpy(weights)).sum().backward()
    x0 = x.detach().numpy()
    np.testing.assert_allclose(y.detach().numpy(), cross_in_numpy(x0, x0, norm), rtol=1e-10)

    def loss(moved: np.ndarray) -> float:
        return float((cross_in_numpy(moved, moved if other_gradient else x0, norm) * weights).sum())

    assert x.grad is not None
    np.testing.assert_allclose(x.grad.numpy(), central_difference(loss, x0), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("domain", ["clean", "adv"])
def test_forwarded_samples_get_a_gradient_from_what_they_normalize_unless_it_is_stopped(domain):
    for other_gradient in (False, True):
        norm = make_norm("cross_bn", 4, other_gradient=other_gradient)
        x = batch(CROSSED).float().requires_grad_()
        with along(norm, CROSSED):
            norm(x)[ROWS[domain]].square().sum().backward()
        assert x.grad is not None
        reached = {part for part, rows in ROWS.items() if x.grad[rows].any()}
        source = {"clean": "adv", "adv": "clean"}[domain] + FORWARDED
        assert reached == ({domain, source} if other_gradient else {domain})


def test_only_forwarded_samples_update_a_crossed_norm():
    norm, twin = (randomized(make_norm("cross_bn", 4).double()) for _ in range(2))
    x = batch(CROSSED)
    with along(norm, CROSSED), along(twin, CROSSED):
        norm(x)
        twin(torch.cat([x[:10], 3 * x[10:] + 1]))
    assert changed(norm, snapshot(twin)) == set()
    for domain in ("clean", "adv"):
        values = x[ROWS[domain + FORWARDED]].transpose(0, 1).flatten(1)
        before = randomized(make_norm("cross_bn", 4).double()).statistics_bank(domain)
        for new, old, moment in zip(norm.statistics_bank(domain), before, (values.mean(1), values.var(1))):
            torch.testing.assert_close(new, 0.9 * old + 0.1 * moment, **TIGHT)


def test_one_crossed_domain_needs_the_forwarded_samples_of_the_other_alone():
    """Cross-AT: clean samples are forwarded, adversarial ones follow; the other bank and affine map play no part."""
    norm = randomized(make_norm("cross_bn", 4).double())
    both, alone = (copy.deepcopy(norm) for _ in range(2))
    x = batch(CROSSED)
    with along(both, CROSSED):
        expected = both(x)
    with route(alone, "adv", forwarded={"clean": 4}):
        found = alone(torch.cat([x[ROWS["clean*"]], x[ROWS["adv"]]]))
    torch.testing.assert_close(found, torch.cat([expected[ROWS["clean*"]], expected[ROWS["adv"]]]), **TIGHT)
    moved = changed(alone, snapshot(norm))
    assert moved == {f"{name}_clean" for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert all(torch.equal(alone.get_buffer(name), both.get_buffer(name)) for name in moved)


def test_forwarded_samples_are_any_samples_of_their_domain_to_a_norm_that_crosses_nothing():
    for name in ("bn", "dual_bn", "dual_affine_bn", "dual_stats_bn", "gmm_bn", "dual_affine_gn"):
        norm = randomized(build(name).double())
        twin = copy.deepcopy(norm)
        x = batch({"all": 12})
        with route(norm, {"clean": 3, "adv": 2}, forwarded={"clean": 7}):
            found = norm(x)
        with route(twin, {"clean": 10, "adv": 2}):
            torch.testing.assert_close(found, twin(x), **TIGHT)
        for key, value in twin.named_buffers():
            torch.testing.assert_close(norm.get_buffer(key), value, **TIGHT)


@pytest.mark.parametrize("name", ["bn", "dual_bn", "dual_affine_bn", "dual_stats_bn"])
def test_samples_of_one_domain_that_lie_apart_are_normalized_and_counted_together(name):
    norm = randomized(build(name).double())
    twin = copy.deepcopy(norm)
    first, middle, last = batch({"clean*": 3, "adv": 4, "clean": 2}).split([3, 4, 2])
    with route(norm, {"adv": 4, "clean": 2}, forwarded={"clean": 3}):
        found = norm(torch.cat([first, middle, last]))
    with route(twin, {"clean": 5, "adv": 4}):
        expected = twin(torch.cat([first, last, middle]))
    torch.testing.assert_close(found, torch.cat([expected[:3], expected[5:], expected[3:5]]), **TIGHT)
    for key, value in twin.named_buffers():
        torch.testing.assert_close(norm.get_buffer(key), value, **TIGHT)


def differentiable(norm: RoutedNorm, counts: dict[str, int], mode: str) -> Callable[..., Tensor]:
    def function(x: Tensor, *_parameters: Tensor) -> Tensor:  # gradcheck moves the norm's own parameters in place
        with along(norm, counts), statistics(norm, mode=mode):
            return norm(x)

    return function


@pytest.mark.parametrize("mode", ["batch", "running"])
@each_variant
def test_gradcheck(name, options, mode):
    norm, counts = randomized(build(name, 2, **options).double()), shares(name)
    x = batch(counts, channels=2, spatial=(2, 1)).requires_grad_()
    if options and mode == "batch":  # stops the input's gradient on purpose, tested above
        with pytest.raises(GradcheckError, match="respect to input 0"):
            torch.autograd.gradcheck(differentiable(norm, counts, mode), (x, *norm.parameters()))
        x = x.detach()
    assert torch.autograd.gradcheck(differentiable(norm, counts, mode), (x, *norm.parameters()))


@pytest.mark.parametrize(
    ("name", "options"),
    [("bn", {}), ("dual_bn", {}), ("dual_affine_bn", {}), ("cross_bn", {}), ("gmm_bn", {}), ("dual_affine_gn", {})],
    ids=str,
)
@pytest.mark.parametrize("mode", ["batch", "running"])
def test_gradgradcheck(name, options, mode):
    norm, counts = randomized(build(name, 2, **options).double()), dict(zip(parts_of(name), (3, 2, 2, 2)))
    x = batch(counts, channels=2, spatial=(2, 1)).requires_grad_()
    assert torch.autograd.gradgradcheck(differentiable(norm, counts, mode), (x, *norm.parameters()))


@pytest.mark.parametrize("name", [name for name in list_norms() if len(parts_of(name)) > 1])
def test_a_parts_output_does_not_depend_on_its_place_in_the_batch_when_running(name):
    norm, counts = randomized(build(name).double()), shares(name)
    x = batch(counts)
    pieces = dict(zip(counts, x.split(list(counts.values()))))
    outputs = []
    for order in (counts, turned(counts)):
        with along(norm, order), statistics(norm, mode="running"):
            whole = norm(torch.cat([pieces[part] for part in order]))
        outputs.append(dict(zip(order, whole.split(list(order.values())))))
    for part, piece in pieces.items():
        first = {part.removesuffix(FORWARDED): len(piece)} if part.endswith(FORWARDED) else None
        with route(norm, part.removesuffix(FORWARDED), forwarded=first), statistics(norm, mode="running"):
            alone = norm(piece)
        for output in outputs:
            torch.testing.assert_close(output[part], alone, **TIGHT)
