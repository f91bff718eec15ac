"""Wrappers around objectives and around each other."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import advnorm
from advnorm._core.errors import ConfigError
from advnorm._core.seeding import ImageNoise
from advnorm.objectives import APART, APARTSAM, AWP, LIGS, SAM, Execution, Hybrid, Standard
from advnorm.objectives.ligs import shift_images
from support.norm_oracles import changed, snapshot
from support.objective_oracles import Given, cross_entropy, pgd, tiny
from support.problems import raises_problem
from support.second_pass_oracles import (
    INDEX,
    PASSES,
    Attacked,
    Batch,
    M,
    X,
    Y,
    agree,
    algorithm_1,
    drawn_rows,
    each_pass,
    equation_7,
    on_one,
    seen_by,
    wu,
)


def with_ligs(network: Attacked, batch: Batch, mode: str) -> Tensor:
    """Paper D, eq. 1, on pairs of an image and its neighbour, which takes the place of the adversarial one."""
    x, neighbour, y = batch

    def input_gradient(at: Tensor) -> Tensor:
        at = at.clone().requires_grad_()
        logits = network.forward({"clean": at}, mode="batch_frozen")["clean"]
        return torch.autograd.grad(cross_entropy(logits, y).sum(), at, create_graph=True)[0].flatten(1)

    a, b = input_gradient(x), input_gradient(neighbour)
    ligs = ((a * b).sum(1) / ((a**2).sum(1) * (b**2).sum(1)) ** 0.5).mean()
    return on_one("clean")(network, batch, mode) + 0.5 * (1 - ligs)


@pytest.mark.parametrize("norm", ["bn", "dual_bn"])
@each_pass
def test_a_second_pass_resists_the_regularizer_too(wrap, norm):
    model, x = tiny(norm), X.double()
    neighbour = shift_images("gaussian", x, Y, ImageNoise(0, INDEX).fold("ligs"), 0.2, None)
    before = copy.deepcopy(model)
    objective = wrap(LIGS(Standard(model), weight=0.5, size=0.2))
    passes = seen_by(objective.objective)
    step = objective(x, Y, index=INDEX)
    rows, attack = drawn_rows(passes), {"groups": objective.groups, "radius": objective.radius or 0.0}
    if objective.attacks_weights:
        attack["move"] = wu(0.1, norms=False) if isinstance(objective, AWP) else equation_7(0.3)
    share = objective.share(M)
    expected = algorithm_1(before, with_ligs, (x, neighbour, Y), rows, share=share, **attack)
    assert {"clean_ce", "ligs", "second_pass"} == set(step.terms)
    agree(step, model, expected, share)


@pytest.mark.parametrize("outer", [APART, SAM, APARTSAM, AWP])
@pytest.mark.parametrize("inner", [APART, SAM, APARTSAM, AWP])
def test_two_second_passes_are_rejected_with_the_way_to_have_both(outer, inner):
    with raises_problem("conflict", "objective"):
        outer(inner(Standard(tiny())))


@pytest.mark.parametrize("inner", [APART, SAM, APARTSAM, AWP])
def test_a_regularizer_around_a_second_pass_is_rejected_with_the_right_order(inner):
    with raises_problem("conflict", "objective"):
        LIGS(inner(Standard(tiny())))


@pytest.mark.parametrize("outer", [APART, SAM, APARTSAM, AWP, LIGS])
@pytest.mark.parametrize("wrong", [tiny(), "hybrid", None, Standard], ids=["model", "name", "none", "class"])
def test_what_is_wrapped_must_be_an_objective(outer, wrong):
    with raises_problem("wrong_type", "objective"):
        outer(wrong)


@pytest.mark.parametrize(
    ("kind", "options", "fields"),
    [
        (APART, {"radius": -0.1, "samples": 0, "groups": 0, "group": 2}, {"radius", "samples", "groups", "group"}),
        (APART, {"radius": float("nan"), "samples": 1.5}, {"radius", "samples"}),
        (APART, {"radius": 1.0, "samples": True, "groups": True}, {"radius", "samples", "groups"}),
        (APART, {"samples": 10, "groups": 4, "radius": "0.1"}, {"groups", "radius"}),
        (SAM, {"rho": -1, "rhoo": 1}, {"rho", "rhoo"}),
        (APARTSAM, {"rho": None, "radius": -1, "samples": -3, "gropus": 2}, {"rho", "radius", "samples", "gropus"}),
        (AWP, {"gamma": "1", "norms": 1, "norm": True}, {"gamma", "norms", "norm"}),
    ],
)
def test_all_problems_of_options_come_in_one_error(kind, options, fields):
    with pytest.raises(ConfigError) as error:
        kind(Standard(tiny()), **options)
    assert {problem.field for problem in error.value.problems} == fields


@pytest.mark.parametrize("kind", [APART, APARTSAM])
@pytest.mark.parametrize("norm", ["gn", "dual_affine_ln", "none", "plain"])
def test_apart_without_batch_statistics_is_rejected_with_the_fix(kind, norm):
    model = tiny(plain=True) if norm == "plain" else tiny(norm)
    with pytest.raises(ConfigError, match=r"convert.*convert_norm") as caught:
        kind(Standard(model))
    if norm == "plain":
        assert "'bn'" in str(caught.value) or '"bn"' in str(caught.value)
        advnorm.convert_norm(model, "bn")
        kind(Standard(model))(X, Y).loss.backward()


@pytest.mark.parametrize("norm", ["gn", "none", "dual_affine_in"])
@pytest.mark.parametrize("name", ["sam", "awp"])
def test_weights_can_be_attacked_whatever_the_norm(name, norm):
    model = tiny(norm)
    PASSES[name](Standard(model))(X, Y).loss.backward()
    assert model.conv1.weight.grad.abs().sum() > 0


@each_pass
def test_what_an_engine_sets_reaches_the_objective_inside(wrap):
    model = tiny("dual_bn")
    objective = wrap(LIGS(Hybrid(model, pgd())))
    inside = objective.objective.objective
    objective.attack, objective.statistics = pgd(steps=1), "running"
    assert inside.attack == pgd(steps=1) and inside.statistics == "running"
    assert objective.attack is inside.attack and objective.statistics == "running"
    assert objective.model is model and objective.needs_attack and objective.trained_domains() == ("clean", "adv")
    assert "Hybrid" in repr(objective) and "weight=1.0" in repr(objective)
    assert not wrap(Standard(model)).needs_attack and wrap(Standard(model)).trained_domains() == ("clean",)
    assert objective.innermost is inside
    through: list[int] = []
    execution = Execution(network=lambda x: (through.append(len(x)), model(x))[1])
    objective.attack, objective.statistics = Given(), "batch"
    objective(X, Y, execution=execution)
    assert len(through) == 2, "a compiled network takes the forwards of both passes"
    objective.seed, objective.label_smoothing = 5, 0.25
    assert inside.seed == objective.objective.seed == 5 and inside.label_smoothing == 0.25
    assert objective.domains == ("clean", "adv") and wrap(Standard(model)).domains == ("clean",)
    index = torch.arange(len(X))
    assert torch.equal(objective.craft(X, Y, index), inside.craft(X, Y, index))


@pytest.mark.parametrize("norm", ["bn", "dual_bn"])
def test_the_seed_decides_which_images_take_the_second_pass_and_the_noise_of_ligs(norm):
    index = torch.arange(M)
    apart, ligs = APART(Standard(tiny(norm)), samples=0.5), LIGS(Standard(tiny(norm)))

    def drawn(seed: int) -> tuple[list[int], float]:
        apart.seed = ligs.seed = seed
        subset = apart._subset(apart.craft_batch(X, Y, index))
        return subset.index.tolist(), ligs(X, Y, index=index).terms["ligs"].item()

    subsets, terms = zip(*map(drawn, (0, 1, 2, 0)))
    assert len(set(map(tuple, subsets))) == len(set(terms)) == 3
    assert subsets[0] == subsets[3] and terms[0] == terms[3]


def test_a_share_of_clean_images_without_equal_groups_is_rejected_before_any_bank_is_updated():
    model = tiny("dual_bn")
    objective = APART(Hybrid(model, pgd(), clean_share=0.5), groups=2)
    before = snapshot(model)
    with raises_problem("conflict", "groups"):
        objective(X[:6], Y[:6])
    assert not changed(model, before)
    assert objective(X, Y).loss.isfinite()


def test_a_gradient_in_half_precision_has_its_length_in_float32():
    """Squares of 1e-5 are none in float16: the step was a third of rho."""
    gradients = [torch.full((7,), 6e-6, dtype=torch.float16), torch.full((5,), -6e-6, dtype=torch.float16)]
    steps = SAM(Standard(tiny("bn")), rho=0.05).weight_perturbations(gradients, gradients)
    assert {step.dtype for step in steps} == {torch.float16}
    assert torch.cat(steps).double().norm().item() == pytest.approx(0.05, rel=1e-3)
