"""Gradient checkpointing: a recomputation uses the scopes of the forward and updates no bank."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from advnorm._core.errors import RouteError
from advnorm.norms import checkpoint_context, list_norms, mixture_likelihood, route, statistics, zero_perturbation
from support.crossing import crossing
from support.norm_cases import images, in_thread, network, rejects
from support.norm_oracles import BANKED, along, domains_of, shares, snapshot


def step_with_checkpoint(
    name: str, how: str, *, mode: str | None = None, perturbed: bool = False, groups: int = 1
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Gradients and state after a training step in which the first five layers are recomputed."""
    model, counts = network(name), shares(name, unit=groups)
    x = images(counts).requires_grad_()
    head, tail = model[:5], model[5:]
    scope = contextlib.ExitStack()
    with scope:
        scope.enter_context(along(model, counts))
        scope.enter_context(statistics(model, mode=mode, groups=groups))
        if perturbed:
            deltas = zero_perturbation(model, requires_grad=False).map(lambda delta: delta + 0.1)
            scope.enter_context(statistics(model, perturbation=deltas))
        if how == "plain":
            hidden = head(x)
        elif how == "reentrant":
            hidden = checkpoint(head, x, use_reentrant=True)
        elif how == "inside":
            hidden = checkpoint(head, x, use_reentrant=False)
        else:
            hidden = checkpoint(head, x, use_reentrant=False, context_fn=checkpoint_context(model))
        loss = tail(hidden).square().sum()
        if how in ("inside", "reentrant", "context_inside"):
            loss.backward()
    if how in ("plain", "context_outside"):
        loss.backward()
    elif how == "context_other_route":
        with route(model, domains_of(name)[0]), statistics(model, mode="running"):
            loss.backward()
    assert x.grad is not None
    return [x.grad, *(p.grad for p in model.parameters())], snapshot(model)  # type: ignore[list-item]


@pytest.mark.parametrize("how", ["reentrant", "inside", "context_inside", "context_outside", "context_other_route"])
@pytest.mark.parametrize("name", list_norms())
def test_recomputation_updates_no_bank_and_gives_the_same_gradients(name, how):
    gradients, state = step_with_checkpoint(name, how)
    expected_gradients, expected_state = step_with_checkpoint(name, "plain")
    for ours, theirs in zip(gradients, expected_gradients):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    for key, value in expected_state.items():
        assert torch.equal(state[key], value), key


@pytest.mark.parametrize(
    ("name", "how", "case"),
    crossing(
        BANKED,
        ["reentrant", "inside", "context_outside"],
        [{"mode": "running"}, {"mode": "batch_frozen"}, {"groups": 2}, {"perturbed": True}],
        keep=3,
    ),
)
def test_recomputation_uses_mode_groups_and_perturbation_of_the_forward(name, how, case):
    gradients, state = step_with_checkpoint(name, how, **case)
    expected_gradients, expected_state = step_with_checkpoint(name, "plain", **case)
    for ours, theirs in zip(gradients, expected_gradients):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    for key, value in expected_state.items():
        assert torch.equal(state[key], value), key


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputation_outside_of_its_scope_is_rejected(reentrant):
    model, counts = network("dual_bn"), shares("dual_bn")
    x = images(counts).requires_grad_()
    with route(model, counts):
        loss = checkpoint(model, x, use_reentrant=reentrant).sum()
    with rejects("missing_route", "route", RouteError):
        loss.backward()


@pytest.mark.parametrize("how", ["plain", "inside", "context_inside", "context_outside"])
def test_the_likelihood_of_checkpointed_layers_counts_every_layer_once(how):
    model, counts = network("gmm_bn"), shares("gmm_bn")
    x, unchecked = images(counts).requires_grad_(), images(counts).requires_grad_()
    reference = copy.deepcopy(model)
    with route(reference, counts), mixture_likelihood(reference) as expected:
        reference(unchecked)
    expected.loss().backward()
    context = {"context_fn": checkpoint_context(model)} if "context" in how else {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(route(model, counts))
        nll = stack.enter_context(mixture_likelihood(model))
        _ = model(x) if how == "plain" else checkpoint(model, x, use_reentrant=False, **context)
        loss = nll.loss()
        if "inside" in how:
            loss.backward()
    if "inside" not in how:
        loss.backward()
    torch.testing.assert_close(loss, expected.loss())
    torch.testing.assert_close(x.grad, unchecked.grad)
    torch.testing.assert_close(nll.loss(), expected.loss(), msg="the recomputation added its terms a second time")


@pytest.mark.parametrize("with_context", [False, True])
def test_a_backward_on_another_thread_may_recompute_inside_the_scope(with_context):
    """On a GPU the autograd engine recomputes on the device's own thread while the scope is open on the main one."""
    gradients = []
    for threaded in (False, True):
        model, counts = network("dual_bn"), shares("dual_bn")
        x = images(counts).requires_grad_()
        context = {"context_fn": checkpoint_context(model)} if with_context else {}
        with route(model, counts):
            loss = checkpoint(model, x, use_reentrant=False, **context).square().sum()
            in_thread(loss.backward) if threaded else loss.backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)
