"""With one domain a routed norm is the built-in norm: the same kernels, the same bits."""

from __future__ import annotations

import contextlib
import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

from advnorm.norms import RoutedNorm, list_norms, make_norm, route, statistics
from support.crossing import crossing
from support.norm_oracles import BANKED, PAPER, along, batch, build, changed, domains_of, randomized, shares, snapshot

#: Norms whose banks normalize the samples that update them and scale them with stored parameters, not products.
SELF = [name for name in BANKED if PAPER[name].statistics in ("mixed", "own") and PAPER[name].affine != "sandwich"]
NAME_AND_DOMAIN = [(name, domain) for name in SELF for domain in domains_of(name)]

INPUTS = {
    "flat": (1, (6, 4), None),
    "1d": (1, (6, 4, 5), None),
    "2d": (2, (6, 4, 3, 5), None),
    "3d": (3, (6, 4, 3, 2, 2), None),
    "channels_last": (2, (6, 4, 3, 5), torch.channels_last),
    "channels_last_3d": (3, (6, 4, 3, 2, 2), torch.channels_last_3d),
}
OPTIONS = {
    "default": {},
    "cumulative": {"momentum": None},
    "momentum": {"momentum": 0.37, "eps": 1e-3},
    "still": {"momentum": 0.0},
    "no_affine": {"affine": False},
    "no_bias": {"bias": False},
    "no_tracking": {"track_running_stats": False},
    "bare": {"affine": False, "track_running_stats": False},
}
BUILTIN = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def own_names(name: str, domain: str) -> dict[str, str]:
    """Where a norm stores what the built-in norm stores, for one domain."""
    row = PAPER[name]
    statistics_suffix = "" if row.statistics == "mixed" else f"_{domain}"
    affine_suffix = "" if row.affine == "one" else f"_{domain}"
    return {
        **{k: k + affine_suffix for k in ("weight", "bias")},
        **{k: k + statistics_suffix for k in ("running_mean", "running_var", "num_batches_tracked")},
    }


def pair_of_norms(name: str, domain: str, dim: int, **options) -> tuple[RoutedNorm, nn.Module, dict[str, str]]:
    norm = randomized(build(name, dim=dim, **options))
    builtin = BUILTIN[dim](4, **options)
    names = own_names(name, domain)
    state = norm.state_dict()
    builtin.load_state_dict({key: state[names[key]] for key in builtin.state_dict()})
    return norm, builtin, names


def inputs(case: str, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    _, shape, layout = INPUTS[case]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2 + 1
    x = x.to(dtype)
    return x if layout is None else x.contiguous(memory_format=layout)


def step(module: nn.Module, x: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Forward, backward and a plain gradient step on the parameters; returns output and input gradient."""
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    module.zero_grad(set_to_none=True)
    y = module(x)
    (y.float() * weights).sum().backward()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
    assert x.grad is not None
    return y.detach(), x.grad


def assert_same_bits(ours: torch.Tensor, theirs: torch.Tensor, what: str) -> None:
    assert ours.dtype == theirs.dtype, what
    assert torch.equal(ours, theirs), f"{what} differs by {(ours.double() - theirs.double()).abs().max()}"


def test_every_registered_norm_is_described_by_a_row_of_the_papers_table():
    assert set(list_norms()) == set(PAPER), "a norm without an oracle: add its row to PAPER in norm_oracles.py"
    assert len(SELF) >= 6


@pytest.mark.parametrize(
    ("name_and_domain", "case", "option"), crossing(NAME_AND_DOMAIN, list(INPUTS), list(OPTIONS), keep=4)
)
def test_a_single_domain_equals_the_builtin_batch_norm_bit_for_bit(name_and_domain, case, option):
    name, domain = name_and_domain
    dim = INPUTS[case][0]
    norm, builtin, names = pair_of_norms(name, domain, dim, **OPTIONS[option])
    before = snapshot(norm)
    weights = torch.randn(INPUTS[case][1])
    with route(norm, domain):
        for training in (True, True, True, False):
            norm.train(training)
            builtin.train(training)
            x = inputs(case, seed=int(training))
            (y, dx), (y_builtin, dx_builtin) = step(norm, x, weights), step(builtin, x, weights)
            assert_same_bits(y, y_builtin, "output")
            assert_same_bits(dx, dx_builtin, "input gradient")
            assert y.stride() == y_builtin.stride()
            assert dx.stride() == dx_builtin.stride()
            for key, parameter in builtin.named_parameters():
                assert_same_bits(getattr(norm, names[key]).grad, parameter.grad, f"gradient of {key}")
            for key, buffer in builtin.state_dict().items():
                assert_same_bits(norm.state_dict()[names[key]], buffer, key)
    mine = {names[key] for key in builtin.state_dict()}
    assert changed(norm, before) <= mine
    if builtin.track_running_stats:
        assert builtin.num_batches_tracked == 3
    others = {key: parameter for key, parameter in norm.named_parameters() if key not in mine}
    assert all(parameter.grad is None for parameter in others.values())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "domain"), NAME_AND_DOMAIN)
def test_a_single_domain_equals_the_builtin_batch_norm_in_other_precisions(name, domain, dtype):
    norm, builtin, names = pair_of_norms(name, domain, 2)
    if dtype == torch.float64:  # bfloat16 inputs keep float32 statistics, as mixed precision does
        norm, builtin = norm.double(), builtin.double()
    weights = torch.randn(INPUTS["2d"][1])
    with route(norm, domain):
        for training in (True, True, False):
            norm.train(training)
            builtin.train(training)
            x = inputs("2d", seed=3, dtype=dtype)
            (y, dx), (y_builtin, dx_builtin) = step(norm, x, weights), step(builtin, x, weights)
            assert_same_bits(y, y_builtin, "output")
            assert_same_bits(dx, dx_builtin, "input gradient")
    for key, buffer in builtin.state_dict().items():
        assert_same_bits(norm.state_dict()[names[key]], buffer, key)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize(("name", "domain"), NAME_AND_DOMAIN)
def test_a_single_domain_equals_the_builtin_batch_norm_under_bfloat16_autocast(name, domain, layout):
    norm, builtin, names = pair_of_norms(name, domain, 2)
    conv = nn.Conv2d(3, 4, 3, padding=1).to(memory_format=layout)
    ours, theirs = nn.Sequential(copy.deepcopy(conv), norm), nn.Sequential(copy.deepcopy(conv), builtin)
    weights = torch.randn(6, 4, 5, 5)
    for training in (True, True, True, False):
        ours.train(training)
        theirs.train(training)
        x = torch.randn(6, 3, 5, 5).contiguous(memory_format=layout)
        with torch.autocast("cpu", torch.bfloat16), route(norm, domain):
            (y, dx), (y_builtin, dx_builtin) = step(ours, x, weights), step(theirs, x, weights)
        assert y.dtype == torch.bfloat16
        assert_same_bits(y, y_builtin, "output")
        assert_same_bits(dx, dx_builtin, "input gradient")
        assert y.stride() == y_builtin.stride()
        for key, value in theirs[0].named_parameters():
            assert_same_bits(ours[0].get_parameter(key).grad, value.grad, f"gradient of the convolution's {key}")
    for key, buffer in builtin.state_dict().items():
        assert_same_bits(norm.state_dict()[names[key]], buffer, key)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_bn_needs_no_route_and_treats_a_concatenated_batch_as_one(layout):
    x = inputs("2d", seed=5).contiguous(memory_format=layout)
    weights = torch.randn(x.shape)
    norm, builtin, _ = pair_of_norms("bn", "clean", 2)
    routed = copy.deepcopy(norm)
    y, dx = step(norm, x, weights)
    with route(routed, {"clean": 4, "adv": 2}):
        y_routed, dx_routed = step(routed, x, weights)
    y_builtin, dx_builtin = step(builtin, x, weights)
    assert_same_bits(y, y_builtin, "output")
    assert_same_bits(dx, dx_builtin, "input gradient")
    assert_same_bits(y_routed, y_builtin, "output of a concatenated batch")
    assert_same_bits(dx_routed, dx_builtin, "input gradient of a concatenated batch")
    for key, value in builtin.state_dict().items():
        assert_same_bits(norm.state_dict()[key], value, key)
        assert_same_bits(routed.state_dict()[key], value, key)


@pytest.mark.parametrize("prefix", ["", "dual_affine_"])
@pytest.mark.parametrize("case", [case for case in INPUTS if case != "flat"])
@pytest.mark.parametrize("domain", ["clean", "adv"])
@pytest.mark.parametrize("training", [True, False])
def test_per_sample_norms_equal_the_builtin_ones(prefix, case, domain, training):
    dim, shape, _ = INPUTS[case]
    x, weights = inputs(case, seed=2), torch.randn(shape)
    for short, groups in (("ln", 1), ("gn", 2), ("in", 4)):
        options = {"num_groups": 2} if short == "gn" else {}
        norm = randomized(make_norm(prefix + short, 4, dim=dim, **options)).train(training)
        names = own_names(prefix + short, domain)
        builtin = nn.GroupNorm(groups, 4)
        builtin.load_state_dict({key: norm.state_dict()[names[key]] for key in ("weight", "bias")})
        before = snapshot(norm)
        with route(norm, domain):
            y = norm(x)
            assert changed(norm, before) == set()
            (step_y, dx), (builtin_y, builtin_dx) = step(norm, x, weights), step(builtin, x, weights)
        assert_same_bits(y.detach(), builtin_y, short)
        assert_same_bits(step_y, builtin_y, short)
        assert_same_bits(dx, builtin_dx, short)
        if short == "in":
            instance = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}[dim](4, affine=True)
            instance.load_state_dict({key: before[names[key]] for key in ("weight", "bias")})
            torch.testing.assert_close(y, instance(x), rtol=1e-5, atol=1e-5)
        if short == "ln":
            w, b = (before[names[key]].view(-1, *(1,) * dim) for key in ("weight", "bias"))
            expected = F.layer_norm(x, x.shape[1:]) * w + b
            torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
        unused = [p.grad for key, p in norm.named_parameters() if key not in names.values()]
        assert unused == ([None, None] if prefix else [])


def test_gn_takes_32_groups_or_the_largest_number_that_divides_both():
    for channels, groups in ((64, 32), (48, 16), (20, 4), (7, 1), (512, 32)):
        x = torch.randn(2, channels, 3, 3)
        torch.testing.assert_close(make_norm("gn", channels)(x), F.group_norm(x, groups))


@pytest.mark.parametrize("training", [True, False])
def test_none_is_the_identity_and_has_no_state(training):
    norm, x = make_norm("none", 4).train(training), torch.randn(3, 4, 2, 2)
    assert torch.equal(norm(x), x)
    with route(norm, {"clean": 2, "adv": 1}):
        assert torch.equal(norm(x), x)
    assert norm.state_dict() == {}


@pytest.mark.parametrize("name", list_norms())
@pytest.mark.parametrize("mode", ["batch", "running"])
def test_a_concatenated_batch_keeps_channels_last(name, mode):
    norm, counts = randomized(build(name)), shares(name)
    x = batch(counts, spatial=(3, 4)).float().contiguous(memory_format=torch.channels_last)
    with along(norm, counts), statistics(norm, mode=mode):
        y = norm(x)
        expected = norm(x.contiguous())
    assert y.stride() == x.stride()
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


class Doubled(nn.Module):
    def forward(self, value):
        return 2 * value


@pytest.mark.parametrize("place", ["builtin", "routed"])
def test_a_parametrized_weight_scales_as_in_the_builtin_norm(place):
    norm, name = (nn.BatchNorm2d(4), "weight") if place == "builtin" else (make_norm("dual_bn", 4), "weight_adv")
    parametrize.register_parametrization(norm, name, Doubled())
    x = torch.rand(3, 4, 2, 2)
    with route(norm, "adv") if place == "routed" else contextlib.nullcontext():
        torch.testing.assert_close(norm(x), 2 * nn.BatchNorm2d(4)(x))


def test_a_parametrized_bias_beside_a_plain_weight_is_added():
    norm, x = make_norm("dual_bn", 4), torch.rand(3, 4, 2, 2)
    with route(norm, "adv"):
        expected = norm(x) + 2
        torch.nn.init.ones_(norm.bias_adv)
        parametrize.register_parametrization(norm, "bias_adv", Doubled())
        torch.testing.assert_close(norm(x), expected)


def test_a_state_without_counts_leaves_them_as_in_the_builtin_norm():
    builtin, routed = (nn.Sequential(norm) for norm in (nn.BatchNorm2d(3, momentum=None), make_norm("bn", 3)))
    routed[0].momentum = None
    for model in (builtin, routed):
        for seed in range(3):
            model(torch.rand(4, 3, 2, 2, generator=torch.Generator().manual_seed(seed)))
        state = {name: value for name, value in model.state_dict().items() if "weight" in name}
        model.load_state_dict(state, strict=False)
        model(torch.full((4, 3, 2, 2), -5.0))
    assert int(routed[0].num_batches_tracked) == int(builtin[0].num_batches_tracked) == 4
    torch.testing.assert_close(routed[0].running_mean, builtin[0].running_mean)


def test_a_copy_of_a_compiled_norm_runs_itself_and_pickles():
    norm = make_norm("bn", 4)
    norm.compile(backend="eager")
    x = torch.rand(3, 4, 2, 2)
    norm(x)
    twin = copy.deepcopy(norm)
    torch.nn.init.constant_(twin.weight, 7)
    torch.testing.assert_close(twin(x), 7 * nn.BatchNorm2d(4)(x))
    assert torch.equal(pickle.loads(pickle.dumps(norm)).weight, norm.weight)


@pytest.mark.parametrize("mode", ["batch", "batch_frozen", "running"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_without_biases_scale_each_part_of_a_mixed_batch(mode, dtype):
    norm = randomized(build("dual_affine_bn", bias=False))
    builtin = nn.BatchNorm2d(4, affine=False).train(mode != "running")
    builtin.load_state_dict({key: value for key, value in norm.state_dict().items() if "weight" not in key})
    x = inputs("2d", seed=0, dtype=dtype)
    with route(norm, {"clean": 2, "adv": len(x) - 2}), statistics(norm, mode=mode):
        output = norm(x)
    z = builtin(x).float()
    weights = [getattr(norm, f"weight_{domain}").view(4, 1, 1) for domain in ("clean", "adv")]
    expected = torch.cat([z[:2] * weights[0], z[2:] * weights[1]]).to(dtype)
    assert output.dtype == dtype
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(output, expected, rtol=tolerance, atol=tolerance)


def test_a_state_without_counts_gives_a_norm_on_the_meta_device_counts_of_zero():
    with torch.device("meta"):
        norm = make_norm("dual_bn", 3)
    state = {name: value for name, value in make_norm("dual_bn", 3).state_dict().items() if "num_batches" not in name}
    norm.load_state_dict(state, assign=True)
    assert norm.num_batches_tracked_clean.item() == norm.num_batches_tracked_adv.item() == 0
