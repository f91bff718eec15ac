"""Mixture norms: the formulas of paper C, the likelihood, and a fixed component."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
import torch.nn.functional as F
from torch import nn

import advnorm
from advnorm._core.errors import RouteError
from advnorm.norms import (
    RoutedNorm,
    make_norm,
    mixture_component,
    mixture_likelihood,
    mixture_norms,
    pair_banks,
    route,
    statistics,
)
from support.norm_cases import TIGHT, images, rejects
from support.norm_oracles import MODES, Oracle, batch, changed, randomized, snapshot


def mixture_in_scipy(
    x: np.ndarray, means: np.ndarray, variances: np.ndarray, eps: float, weight: np.ndarray, bias: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """C, eq. 10 to 16 and 20, for statistics (domains, channels): output, and log posteriors (K, N, H, W)."""
    lift = (slice(None), None, None)
    std = np.sqrt(variances + eps)
    log_density = np.stack(
        [scipy.stats.norm.logpdf(x, m[lift], s[lift]).sum(1) for m, s in zip(means, std)]  # all channels of a position
    )
    log_posterior = log_density - scipy.special.logsumexp(log_density, axis=0)
    z = sum(np.exp(lp)[:, None] * (x - m[lift]) / s[lift] for lp, m, s in zip(log_posterior, means, std))
    return weight[lift] * z + bias[lift], log_posterior


def mixture_moments(
    norm: RoutedNorm, x: np.ndarray, counts: dict[str, int], mode: str
) -> tuple[np.ndarray, np.ndarray]:
    if mode == "running":
        state = norm.state_dict()
        return tuple(
            np.stack([state[f"{k}_{d}"].double().numpy() for d in counts]) for k in ("running_mean", "running_var")
        )
    pieces = np.split(x, np.cumsum(list(counts.values()))[:-1])
    return np.stack([p.mean((0, 2, 3)) for p in pieces]), np.stack([p.var((0, 2, 3)) for p in pieces])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("domains", [("clean", "adv"), ("clean", "adv", "noise")], ids=len)
def test_gmm_bn_equals_scipys_gaussians_and_its_likelihood_is_a_mean_over_samples(domains, mode):
    norm = randomized(make_norm("gmm_bn", 4, domains=domains).double())
    counts = dict(zip(domains, (5, 3, 2)))
    x = batch(counts)
    means, variances = mixture_moments(norm, x.numpy(), counts, mode)
    weight, bias = norm.weight.detach().numpy(), norm.bias.detach().numpy()
    expected, log_posterior = mixture_in_scipy(x.numpy(), means, variances, norm.eps, weight, bias)
    with route(norm, counts), statistics(norm, mode=mode), mixture_likelihood(norm) as nll:
        y = norm(x)
    np.testing.assert_allclose(y.detach().numpy(), expected, rtol=1e-9, atol=1e-11)
    labels = np.repeat(np.arange(len(counts)), list(counts.values()))
    own = log_posterior[labels, np.arange(len(x))]  # (N, H, W): eq. 21 picks each sample's own domain
    np.testing.assert_allclose(nll.loss().item(), -own.sum((1, 2)).mean(), rtol=1e-9)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_gmm_bn_with_512_channels_neither_underflows_nor_overflows(mode, dtype):
    counts = {"clean": 4, "adv": 4}
    norm = randomized(make_norm("gmm_bn", 512))
    norm = norm.double() if dtype == torch.float64 else norm
    x = (batch(counts, channels=512, spatial=(2, 2)) * 4).to(dtype).requires_grad_()
    with route(norm, counts), statistics(norm, mode=mode), mixture_likelihood(norm) as nll:
        y = norm(x)
        loss = nll.loss()
    (y.double().square().mean() + loss.double()).backward()
    assert x.grad is not None
    for value in (y, loss, x.grad, norm.weight.grad, norm.bias.grad):
        assert torch.isfinite(value).all()
    x64 = x.detach().double()
    means, variances = mixture_moments(norm, x64.numpy(), counts, "batch_frozen" if mode == "batch" else mode)
    weight, bias = norm.weight.detach().double().numpy(), norm.bias.detach().double().numpy()
    expected, log_posterior = mixture_in_scipy(x64.numpy(), means, variances, norm.eps, weight, bias)
    tolerance = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 1e-1}[dtype]
    np.testing.assert_allclose(y.detach().double().numpy(), expected, rtol=tolerance, atol=tolerance)
    density_gap = np.abs(np.diff(log_posterior, axis=0))
    assert density_gap.max() > 500, "the case must be one where a density ratio leaves the range of a float64"


def test_gmm_bn_is_plain_bn_when_both_gaussians_agree_and_separate_bn_when_they_are_far_apart():
    """C, app. F, after eq. 19: posteriors that are binary and right give the Separate BN."""
    norm = randomized(make_norm("gmm_bn", 4).double())
    same = batch({"all": 4})
    plain = nn.BatchNorm2d(4).double()
    plain.load_state_dict({"weight": norm.weight, "bias": norm.bias}, strict=False)
    with route(norm, {"clean": 4, "adv": 4}):
        torch.testing.assert_close(norm(torch.cat([same, same])), plain(torch.cat([same, same])), **TIGHT)
        far = torch.cat([same, same + 1e3])
        torch.testing.assert_close(norm(far), torch.cat([plain(far[:4]), plain(far[4:])]), **TIGHT)


@pytest.mark.parametrize("stripped", [False, True])
def test_a_mixture_of_bfloat16_banks_is_computed_in_float32(stripped):
    torch.manual_seed(3)
    norm = make_norm("gmm_bn", 256).eval()
    with torch.no_grad():
        for bank in ("clean", "adv"):
            mean, var, _ = norm.statistics_bank(bank)
            mean.normal_(std=0.05)
            var.uniform_(0.9, 1.1)
    norm = norm.bfloat16()
    x = torch.randn(4, 256, 2, 2).bfloat16()
    wide = copy.deepcopy(norm).double()
    if stripped:
        from advnorm import strip

        norm = strip(norm)
    torch.testing.assert_close(norm(x).double(), wide(x.double()), rtol=0.02, atol=0.02)


def test_a_mixture_evaluates_without_a_route_and_needs_one_to_train():
    norm, x = make_norm("gmm_bn", 3).double(), images({"all": 4})
    norm.eval()(x)
    with rejects("missing_route", "route", RouteError):
        norm.train()(x)


def test_the_likelihood_is_summed_over_layers_and_averaged_over_all_samples_whatever_their_shares():
    model = nn.Sequential(make_norm("gmm_bn", 3), nn.Conv2d(3, 4, 1), nn.ReLU(), make_norm("gmm_bn", 4)).double()
    randomized(model)
    counts = {"clean": 6, "adv": 2}
    x = batch(counts, channels=3)
    with route(model, counts), mixture_likelihood(model) as nll:
        model(x)
    total, hidden = 0.0, x
    for layer in model:
        if isinstance(layer, RoutedNorm):
            oracle = Oracle("gmm_bn", layer)
            with route(layer, counts):
                before = hidden
                hidden = layer(hidden)
            oracle.forward(before, counts)
            assert oracle.likelihood is not None
            total += oracle.likelihood.item()
        else:
            hidden = layer(hidden)
    assert nll.loss().item() == pytest.approx(total, rel=1e-9)


def test_the_likelihood_of_one_domain_routed_alone_is_a_mean_over_its_samples():
    norm = randomized(make_norm("gmm_bn", 4).double())
    x = batch({"clean": 5})
    means, variances = mixture_moments(norm, x.numpy(), {"clean": 5, "adv": 0}, "running")
    _, log_posterior = mixture_in_scipy(x.numpy(), means, variances, norm.eps, np.ones(4), np.zeros(4))
    with statistics(norm, mode="running"):
        for k, domain in enumerate(("clean", "adv")):
            with route(norm, domain), mixture_likelihood(norm) as nll:
                norm(x)
            assert nll.loss().item() == pytest.approx(-log_posterior[k].sum((1, 2)).mean(), rel=1e-9)


def test_the_likelihood_of_vectors_has_one_position_per_sample():
    norm, counts = randomized(make_norm("gmm_bn", 4, dim=1).double()), {"clean": 5, "adv": 3}
    x, oracle = batch(counts, spatial=()), Oracle("gmm_bn", norm)
    with route(norm, counts), mixture_likelihood(norm) as nll:
        norm(x)
    oracle.forward(x, counts)
    torch.testing.assert_close(nll.loss(), oracle.likelihood, **TIGHT)


def test_the_gradient_of_the_likelihood_equals_the_oracles():
    norm = randomized(make_norm("gmm_bn", 4).double())
    oracle, counts = Oracle("gmm_bn", norm), {"clean": 5, "adv": 3}
    ours = batch(counts).requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    with route(norm, counts), mixture_likelihood(norm) as nll:
        norm(ours)
    nll.loss().backward()
    oracle.forward(theirs, counts)
    assert oracle.likelihood is not None
    oracle.likelihood.backward()
    torch.testing.assert_close(ours.grad, theirs.grad, **TIGHT)


def test_an_open_likelihood_cannot_be_entered_again_and_keeps_what_it_collected():
    norm = make_norm("gmm_bn", 4)
    x = batch({"clean": 4, "adv": 4}).float()
    with route(norm, {"clean": 4, "adv": 4}), mixture_likelihood(norm) as nll:
        norm(x)
        loss = nll.loss()
        with rejects("already_open", kind=RouteError), nll:
            pass
        assert torch.equal(nll.loss(), loss)


def test_a_likelihood_scope_used_twice_starts_empty():
    norm = make_norm("gmm_bn", 4)
    x = batch({"clean": 4, "adv": 4}).float()
    nll = mixture_likelihood(norm)
    losses = []
    for _ in range(2):
        with route(norm, {"clean": 4, "adv": 4}), nll:
            norm(x)
        losses.append(nll.loss())
    assert torch.equal(*losses)


COUNTS = {"clean": 5, "adv": 3}


def mixture_network() -> nn.Module:
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
    with route(norm, COUNTS), mixture_component(norm, domain), statistics(norm, mode=mode):
        out = norm(inputs)
    gradients = torch.autograd.grad(out, [inputs, norm.weight, norm.bias], cotangent)

    mirror = x.clone().requires_grad_()
    affine = [p.detach().clone().requires_grad_() for p in (norm.weight, norm.bias)]
    stored = (bank["mean"], bank["var"]) if mode != "batch_frozen" else (None, None)
    expected = F.batch_norm(mirror, *stored, *affine, training=mode != "running", eps=norm.eps)
    torch.testing.assert_close(out, expected)
    for ours, theirs in zip(gradients, torch.autograd.grad(expected, [mirror, *affine], cotangent)):
        torch.testing.assert_close(ours, theirs)

    updated = {f"{name}_{domain}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert set(changed(norm, before)) == (updated if mode == "batch" else set())
    for name, value in bank.items():
        torch.testing.assert_close(getattr(norm, f"running_{name}_{domain}"), value)


def test_a_component_nests_ends_and_needs_no_route():
    norm, x = randomized(make_norm("gmm_bn", 4).double()).eval(), batch({"all": 4})
    mixed = norm(x)
    with mixture_component(norm, "clean"):
        outer = norm(x)
        with mixture_component(norm, "adv"):
            inner = norm(x)
        assert torch.equal(norm(x), outer)
    assert torch.equal(norm(x), mixed)
    assert not any(torch.equal(a, b) for a, b in ((mixed, outer), (mixed, inner), (outer, inner)))


def test_a_component_is_what_remains_when_one_gaussian_is_out_of_reach():
    norm, x = randomized(make_norm("gmm_bn", 4).double()).eval(), batch({"all": 4})
    with mixture_component(norm, "adv"):
        alone = norm(x)
    norm.running_mean_clean += 1e3  # its posterior is 0 everywhere
    torch.testing.assert_close(norm(x), alone)


def test_perturbed_statistics_and_groups_hold_for_a_component_too():
    norm, x = randomized(make_norm("gmm_bn", 4).double()), batch({"all": 4})
    delta = {"": {"adv": (torch.full((4,), 0.1, dtype=torch.float64), torch.full((4,), 0.2, dtype=torch.float64))}}
    with mixture_component(norm, "adv"), statistics(norm, mode="running", perturbation=delta):
        found = norm(x)
    mean, std = 1.1 * norm.running_mean_adv, (norm.running_var_adv + norm.eps).sqrt() / 1.2
    shape = (1, -1, 1, 1)
    expected = (x - mean.view(shape)) / std.view(shape) * norm.weight.view(shape) + norm.bias.view(shape)
    torch.testing.assert_close(found, expected)
    with mixture_component(norm, "adv"), statistics(norm, mode="batch_frozen", groups=2):
        halves = norm(x)
    for half, rows in zip(halves.split(2), x.split(2)):
        torch.testing.assert_close(half, F.batch_norm(rows, None, None, norm.weight, norm.bias, True, eps=norm.eps))


def test_a_component_is_one_graph_that_equals_eager():
    torch._dynamo.reset()
    model, x = mixture_network(), torch.rand(3, 1, 8, 8)
    run = torch.compile(model, fullgraph=True, backend="eager")
    for domain in ("clean", "adv", "clean"):
        with mixture_component(model, domain):
            torch.testing.assert_close(run(x), model(x))
    torch.testing.assert_close(run(x), model(x))


def test_an_attack_goes_through_the_component_and_strip_takes_it_out():
    model, x, y = mixture_network(), torch.rand(6, 1, 8, 8), torch.arange(6)
    attack = advnorm.attacks.PGD(threat=advnorm.ThreatModel(eps=0.2), steps=3, route="clean")
    plain = advnorm.strip(model, component="adv")
    assert sum(isinstance(module, nn.BatchNorm2d) for module in plain.modules()) == len(mixture_norms(model)) == 3
    with mixture_component(model, "adv"):
        torch.testing.assert_close(model(x), plain(x))
        attacked = attack(model, x, y)
        torch.testing.assert_close(attacked, advnorm.attacks.PGD(threat=attack.threat, steps=3)(plain, x, y))
        torch.testing.assert_close(advnorm.strip(model)(x), plain(x))
    assert not torch.allclose(attacked, attack(model, x, y))
    torch.testing.assert_close(advnorm.strip(model, route="adv")(x), model(x))


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda: mixture_component(make_norm("gmm_bn", 4), "avd"), "unknown_name"),
        (lambda: mixture_component(make_norm("dual_bn", 4), "adv"), "no_mixture_norm"),
        (lambda: mixture_component(nn.Linear(2, 2), "adv"), "no_routed_norm"),
        (lambda: pair_banks(make_norm("gmm_bn", 4), statistics="clean", affine="adv"), "not_supported"),
        (lambda: advnorm.strip(mixture_network(), component="avd"), "unknown_name"),
        (lambda: advnorm.strip(nn.Linear(2, 2), component="adv"), "unknown_name"),
    ],
)
def test_a_component_that_cannot_be_fixed_is_rejected(call, code):
    with rejects(code):
        call()
