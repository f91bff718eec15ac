"""The sandwich: an affine mapping that all domains share, then one of each domain (Gong et al. 2021)."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from advnorm import convert_norm, create_model, make_norm, route, strip
from advnorm.attacks.folded_copy import make_folded_copy
from advnorm.models import load_weights, save_weights
from support.norm_oracles import randomized
from support.problems import raises_problem

X = torch.rand(6, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def network(norm: str = "sandwich_bn") -> nn.Module:
    return randomized(create_model("small_cnn", num_classes=3, norm=norm).double()).eval()


def test_a_new_sandwich_is_a_dual_bn():
    norm, dual = make_norm("sandwich_bn", 3).double(), make_norm("dual_bn", 3).double()
    with route(norm, {"clean": 4, "adv": 2}), route(dual, {"clean": 4, "adv": 2}):
        assert torch.equal(norm(X), dual(X))


@pytest.mark.parametrize("domain", ["clean", "adv"])
def test_it_computes_the_formula_in_numpy(domain):
    norm = randomized(make_norm("sandwich_bn", 3).double()).eval()
    state = {name: value.numpy()[:, None, None] for name, value in norm.state_dict().items() if value.dim()}
    z = X.numpy() - state[f"running_mean_{domain}"]
    z = z / np.sqrt(state[f"running_var_{domain}"] + norm.eps)
    z = z * state["weight"] + state["bias"]
    z = z * state[f"own_weight_{domain}"] + state[f"own_bias_{domain}"]
    with route(norm, domain):
        np.testing.assert_allclose(norm(X).detach().numpy(), z, rtol=1e-12, atol=1e-13)


def test_any_number_of_domains_trains_as_plain_norms_with_two_mappings_behind_them():
    domains = ("clean", "adv", "noise")
    norm = randomized(make_norm("sandwich_bn", 3, domains=domains).double())
    own = {name: value.detach().clone().requires_grad_() for name, value in norm.named_parameters()}
    plain = {domain: nn.BatchNorm2d(3, affine=False).double() for domain in domains}
    for domain, twin in plain.items():
        twin.running_mean, twin.running_var = (bank.clone() for bank in norm.statistics_bank(domain)[:2])
    counts = dict(zip(domains, (3, 2, 1)))
    with route(norm, counts):
        outputs = norm(X)
    expected = []
    for domain, x in zip(domains, X.split(list(counts.values()))):
        a, b, c, d = (
            own[name].view(-1, 1, 1) for name in ("weight", "bias", f"own_weight_{domain}", f"own_bias_{domain}")
        )
        expected.append(c * (a * plain[domain](x) + b) + d)
    torch.testing.assert_close(outputs, torch.cat(expected))
    outputs.square().sum().backward()
    torch.cat(expected).square().sum().backward()
    for name, value in norm.named_parameters():
        torch.testing.assert_close(value.grad, own[name].grad)
    for domain, twin in plain.items():
        torch.testing.assert_close(norm.statistics_bank(domain)[0], twin.running_mean)
        torch.testing.assert_close(norm.statistics_bank(domain)[1], twin.running_var)


def test_shared_parameters_learn_from_both_domains_and_own_ones_from_theirs():
    norm = randomized(make_norm("sandwich_bn", 3).double())
    with route(norm, "adv"):
        norm(X).square().sum().backward()
    learned = {name for name, value in norm.named_parameters() if value.grad is not None and value.grad.any()}
    assert learned == {"weight", "bias", "own_weight_adv", "own_bias_adv"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_conversion_keeps_the_parameters_as_the_shared_mapping_and_starts_the_own_ones_as_identity(dtype):
    plain = randomized(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))).to(dtype).eval()
    x, weight = X.to(dtype), plain[1].weight
    expected = plain(x)
    convert_norm(plain, "sandwich_bn")
    assert plain[1].weight is weight
    for domain in ("clean", "adv"):
        own = plain[1].get_parameter(f"own_weight_{domain}"), plain[1].get_parameter(f"own_bias_{domain}")
        assert own[0].dtype == dtype and own[0].eq(1).all() and own[1].eq(0).all()
        with route(plain, domain):
            torch.testing.assert_close(plain(x), expected, rtol=0, atol=0)


@pytest.mark.parametrize("domain", ["clean", "adv"])
def test_a_stripped_branch_has_the_same_outputs_and_folds(domain):
    model = network()
    plain = strip(model, domain)
    with route(model, domain):
        expected = model(X)
    assert torch.equal(plain(X), expected)
    assert type(plain.bn1) is nn.BatchNorm2d and all(value.requires_grad for value in plain.bn1.parameters())
    assert torch.equal(plain.bn1.weight, model.bn1.weight * model.bn1.get_parameter(f"own_weight_{domain}"))
    folded = make_folded_copy(plain, dtype=torch.float64)
    assert folded is not None and folded.folded
    torch.testing.assert_close(folded(X), expected.float(), rtol=1e-5, atol=1e-6)  # logits are float32


def test_an_interpolation_mixes_the_mappings_of_the_branches():
    """The mean of the composed mappings, not the composition of mean factors."""
    norm = randomized(nn.Sequential(make_norm("sandwich_bn", 3))).double()
    mixed = strip(norm, {"clean": 0.25, "adv": 0.75})[0]
    get = norm[0].get_parameter
    weight = get("weight") * (0.25 * get("own_weight_clean") + 0.75 * get("own_weight_adv"))
    bias = sum(
        share * (get(f"own_weight_{name}") * get("bias") + get(f"own_bias_{name}"))
        for name, share in (("clean", 0.25), ("adv", 0.75))
    )
    torch.testing.assert_close(mixed.weight, weight)
    torch.testing.assert_close(mixed.bias, bias)


def test_a_linked_copy_is_rejected():
    with raises_problem("not_supported", "linked"):
        strip(network(), "adv", linked=True)


@pytest.mark.parametrize("norm", ["bn", "dual_bn"])
def test_weights_of_other_norms_are_neither_read_as_factors_nor_made_of_them(norm, tmp_path):
    """Each factor filled with the same weight would square it."""
    other, model = network(norm), network()
    before = copy.deepcopy(model.state_dict())
    path = save_weights(tmp_path / "other.safetensors", other, {})
    with raises_problem("wrong_tensors", "weights"):
        load_weights(model, path)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    path = save_weights(tmp_path / "sandwich.safetensors", model, {})
    with raises_problem("wrong_tensors", "weights"):
        load_weights(other, f"{path}:adv")
    model = create_model("small_cnn", num_classes=3, norm="sandwich_bn").double()
    load_weights(model, path)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
