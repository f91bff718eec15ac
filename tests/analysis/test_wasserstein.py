"""Distances against a closed form in NumPy and against samples."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from advnorm.analysis import Gaussian, wasserstein
from advnorm.analysis.banks import Distance


def gaussian(rng, channels):
    return rng.normal(size=channels), rng.uniform(0.1, 2, size=channels)


@settings(deadline=None, max_examples=25, derandomize=True)
@given(channels=st.integers(1, 40), seed=st.integers(0, 999))
def test_the_distance_is_the_closed_form(channels, seed):
    rng = np.random.default_rng(seed)
    (m1, s1), (m2, s2) = gaussian(rng, channels), gaussian(rng, channels)
    first, second = (Gaussian(torch.tensor(m), torch.tensor(s)) for m, s in ((m1, s1), (m2, s2)))
    # Bures' form for any covariance; diagonal ones commute.
    cross = np.sqrt(np.sqrt(np.diag(s1**2)) @ np.diag(s2**2) @ np.sqrt(np.diag(s1**2)))
    bures = np.sum((m1 - m2) ** 2) + np.trace(np.diag(s1**2) + np.diag(s2**2) - 2 * cross)
    assert wasserstein(first, second).total == pytest.approx(bures, rel=1e-9, abs=1e-12)
    assert wasserstein(first, second) == wasserstein(second, first)
    assert wasserstein(first, first) == Distance(0.0, 0.0)


def test_the_distance_is_that_of_sorted_samples():
    rng = np.random.default_rng(0)
    (m1, s1), (m2, s2) = gaussian(rng, 5), gaussian(rng, 5)
    estimate = 0.0
    for channel in range(5):  # in one dimension the best transport keeps the order
        a, b = (np.sort(rng.normal(m[channel], s[channel], 200_000)) for m, s in ((m1, s1), (m2, s2)))
        estimate += np.mean((a - b) ** 2)
    exact = wasserstein(*(Gaussian(torch.tensor(m), torch.tensor(s)) for m, s in ((m1, s1), (m2, s2)))).total
    assert exact == pytest.approx(estimate, rel=0.01)
