"""Second passes in training: two processes, bf16, moving averages, resuming, and their effect."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import advnorm
from advnorm.analysis.perturbed_statistics import StatisticsPerturbation
from advnorm.data.digits import digits
from advnorm.objectives import APART, Hybrid, Objective, Standard
from advnorm.training.averaging import EMA
from support import second_pass_ranks
from support.digits_training import batches, train
from support.norm_oracles import changed, snapshot
from support.objective_oracles import Given, Tiny, pgd, tiny
from support.objective_ranks import STEPS, WORLD, data, descend
from support.ranks import seen, two_processes
from support.second_pass_oracles import EXACT, INDEX, PASSES, M, X, Y, each_pass


@pytest.fixture(scope="module")
def ranks(launch_ranks) -> list[dict[str, Any]]:
    """What each rank saw, from one launch of all ranks."""
    return launch_ranks(second_pass_ranks.__file__, WORLD)


@pytest.mark.parametrize("key", [pytest.param(key, marks=two_processes) for key in second_pass_ranks.CASES])
def test_two_ranks_train_as_one_process_on_the_whole_batch(ranks, key):
    """The attack on the model is that of the whole batch, on every rank the same."""
    case, found = second_pass_ranks.CASES[key], seen(ranks, key)
    near = {"rtol": 1e-5, "atol": 1e-7} if case.ligs else EXACT  # the gradient of a float32 image is float32
    objective = case.objective(sync=False)
    before = snapshot(objective.model)
    losses = descend(objective, [data(step) for step in range(STEPS)])
    mean = [sum(pair) / WORLD for pair in zip(*(result["losses"] for result in found))]
    assert mean == pytest.approx(losses, rel=near["rtol"])
    assert "conv1.weight" in changed(objective.model, before)
    for result in found:
        for name, value in objective.model.state_dict().items():
            torch.testing.assert_close(result["state"][name], value, **near, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("key", [pytest.param(key, marks=two_processes) for key in second_pass_ranks.CASES])
def test_a_step_reduces_the_gradients_once_and_adds_a_mean_per_attack_on_the_model(ranks, key):
    case = second_pass_ranks.CASES[key]
    for result in seen(ranks, key):
        assert result["calls"] == {"bucket": STEPS, "all_reduce": STEPS * (2 * case.forwards + case.means)}


@pytest.mark.world_size
def test_a_bank_that_no_image_takes_is_no_error_under_ddp(ranks):
    """``find_unused_parameters`` looks for parameters in the graph of all that a step returns."""
    for key in second_pass_ranks.UNUSED:
        for rank, results in enumerate(ranks):
            assert "error" not in results[key], f"rank {rank}: {results[key]['trace']}"


def bf16(**options: Any) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, **options)


def in_float32(norm: str = "bn") -> Tiny:
    return tiny(norm).float()


@pytest.mark.parametrize("name", ["sam", "awp"])
def test_under_autocast_the_second_pass_uses_the_moved_weights(name):
    """Autocast keeps the halves of weights that it made once; those of the first pass must not serve the second."""
    model, twin = in_float32(), in_float32()
    wrap = PASSES[name]
    with bf16():
        model.eval()(X)  # the cache is warm
        step = wrap(Standard(model.train()))(X, Y)
    with bf16(cache_enabled=False):
        first = Standard(twin)(X, Y).loss
    objective = wrap(Standard(twin))
    parameters = list(twin.parameters())
    with torch.no_grad():
        for parameter, moved in zip(
            parameters, objective.weight_perturbations(parameters, torch.autograd.grad(first, parameters))
        ):
            parameter += moved
    with bf16(cache_enabled=False), advnorm.statistics(twin, mode="batch_frozen"):
        fresh = Standard(twin)(X, Y).loss.detach()
    assert torch.equal(step.terms["second_pass"], fresh)
    assert abs(float(fresh - first)) > 0.02


@each_pass
@pytest.mark.parametrize("cache", [True, False])
def test_under_autocast_a_later_forward_uses_the_weights_of_the_model_again(wrap, cache):
    model = in_float32()
    with bf16(cache_enabled=cache):
        step = wrap(Standard(model))(X, Y)
        model.eval()
        after = model(X)
    with bf16():
        assert torch.equal(model(X), after)
    step.loss.backward()
    assert all(p.grad is None or (p.grad.dtype == p.dtype and p.grad.isfinite().all()) for p in model.parameters())


@each_pass
def test_bf16_gradients_are_near_those_of_float32(wrap):
    def gradients(scope: Any) -> Tensor:
        model = in_float32("dual_bn")
        with scope:
            step = wrap(Hybrid(model, Given()))(X, Y, index=INDEX)
        step.loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    exact, half = gradients(bf16(enabled=False)), gradients(bf16())
    assert float(torch.cosine_similarity(exact, half, dim=0)) > 0.98


@each_pass
def test_a_scaled_loss_scales_the_gradient(wrap):
    one, other = tiny(), tiny()
    wrap(Standard(one))(X, Y, index=INDEX).loss.backward()
    (wrap(Standard(other))(X, Y, index=INDEX).loss * 1024).backward()
    for a, b in zip(one.parameters(), other.parameters()):
        assert torch.equal(1024 * a.grad, b.grad)


@each_pass
def test_optimizer_average_and_generators_are_not_touched(wrap):
    model = in_float32()
    objective, ema = wrap(Standard(model)), EMA(model, 0.9)
    optimizer = torch.optim.SGD(objective.parameters(), lr=0.1, momentum=0.9)
    objective(X, Y).loss.backward()
    optimizer.step()
    ema.update(model)
    optimizer.zero_grad()

    def state() -> list[Tensor]:
        momentum = [entry["momentum_buffer"] for entry in optimizer.state.values()]
        return [v.clone() for v in (*momentum, *ema.average.values(), torch.get_rng_state())]

    before, updates = state(), ema.updates
    objective(X, Y).loss.backward()
    assert all(torch.equal(a, b) for a, b in zip(before, state())) and ema.updates == updates


@each_pass
def test_a_training_continues_from_the_model_alone(wrap):
    """A second pass keeps no state: its state dict is the model's, and a fresh wrapper takes the same steps."""
    model = in_float32("dual_bn")
    objective = wrap(Hybrid(model, pgd()))
    assert {name.removeprefix("objective.model.") for name in objective.state_dict()} == set(model.state_dict())

    def take(objective: Objective, steps: range) -> None:
        for step in steps:
            objective.zero_grad()
            objective(X, Y, index=INDEX + step * M).loss.backward()
            with torch.no_grad():
                for p in objective.parameters():
                    p -= 0.1 * p.grad

    take(objective, range(2))
    resumed = wrap(Hybrid(copy.deepcopy(model), pgd()))
    take(objective, range(2, 4))
    take(resumed, range(2, 4))
    assert changed(resumed.model, snapshot(model)) == set()


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_the_attack_on_statistics_hurts_far_more_than_chance_and_more_in_groups(seed):
    """Paper B, fig. 1: one batch makes the perturbation, and the training set evaluates it."""
    model, everything = train(6, seed=seed), batches("train")

    def under(radius: float, kind: str = "gradient", groups: int = 1, draw: int = 0) -> float:
        attack = StatisticsPerturbation(radius=radius, kind=kind, groups=groups, seed=draw)
        return attack.accuracy(model, everything, attack.perturbation(model, *everything[0]))

    clean = under(0.0)
    lost = clean - under(0.5)
    by_chance = {
        kind: clean - sum(under(0.5, kind, draw=draw) for draw in range(3)) / 3 for kind in ("uniform", "binary")
    }
    in_groups = [under(0.5, groups=groups) for groups in (1, 4, 16)]
    assert clean > 0.98 and lost > 0.1
    assert lost > 5 * by_chance["uniform"] and lost > 1.4 * by_chance["binary"]
    assert in_groups[0] - 0.01 > in_groups[1] and in_groups[1] - 0.1 > in_groups[2]
    assert in_groups[2] < under(0.0, groups=16) - 0.2, "the groups alone do less"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_network_trained_with_apart_keeps_more_accuracy_under_perturbed_statistics(seed):
    """Paper B, fig. 2, at equal budgets: twice the epochs for the standard network."""
    standard = train(12, seed=seed)
    apart = train(6, seed=seed, wrap=lambda inner: APART(inner, radius=0.2, groups=4))
    x, y = digits("test")

    def under(model: nn.Module, which: Any, radius: float) -> float:
        attacks = [
            StatisticsPerturbation(
                radius=radius, kind="binary", which=which, scaling="std", statistics="running", seed=draw
            )
            for draw in range(5)
        ]
        return sum(attack.accuracy(model, [(x, y)], attack.perturbation(model)) for attack in attacks) / 5

    kept = {
        (which, radius): (under(standard, which, radius), under(apart, which, radius))
        for which, radius in (("mean", 0.0), ("mean", 0.6), ("mean", 0.8), ("std", 0.4), ("std", 0.6), ("std", 0.8))
    }
    clean = kept.pop(("mean", 0.0))
    assert min(clean) > 0.95
    assert all(robust > plain for plain, robust in kept.values())
    assert kept["mean", 0.8][1] > kept["mean", 0.8][0] + 0.05 and kept["std", 0.6][1] > kept["std", 0.6][0] + 0.05
