"""Crossings of test parameters: pairwise in the fast tests, complete in the slow ones."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest


def crossing(*axes: Sequence[Any], keep: int) -> list[Any]:
    """All combinations of the axes, as parameters.

    The fast tests run those whose indices sum to a multiple of ``keep``. They include every pair of values.
    """
    fast: set[tuple[tuple[int, int], ...]] = set()
    cases = []
    for indices in product(*(range(len(axis)) for axis in axes)):
        values = tuple(axis[index] for axis, index in zip(axes, indices))
        label = "-".join(str(value[0] if isinstance(value, tuple) else value) for value in values)
        if sum(indices) % keep == 0:
            fast.update(combinations(enumerate(indices), 2))
            cases.append(pytest.param(*values, id=label))
        else:
            cases.append(pytest.param(*values, id=label, marks=pytest.mark.slow))
    pairs = {
        ((i, a), (j, b))
        for (i, first), (j, second) in combinations(list(enumerate(axes)), 2)
        for a, b in product(range(len(first)), range(len(second)))
    }
    assert fast >= pairs, "a pair of values is in no fast test; choose a smaller keep"
    return cases


def fast_first(fast: Sequence[Any], all_values: Sequence[Any]) -> list[Any]:
    """All values as parameters; the fast tests run only ``fast``."""
    slow = [value if isinstance(value, tuple) else (value,) for value in all_values if value not in fast]
    return [*fast, *(pytest.param(*value, marks=pytest.mark.slow) for value in slow)]
