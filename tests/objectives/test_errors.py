"""Wrong use of objectives: one error that lists all problems."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Annotated, Any

import pytest
import torch

from advnorm._core.errors import AdvnormError, ConfigError, Problem
from advnorm._core.settings import Setting
from advnorm.objectives import LIGS, OBJECTIVES, list_objectives
from support.objective_oracles import Given, images, pgd, tiny
from support.problems import raises_problem

X, Y = images(4)


def problems_of(
    name: str, norm: str = "dual_bn", attack: Any = "given", norm_options: Any = None, **options: Any
) -> list[Problem]:
    model = tiny(plain=True) if norm == "plain" else tiny(norm, **(norm_options or {}))
    with pytest.raises(ConfigError) as found:
        OBJECTIVES.get(name)(model, Given() if attack == "given" else attack, **options)
    return list(found.value.problems)


def error(*args: Any, **settings: Any) -> list[tuple[str, str]]:
    """Code and field of each problem."""
    return [(problem.code, problem.field) for problem in problems_of(*args, **settings)]


@pytest.mark.parametrize("norm", ["cross_bn", "gmm_bn"])
@pytest.mark.parametrize("name", ["hybrid", "kl", "alp", "trades"])
def test_a_norm_that_needs_both_domains_rejects_a_sequential_layout(name, norm):
    (problem,) = problems_of(name, norm, layout="sequential")
    assert (problem.code, problem.field) == ("conflict", "layout") and problem.message.startswith(norm)


@pytest.mark.parametrize("norm", ["bn", "dual_bn", "dual_affine_bn", "gmm_bn", "gn", "plain"])
def test_cross_at_rejects_norms_without_crossed_statistics(norm):
    assert error("cross", norm) == [("conflict", "norm")]


@pytest.mark.parametrize("name", [name for name in list_objectives() if name != "standard"])
def test_a_missing_or_wrong_attack_is_an_error(name):
    norm = "cross_bn" if name == "cross" else "dual_bn"
    assert error(name, norm, attack=None) == [("missing_attack", "attack")]
    assert error(name, norm, attack="pgd10") == [("wrong_type", "attack")]


def test_all_problems_come_in_one_error():
    found = error(
        "hybrid",
        "gmm_bn",
        attack=None,
        layout="sequential",
        clean_weight=1.5,
        kl_weight=-1,
        label_smoothing=1.0,
        statistics="runing",
    )
    assert sorted(found) == [
        ("conflict", "layout"),
        ("missing_attack", "attack"),
        ("out_of_range", "clean_weight"),
        ("out_of_range", "kl_weight"),
        ("out_of_range", "label_smoothing"),
        ("unknown_name", "statistics"),
    ]


@pytest.mark.parametrize(
    ("name", "options", "code", "field"),
    [
        ("hybrid", {"clean_weight": -0.1}, "out_of_range", "clean_weight"),
        ("hybrid", {"clean_weight": True}, "wrong_type", "clean_weight"),
        ("hybrid", {"clean_weight": float("nan")}, "wrong_type", "clean_weight"),
        ("hybrid", {"clean_share": 2}, "out_of_range", "clean_share"),
        ("hybrid", {"layout": "sequentially"}, "unknown_name", "layout"),
        ("hybrid", {"pairing_weight": "1"}, "wrong_type", "pairing_weight"),
        ("hybrid", {"likelihood_weight": 0.1}, "conflict", "likelihood_weight"),
        ("hybrid", {"clean_share": 0.0, "kl_weight": 1.0}, "conflict", "clean_share"),
        ("hybrid", {"clean_share": 0.0, "clean_weight": 1.0}, "conflict", "clean_share"),
        ("kl", {"clean_share": 0.0}, "conflict", "clean_share"),
        ("alp", {"clean_share": 0.0}, "conflict", "clean_share"),
        ("trades", {"beta": -1}, "out_of_range", "beta"),
        ("trades", {"clean_share": 0.5}, "conflict", "clean_share"),
        ("standard", {"label_smoothing": -0.1}, "out_of_range", "label_smoothing"),
        ("classical", {"statistics": "batch_frozen"}, "unknown_name", "statistics"),
    ],
)
def test_a_bad_option_is_an_error(name, options, code, field):
    assert error(name, **options) == [(code, field)]


@pytest.mark.parametrize("name", list_objectives())
def test_an_unknown_option_is_an_error_with_the_nearest_name(name):
    (problem,) = problems_of(name, "cross_bn" if name == "cross" else "dual_bn", label_smoothin=0.1)
    assert (problem.code, problem.field) == ("unknown_name", "label_smoothin") and "'label_smoothing'" in str(problem)


@pytest.mark.parametrize(
    ("name", "norm", "options"),
    [
        ("hybrid", "dual_bn", {"clean_weight": 1.0}),
        ("kl", "dual_bn", {}),
        ("alp", "bn", {}),
        ("hybrid", "cross_bn", {}),
        ("hybrid", "gmm_bn", {}),
        ("cross", "cross_bn", {}),
    ],
)
def test_a_share_that_rounds_to_no_clean_image_is_no_silent_loss_of_a_term(name, norm, options):
    """One tenth of a batch of four: either an image is kept, or the error says what to do."""
    objective = OBJECTIVES.get(name)(tiny(norm), Given(), clean_share=0.1, **options)
    try:
        step = objective(X, Y)
    except AdvnormError:
        return
    assert "clean" in step.logits and step.loss.requires_grad


@pytest.mark.parametrize("norm", ["cross_bn", "gmm_bn"])
def test_a_norm_that_needs_both_domains_needs_clean_images(norm):
    assert error("hybrid", norm, clean_share=0.0) == [("conflict", "clean_share")]


@pytest.mark.parametrize("norm", ["cross_bn", "gmm_bn"])
@pytest.mark.parametrize("name", ["standard", "classical"])
def test_an_objective_of_one_domain_rejects_norms_that_need_both(name, norm):
    assert error(name, norm) == [("conflict", "norm")]


def test_a_model_must_be_a_module():
    with raises_problem("wrong_type", "model"):
        OBJECTIVES.get("hybrid")(lambda x: x, pgd())


def test_an_unknown_objective_suggests_the_nearest():
    with raises_problem("unknown_name", "objective"):
        OBJECTIVES.get("hibrid")


def test_the_output_of_a_step_prints_on_one_line():
    printed = repr(OBJECTIVES.get("hybrid")(tiny("dual_bn"), pgd())(X, Y))
    assert "adv_ce" in printed and "'clean': (4, " in printed and "tensor" not in printed and "\n" not in printed


def test_the_problems_of_a_combination_are_known_without_a_model():
    for name, norm, options in (
        ("hybrid", "gmm_bn", {"layout": "sequential"}),
        ("cross", "dual_bn", {}),
        ("trades", "dual_bn", {"clean_share": 0.5}),
        ("hybrid", "dual_bn", {"likelihood_weight": 0.1}),
    ):
        problems = OBJECTIVES.get(name).problems(norm, **options)
        assert problems == problems_of(name, norm, **options)
    assert OBJECTIVES.get("cross").problems("cross_bn", {"other_gradient": False, "sync": True}) == []
    assert OBJECTIVES.get("hybrid").problems("dual_bn", clean_weight=0.3) == []


@pytest.mark.parametrize("norm", ["cross_bn", "gmm_bn"])
@pytest.mark.parametrize("statistics", ["batch", "batch_frozen"])
def test_norms_that_need_both_domains_reject_an_attack_on_batch_statistics(norm, statistics):
    attack = dataclasses.replace(pgd(), statistics=statistics)
    assert error("hybrid", norm, attack) == [("conflict", "attack.statistics")]
    assert OBJECTIVES.get("hybrid").problems(norm, attack_statistics=statistics)
    assert OBJECTIVES.get("hybrid").problems("dual_bn", attack_statistics=statistics) == []


def test_a_norm_must_know_the_domains_that_are_trained_on():
    (problem,) = problems_of("hybrid", "multi_bn", norm_options={"domains": ["clean", "x"]})
    assert (problem.code, problem.field) == ("conflict", "norm") and "add adv" in problem.hint
    assert OBJECTIVES.get("standard").problems("multi_bn", {"domains": ["clean", "x"]}) == []


def test_nothing_of_a_failed_step_stays_behind():
    model = tiny("dual_bn")
    objective = OBJECTIVES.get("hybrid")(model, pgd())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(Exception):  # noqa: B017, PT011 - whichever: the labels are wrong
        objective(X, torch.full_like(Y, 99))
    model.eval()
    with pytest.raises(AdvnormError, match="no route is set"):
        model(X)
    model.train()
    assert objective(X, Y).loss.isfinite()
    assert set(before) == set(model.state_dict())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: (x - 0.5) / 0.2, "must lie in [0, 1]"),
        (lambda x: 255 * x, "must lie in [0, 1]"),
        (lambda x: (255 * x).to(torch.uint8), "got torch.uint8"),
        (lambda x: x.bfloat16(), "got torch.bfloat16"),
        (lambda x: x.half(), "got torch.float16"),
    ],
)
def test_images_outside_of_the_attacks_box_are_rejected_at_the_first_batch(change, words):
    objective = OBJECTIVES.get("hybrid")(tiny("dual_bn"), pgd())
    with pytest.raises(ConfigError) as found:
        objective(change(X), Y)
    assert words in str(found.value)
    assert objective(X, Y).loss.isfinite()
    standard = OBJECTIVES.get("standard")(tiny("bn"))
    assert standard(X - 0.5, Y).loss.isfinite()
    with pytest.raises(ConfigError) as found:
        LIGS(standard, shift="fgsm")(change(X), Y)  # attacks, and its objective does not
    assert words in str(found.value)
    assert LIGS(standard, shift="gaussian")(X - 0.5, Y).loss.isfinite()


@pytest.mark.parametrize("name", ["hybrid", "standard", "trades"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda y: y.float(), "float32"),
        (lambda y: y.int(), "int32"),
        (lambda y: y[:, None], f"({len(Y)}, 1)"),
        (lambda y: y[:3], "(3,)"),
        (lambda y: y.tolist(), "list"),
        (lambda y: 0 * y - 100, "-100"),
        (lambda y: y + 7, "the model's 4 classes"),
    ],
)
def test_wrong_labels_are_rejected(name, change, words):
    objective = OBJECTIVES.get(name)(tiny("dual_bn"), *([] if name == "standard" else [pgd()]))
    with pytest.raises(ConfigError) as found:
        objective(X, change(Y))
    assert words in str(found.value)
    assert objective(X, Y).loss.isfinite()


def test_probabilities_by_class_are_labels():
    classes = OBJECTIVES.get("standard")(tiny("bn"))(X, Y).logits["clean"].shape[1]
    soft = torch.nn.functional.one_hot(Y, classes).float()
    standard = OBJECTIVES.get("standard")(tiny("bn"))
    torch.testing.assert_close(standard(X, soft).loss, OBJECTIVES.get("standard")(tiny("bn"))(X, Y).loss)
    hybrid, other = (OBJECTIVES.get("hybrid")(tiny("bn"), pgd()) for _ in range(2))
    torch.testing.assert_close(hybrid(X, soft).loss, other(X, Y).loss)
    with raises_problem("wrong_type", "images"):
        standard(X.numpy(), Y)


def test_half_precision_is_rejected_in_any_batch_and_bytes_by_any_objective():
    objective = OBJECTIVES.get("hybrid")(tiny("dual_bn"), pgd())
    assert objective(X, Y).loss.isfinite()
    with raises_problem("wrong_dtype", "images"):
        objective(X.half(), Y)
    with raises_problem("wrong_dtype", "images"):
        OBJECTIVES.get("standard")(tiny("bn"))((255 * X).to(torch.uint8), Y)
    with raises_problem("wrong_dtype", "images") as caught:
        OBJECTIVES.get("standard")(tiny("bn"))(X > 0.5, Y)
    assert caught.value.problems[0].hint == "use x.float()"


@pytest.mark.parametrize("index", [torch.arange(2), [0, 1, 2, 3]])
def test_an_index_is_a_tensor_with_a_number_per_image(index):
    with raises_problem("wrong_shape", "index"):
        OBJECTIVES.get("hybrid")(tiny("dual_bn"), pgd())(X, Y, index=index)


def test_settings_that_change_later_are_validated_too():
    objective = OBJECTIVES.get("hybrid")(tiny("dual_bn"), pgd())
    for name, value, code in (
        ("statistics", "bacth", "unknown_name"),
        ("clean_share", 2, "out_of_range"),
        ("attack", None, "missing_attack"),
        ("attack", "pgd10", "wrong_type"),
    ):
        before = getattr(objective, name)
        with raises_problem(code, name):
            setattr(objective, name, value)
        assert getattr(objective, name) is before


def test_options_are_in_the_signature_and_a_subclass_changes_a_default_by_an_assignment():
    class Paired(OBJECTIVES.get("hybrid")):
        pairing_weight = 2
        extra: Annotated[int, Setting("An option.", "[0, 9]")] = 3

    parameters = inspect.signature(Paired).parameters
    assert list(parameters)[:3] == ["model", "attack", "extra"] and parameters["pairing_weight"].default == 2
    assert inspect.signature(LIGS).parameters["shift"].default == "gaussian"
    objective = Paired(tiny("dual_bn"), pgd(), clean_weight=0.25)
    assert (objective.extra, objective.pairing_weight, objective.clean_weight) == (3, 2.0, 0.25)
    assert "extra=3" in objective.describe()
    with raises_problem("out_of_range", "extra"):
        Paired(tiny("dual_bn"), pgd(), extra=10)


@pytest.mark.parametrize("name", ["hybrid", "standard"])
def test_an_empty_batch_is_rejected_also_as_the_first_batch(name):
    kind = OBJECTIVES.get(name)
    with raises_problem("empty", "images"):
        kind(tiny("dual_bn"), pgd() if kind.needs_attack else None)(X[:0], Y[:0])
