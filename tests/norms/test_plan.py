"""Plans: which samples must be forwarded, and the plans that are rejected."""

from __future__ import annotations

import pytest

from advnorm.norms import Plan, make_norm, make_plan
from support.norm_cases import rejects


def test_only_domains_that_are_not_routed_themselves_must_be_forwarded():
    plan = Plan(name="half", domains=("a", "b"), normalized_by=("a", "a"), feeds=("a", "b"), affine=("a", "b"))
    assert plan.forwarded_for(["b"]) == ("a",)
    assert plan.forwarded_for(["a", "b"]) == plan.forwarded_for(["a"]) == ()


@pytest.mark.parametrize(
    ("domains", "codes"),
    [
        ((), ["empty"]),
        (("clean", "clean"), ["conflict"]),
        (("clean", "two words"), ["wrong_type"]),
        (("clean", ""), ["wrong_type"]),
        (("clean", 3), ["wrong_type"]),
        (("clean", "clean", "a.b"), ["wrong_type", "conflict"]),
    ],
)
def test_bad_domain_names_are_rejected(domains, codes):
    with rejects(codes[0], "domains") as caught:
        make_norm("multi_bn", 4, domains=domains)
    assert [problem.code for problem in caught.value.problems] == codes


def test_a_plan_with_contradictions_lists_all_its_problems():
    with rejects("wrong_shape", "affine") as caught:
        Plan(name="mine", domains=("a", "b"), normalized_by=("a",), feeds=(), affine=("a", "b", "c"))
    assert {problem.field for problem in caught.value.problems} == {"normalized_by", "feeds", "affine"}
    with rejects("conflict", "normalized_by"):
        Plan(name="mine", domains=("a", "b"), normalized_by=("a", "c"), feeds=("a", "b"), affine=("a", "b"))


def test_an_unknown_domain_is_answered_with_the_nearest():
    with rejects("unknown_name", "domain"):
        make_plan("dual_bn").index("claen")
