"""Scopes that cannot be opened: unknown domains, wrong counts, modes, groups and perturbations."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from advnorm import strip
from advnorm._core.errors import AdvnormError, ConfigError, RouteError
from advnorm.norms import (
    RoutedNorm,
    checkpoint_context,
    domains,
    list_norms,
    make_norm,
    make_plan,
    mixture_likelihood,
    pair_banks,
    route,
    statistics,
    zero_perturbation,
)
from support.norm_cases import rejects
from support.norm_oracles import build


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: strip(None), "model"),
        (lambda: domains("x"), "model"),
        (lambda: zero_perturbation(3), "model"),
        (lambda: mixture_likelihood(3), "model"),
        (lambda: route("x", "adv"), "model"),
    ],
)
def test_arguments_of_a_wrong_type_are_rejected_by_name(call, field):
    with rejects("wrong_type", field):
        call()


def test_every_error_is_an_advnorm_error_and_a_builtin_one():
    assert issubclass(ConfigError, AdvnormError) and issubclass(ConfigError, ValueError)
    assert issubclass(RouteError, AdvnormError) and issubclass(RouteError, RuntimeError)


@pytest.mark.parametrize("name", list_norms())
def test_an_unknown_domain_is_answered_with_the_nearest(name):
    norm = build(name)
    with rejects("unknown_name", "domain") as caught:
        route(norm, "claen")
    assert "did you mean 'clean'" in str(caught.value)
    with rejects("unknown_name", "domain") as caught:
        route(norm, {"clean": 1, "adb": 1, "zzz": 1})
    assert len(caught.value.problems) == 2
    if name != "gmm_bn":  # cannot be paired at all
        with rejects("unknown_name", "domain"):
            pair_banks(norm, statistics="clean", affine="Adv")


def test_a_domain_that_only_some_norms_know_is_rejected():
    model = nn.Sequential(make_norm("triple_bn", 4), make_norm("dual_bn", 4))
    with rejects("unknown_name", "domain"):
        route(model, "adv2")


@pytest.mark.parametrize("count", [-1, True, False, 2.0, "3", None, torch.tensor(2)], ids=repr)
def test_a_count_must_be_a_number_of_samples(count):
    with rejects("out_of_range", "route.adv"):
        route(make_norm("dual_bn", 4), {"clean": 2, "adv": count})


def test_all_bad_counts_are_named_in_one_error():
    with rejects("out_of_range", "route.clean") as caught:
        route(make_norm("dual_bn", 4), {"clean": -1, "adv": True})
    assert [problem.got for problem in caught.value.problems] == [-1, True]


@pytest.mark.parametrize("bad", [{}, None, 3, ["clean", "adv"], ("clean", 4), {"clean"}], ids=repr)
def test_a_route_must_be_a_domain_or_a_mapping(bad):
    with rejects("wrong_type", "route"):
        route(make_norm("dual_bn", 4), bad)


def test_forwarded_samples_must_name_known_domains_and_counts():
    norm = make_norm("cross_bn", 4)
    with rejects("unknown_name", "domain"):
        route(norm, "adv", forwarded={"claen": 4})
    with rejects("out_of_range", "forwarded.clean"):
        route(norm, "adv", forwarded={"clean": -1})


@pytest.mark.parametrize(
    "scope",
    [
        lambda model: route(model, "adv"),
        lambda model: statistics(model, mode="running"),
        lambda model: pair_banks(model, statistics="clean", affine="adv"),
        lambda model: checkpoint_context(model)(),
    ],
    ids=["route", "statistics", "pair", "checkpoint"],
)
def test_a_model_without_routed_norms_is_rejected(scope):
    with rejects("no_routed_norm", "model"):
        scope(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)))


def test_scopes_for_particular_norms_reject_others():
    with rejects("no_mixture_norm", "model"):
        mixture_likelihood(make_norm("dual_bn", 4))
    with rejects("not_supported", "model"):
        pair_banks(make_norm("gmm_bn", 4), statistics="clean", affine="adv")
    for model in (nn.ReLU(), make_norm("ln", 4)):
        with rejects("no_statistics_bank", "model"):
            zero_perturbation(model)


@pytest.mark.parametrize("mode", ["frozen", "train", "eval", "Batch", "", 3, True, "batch-frozen"], ids=repr)
def test_a_wrong_mode_is_rejected(mode):
    with rejects("unknown_name", "mode"):
        statistics(make_norm("bn", 4), mode=mode)


@pytest.mark.parametrize("groups", [0, -2, 1.0, True, "2"], ids=repr)
def test_a_wrong_number_of_groups_is_rejected(groups):
    with rejects("out_of_range", "groups"):
        statistics(make_norm("bn", 4), groups=groups)


def test_all_problems_of_a_statistics_scope_are_reported_at_once():
    with rejects("unknown_name", "mode") as caught:
        statistics(make_norm("bn", 4), mode="runing", groups=0, perturbation={"layer9": {}})
    assert [problem.field for problem in caught.value.problems] == ["mode", "groups", "perturbation"]


def test_a_perturbation_of_another_norm_is_rejected():
    other = zero_perturbation(nn.Sequential(make_norm("bn", 4)))
    with rejects("unknown_name", "perturbation"):
        statistics(make_norm("bn", 4), perturbation=other)


@pytest.mark.parametrize(
    ("perturbation", "code"),
    [
        ({"": {"adversarial": (torch.zeros(4), torch.zeros(4))}}, "unknown_name"),
        ({"": {"adv": (torch.zeros(3), torch.zeros(3))}}, "wrong_shape"),
        ({"": {"adv": (torch.zeros(4),)}}, "wrong_shape"),
    ],
)
def test_a_perturbation_of_unknown_banks_or_another_shape_is_rejected(perturbation, code):
    """A misspelt bank would be ignored, and the attack would have no effect."""
    with rejects(code, "perturbation"):
        statistics(make_norm("dual_bn", 4), perturbation=perturbation)


def test_a_perturbation_maps_as_many_tensors_as_it_has():
    zero = zero_perturbation(make_norm("dual_bn", 4))
    with pytest.raises(ValueError, match="zip"):
        zero.sign_step(zero.tensors[:3], 0.1)


def test_messages_are_one_paragraph_without_dumps():
    norm: Any = make_norm("dual_bn", 4)
    for attempt in (
        lambda: norm(torch.randn(4, 4, 2, 2)),
        lambda: route(norm, {"clean": 1.5, "adv": -1}),
        lambda: make_norm("dualbn", 4),
        lambda: statistics(norm, mode="x", groups=0),
        lambda: RoutedNorm(0, make_plan("bn")),
    ):
        with pytest.raises(AdvnormError) as caught:
            attempt()
        message = str(caught.value)
        assert len(message) < 600, message
        assert not re.search(r"\n|<function|object at 0x", message), message


@pytest.mark.parametrize("forwarded", [7, 10])
def test_more_forwarded_samples_than_the_batch_has_are_rejected(forwarded):
    norm, x = make_norm("cross_bn", 3), torch.rand(6, 3, 2, 2)
    scope = route(norm, "adv", forwarded={"clean": forwarded})
    with rejects("wrong_route", "route", RouteError, unchanged=norm), scope:
        norm(x)
