"""Every registered claim: supported by values that fit it, and never by numbers that move away from them."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advnorm.studies import STUDIES
from advnorm.studies.uncertainty import MeasuredValues, Sample
from support.claim_values import supporting

NAMES = STUDIES.names()
#: Claims whose clauses are no linear inequalities, so that a path of several numbers may leave and enter them again:
#: ratios, products, extremes of distances, a share of cases. Each of their numbers moves alone.
NOT_LINEAR = {
    "A/fig4", "A/fig5", "A/fig6", "A/fig7", "B/table3", "C/table1", "C/table2", "C/table3", "D/table2",
    "D/fig6", "D/fig8", "D/fig14", "D/fig15", "D/fig16", "D/fig17", "E/fig2", "E/table6",
}  # fmt: skip
#: Claims that a number can leave and enter again: it leaves the points of a curve or plane that are compared, removes
#: one jump of a curve and adds another, or its size is compared, which grows again beyond zero.
FOLDED = {"C/fig1", "C/fig2", "C/fig3", "C/fig4", "C/fig6", "E/fig5", "E/fig6"}


def moved(values, away, distance):
    """Values at a distance along a path from supporting ones."""
    return {key: [one + distance * away.get(key, 0.0) for one in found] for key, found in values.items()}


@pytest.mark.parametrize("name", NAMES)
def test_values_that_fit_the_claim_support_it(name):
    conclusion = STUDIES.get(name).evaluate_claim(supporting(name))
    assert conclusion.verdict == "supported"
    with_source = [one.text for one in conclusion.clauses if one.margin and one.margin in one.text]
    assert not with_source  # margins are listed apart


@settings(max_examples=12, deadline=None, derandomize=True)  # a claim that is not linear may fold at a rare example
@given(st.integers(0, 10**6), st.floats(0.5, 40), st.floats(1.1, 5))
@pytest.mark.parametrize("name", [name for name in NAMES if name not in FOLDED])
def test_a_claim_is_not_supported_again_when_numbers_move_further_away(name, seed, size, further):
    study, values, draw = STUDIES.get(name), supporting(name), random.Random(seed)
    count = 1 if name in NOT_LINEAR else draw.randint(1, len(values))
    scale = size * max(abs(one) for found in values.values() for one in found) / 100
    away = {key: draw.uniform(-scale, scale) for key in draw.sample(sorted(values), count)}
    near, far = (study.verdict(moved(values, away, distance)) for distance in (1.0, further))
    assert near == "supported" or far != "supported"


@pytest.mark.slow  # each verdict evaluates a claim hundreds of times
@settings(max_examples=3, deadline=None)
@given(st.integers(0, 10**6), st.floats(0, 20))
@pytest.mark.parametrize("name", [name for name in NAMES if len(supporting(name)) < 50])
def test_a_verdict_with_intervals_never_decides_against_the_numbers(name, seed, size):
    """Supported needs more than numbers that hold, contradicted more than numbers that fail."""
    study, values, draw = STUDIES.get(name), supporting(name), random.Random(seed)
    keys = draw.sample(sorted(values), min(3, len(values)))
    changed = moved(values, {key: draw.uniform(-size, size) for key in keys}, 1.0)
    samples = {key: Sample((found[0] - 0.2, found[0] + 0.2)) for key, found in changed.items()}
    exact = {key: list(sample.values) for key, sample in samples.items()}
    measured = study.evaluate_claim(MeasuredValues(samples)).verdict
    assert measured in ("undecided", study.verdict(exact))
