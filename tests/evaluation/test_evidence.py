"""The rules of the audit: which numbers lead to which verdict."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from advnorm.evaluation.evidence import Evidence, EvidenceList, decide_verdict, weigh_gap, weigh_one_step


def decided(pgd: float, worst: float, chance: float) -> str:
    """The verdict on accuracies in percent, without other evidence."""
    numbers = pgd / 100, worst / 100
    return decide_verdict(*numbers, [weigh_gap(*numbers)], chance=chance, images=1000)[0]


@pytest.mark.parametrize(
    ("pgd", "worst", "expected"),
    [
        (51.33, 46.19, "real"),  # A, table 1: dual BN, 8/255
        (31.67, 23.14, "real"),  # ... 16/255
        (33.16, 22.89, "real"),  # C, table 1: TRADES-Cat, 16/255
        (26.98, 16.90, "real"),  # A, table 4: dual affine LN
        (32.23, 18.59, "real"),  # C, table 3: KL 0.4
        (21.92, 10.64, "inconclusive"),  # A, table 3: Setup2, which fails according to the paper
        (49.75, 7.03, "false"),  # A, table 3: single BN, 8/255
        (29.86, 0.48, "false"),  # ... 16/255
        (23.06, 1.20, "false"),  # A, table 4: single IN
        (33.11, 3.70, "false"),  # C, table 1: MAT-Cat
        (32.19, 0.98, "false"),  # C, table 4: MAT-Cat with DBN
        (0.32, 0.10, "none"),  # A, table 1: the clean branch
    ],
)
def test_pairs_of_pgd_and_autoattack_get_the_verdict_of_the_papers(pgd, worst, expected):
    assert decided(pgd, worst, chance=0.1) == expected


@pytest.mark.parametrize(("signs", "expected"), [([], "inconclusive"), (["square"], "false")])
def test_under_l1_a_gap_is_false_only_with_another_sign(signs, expected):
    others = [Evidence(name=s, value=9, expected="", ok=False, weight="doubt", text="points that ...") for s in signs]
    gap = weigh_gap(0.35, 0.01, others, norm="L1")
    assert decide_verdict(0.35, 0.01, [gap, *others], chance=0.1, images=1000)[0] == expected


def test_one_step_is_a_claim_except_under_l1_where_it_is_weak_on_every_network():
    numbers = {"one_step": 0.65, "worst": 0.07, "clean": 1.0, "images": 100}
    assert not weigh_one_step(**numbers).ok and not weigh_one_step(**numbers, norm="L2").ok
    assert weigh_one_step(**numbers, norm="L1").ok


@pytest.mark.parametrize(
    ("pgd", "worst", "chance", "expected"),
    [
        (48, 2, 0.52, "false"),  # two classes
        (97.8, 0, 1.0, "false"),  # one class
        (48, 45, 0.52, "none"),  # no more than a constant answer, and PGD-10 agrees
        (9, 0, 0.1, "none"),
        (60, 55, 0.52, "real"),
        (16, 11.5, 0.14, "none"),  # a little more than a constant answer, and nothing is left of it
        (95, 60, 0.9, "none"),
        (11, 1, 0.14, "none"),  # a wide gap where nobody claims robustness
    ],
)
def test_no_robustness_is_found_only_if_pgd_agrees_with_the_worst_case(pgd, worst, chance, expected):
    assert decided(pgd, worst, chance) == expected


@pytest.mark.parametrize(("images", "stride"), [(30, 1), (60, 1), (200, 3), (1000, 17)])
def test_two_more_robust_images_never_turn_a_false_verdict(images, stride):
    """A gap of 10 points with a quarter left may be three images: 4 and 1 of 30."""
    false = []
    for claimed in range(1, images + 1, stride):
        for worst in range(0, claimed, stride):
            gap = weigh_gap(claimed / images, worst / images, images=images)
            kept = weigh_gap(claimed / images, min(claimed, worst + 2) / images)
            assert (gap.ok, gap.weight) == (kept.ok, kept.weight)
            assert abs(gap.value - 100 * (claimed - worst) / images) < 1e-9
            false.append(not gap.ok and gap.weight == "decides")
    assert any(false) and weigh_gap(4 / 30, 1 / 30, images=30).ok


def test_a_worst_case_below_a_constant_answer_is_never_real():
    for chance in (0.1, 0.3, 0.9):
        for pgd in range(0, 101, 3):
            for worst in range(0, min(pgd, int(100 * chance)) + 1, 3):
                assert decided(pgd, worst, chance) != "real", (pgd, worst, chance)


# -- marks and printed numbers -----------------------------------------------------------------------------------------


def reads_in_order(item: Evidence) -> bool:
    """Whether the printed value does not exceed the printed limit; True without a printed limit."""
    limit = re.match(r"at most (\S+)", item.expected)
    return limit is None or float(item.measured) <= float(limit[1])


counts = st.integers(30, 2000).flatmap(
    lambda n: st.tuples(st.just(n), *(st.integers(0, n) for _ in range(3))).map(lambda t: (t[0], *sorted(t[1:])))
)


@given(counts)
def test_a_mark_never_contradicts_the_printed_numbers_of_gap_and_one_step(numbers):
    images, worst, claimed, clean = numbers
    for item in (
        weigh_gap(claimed / images, worst / images, images=images),
        weigh_one_step(claimed / images, worst / images, clean / images, images=images),
    ):
        assert item.ok == reads_in_order(item), item
        assert item.expected == "no claim" or f"2 of {images} images of slack" in item.expected


@given(st.floats(-100, 100), st.floats(0, 60), st.booleans(), st.integers(1, 2000), st.floats(-1e-6, 1e-6))
def test_a_mark_never_contradicts_the_printed_numbers(value, most, points, images, near):
    for number in (value, most + near):
        found = EvidenceList(images)
        ok = found.expect("any", "any", number, most, points=points)
        assert ok == found.items[0].ok == reads_in_order(found.items[0])
        decides = points and 200 / images > most
        assert (f"(2 of {images} images)" in found.items[0].expected) == decides


def test_a_value_just_above_its_limit_is_printed_with_more_digits():
    found = EvidenceList(1000)
    assert not found.expect("any", "any", 5.004, 5) and found.items[0].measured == "5.004"
    assert not found.expect("any", "any", math.nan, 5) and found.items[1].measured == "nan"
    assert found.expect("any", "any", 7.0, math.inf) and found.items[2].expected == ""
