"""Recalibration of statistics banks (paper A, table 5)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from advnorm.norms import (
    RoutedNorm,
    make_norm,
    pair_banks,
    recalibrate,
    route,
    routed_modules,
    statistics,
    zero_perturbation,
)
from support.norm_cases import images, network, rejects, scope_states
from support.norm_oracles import PAPER, changed, snapshot

examples = settings(max_examples=40, deadline=None, derandomize=True, database=None)


def moments_layer_by_layer(
    model: nn.Sequential, batches: list[Tensor], affine_suffix: str
) -> list[tuple[Tensor, Tensor]]:
    """Pooled mean and unbiased variance of what reaches every norm, each batch normalized by its own moments."""
    seen: dict[int, list[np.ndarray]] = {}
    for hidden in batches:
        for index, layer in enumerate(model):
            if isinstance(layer, RoutedNorm):
                seen.setdefault(index, []).append(hidden.detach().numpy().transpose(1, 0, 2, 3).reshape(4, -1))
                mean, var = hidden.mean((0, 2, 3), keepdim=True), hidden.var((0, 2, 3), keepdim=True, correction=0)
                weight, bias = (layer.get_parameter(k + affine_suffix).view(4, 1, 1) for k in ("weight", "bias"))
                hidden = (hidden - mean) / (var + layer.eps).sqrt() * weight + bias
            else:
                hidden = layer(hidden)
    values = [np.concatenate(parts, 1) for parts in seen.values()]
    return [(torch.from_numpy(v.mean(1)), torch.from_numpy(v.var(1, ddof=1))) for v in values]


def assert_bank_holds(model: nn.Sequential, suffix: str, expected: list[tuple[Tensor, Tensor]]) -> None:
    for norm, (mean, var) in zip(routed_modules(model).values(), expected):
        torch.testing.assert_close(norm.get_buffer("running_mean" + suffix), mean, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(norm.get_buffer("running_var" + suffix), var, rtol=1e-9, atol=1e-11)


def odd_batches() -> list[Tensor]:
    return [images({"all": size}, seed=size) for size in (5, 3, 1, 2)]


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(
    ("name", "route_", "into", "written"),
    [
        ("bn", None, None, ""),
        ("bn", "adv", None, ""),
        ("dual_bn", "adv", None, "_adv"),
        ("dual_bn", "clean", None, "_clean"),
        ("dual_bn", "adv", "clean", "_clean"),
        ("dual_bn", "clean", "adv", "_adv"),
        ("dual_affine_bn", "adv", None, ""),
        ("dual_stats_bn", "adv", None, "_adv"),
        ("dual_stats_bn", "adv", "clean", "_clean"),
        ("cross_bn", "adv", None, "_clean"),
        ("cross_bn", "adv", "adv", "_adv"),
        ("triple_bn", "adv2", "adv", "_adv"),
        ("multi_bn", "noise", None, "_noise"),
    ],
)
def test_recalibration_stores_the_pooled_moments_and_nothing_else(name, route_, into, written, training):
    model = network(name).train(training)
    model[2].train(not training)
    flags = [module.training for module in model.modules()]
    before = snapshot(model)
    affine = f"_{route_}" if PAPER[name].affine == "own" else ""
    expected = moments_layer_by_layer(model, odd_batches(), affine)
    assert recalibrate(model, iter(odd_batches()), route=route_, into=into) == 11
    assert_bank_holds(model, written, expected)
    assert changed(model, before) <= {
        f"{i}.{k}{written}" for i in (1, 4) for k in ("running_mean", "running_var", "num_batches_tracked")
    }
    assert [module.training for module in model.modules()] == flags
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert all(not module._forward_pre_hooks for module in model.modules())


def test_recalibration_takes_tensors_tuples_and_mappings():
    x = images({"all": 7})
    expected = None
    for data in (
        x,
        [x[:4], x[4:]],
        [(x[:4], 0), (x[4:], 1)],
        [{"image": x[:4], "label": 0}, {"image": x[4:], "label": 1}],
    ):
        model = network("dual_bn")
        assert recalibrate(model, data, route="adv", batch_size=4) == 7
        if expected is None:
            expected = snapshot(model)
        assert changed(model, expected) == set()


@pytest.mark.parametrize("surroundings", ["running", "route", "groups", "pair", "perturbation"])
def test_recalibration_does_not_depend_on_the_scopes_around_it(surroundings):
    free, enclosed = network("dual_bn"), network("dual_bn")
    recalibrate(free, odd_batches(), route="adv")
    scope = {
        "running": lambda: statistics(enclosed, mode="running"),
        "route": lambda: route(enclosed, "clean"),
        "groups": lambda: statistics(enclosed, groups=3),
        "pair": lambda: pair_banks(enclosed, statistics="clean", affine="clean"),
        "perturbation": lambda: statistics(
            enclosed, perturbation=zero_perturbation(enclosed).map(lambda d: d.detach() + 0.5)
        ),
    }[surroundings]()
    with scope:
        inside = scope_states(enclosed)
        recalibrate(enclosed, odd_batches(), route="adv")
        assert scope_states(enclosed) == inside
    for key, value in free.state_dict().items():
        torch.testing.assert_close(enclosed.state_dict()[key], value)


def test_recalibration_changes_nothing_when_the_data_break_off():
    model = network("dual_bn").train()
    outside, before = scope_states(model), snapshot(model)

    def broken():
        yield images({"all": 4})
        yield images({"all": 4})
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        recalibrate(model, broken(), route="adv")
    assert changed(model, before) == set()
    assert scope_states(model) == outside
    assert all(not module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_recalibration_stores_no_moments_that_are_not_finite(bad):
    model = network("dual_bn").train()
    before, x = snapshot(model), images({"all": 4})
    x[1, 0, 0, 0] = bad
    with rejects("not_finite", "data"):
        recalibrate(model, [images({"all": 4}), x], route="adv")
    assert changed(model, before) == set()


def test_recalibration_leaves_the_random_state_and_the_users_hooks_alone():
    calls = []
    model = nn.Sequential(nn.Dropout(0.5), network("dual_bn")).train()
    handle = model[1][1].register_forward_pre_hook(lambda module, args: calls.append(len(args[0])))
    state = torch.get_rng_state()
    recalibrate(model, odd_batches(), route="adv")
    assert torch.equal(torch.get_rng_state(), state), "dropout moved the random state of the caller"
    assert calls == [5, 3, 1, 2]
    assert list(model[1][1]._forward_pre_hooks) == [handle.id]


def test_recalibration_cuts_a_tensor_into_equally_large_batches():
    model, sizes = network("dual_bn"), []
    model[0].register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    recalibrate(model, images({"all": 9}), route="adv", batch_size=4)
    assert sizes == [3, 3, 3]
    assert model[1].num_batches_tracked_adv == 3


def test_recalibration_leaves_a_builtin_norm_beside_it_alone():
    model = nn.Sequential(nn.BatchNorm2d(3).double(), network("dual_bn")).train()
    before = snapshot(model)
    recalibrate(model, odd_batches(), route="adv")
    assert {key for key in changed(model, before) if key.startswith("0.")} == set()


def test_recalibration_pools_a_norm_that_runs_twice_in_one_forward():
    norm = make_norm("bn", 3, dim=1).double()
    model = nn.Sequential(norm, nn.Tanh(), norm)
    x = torch.randn(6, 3, dtype=torch.float64)
    recalibrate(model, x)
    z = torch.tanh((x - x.mean(0)) / (x.var(0, correction=0) + norm.eps).sqrt())
    torch.testing.assert_close(norm.running_mean, torch.cat([x, z]).mean(0))
    torch.testing.assert_close(norm.running_var, torch.cat([x, z]).var(0))


def test_recalibration_pools_in_float64():
    """Many batches far from zero: sums in single precision would drift."""
    norm = make_norm("bn", 3, dim=1)
    x = (torch.randn(4095, 3, dtype=torch.float64) + 100).float()
    recalibrate(norm, x, batch_size=7)
    torch.testing.assert_close(norm.running_mean.double(), x.double().mean(0), rtol=1e-6, atol=0)
    torch.testing.assert_close(norm.running_var.double(), x.double().var(0), rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("model", "data", "options", "code", "field"),
    [
        ("dual_bn", [], {"route": "adv"}, "empty", "data"),
        ("dual_bn", iter(()), {"route": "adv"}, "empty", "data"),
        ("dual_bn", None, {}, "missing_route", "route"),
        ("dual_bn", None, {"route": "adb"}, "unknown_name", "domain"),
        ("dual_bn", None, {"route": "adv", "into": "claen"}, "unknown_name", "domain"),
        ("dual_bn", None, {"route": {"clean": 2, "adv": 2}}, "wrong_type", "route"),
        ("dual_bn", None, {"route": "adv", "batch_size": 0}, "out_of_range", "batch_size"),
        ("dual_bn", 5, {"route": "adv"}, "wrong_type", "data"),
        ("dual_bn", [np.zeros((2, 3, 4, 4))], {"route": "adv"}, "wrong_type", "data"),
        ("dual_bn", torch.zeros(4, 3, 4, 4, dtype=torch.uint8), {"route": "adv"}, "wrong_type", "data"),
        ("dual_bn", [torch.zeros(4, 3, 4, 4, dtype=torch.uint8)], {"route": "adv"}, "wrong_type", "data"),
        ("ln", None, {}, "no_statistics_bank", "model"),
        (lambda: nn.Conv2d(3, 3, 1), None, {}, "no_statistics_bank", "model"),
        (lambda: network("dual_bn", track_running_stats=False), None, {"route": "adv"}, "not_supported", "model"),
        ("gmm_bn", None, {"route": "adv"}, "not_supported", "model"),
        (lambda: nn.Sequential(make_norm("bn", 3).double(), network("dual_bn")), None, {}, "missing_route", "route"),
    ],
)
def test_recalibration_reports_wrong_arguments_and_changes_nothing(model, data, options, code, field):
    model = network(model) if isinstance(model, str) else model()
    before = snapshot(model)
    with rejects(code, field):
        recalibrate(model, odd_batches() if data is None else data, **options)
    assert changed(model, before) == set()


def test_recalibration_rejects_a_tensor_without_images():
    model = network("dual_bn")
    before = snapshot(model)
    with rejects("empty", "data"):
        recalibrate(model, torch.zeros(0, 3, 4, 4, dtype=torch.float64), route="adv")
    assert changed(model, before) == set()


@examples
@given(sizes=st.lists(st.integers(2, 6), min_size=1, max_size=5))
def test_recalibration_of_a_lone_norm_does_not_depend_on_how_the_data_are_cut(sizes):
    norm = make_norm("dual_bn", 3, dim=1).double()
    x = torch.randn(sum(sizes), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(len(sizes)))
    assert recalibrate(norm, x.split(sizes), route="clean") == len(x)
    torch.testing.assert_close(norm.running_mean_clean, x.mean(0), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(norm.running_var_clean, x.var(0), rtol=1e-10, atol=1e-12)
    assert torch.equal(norm.running_var_adv, torch.ones(3, dtype=torch.float64))


def test_recalibration_counts_its_batches():
    model = network("dual_bn")
    x = images({"clean": 4})
    recalibrate(model, [x, x, x], route="adv")
    assert {int(m.num_batches_tracked_adv) for m in routed_modules(model).values()} == {3}


def test_recalibration_converts_the_images_to_the_dtype_of_the_model():
    data = [batch.float() for batch in odd_batches()]
    found, expected = network("dual_bn"), network("dual_bn")
    assert next(found.parameters()).dtype == torch.float64
    recalibrate(found, data, route="adv")
    recalibrate(expected, [batch.double() for batch in data], route="adv")
    assert changed(found, snapshot(expected)) == set()
