"""Intervals of accuracies and of paired differences, against scipy and exact enumeration."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest, multinomial, norm

from advnorm import ConfigError
from advnorm.evaluation.intervals import format_accuracy, mcnemar_p_value, paired_interval, wilson_interval


@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95, 0.999])
@pytest.mark.parametrize("n", [1, 7, 200, 10_000])
def test_the_interval_is_scipys(n, confidence):
    for successes in sorted({0, 1, n // 3, n // 2, n - 1, n}):
        ours = wilson_interval(successes, n, confidence)
        theirs = binomtest(successes, n).proportion_ci(confidence, method="wilson")
        assert ours == pytest.approx((theirs.low, theirs.high), abs=1e-12)
        assert 0 <= ours[0] <= successes / n <= ours[1] <= 1 and ours[0] < ours[1]


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ((0, 0), "n"),
        ((-1, 5), "successes"),
        ((6, 5), "successes"),
        ((1, 5, 1.0), "confidence"),
        ((1, 5, 0), "confidence"),
    ],
)
def test_impossible_counts_are_rejected(arguments, field):
    with pytest.raises(ConfigError) as caught:
        wilson_interval(*arguments)
    assert [(p.code, p.field) for p in caught.value.problems] == [("out_of_range", field)]


@given(st.integers(0, 400), st.integers(1, 400), st.integers(2, 40))
def test_more_images_never_widen_the_interval(successes, n, factor):
    successes = min(successes, n)
    few, many = wilson_interval(successes, n), wilson_interval(successes * factor, n * factor)
    assert many[1] - many[0] < few[1] - few[0]
    few, many = (paired_interval(k * successes, k * successes, k * n) for k in (1, factor))
    assert many[1] - many[0] < few[1] - few[0]


@pytest.mark.parametrize(("first", "second"), [(0, 0), (5, 0), (3, 9), (40, 41), (300, 250)])
def test_mcnemars_p_value_is_the_sum_of_the_less_likely_splits(first, second):
    n = first + second
    shares = [math.comb(n, k) / 2**n for k in range(n + 1)]
    expected = sum(share for share in shares if share <= shares[first] * (1 + 1e-9))
    assert mcnemar_p_value(first, second) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("n", [15, 30])
def test_the_paired_interval_covers_the_true_difference_by_exact_enumeration(n):
    coverages = []
    for only_first, only_second in [(0.0, 0.0), (0.05, 0.05), (0.2, 0.05), (0.3, 0.3), (0.5, 0.1), (0.02, 0.6)]:
        covered = 0.0
        for b in range(n + 1):
            for c in range(n + 1 - b):
                low, high = paired_interval(b - c, b + c, n)
                weight = multinomial.pmf([b, c, n - b - c], n, [only_first, only_second, 1 - only_first - only_second])
                covered += weight * (low <= only_first - only_second <= high)
        coverages.append(covered)
    assert min(coverages) > 0.93 and sum(coverages) / len(coverages) > 0.95


@given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 30), st.integers(0, 30))
def test_the_paired_interval_is_walds_after_half_an_observation_for_each_outcome(both, neither, first, second):
    b, c, n = first + 0.5, second + 0.5, both + neither + first + second + 2
    deviation = math.sqrt(((b + c) / n - ((b - c) / n) ** 2) / n)
    expected = [(b - c) / n + sign * norm.ppf(0.975) * deviation for sign in (-1, 1)]
    found = paired_interval(first - second, first + second, n - 2)
    assert found == pytest.approx((max(expected[0], -1), min(expected[1], 1)), abs=1e-12)


def test_an_accuracy_is_shown_with_its_interval():
    assert format_accuracy(0.4554, 10_000) == "45.5 (44.6–46.5)"
    assert format_accuracy(0.0, 1000, 2) == "0.00 (0.00–0.38)"
