"""Intervals of accuracies, against scipy."""

import pytest
from scipy.stats import binomtest

from advnorm import ConfigError
from advnorm.evaluation.statistics import wilson_interval


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
