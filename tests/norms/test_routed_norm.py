"""The state of a routed norm, and the errors of its forward."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from advnorm._core.errors import RouteError
from advnorm.norms import list_norms, make_norm, mixture_likelihood, route, statistics, zero_perturbation
from support.norm_cases import ROUTED, rejects
from support.norm_oracles import (
    BANKED,
    FORWARDED,
    PAPER,
    along,
    build,
    changed,
    domains_of,
    parts_of,
    randomized,
    shares,
    snapshot,
)


def test_bn_has_exactly_the_state_of_the_builtin_norm():
    assert list(make_norm("bn", 4).state_dict()) == list(nn.BatchNorm2d(4).state_dict())
    builtin = randomized(nn.BatchNorm2d(4)).eval()
    norm = make_norm("bn", 4).eval()
    norm.load_state_dict(builtin.state_dict(), strict=True)
    x = torch.randn(3, 4, 2, 2)
    assert torch.equal(norm(x), builtin(x))
    builtin.load_state_dict(randomized(norm, seed=3).state_dict(), strict=True)
    assert torch.equal(norm(x), builtin(x))


@pytest.mark.parametrize("name", list_norms())
def test_state_names_are_the_builtin_names_with_the_domain_where_there_are_several_banks(name):
    row, known = PAPER[name], domains_of(name)
    affine = [f"_{d}" for d in known] if row.affine == "own" else [""]
    own = [f"own_{k}_{d}" for k in ("weight", "bias") for d in known] if row.affine == "sandwich" else []
    banks = {"mixed": [""], "sample": [], "scale": [], "nothing": []}.get(row.statistics, [f"_{d}" for d in known])
    kinds = {"nothing": (), "scale": ("weight",)}.get(row.statistics, ("weight", "bias"))
    expected = {*own, *(f"{k}{s}" for k in kinds for s in affine)}
    expected |= {f"{k}{s}" for k in ("running_mean", "running_var", "num_batches_tracked") for s in banks}
    norm = build(name)
    assert set(norm.state_dict()) == expected
    assert {k for k, _ in norm.named_parameters()} == {k for k in expected if "weight" in k or "bias" in k}
    twin = build(name)
    twin.load_state_dict(randomized(norm).state_dict())
    assert changed(twin, snapshot(norm)) == set()


@pytest.mark.parametrize("name", list_norms())
def test_convert_sync_batchnorm_leaves_routed_norms_alone(name):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), build(name), nn.BatchNorm2d(4))
    norm = model[1]
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert converted[1] is norm
    assert isinstance(converted[2], nn.SyncBatchNorm)
    assert not isinstance(norm, nn.modules.batchnorm._NormBase)


@pytest.mark.parametrize("name", list_norms())
def test_reset_parameters_is_a_fresh_norm(name):
    norm = randomized(build(name))
    for key, buffer in norm.named_buffers():
        buffer += "num_batches_tracked" in key
    norm.reset_parameters()
    assert changed(norm, snapshot(build(name))) == set()


# -- errors of a forward: nothing moves ------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", ROUTED)
def test_the_error_of_a_forward_without_a_route_shows_how_to_set_one(name, training):
    norm = randomized(build(name)).train(training)
    x = torch.randn(4, 4, 2, 2)
    if name == "gmm_bn" and not training:
        assert norm(x).shape == x.shape  # at test time the mixture needs no route
        return
    with rejects("missing_route", "route", RouteError, unchanged=norm) as caught:
        norm(x)
    counts = ", ".join(f"'{d}': n{i}" for i, d in enumerate(domains_of(name)))
    for word in (name, f"route(model, '{domains_of(name)[-1]}')", f"{{{counts}}}"):
        assert word in str(caught.value)


@pytest.mark.parametrize("name", list_norms())
def test_a_route_of_another_size_than_the_batch_is_rejected(name):
    norm = randomized(build(name))
    counts = shares(name)
    total = sum(counts.values())
    for batch_size in (total - 1, total + 2, 1):
        with rejects("wrong_route", "route", RouteError, unchanged=norm) as caught, along(norm, counts):
            norm(torch.randn(batch_size, 4, 2, 2))
        assert f"covers {total} samples and the batch has {batch_size}" in str(caught.value)


@pytest.mark.parametrize("mode", ["batch", "running"])
@pytest.mark.parametrize("name", list_norms())
def test_an_empty_batch_is_rejected(name, mode):
    norm = randomized(build(name))
    for counts in (domains_of(name)[0], dict.fromkeys(domains_of(name), 0)):
        with rejects("empty", kind=RouteError, unchanged=norm), route(norm, counts), statistics(norm, mode=mode):
            norm(torch.zeros(0, 4, 2, 2))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("lonely", [0, -1], ids=["first", "last"])
@pytest.mark.parametrize("name", [name for name in BANKED if PAPER[name].statistics != "mixed"])
def test_one_value_per_channel_of_a_domain_is_rejected_before_any_bank_is_updated(name, lonely, groups):
    """The variance of one value cannot normalize, and banks that were updated before the error would stay wrong."""
    norm = randomized(build(name, dim=1))
    updating = parts_of(name)[: len(domains_of(name))]
    counts = {part: groups if part == updating[lonely] else 3 * groups for part in parts_of(name)}
    bank = updating[lonely].removesuffix(FORWARDED)
    scopes = along(norm, counts), statistics(norm, groups=groups)
    with rejects("too_few_samples", bank, RouteError, unchanged=norm), scopes[0], scopes[1]:
        norm(torch.randn(sum(counts.values()), 4))
    with along(norm, counts), statistics(norm, mode="running"):
        assert torch.isfinite(norm(torch.randn(sum(counts.values()), 4))).all()


@pytest.mark.parametrize("name", ["bn", "dual_affine_bn"])
def test_one_value_per_channel_in_all_is_rejected(name):
    norm = randomized(build(name, dim=1))
    with rejects("too_few_samples", "shared", RouteError, unchanged=norm), route(norm, "adv"):
        norm(torch.randn(1, 4))
    with route(norm, {"clean": 1, "adv": 1}):  # one of each, and their statistics are mixed: two values
        assert norm(torch.randn(2, 4)).shape == (2, 4)


@pytest.mark.parametrize("name", [name for name in list_norms() if name.endswith(("gn", "in"))])
def test_one_value_per_group_of_channels_is_rejected(name):
    """The built-in norm returns zeros or raises, depending on the size of the batch."""
    norm = build(name)
    for batch_size in (1, 3):
        with rejects("too_few_samples", "x", RouteError), route(norm, "adv"):
            norm(torch.randn(batch_size, 4, 1, 1))


@pytest.mark.parametrize("mode", ["batch", "batch_frozen"])
@pytest.mark.parametrize("name", ["cross_bn", "gmm_bn"])
def test_batch_statistics_of_a_missing_domain_are_rejected(name, mode):
    norm = randomized(build(name))
    x = torch.randn(6, 4, 2, 2)
    for counts, missing in (("adv", "clean"), ("clean", "adv"), ({"clean": 6, "adv": 0}, "adv"), ({"adv": 6}, "clean")):
        scopes = route(norm, counts), statistics(norm, mode=mode)
        with rejects("missing_samples", "route", RouteError, unchanged=norm) as caught, scopes[0], scopes[1]:
            norm(x)
        assert f"statistics of {missing}," in str(caught.value)
        with route(norm, counts), statistics(norm, mode="running"):
            assert torch.isfinite(norm(x)).all()


@pytest.mark.parametrize("mode", ["batch", "batch_frozen"])
def test_a_crossed_norm_needs_the_forwarded_samples_whose_statistics_it_uses(mode):
    """Statistics of crossed samples would not do: their variances grow apart from norm to norm."""
    norm = randomized(make_norm("cross_bn", 4))
    x = torch.randn(8, 4, 2, 2)
    for routed, forwarded, missing in (
        ("adv", None, "clean"),
        ({"clean": 8}, None, "adv"),
        ({"clean": 4, "adv": 2}, {"clean": 2}, "adv"),
        ({"clean": 2, "adv": 4}, {"adv": 2}, "clean"),
        ("adv", {"adv": 4}, "clean"),
        ("adv", {"clean": 0, "adv": 4}, "clean"),
    ):
        scopes = route(norm, routed, forwarded=forwarded), statistics(norm, mode=mode)
        with rejects("missing_samples", "route", RouteError, unchanged=norm) as caught, scopes[0], scopes[1]:
            norm(x)
        assert f"statistics of {missing}," in str(caught.value)
        assert "forwarded={'clean': n0, 'adv': n1}" in caught.value.problems[0].hint


def test_forwarded_samples_that_do_not_fit_the_batch_are_rejected():
    norm = randomized(make_norm("cross_bn", 4))
    for routed, forwarded, covered in (({"clean": 2, "adv": 2}, {"clean": 2, "adv": 3}, 9), ("adv", {"clean": 10}, 10)):
        scope = route(norm, routed, forwarded=forwarded)
        with rejects("wrong_route", "route", RouteError, unchanged=norm) as caught, scope:
            norm(torch.randn(8, 4, 2, 2))
        assert f"forwarded {forwarded} covers {covered} samples" in str(caught.value)


@pytest.mark.parametrize("perturbed", [False, True])
@pytest.mark.parametrize("mode", ["batch", "batch_frozen"])
@pytest.mark.parametrize("name", BANKED)
def test_groups_that_do_not_divide_a_domains_share_are_rejected(name, mode, perturbed):
    norm = randomized(build(name))
    counts = dict.fromkeys(parts_of(name), 4)
    counts[parts_of(name)[-1]] = 3
    counts[parts_of(name)[0]] += 1  # the whole batch would be divisible
    perturbation = zero_perturbation(norm) if perturbed else None
    scope = statistics(norm, mode=mode, groups=2, perturbation=perturbation)
    with rejects("not_divisible", "groups", RouteError, unchanged=norm), along(norm, counts), scope:
        norm(torch.randn(sum(counts.values()), 4, 2, 2))


@pytest.mark.parametrize("name", list_norms())
@pytest.mark.parametrize(
    ("dim", "shape", "fix"),
    [
        (1, (4, 4, 2, 2), "dim=2"),
        (1, (4,), "dim=1"),
        (2, (4, 4, 3), "dim=1"),
        (2, (4, 4), "dim=1"),
        (2, (4, 4, 2, 2, 2), "dim=3"),
        (3, (4, 4, 2, 2), "dim=2"),
    ],
)
def test_an_input_of_another_dimension_is_rejected(name, dim, shape, fix):
    norm = randomized(build(name, dim=dim))
    with rejects("wrong_shape", "x", unchanged=norm) as caught, route(norm, domains_of(name)[0]):
        norm(torch.randn(shape))
    assert fix in caught.value.problems[0].hint


@pytest.mark.parametrize("name", list_norms())
def test_an_input_with_another_number_of_channels_is_rejected(name):
    norm = randomized(build(name))
    with rejects("wrong_shape", "x", unchanged=norm), route(norm, domains_of(name)[0]):
        norm(torch.randn(4, 5, 2, 2))


@pytest.mark.parametrize("name", BANKED)
def test_a_norm_without_running_statistics_rejects_mode_running(name):
    norm = build(name, track_running_stats=False)
    counts = shares(name)
    x = torch.randn(sum(counts.values()), 4, 2, 2)
    with along(norm, counts):
        with rejects("not_supported", "mode", RouteError), statistics(norm, mode="running"):
            norm(x)
        trained, evaluated = norm.train()(x), norm.eval()(x)
    assert torch.equal(trained, evaluated)
    assert not list(norm.buffers())


def test_a_likelihood_needs_a_domain_and_a_forward():
    norm = randomized(make_norm("gmm_bn", 4)).eval()
    with mixture_likelihood(norm) as likelihood, rejects("missing_route", "route", RouteError, unchanged=norm):
        norm(torch.randn(4, 4, 2, 2))
    with rejects("empty", kind=RouteError):
        likelihood.loss()


def test_an_old_checkpoint_without_batch_counts_loads():
    built_in, routed = nn.BatchNorm2d(4), make_norm("bn", 4)
    state = {key: value for key, value in built_in.state_dict().items() if key != "num_batches_tracked"}
    routed.load_state_dict(state)
    assert routed.num_batches_tracked == 0
    with pytest.raises(RuntimeError, match="running_var"):
        routed.load_state_dict({key: value for key, value in state.items() if key != "running_var"})
