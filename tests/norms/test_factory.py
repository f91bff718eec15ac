"""Norms by name: what the registry rejects, and how a user adds a norm."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from advnorm._core.errors import ConfigError
from advnorm.norms import NORMS, Plan, list_norms, make_norm, make_plan, register_norm, route
from support.norm_cases import rejects
from support.norm_oracles import build


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("dualbn", "did you mean 'dual_bn'"),
        ("DUAL_BN", "'dual_bn'"),
        ("tripple_bn", "did you mean 'triple_bn'"),
        ("xyz", "'cross_bn'"),
        (None, "'none'"),
        (3, "'bn'"),
    ],
)
@pytest.mark.parametrize("maker", [lambda name: make_norm(name, 4), make_plan], ids=["make_norm", "make_plan"])
def test_a_wrong_norm_name_is_answered_with_the_nearest_or_all(maker, name, hint):
    with rejects("unknown_name", "norm") as caught:
        maker(name)
    assert hint in str(caught.value)


@pytest.mark.parametrize("name", list_norms())
def test_an_unknown_option_is_rejected_by_every_norm(name):
    with rejects("unknown_name", "momentun"):
        build(name, momentun=0.2)


@pytest.mark.parametrize("name", [name for name in list_norms() if name != "cross_bn"])
def test_an_option_of_another_norm_is_rejected_by_name(name):
    with rejects("unknown_name", "other_gradient"):
        build(name, other_gradient=True)
    if not name.endswith("gn"):
        with rejects("unknown_name", "num_groups"):
            build(name, num_groups=2)


@pytest.mark.parametrize("name", list_norms())
@pytest.mark.parametrize("channels", [0, -3, 2**31, 10**30, True, 1.5])
def test_an_impossible_number_of_channels_is_rejected(name, channels):
    with rejects("out_of_range", "num_features"):
        build(name, channels)


@pytest.mark.parametrize("name", list_norms())
@pytest.mark.parametrize("dim", [0, 4, "2d"])
def test_a_wrong_dim_is_rejected(name, dim):
    with rejects("out_of_range", "dim"):
        build(name, dim=dim)


@pytest.mark.parametrize(
    ("arguments", "options", "fields"),
    [
        (("gn", 8), {"num_groups": 0}, ["num_groups"]),
        (("gn", 8), {"num_groups": -1}, ["num_groups"]),
        (("gn", 8), {"num_groups": 2.0}, ["num_groups"]),
        (("gn", 8), {"num_groups": "2"}, ["num_groups"]),
        (("gn", 8), {"num_groups": 3}, ["num_groups"]),
        (("dual_affine_gn", 6), {"num_groups": 4}, ["num_groups"]),
        (("bn", 8.0), {}, ["num_features"]),
        (("bn", 0), {"eps": -1}, ["eps", "num_features"]),
        (("bn", 8), {"momentum": 5}, ["momentum"]),
        (("bn", 8), {"momentum": "a"}, ["momentum"]),
    ],
)
def test_all_wrong_settings_of_a_norm_are_reported_at_once(arguments, options, fields):
    with pytest.raises(ConfigError) as caught:
        make_norm(*arguments, **options)
    assert [problem.field for problem in caught.value.problems] == fields


@pytest.mark.parametrize(
    ("name", "domains"),
    [
        *((name, names) for name in list_norms("dual_*") for names in (("clean",), ("a", "b", "c"))),
        ("triple_bn", ("a", "b")),
        ("cross_bn", ("a", "b", "c")),
        ("gmm_bn", ("a",)),
    ],
)
def test_a_norm_with_a_fixed_number_of_domains_rejects_another_number(name, domains):
    with rejects("out_of_range", "domains"):
        make_norm(name, 4, domains=domains)


@pytest.mark.parametrize("domains", ["clean", 3])
@pytest.mark.parametrize("name", list_norms())
def test_domains_must_be_a_list_of_names(name, domains):
    with rejects("wrong_type", "domains"):
        make_norm(name, 4, domains=domains)


def test_a_user_can_register_a_norm(monkeypatch):
    monkeypatch.setattr(NORMS, "_entries", dict(NORMS._entries))

    @register_norm("shared_affine_bn", domains=("a", "b"), num_domains=2, summary="own statistics, one affine bank")
    def plan(name, domains):
        return Plan(name=name, domains=domains, normalized_by=domains, feeds=domains, affine=("one", "one"))

    norm, x = make_norm("shared_affine_bn", 4), torch.rand(3, 4, 2, 2)
    assert "shared_affine_bn" in list_norms() and norm.plan == plan("shared_affine_bn", ("a", "b"))
    with route(norm, "b"):
        assert torch.equal(norm(x), nn.BatchNorm2d(4)(x))
    with rejects("out_of_range", "domains"):
        make_norm("shared_affine_bn", 4, domains=("a", "b", "c"))
    with rejects("already_exists"):
        register_norm("bn")(plan)
