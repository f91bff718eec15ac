"""Finding studies and cells by name, and evaluating claims."""

import math

import pytest

from advnorm.studies import Study, find, get, list_studies
from advnorm.studies.claims import Clause, for_each, mean
from support.problems import raises_problem


def test_a_failing_clause_decides_even_if_later_numbers_are_missing():
    def check(values):
        yield Clause("one", mean(values, "cell", "one") > 0)
        yield Clause("two", mean(values, "cell", "two") > 0)

    study = Study(name="A/table9", cells=list, locate=lambda *_: None, check=check)
    for values, verdict in (
        ((1, 1), "supported"),
        ((1, -1), "contradicted"),
        ((1,), "undecided"),
        ((-1,), "contradicted"),
    ):
        found = study.evaluate_claim({("cell", name): [value] for name, value in zip(("one", "two"), values)})
        assert (found.verdict, found.problem) == (verdict, None)
        assert [clause[:2] for clause in found.clauses] == [(n, v > 0) for n, v in zip(("one", "two"), values)]
    found = study.evaluate_claim({})
    assert (found.verdict, found.clauses, found.missing) == ("not run", (), ("cell", "one"))


def test_for_each_evaluates_every_item_even_if_one_lacks_numbers():
    def check(values):
        yield from for_each(("one", "two", "three"), lambda name: [Clause(name, mean(values, "cell", name) > 0)])
        yield Clause("whole", True)

    study = Study(name="A/table9", cells=list, locate=lambda *_: None, check=check)
    for two, three, verdict in ((1, 1, "supported"), (None, 1, "undecided"), (None, -1, "contradicted")):
        values = {("cell", name): [value] for name, value in (("one", 1), ("two", two), ("three", three)) if value}
        found = study.evaluate_claim(values)
        clauses = [clause[:2] for clause in found.clauses]
        assert found.verdict == verdict and (("whole", True) in clauses) == (two is not None)
        assert ("three", three > 0) in clauses


@pytest.mark.parametrize(
    ("check", "verdict", "clauses", "problem"),
    [
        (lambda values: [], "not run", [], None),
        (lambda values: True, "not run", [], "'bool' object is not iterable"),
        (lambda values: [("one", True, None, 4)], "not run", [], "positional arguments"),
        (lambda values: [("one", True)], "supported", [("one", True)], None),
        (
            lambda values: (Clause(f"{place}", place < 0) for place in (1, math.log(0))),
            "not run",
            [],
            "math domain error",
        ),
        (lambda values: (Clause(f"{1 / place}", place > 1) for place in (1, 0)), "contradicted", None, None),
        (lambda values: (Clause("so", int(text) > 1) for text in ("1", "x")), "contradicted", None, "invalid literal"),
    ],
)
def test_a_conclusion_reports_whatever_a_check_returns_or_raises(check, verdict, clauses, problem):
    found = Study(name="A/table9", cells=list, locate=lambda *_: None, check=check).evaluate_claim({})
    assert found.verdict == verdict and (found.problem is None) == (problem is None)
    assert problem is None or problem in str(found.problem)
    if clauses is None:
        assert found.clauses and not found.clauses[-1].held
    else:
        assert [clause[:2] for clause in found.clauses] == clauses


def test_names_find_studies_and_cells():
    assert "A/table3" in list_studies("A/*")
    assert get("A/table3/dual_bn/eps16").norm == "dual_bn"
    assert find("A/table3")[1] is None
    with raises_problem("unknown_name", "cell"):
        get("A/table3/dual_bn/eps61")
    with raises_problem("unknown_name", "study"):
        find("A/tabel3")
    with raises_problem("missing_name", "cell"):
        get("A/table3")
    with raises_problem("unknown_name", "study"):
        find("A/fig1")  # a drawing
