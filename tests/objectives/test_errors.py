"""Wrong use of objectives: one readable error that says everything at once."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from advnorm._core.errors import AdvnormError, ConfigError
from advnorm.objectives import LIGS, OBJECTIVES, list_objectives
from support.objective_oracles import Given, images, pgd, tiny

X, Y = images(4)


def error(name: str, norm: str = "dual_bn", attack: Any = "given", norm_options: Any = None, **options: Any) -> str:
    model = tiny(plain=True) if norm == "plain" else tiny(norm, **(norm_options or {}))
    with pytest.raises(ConfigError) as found:
        OBJECTIVES.get(name)(model, Given() if attack == "given" else attack, **options)
    return str(found.value)


@pytest.mark.parametrize("norm", ["cross_bn", "gmm_bn"])
@pytest.mark.parametrize("name", ["hybrid", "kl", "alp", "trades"])
def test_a_norm_that_needs_both_domains_refuses_a_sequential_layout(name, norm):
    message = error(name, norm, layout="sequential")
    assert norm in message and "layout='concatenated'" in message


@pytest.mark.parametrize("norm", ["bn", "dual_bn", "dual_affine_bn", "gmm_bn", "gn", "plain"])
def test_cross_at_refuses_norms_that_cross_nothing(norm):
    assert "norm='cross_bn'" in error("cross", norm)


@pytest.mark.parametrize("name", [name for name in list_objectives() if name != "standard"])
def test_a_missing_or_wrong_attack_is_told_with_the_cure(name):
    norm = "cross_bn" if name == "cross" else "dual_bn"
    assert "PGD(" in error(name, norm, attack=None)
    assert "'pgd10'" in error(name, norm, attack="pgd10")


def test_everything_wrong_is_told_at_once():
    message = error(
        "hybrid",
        "gmm_bn",
        attack=None,
        layout="sequential",
        clean_weight=1.5,
        kl_weight=-1,
        label_smoothing=1.0,
        statistics="runing",
    )
    for part in ("attack", "gmm_bn", "clean_weight", "1.5", "kl_weight", "-1", "label_smoothing", "'runing'"):
        assert part in message
    assert message.count("bad objective") == 1


@pytest.mark.parametrize(
    ("name", "options", "parts"),
    [
        ("hybrid", {"clean_weight": -0.1}, ["clean_weight", "[0, 1]", "-0.1"]),
        ("hybrid", {"clean_weight": True}, ["clean_weight", "True"]),
        ("hybrid", {"clean_weight": float("nan")}, ["clean_weight", "nan"]),
        ("hybrid", {"clean_share": 2}, ["clean_share", "[0, 1]", "2"]),
        ("hybrid", {"layout": "sequentially"}, ["'sequentially'", "did you mean 'sequential'"]),
        ("hybrid", {"pairing_weight": "1"}, ["pairing_weight", "'1'"]),
        ("hybrid", {"likelihood_weight": 0.1}, ["likelihood_weight", "gmm_bn"]),
        ("hybrid", {"clean_share": 0.0, "kl_weight": 1.0}, ["kl_weight", "clean_share"]),
        ("hybrid", {"clean_share": 0.0, "clean_weight": 1.0}, ["clean_share", "clean_weight"]),
        ("kl", {"clean_share": 0.0}, ["kl_weight", "clean_share"]),
        ("alp", {"clean_share": 0.0}, ["pairing_weight", "clean_share"]),
        ("trades", {"beta": -1}, ["beta", "-1"]),
        ("trades", {"clean_share": 0.5}, ["clean_share"]),
        ("standard", {"label_smoothing": -0.1}, ["label_smoothing", "-0.1"]),
        ("classical", {"statistics": "batch_frozen"}, ["'batch_frozen'", "'batch'", "'running'"]),
    ],
)
def test_a_bad_option_is_told_with_what_is_allowed(name, options, parts):
    message = error(name, **options)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize("name", list_objectives())
def test_an_unknown_option_is_told_with_the_nearest_name(name):
    message = error(name, "cross_bn" if name == "cross" else "dual_bn", label_smoothin=0.1)
    assert "'label_smoothin'" in message and "did you mean 'label_smoothing'" in message


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
def test_a_norm_that_needs_both_domains_refuses_to_go_without_clean_images(norm):
    assert "clean_share" in error("hybrid", norm, clean_share=0.0)


@pytest.mark.parametrize("norm", ["cross_bn", "gmm_bn"])
@pytest.mark.parametrize("name", ["standard", "classical"])
def test_an_objective_of_one_domain_refuses_norms_that_need_both_at_the_first_step_at_the_latest(name, norm):
    with pytest.raises(AdvnormError, match=norm):
        OBJECTIVES.get(name)(tiny(norm), Given())(X, Y)


def test_a_model_that_is_none_is_told():
    with pytest.raises(ConfigError, match="nn.Module"):
        OBJECTIVES.get("hybrid")(lambda x: x, pgd())


def test_an_unknown_objective_suggests_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'hybrid'"):
        OBJECTIVES.get("hibrid")


def test_what_speaks_against_a_combination_is_known_without_a_model():
    for name, norm, options in (
        ("hybrid", "gmm_bn", {"layout": "sequential"}),
        ("cross", "dual_bn", {}),
        ("trades", "dual_bn", {"beta": -1}),
        ("hybrid", "dual_bn", {"likelihood_weight": 0.1}),
    ):
        problems = OBJECTIVES.get(name).problems(norm, **options)
        assert problems and all(problem in error(name, norm, **options) for problem in problems)
    assert OBJECTIVES.get("cross").problems("cross_bn", {"other_gradient": False, "sync": True}) == []
    assert OBJECTIVES.get("hybrid").problems("dual_bn", clean_weight=0.3) == []


@pytest.mark.parametrize("norm", ["cross_bn", "gmm_bn"])
@pytest.mark.parametrize("statistics", ["batch", "batch_frozen"])
def test_an_attack_that_sees_one_domain_is_refused_by_norms_that_need_both(norm, statistics):
    attack = dataclasses.replace(pgd(), statistics=statistics)
    assert f"{norm} normalizes with the statistics of both domains" in error("hybrid", norm, attack)
    assert OBJECTIVES.get("hybrid").problems(norm, attack_statistics=statistics)
    assert OBJECTIVES.get("hybrid").problems("dual_bn", attack_statistics=statistics) == []


def test_a_norm_must_know_the_domains_that_are_trained_on():
    message = error("hybrid", "multi_bn", norm_options={"domains": ["clean", "x"]})
    assert "Hybrid trains on clean and adv images, and multi_bn has the domains clean, x; name adv" in message
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
        (lambda x: (x - 0.5) / 0.2, "images must lie in [0, 1]"),
        (lambda x: 255 * x, "images must lie in [0, 1]"),
        (lambda x: (255 * x).to(torch.uint8), "images must be floats in [0, 1], got torch.uint8"),
        (lambda x: x.bfloat16(), "images must be float32, got torch.bfloat16, which cannot hold a perturbed pixel"),
        (lambda x: x.half(), "images must be float32, got torch.float16"),
    ],
)
def test_images_that_an_attack_would_cut_to_its_box_are_refused_at_the_first_batch(change, words):
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
        (lambda y: y.float(), "labels must be int64, got torch.float32; use y.long()"),
        (lambda y: y.int(), "labels must be int64, got torch.int32; use y.long()"),
        (lambda y: y[:, None], f"labels must have shape ({len(Y)},), one per image, got ({len(Y)}, 1)"),
        (lambda y: y[:3], f"labels must have shape ({len(Y)},), one per image, got (3,)"),
        (lambda y: y.tolist(), "labels must be a tensor of class numbers, got list"),
        (lambda y: 0 * y - 100, "labels must be at least 0, got -100; drop or relabel ignored samples"),
        (lambda y: y + 7, "and the model has"),
    ],
)
def test_labels_that_are_none_are_told(name, change, words):
    objective = OBJECTIVES.get(name)(tiny("dual_bn"), *([] if name == "standard" else [pgd()]))
    with pytest.raises(ConfigError) as found:
        objective(X, change(Y))
    assert words in str(found.value)
    assert objective(X, Y).loss.isfinite()


def test_probabilities_by_class_are_labels_where_nothing_is_attacked():
    classes = OBJECTIVES.get("standard")(tiny("bn"))(X, Y).logits["clean"].shape[1]
    soft = torch.nn.functional.one_hot(Y, classes).float()
    standard = OBJECTIVES.get("standard")(tiny("bn"))
    torch.testing.assert_close(standard(X, soft).loss, OBJECTIVES.get("standard")(tiny("bn"))(X, Y).loss)
    with pytest.raises(ConfigError, match=r"labels must be int64, got torch.float32; use y.argmax\(1\)"):
        OBJECTIVES.get("hybrid")(tiny("bn"), pgd())(X, soft)
    with pytest.raises(ConfigError, match="images must be a tensor of floats"):
        standard(X.numpy(), Y)


def test_half_precision_is_refused_in_any_batch_and_bytes_by_any_objective():
    objective = OBJECTIVES.get("hybrid")(tiny("dual_bn"), pgd())
    assert objective(X, Y).loss.isfinite()
    with pytest.raises(ConfigError, match="cannot hold a perturbed pixel"):
        objective(X.half(), Y)
    with pytest.raises(ConfigError, match="use x.float"):
        OBJECTIVES.get("standard")(tiny("bn"))((255 * X).to(torch.uint8), Y)


def test_an_index_of_another_length_is_refused():
    with pytest.raises(ConfigError, match=f"index names 2 images and the batch has {len(X)}"):
        OBJECTIVES.get("hybrid")(tiny("dual_bn"), pgd())(X, Y, index=torch.arange(2))


def test_what_is_set_later_is_checked_as_what_is_given():
    objective = OBJECTIVES.get("hybrid")(tiny("dual_bn"), pgd())
    for name, value, words in (
        ("statistics", "bacth", "'batch' or 'running', got 'bacth'"),
        ("attack", None, "an attack is needed"),
        ("attack", "pgd10", "attack must be an Attack"),
    ):
        before = getattr(objective, name)
        with pytest.raises(ConfigError, match=words):
            setattr(objective, name, value)
        assert getattr(objective, name) is before


def test_an_empty_batch_is_told_in_words_also_at_the_first_batch():
    with pytest.raises(AdvnormError, match="empty"):
        OBJECTIVES.get("hybrid")(tiny("dual_bn"), pgd())(X[:0], Y[:0])
