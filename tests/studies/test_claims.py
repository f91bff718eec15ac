"""Clauses of claims at the very limits of their words, and checks in parts."""

import pytest

from advnorm.studies.claims import ALMOST_NONE, COMPARABLE, SIGNIFICANT, Clause, Margin, for_each

HALF = Margin(0.5, "half: {}", "a test")


@pytest.mark.parametrize(
    ("clause", "numbers", "held"),
    [
        (Clause.higher, (5.0, 5.0), False),
        (Clause.higher, (5.1, 5.0), True),
        (Clause.lower, (5.0, 5.0), False),
        (Clause.lower, (4.9, 5.0), True),
        (Clause.far_higher, (5.0 + COMPARABLE, 5.0), False),
        (Clause.far_higher, (5.1 + COMPARABLE, 5.0), True),
        (Clause.significantly_higher, (5.0 + SIGNIFICANT, 5.0), True),
        (Clause.significantly_higher, (4.9 + SIGNIFICANT, 5.0), False),
        (Clause.comparable, (5.0 + COMPARABLE, 5.0), True),
        (Clause.comparable, (5.0, 5.0 + COMPARABLE), True),
        (Clause.comparable, (5.0, 5.1 + COMPARABLE), False),
        (Clause.robust, (40.0, ALMOST_NONE), False),
        (Clause.robust, (40.0, ALMOST_NONE + 0.1), True),
        (Clause.almost_no_robustness, (0.0, ALMOST_NONE), True),
        (Clause.almost_no_robustness, (0.0, ALMOST_NONE + 0.1), False),
    ],
)
def test_a_clause_holds_up_to_the_limit_of_its_words(clause, numbers, held):
    assert clause("words", *map(float, numbers)).held is held


@pytest.mark.parametrize(
    ("held", "share", "expected"), [(3, None, False), (4, None, True), (2, HALF, True), (1, HALF, False)]
)
def test_all_cases_hold_or_a_share_of_them(held, share, expected):
    clause = Clause.in_cases("words", [case < held for case in range(4)], "detail", share=share)
    assert clause.held is expected and clause.text == f"words: in {held} of 4 cases, detail"


def read(*parts):
    """Parts of a clause, and an error where a number is missing."""
    for part in parts:
        if part is None:
            raise KeyError("missing")
        yield Clause("part", part)


def test_a_part_that_fails_decides_before_a_number_that_is_missing():
    assert Clause.conjunction("words", read(True, True)).held
    assert not Clause.conjunction("words", read(True, False, None)).held
    with pytest.raises(KeyError):
        Clause.conjunction("words", read(True, None))


def test_a_missing_number_of_an_item_hides_no_clause_and_is_reported():
    clauses = for_each([[True, None, True], [False]], lambda parts: read(*parts))
    seen = list[bool]()
    with pytest.raises(KeyError):
        seen.extend(clause.held for clause in clauses)
    assert seen == [True, False]
