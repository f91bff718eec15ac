"""Concatenated batches against the papers' formulas: values, gradients, running statistics, in float64 and below."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from torch import Tensor, nn
from torch.autograd.gradcheck import GradcheckError

from advnorm.norms import RoutedNorm, likelihood, list_norms, make_norm, route, statistics, zero_perturbation
from support.norm_oracles import (
    BANKED,
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

TIGHT = {"rtol": 1e-9, "atol": 1e-11}
#: (name, options of its own): every registered norm, cross_bn with and without the gradient of its statistics.
VARIANTS = {name: (name, {}) for name in list_norms()}
VARIANTS["cross_bn_constant"] = ("cross_bn", {"other_gradient": False})
BANKED_VARIANTS = {key: variant for key, variant in VARIANTS.items() if variant[0] in BANKED}
each_variant = pytest.mark.parametrize(("name", "options"), VARIANTS.values(), ids=VARIANTS)
each_banked_variant = pytest.mark.parametrize(("name", "options"), BANKED_VARIANTS.values(), ids=BANKED_VARIANTS)


def random_deltas(norm: RoutedNorm, *, scale: float = 0.3) -> dict[str, tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)

    def uniform() -> Tensor:
        value = scale * (2 * torch.rand(norm.shape, generator=generator, dtype=torch.float64) - 1)
        return value.requires_grad_()

    return {bank: (uniform(), uniform()) for bank in norm.plan.statistics_banks}


def compare(
    name: str,
    norm: RoutedNorm,
    x: Tensor,
    counts: dict[str, int],
    *,
    mode: str = "batch",
    groups: int = 1,
    deltas: dict[str, tuple[Tensor, Tensor]] | None = None,
    other_gradient: bool = True,
    tolerance: dict[str, float] = TIGHT,
) -> None:
    """Run norm and oracle on the same batch and loss; compare everything either of them produces."""
    oracle = Oracle(name, norm, other_gradient=other_gradient)
    ours, theirs = x.clone().requires_grad_(), x.double().clone().requires_grad_()
    twins = (
        None
        if deltas is None
        else {k: tuple(d.detach().clone().requires_grad_() for d in v) for k, v in deltas.items()}
    )
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    perturbation = None if deltas is None else {"": deltas}
    with along(norm, counts), statistics(norm, mode=mode, groups=groups, perturbation=perturbation):
        y = norm(ours)
    assert y.dtype == x.dtype
    expected = oracle.forward(theirs, counts, mode=mode, groups=groups, deltas=twins)
    torch.testing.assert_close(y.double(), expected, **tolerance)
    (y.double() * weights).sum().backward()
    (expected * weights).sum().backward()
    assert ours.grad is not None
    torch.testing.assert_close(ours.grad.double(), theirs.grad, **tolerance)
    for key, value in norm.named_parameters():
        assert value.grad is not None, key
        torch.testing.assert_close(value.grad.double(), oracle.parameters[key].grad, **tolerance, msg=key)
    for key, value in norm.named_buffers():
        torch.testing.assert_close(value.double(), oracle.buffers[key].double(), **tolerance, msg=key)
    if deltas is not None:
        assert twins is not None
        for bank in deltas:
            for delta, twin, what in zip(deltas[bank], twins[bank], ("mean", "std")):
                assert delta.grad is not None, f"no gradient reaches the perturbation of the {what} of bank {bank!r}"
                torch.testing.assert_close(delta.grad.double(), twin.grad, **tolerance)


# -- every norm, every mode ------------------------------------------------------------------------------------


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


# -- against the built-in batch norm ---------------------------------------------------------------------------


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


# -- cross_bn: what is forwarded and where gradients flow -------------------------------------------------------

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
def test_cross_gradients_flow_through_the_other_statistics_or_take_them_for_constants(other_gradient):
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
def test_forwarded_samples_get_a_gradient_from_what_they_normalize_unless_told_otherwise(domain):
    for other_gradient in (False, True):
        norm = make_norm("cross_bn", 4, other_gradient=other_gradient)
        x = batch(CROSSED).float().requires_grad_()
        with along(norm, CROSSED):
            norm(x)[ROWS[domain]].square().sum().backward()
        assert x.grad is not None
        reached = {part for part, rows in ROWS.items() if x.grad[rows].any()}
        source = {"clean": "adv", "adv": "clean"}[domain] + FORWARDED
        assert reached == ({domain, source} if other_gradient else {domain})


def test_only_forwarded_samples_feed_a_crossed_norm():
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


# -- gmm_bn ----------------------------------------------------------------------------------------------------


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
    with route(norm, counts), statistics(norm, mode=mode), likelihood(norm) as nll:
        y = norm(x)
    np.testing.assert_allclose(y.detach().numpy(), expected, rtol=1e-9, atol=1e-11)
    labels = np.repeat(np.arange(len(counts)), list(counts.values()))
    own = log_posterior[labels, np.arange(len(x))]  # (N, H, W): eq. 21 picks each sample's own domain
    np.testing.assert_allclose(nll.loss().item(), -own.sum((1, 2)).mean(), rtol=1e-9)


def test_the_likelihood_is_summed_over_layers_and_averaged_over_all_samples_whatever_their_shares():
    model = nn.Sequential(make_norm("gmm_bn", 3), nn.Conv2d(3, 4, 1), nn.ReLU(), make_norm("gmm_bn", 4)).double()
    randomized(model)
    counts = {"clean": 6, "adv": 2}
    x = batch(counts, channels=3)
    with route(model, counts), likelihood(model) as nll:
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
            with route(norm, domain), likelihood(norm) as nll:
                norm(x)
            assert nll.loss().item() == pytest.approx(-log_posterior[k].sum((1, 2)).mean(), rel=1e-9)


def test_the_likelihood_of_vectors_has_one_position_per_sample():
    norm, counts = randomized(make_norm("gmm_bn", 4, dim=1).double()), {"clean": 5, "adv": 3}
    x, oracle = batch(counts, spatial=()), Oracle("gmm_bn", norm)
    with route(norm, counts), likelihood(norm) as nll:
        norm(x)
    oracle.forward(x, counts)
    torch.testing.assert_close(nll.loss(), oracle.likelihood, **TIGHT)


def test_the_gradient_of_the_likelihood_equals_the_oracles():
    norm = randomized(make_norm("gmm_bn", 4).double())
    oracle, counts = Oracle("gmm_bn", norm), {"clean": 5, "adv": 3}
    ours = batch(counts).requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    with route(norm, counts), likelihood(norm) as nll:
        norm(ours)
    nll.loss().backward()
    oracle.forward(theirs, counts)
    assert oracle.likelihood is not None
    oracle.likelihood.backward()
    torch.testing.assert_close(ours.grad, theirs.grad, **TIGHT)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_gmm_bn_with_512_channels_neither_underflows_nor_overflows(mode, dtype):
    counts = {"clean": 4, "adv": 4}
    norm = randomized(make_norm("gmm_bn", 512))
    norm = norm.double() if dtype == torch.float64 else norm
    x = (batch(counts, channels=512, spatial=(2, 2)) * 4).to(dtype).requires_grad_()
    with route(norm, counts), statistics(norm, mode=mode), likelihood(norm) as nll:
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


# -- perturbed statistics and groups (paper B) -----------------------------------------------------------------


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


@pytest.mark.parametrize("groups", [2, 3])
@pytest.mark.parametrize("perturbed", [False, True], ids=["plain", "perturbed"])
@pytest.mark.parametrize("mode", MODES)
@each_banked_variant
def test_groups_are_the_nths_of_every_domain_and_feed_pooled_moments(name, options, mode, perturbed, groups):
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
        with statistics(norm, groups=7):  # does not divide: no batch statistic is cut, so nothing to refuse
            assert torch.equal(norm(x), y)


def test_algorithm_1_ascends_the_loss_by_the_sign_of_the_gradient():
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
    worst = zero.ascend(gradients, radius=1e-3)
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
    worst = zero.ascend(gradients, radius=0.5)
    assert [g is None for g in gradients] == [True, True, False, False]
    assert all(not t.any() for t in worst[""]["clean"])
    assert all((t.abs() == 0.5).all() for t in worst[""]["adv"])


# -- derivatives by finite differences -------------------------------------------------------------------------


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
    [
        ("bn", {}),
        ("dual_bn", {}),
        ("dual_affine_bn", {}),
        ("cross_bn", {}),
        ("gmm_bn", {}),
        ("dual_affine_gn", {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("mode", ["batch", "running"])
def test_gradgradcheck(name, options, mode):
    norm, counts = randomized(build(name, 2, **options).double()), dict(zip(parts_of(name), (3, 2, 2, 2)))
    x = batch(counts, channels=2, spatial=(2, 1)).requires_grad_()
    assert torch.autograd.gradgradcheck(differentiable(norm, counts, mode), (x, *norm.parameters()))


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
