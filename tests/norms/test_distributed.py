"""Two processes with synchronized statistics are one process on the whole batch; and what DDP makes of routes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from advnorm.norms import recalibrate, route
from support import norm_ranks
from support.norm_oracles import Oracle, parts_of
from support.norm_ranks import CASES, WORLD, Case, Objective, half, shares_of_data, small_network
from support.ranks import seen, two_processes

pytestmark = two_processes


@pytest.fixture(scope="module")
def ranks(launch_ranks) -> list[dict[str, Any]]:
    """What each rank saw, from one launch of all ranks."""
    return launch_ranks(norm_ranks.__file__, WORLD)


def one_process(case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor], Oracle]:
    """The same two steps by the papers' formulas on the whole batch: outputs and input gradients by part."""
    norm = case.norm(sync=False)
    oracle = Oracle(case.name, norm, other_gradient=case.options.get("other_gradient", True))
    for step in range(2):
        for parameter in oracle.parameters.values():
            parameter.grad = None
        inputs, weights = case.whole(step)
        counts = {part: len(piece) for part, piece in inputs.items()}
        x = torch.cat(list(inputs.values())).double().requires_grad_()
        y = oracle.forward(x, counts, mode=case.mode or "batch")
        (y * torch.cat(list(weights.values())).double()).sum().backward()
    assert x.grad is not None
    sizes = list(counts.values())
    return dict(zip(counts, y.detach().split(sizes))), dict(zip(counts, x.grad.split(sizes))), oracle


@pytest.mark.parametrize("key", CASES)
def test_synchronized_ranks_equal_one_process_on_the_whole_batch(ranks, key):
    case = CASES[key]
    tolerance = {"rtol": 1e-10, "atol": 1e-11} if case.dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}
    found = seen(ranks, key)
    y, dx, oracle = one_process(case)
    for rank, result in enumerate(found):
        torch.testing.assert_close(result["y"].double(), case.mine(y, rank), **tolerance)
        torch.testing.assert_close(result["dx"].double(), case.mine(dx, rank), **tolerance)
        for name, buffer in result["buffers"].items():
            torch.testing.assert_close(
                buffer.double(), oracle.buffers[name].double(), **tolerance, msg=f"{name}, {rank}"
            )
            assert torch.equal(buffer, found[0]["buffers"][name]), f"ranks disagree about {name}"
    for name, parameter in oracle.parameters.items():
        total = sum(result["gradients"][name].double() for result in found)
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(total, expected, **tolerance, msg=name)


def test_the_cases_cover_ranks_without_samples_of_a_domain():
    missing = {case.name for case in CASES.values() for rank in range(WORLD) if 0 in case.counts(rank).values()}
    assert missing == {case.name for case in CASES.values()}
    assert all(set(case.counts(0)) == set(parts_of(case.name)) for case in CASES.values())


def whole_objective() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Three hybrid steps in one process on the whole batch; DDP averages gradients over the ranks."""
    objective = Objective(small_network(sync=False))
    for step in range(3):
        objective.zero_grad()
        whole = torch.cat([half(rank, step) for rank in range(WORLD)])
        (objective(whole) / WORLD).backward()
    gradients = {name: parameter.grad for name, parameter in objective.model.named_parameters()}
    return gradients, dict(objective.model.named_buffers())  # type: ignore[return-value]


def test_a_hybrid_step_inside_one_forward_works_under_ddp_with_its_defaults(ranks):
    gradients, buffers = whole_objective()
    for result in seen(ranks, "objective_in_one_forward"):
        for name, gradient in gradients.items():
            torch.testing.assert_close(result["gradients"][name], gradient, rtol=1e-9, atol=1e-11, msg=name)
        for name, buffer in buffers.items():
            torch.testing.assert_close(result["buffers"][name], buffer, rtol=1e-9, atol=1e-11, msg=name)


def test_an_attack_on_the_bare_module_communicates_nothing(ranks):
    for result in seen(ranks, "objective_in_one_forward"):
        assert result["attack"] == {"all_reduce": 0, "bucket": 0}
        assert result["forward"] == {"all_reduce": 2, "bucket": 0}  # one per synchronized forward
        assert result["buckets"] >= 1  # and the gradients once, in the backward


def test_an_attack_with_the_statistics_of_its_batch_communicates_with_no_rank(ranks):
    first, second = seen(ranks, "attack_of_one_rank")
    assert [(result["attack"], result["forward"]) for result in (first, second)] == [(0, 1), (0, 1)]
    model = small_network(sync=False).float().train()
    for mode, images in first["made"].items():
        torch.testing.assert_close(images, norm_ranks.adversarial(model, mode), rtol=0, atol=0)


def test_a_concatenated_batch_works_under_ddp_with_its_defaults(ranks):
    model = small_network(sync=False)
    for step in range(2):
        model.zero_grad()
        whole = torch.cat([half(rank, step) for rank in range(WORLD)])
        with route(model, {"clean": 6, "adv": 6}):
            (model(torch.cat([whole, whole + 0.1])).square().sum() / WORLD).backward()
    for result in seen(ranks, "concatenated_with_defaults"):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(result["gradients"][name], parameter.grad, rtol=1e-9, atol=1e-11, msg=name)
        for name, buffer in model.named_buffers():
            torch.testing.assert_close(result["buffers"][name], buffer, rtol=1e-9, atol=1e-11, msg=name)


def test_one_route_alone_fails_under_ddp_with_its_defaults(ranks):
    """Documents torch: the other domain's parameters never get a gradient, and the second step raises."""
    for results in ranks:
        assert "find_unused_parameters" in results["one_route_with_defaults"]["error"]


def test_one_route_alone_works_under_ddp_with_find_unused_parameters(ranks):
    for result in seen(ranks, "one_route_with_find_unused"):
        for name, gradient in result["gradients"].items():
            used = "_clean" not in name
            assert (gradient is not None and bool(gradient.any())) is used, name
        assert result["buffers"]["1.num_batches_tracked_adv"] == 2
        assert result["buffers"]["1.num_batches_tracked_clean"] == 0


def test_two_forwards_and_one_backward_fail_under_ddp_with_find_unused_parameters(ranks):
    """Documents torch: which is why a hybrid step belongs into one forward of a wrapped objective."""
    for results in ranks:
        assert "RuntimeError" in results["two_forwards_with_find_unused"].get("error", "it worked")


def test_a_synchronized_norm_communicates_once_for_batch_statistics_and_else_never(ranks):
    for result in seen(ranks, "collectives_per_forward"):
        for key, calls in result.items():
            assert calls == (0 if key.endswith(("running", "unsynchronized")) else 1), key


def test_domains_on_different_ranks_give_each_other_their_moments(ranks):
    norm = norm_ranks.crossed_norm(sync=False)
    with route(norm, {"clean": 3, "adv": 3}):
        y = norm(torch.cat([half(0), half(1)])).detach()
    for result, expected in zip(seen(ranks, "crossed_without_forwarded"), y.chunk(WORLD), strict=True):
        torch.testing.assert_close(result["y"], expected, rtol=1e-9, atol=1e-11)
        for name, buffer in norm.named_buffers():
            torch.testing.assert_close(result["buffers"][name], buffer, rtol=1e-9, atol=1e-11, msg=name)


def test_synchronized_norms_are_recalibrated_by_the_batches_of_all_ranks(ranks):
    model = small_network(sync=False)
    recalibrate(model, [batch for share in shares_of_data() for batch in share], route="adv")
    for result in seen(ranks, "recalibrated"):
        assert result["sync"]
        for name, buffer in model.named_buffers():
            if "num_batches" not in name:
                torch.testing.assert_close(result["buffers"][name], buffer, rtol=1e-9, atol=1e-11, msg=name)
