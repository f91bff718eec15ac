"""Problems as data, and their text."""

import pickle

import pytest

from advnorm._core.errors import (
    AdvnormError,
    ConfigError,
    Description,
    Problem,
    RouteError,
    did_you_mean,
    first_line,
    raise_problems,
    shown,
    unknown_name,
)
from support.problems import raises_problem


def test_a_problem_renders_requirement_value_and_fix():
    problem = Problem(code="out_of_range", message="{field} must be at least 1", field="steps", got=0, hint="use 10")
    assert str(problem) == "steps must be at least 1, got 0; use 10"
    assert str(problem.inside("attack")) == "attack.steps must be at least 1, got 0; use 10"
    assert str(Problem(code="empty", message="no images", got=None)) == "no images, got None"


def test_the_parent_of_a_problem_is_shown_even_if_its_message_names_no_field():
    problem = unknown_name("loss", "cee", ["ce", "kl"]).inside("attack")
    assert problem.field == "attack.loss" and str(problem) == "attack: unknown loss 'cee', did you mean 'ce'?"
    assert Problem(code="conflict", message="x").inside("attack").field == "attack"


def test_an_error_lists_all_problems_and_survives_pickling():
    problems = [Problem(code="empty", message="no images"), Problem(code="busy", message="in use", field="record")]
    with pytest.raises(RouteError) as caught:
        raise_problems(problems, "bad batch", RouteError)
    error = pickle.loads(pickle.dumps(caught.value))
    assert type(error) is RouteError and error.problems == tuple(problems) and error.code == "empty"
    assert str(error) == "bad batch: no images; in use"
    raise_problems([])


def test_equal_problems_of_several_places_are_one_sentence_and_an_equal_fix_follows_once():
    problem = Problem(code="conflict", message="has the wrong size", hint="use 3")
    error = ConfigError.listing([problem.inside(f"layer{place}") for place in range(8)])
    assert str(error) == ("layer0, layer1, layer2, layer3, layer4, layer5 and 2 more: has the wrong size; use 3")
    assert [one.field for one in error.problems] == [f"layer{place}" for place in range(8)]
    others = [Problem(code="empty", message=text, hint="use 3") for text in ("no images", "no labels")]
    assert str(ConfigError.listing(others)) == "no images; no labels; use 3"


def test_errors_are_of_the_builtin_kinds_too():
    assert issubclass(ConfigError, ValueError) and issubclass(RouteError, RuntimeError)
    with raises_problem("empty", kind=ConfigError) as caught:
        raise ConfigError("empty", "no images")
    assert isinstance(caught.value, AdvnormError)


def test_a_hint_names_the_nearest_name_or_all_of_them():
    assert did_you_mean("DUALBN", ["bn", "dual_bn"]) == ", did you mean 'dual_bn'?"
    assert did_you_mean("vit_tiny", ["gcvit_tiny", "vit_tiny_patch16_384", "vit_tiny_p8"]).endswith("'vit_tiny_p8'?")
    assert did_you_mean("xyz", ["bn"]) == "; allowed: 'bn'" and did_you_mean("x", []) == "; allowed: nothing"
    assert did_you_mean("x", [f"network{place}" for place in range(1000)]).endswith("'network39' and 960 more")


def test_values_are_shown_short():
    class Broken:
        def __repr__(self):
            raise RuntimeError

    assert shown("a" * 100) == f"'{'a' * 76}..." and len(shown(10**5000)) < 80
    assert shown(Broken()) == "a value of type Broken" and shown(Description("dtype x")) == "dtype x"
    assert first_line(ValueError("one\ntwo")) == "one" and first_line(ValueError()) == "ValueError"
