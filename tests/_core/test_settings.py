"""Declared settings: conversion, ranges, and all problems at once, for dataclasses and for keyword-only parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest
from torch import nn

from advnorm._core.errors import ConfigError, raise_problems
from advnorm._core.settings import (
    Named,
    Setting,
    convert,
    convert_fields,
    convert_options,
    describe,
    from_mapping,
    in_range,
    range_words,
    to_json,
)
from support.problems import raises_problem


@dataclass(frozen=True, kw_only=True)
class Search:
    steps: Annotated[int, Setting("Number of gradient steps.", "[1, inf)")] = 10
    momentum: Annotated[float, Setting("Decay of the accumulated gradient.", "[0, 1)")] = 0.0
    start: Annotated[Literal["uniform", "clean"] | float, Setting("Start.", "[0, 1]")] = "clean"
    limit: Annotated[int | None, Setting("Number of images.")] = None
    sizes: Annotated[tuple[int, ...], Setting("Sizes of the squares.", "[1, 9]")] = ()
    options: Annotated[dict[str, Any], Setting("Free options.")] = field(default_factory=dict)
    undeclared: Any = None

    def __post_init__(self) -> None:
        raise_problems(convert_fields(self), "bad search")


@dataclass(frozen=True, kw_only=True)
class Outer:
    search: Annotated[Search, Setting("The search.")] = Search()

    def __post_init__(self) -> None:
        raise_problems(convert_fields(self), "bad outer")


class Module(nn.Module):
    def __init__(
        self, model: nn.Module, *, beta: Annotated[float, Setting("Weight.", "(0, inf)")] = 6.0, free: bool = False
    ) -> None:
        super().__init__()


@pytest.mark.parametrize(
    ("hint", "value", "converted"),
    [
        (float, 3, 3.0),
        (int | None, None, None),
        (int | None, "none", None),
        (str | None, "None", "None"),
        (int | float, 0.5, 0.5),
        (bool, True, True),
        (tuple[float, ...], [1, 2], (1.0, 2.0)),
        (Sequence[str], "adv", ("adv",)),
        (int | Sequence[int], [5], (5,)),
        (Literal["auto"] | bool, False, False),
        (Named, "hybrid", Named("hybrid")),
        (Named, {"name": "trades", "betas": [1, {"a": 2}]}, Named("trades", betas=(1, {"a": 2}))),
        (Any, {"a": [1, None]}, {"a": (1, None)}),
    ],
)
def test_a_value_takes_the_type_of_its_setting(hint, value, converted):
    found = convert("x", hint, value)
    assert found == converted and type(found) is type(converted)


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        (int, True),
        (int, 1.0),
        (int, "3"),
        (int, 2**63),
        (float, math.nan),
        (float, math.inf),
        (float, 10**400),
        (float, 1e308),
        (float, False),
        (bool, 1),
        (str, "a\nb"),
        (str, ""),
        (str | None, ""),
        (tuple[int, ...], 5),
        (Sequence[str], 5),
        (Named, {"beta": 6}),
        (dict[str, Any], [1]),
        (Any, object()),
        (Any, [[[[[[1]]]]]]),
    ],
)
def test_a_value_of_another_type_is_rejected(hint, value):
    with raises_problem("wrong_type", "x"):
        convert("x", hint, value)


def test_no_count_is_larger_than_memory_and_time_allow():
    with raises_problem("out_of_range", "steps"):
        Search(steps=9 * 10**12)
    assert convert("seed", int, 2**62) == 2**62


def test_a_misspelt_choice_gets_the_nearest_one():
    with raises_problem("unknown_name", "start") as caught:
        convert("start", Literal["uniform", "clean"] | float, "unifrom")
    assert "did you mean 'uniform'?" in str(caught.value)


def test_an_option_name_is_an_identifier():
    with raises_problem("unknown_name", "x"):
        convert("x", dict[str, Any], {"a-b": 1})


def test_a_dataclass_converts_its_declared_fields_and_lists_every_problem():
    made = Search(momentum=0, limit="none", sizes=[2, 3], options={"a": [1]}, undeclared=[1])
    assert (made.momentum, made.limit, made.sizes, made.options) == (0.0, None, (2, 3), {"a": (1,)})
    assert type(made.momentum) is float and made.undeclared == [1]
    with pytest.raises(ConfigError) as caught:
        Search(steps=0, momentum=1.0, start=1.5, limit=True, sizes=[2, 10])
    assert [(problem.code, problem.field) for problem in caught.value.problems] == [
        ("out_of_range", "steps"),
        ("out_of_range", "momentum"),
        ("out_of_range", "start"),
        ("wrong_type", "limit"),
        ("out_of_range", "sizes"),
    ]
    assert str(caught.value).startswith("bad search: steps must be at least 1, got 0; momentum must lie in [0, 1)")


def test_the_fields_of_a_nested_dataclass_have_dotted_names():
    assert Outer(search={"steps": 3}).search == Search(steps=3)
    for wrong, code, name in (
        ({"steps": 0}, "out_of_range", "search.steps"),
        ({"stepz": 1}, "unknown_name", "search.stepz"),
    ):
        with raises_problem(code, name):
            Outer(search=wrong)
    with raises_problem("wrong_type", "search"):
        Outer(search=5)


def test_a_mapping_becomes_a_dataclass_and_unknown_keys_join_the_other_problems():
    assert from_mapping(Search, {"steps": 3}) == Search(steps=3)
    with pytest.raises(ConfigError) as caught:
        from_mapping(Search, {"stepz": 3, 5: 1, "steps": 0})
    assert [problem.code for problem in caught.value.problems] == ["unknown_name", "unknown_name", "out_of_range"]


def test_options_take_the_types_of_keyword_only_parameters():
    assert convert_options("objective", Module, {"beta": 2}) == ({"beta": 2.0}, [])
    _, problems = convert_options(
        "objective", Module, {"beta": 0, "bta": 1, "model": 1, "free": 1}, {"free": "set it elsewhere"}
    )
    assert [(problem.code, problem.field) for problem in problems] == [
        ("out_of_range", "objective.beta"),
        ("unknown_name", "objective.bta"),
        ("unknown_name", "objective.model"),
        ("conflict", "objective.free"),
    ]
    assert convert_options("", Module, {"free": 1})[1][0].field == "free"


def test_declarations_are_described_for_help_and_the_reference_page():
    rows = {row.name: row for row in describe(Search)}
    assert "undeclared" not in rows
    assert rows["steps"] == ("steps", "an integer", "[1, inf)", 10, "Number of gradient steps.")
    assert rows["limit"].type_words == "an integer or none" and rows["options"].default == {}
    beta, free = describe(Module)
    assert beta == ("beta", "a finite number", "(0, inf)", 6.0, "Weight.") and free.help == ""


@pytest.mark.parametrize(
    ("interval", "inside", "outside", "words"),
    [
        ("[1, inf)", [1, 2.5], [0.999], "be at least 1"),
        ("(0, inf)", [1e-9], [0, -1], "be above 0"),
        ("[0, 1)", [0, 0.99], [1, -0.1], "lie in [0, 1)"),
        ("(0, 1]", [1], [0, 1.1], "lie in (0, 1]"),
    ],
)
def test_an_interval_contains_its_closed_ends_only(interval, inside, outside, words):
    assert all(in_range(interval, value) for value in inside)
    assert not any(in_range(interval, value) for value in outside)
    assert range_words(interval) == words


def test_plain_data_comes_back():
    made = Outer(search=Search(options={"a": (1, 2)}))
    assert to_json(made)["search"]["options"] == {"a": [1, 2]}
    assert to_json(Named("trades", beta=6)) == {"name": "trades", "beta": 6}
    assert repr(Named("trades", beta=6)) == "Named('trades', beta=6)"
