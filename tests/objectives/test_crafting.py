"""The adversarial images that objectives train on: through the right branch, and without a trace in the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from advnorm._core.errors import ConfigError
from advnorm.attacks import APGD, PGD, AutoAttack
from advnorm.objectives import OBJECTIVES, Execution, Objective, base, list_objectives
from advnorm.threat import ThreatModel
from support.objective_oracles import (
    CONCATENATED,
    Given,
    Network,
    crafted,
    cross_entropy,
    forwards,
    images,
    kl,
    pgd,
    tiny,
)

X, Y = images(5)
INDEX = torch.tensor([7, 3, 11, 2, 5])
THREAT = ThreatModel(eps="8/255")
ATTACKING = [name for name in list_objectives() if name != "standard"]


def built(name: str, norm: str = "dual_bn", attack: Any = None, **options: Any) -> Objective:
    model = tiny("cross_bn" if name == "cross" else norm)
    return OBJECTIVES.get(name)(model, attack or pgd(), **options)


def by_hand(network: Network, x: Tensor, y: Tensor, start: Tensor, attack: PGD, *, against_clean: bool) -> Tensor:
    """``x <- clip(x + a sign(grad))`` through the adversarial branch, all norms on their running statistics."""
    with torch.no_grad():
        clean = network.forward({"clean": x}, mode="running")["clean"]
    low, high = (x.double() - attack.threat.eps).clamp(min=0), (x.double() + attack.threat.eps).clamp(max=1)
    x_adv = start.double()
    for _ in range(attack.steps):
        x_adv = x_adv.detach().requires_grad_()
        adv = network.forward({"adv": x_adv}, mode="running")["adv"]
        loss = kl(clean, adv) if against_clean else cross_entropy(adv, y)
        (gradient,) = torch.autograd.grad(loss.sum(), x_adv)
        x_adv = torch.minimum(torch.maximum(x_adv.detach() + attack.step * gradient.sign(), low), high)
    return x_adv


@pytest.mark.parametrize("norm", [*CONCATENATED, "plain"])
@pytest.mark.parametrize("name", ["hybrid", "trades"])
def test_the_attack_ascends_through_the_adversarial_branch_on_running_statistics(name, norm):
    model = tiny(plain=True) if norm == "plain" else tiny(norm)
    attack = pgd(start="gaussian")
    objective = OBJECTIVES.get(name)(model, attack)
    start = attack._started(X, attack.noise(INDEX).fold("restart").fold(0), attack.threat.projection(X))
    expected = by_hand(Network(model), X, Y, start, attack, against_clean=name == "trades")
    found = objective.craft(X, Y, INDEX)
    torch.testing.assert_close(found.double(), expected, rtol=0.0, atol=1e-6)
    assert (found - X).abs().amax() <= attack.threat.eps and (found != start).any()


@pytest.mark.parametrize("name", ATTACKING)
def test_an_objective_trains_on_the_images_of_its_attack(name):
    """Bit for bit those of the attack called by itself, for which every number is in float32."""
    norm = "cross_bn" if name == "cross" else "bn" if name == "trades" else "dual_bn"
    model = tiny(norm).float()
    attack = pgd()
    objective = OBJECTIVES.get(name)(model, attack)
    seen: list[Tensor] = []
    model.register_forward_pre_hook(lambda module, args: seen.append(args[0]) if module.training else None)
    alone = replace(attack, route="adv", **({"loss": "kl"} if name == "trades" else {}))
    x_adv = alone(model, X, Y, index=INDEX)
    objective(X, Y, index=INDEX)
    assert len(seen) == 1
    assert torch.equal(seen[0], x_adv if name == "classical" else torch.cat([X, x_adv]))


def test_standard_training_attacks_nothing():
    model = tiny("dual_bn")
    calls: list[bool] = []
    model.register_forward_hook(lambda *_: calls.append(True))
    OBJECTIVES.get("standard")(model, pgd())(X, Y)
    assert len(calls) == 1


def test_an_attack_that_names_a_route_goes_that_way():
    found = [built("hybrid", attack=pgd(route=route)).craft(X, Y, INDEX) for route in (None, "adv", "clean")]
    assert torch.equal(found[0], found[1]) and not torch.equal(found[1], found[2])


def everything(objective: Objective) -> dict[str, Any]:
    model = objective.model
    return {
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "gradients": {name: p.grad for name, p in model.named_parameters()},
        "flags": [m.training for m in model.modules()],
        "required": [p.requires_grad for p in model.parameters()],
        "random": torch.get_rng_state(),
    }


@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("name", ATTACKING)
def test_an_attack_leaves_the_model_as_it_was(name, with_gradients):
    objective = built(name)
    model = objective.model
    model.norm1.eval()
    model.conv2.weight.requires_grad_(False)
    if with_gradients:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
    before = everything(objective)
    x_adv = objective.craft(X, Y, INDEX)
    after = everything(objective)
    assert not x_adv.requires_grad and (x_adv != X).any()
    assert all(torch.equal(value, after["state"][key]) for key, value in before["state"].items())
    for key, gradient in before["gradients"].items():
        assert after["gradients"][key] is gradient and (gradient is None or bool((gradient == 1).all()))
    assert before["flags"] == after["flags"] and before["required"] == after["required"]
    assert torch.equal(before["random"], after["random"])


@pytest.mark.parametrize("norm", ["bn", "dual_bn", "gmm_bn"])
def test_gradients_and_statistics_are_those_of_the_training_pass_alone(norm):
    objective = built("hybrid", norm, likelihood_weight=0.01 if norm == "gmm_bn" else 0.0)
    x_adv = objective.craft(X, Y, INDEX)
    network = Network(objective.model)
    step = objective(X, Y, index=INDEX)
    assert all(parameter.grad is None for parameter in objective.parameters())
    step.loss.backward()
    logits = forwards(network, X, x_adv)
    loss = sum(0.5 * cross_entropy(logits[domain], Y).mean() for domain in ("clean", "adv"))
    if network.likelihoods:
        loss = loss + 0.01 * torch.stack(network.likelihoods).sum()
    loss.backward()
    torch.testing.assert_close(step.loss, loss, rtol=1e-9, atol=1e-11)
    for name, parameter in objective.model.named_parameters():
        torch.testing.assert_close(parameter.grad, network.gradients[name], rtol=1e-9, atol=1e-11)
    for name, buffer in objective.model.named_buffers():
        torch.testing.assert_close(buffer.double(), network.buffers[name].double(), rtol=1e-9, atol=1e-11)


def test_a_training_pass_on_running_statistics_sees_the_images_of_the_same_attack():
    found = [built("hybrid", statistics=mode).craft(X, Y, INDEX) for mode in ("batch", "running")]
    assert torch.equal(*found)


def test_images_with_an_index_get_their_own_noise_and_without_one_fresh_noise():
    objective = built("hybrid", attack=pgd(steps=1, step_size=1e-30))
    seen: list[Tensor] = []
    objective.model.register_forward_pre_hook(lambda m, args: seen.append(args[0][5:]) if m.training else None)
    for index in (INDEX, INDEX, None, None):
        objective(X, Y, index=index)
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2]) and not torch.equal(seen[2], seen[3])


def test_no_two_processes_give_images_without_an_index_the_same_noise(monkeypatch):
    named = []
    for place in range(3):
        monkeypatch.setattr(base, "rank", lambda place=place: place)
        objective = built("hybrid")
        named += [objective.craft_batch(X, Y).index for _ in range(3)]
    assert len(torch.cat(named).unique()) == 9 * len(X)


@pytest.mark.parametrize("norm", ["bn", "dual_bn", "dual_affine_bn", "dual_stats_bn", "gn", "dual_affine_gn"])
def test_a_copy_of_the_attacked_branch_gives_the_clean_output_only_where_that_is_the_same_branch(norm):
    """TRADES compares with the clean output through the clean branch, which a copy of the other one is not."""
    objective = built("trades", norm, attack=pgd(start="gaussian"))
    expected, seen = objective.craft(X, Y, INDEX), []
    surrogate = Execution(surrogate=lambda x: (seen.append(x), objective.logits(x))[1])
    assert torch.equal(objective.craft(X, Y, INDEX, surrogate), expected)
    of_the_clean = [x for x in seen if torch.equal(x, X)]
    assert len(of_the_clean) == (norm in ("bn", "gn")) and len(seen) == objective.attack.steps + len(of_the_clean)


def test_a_permuted_batch_has_the_permuted_adversarial_images():
    objective = built("hybrid")
    order = torch.tensor([4, 0, 3, 1, 2])
    found = objective.craft(X[order], Y[order], INDEX[order])
    torch.testing.assert_close(found, objective.craft(X, Y, INDEX)[order], rtol=0.0, atol=1e-6)


def test_with_eps_zero_both_domains_are_the_same_images():
    objective = built("kl", "bn", attack=pgd(threat=ThreatModel(eps=0.0)))
    step = objective(X, Y)
    torch.testing.assert_close(step.logits["clean"], step.logits["adv"], rtol=1e-12, atol=1e-12)
    assert step.terms["kl"].item() == pytest.approx(0.0, abs=1e-12)


def test_images_that_leave_ball_or_box_are_put_back():
    class Far(Given):
        def perturb(self, predict: Any, x: Tensor, y: Tensor, noise: Any) -> Tensor:
            return torch.where(x > 0.9, torch.nan, x + 5)

    found = built("hybrid", attack=Far(threat=ThreatModel(eps=0.1))).craft(X, Y, INDEX)
    assert found.isfinite().all() and found.amax() <= 1 and (found - X).abs().amax() <= 0.1
    assert torch.equal(found[X > 0.9], X[X > 0.9])


def test_trades_takes_a_given_attack_to_the_divergence_also_when_it_is_changed_later():
    objective = built("trades")
    assert objective.attack.loss == "kl"
    objective.attack = pgd(steps=5)
    assert objective.attack.loss == "kl" and objective.attack.steps == 5


@pytest.mark.parametrize(
    ("attack", "what"),
    [
        (pgd(target="random"), "got the target 'random'"),
        (APGD(threat=THREAT, steps=2), "got APGD"),
        (AutoAttack(threat=THREAT), "got AutoAttack"),
        (pgd(start="clean"), "no gradient at the clean image"),
        (pgd(start=0.2), "where the attack starts, got 0.2"),
    ],
)
def test_trades_rejects_an_attack_that_cannot_maximize_the_divergence(attack, what):
    """Images that start at the clean ones have no gradient there; some stayed as they were."""
    with pytest.raises(ConfigError, match=what):
        built("trades", attack=attack)
    objective = built("trades")
    before = objective.attack
    with pytest.raises(ConfigError, match=what):
        objective.attack = attack
    assert objective.attack is before


@pytest.mark.parametrize("name", [name for name in ATTACKING if name != "trades"])
def test_other_objectives_take_an_attack_on_the_divergence(name):
    step = built(name, attack=pgd(loss="kl"))(X, Y)
    assert step.loss.isfinite()


def test_the_adversarial_images_depend_on_the_weights_at_the_time():
    objective = built("hybrid")
    before = objective.craft(X, Y, INDEX)
    with torch.no_grad():
        for module in objective.model.modules():
            if isinstance(module, nn.Conv2d):
                module.weight.neg_()
    assert not torch.equal(objective.craft(X, Y, INDEX), before)


def test_the_given_attack_of_the_other_tests_is_what_the_training_pass_sees():
    objective = built("hybrid", attack=Given())
    assert torch.equal(objective.craft(X, Y, INDEX), crafted(X))
