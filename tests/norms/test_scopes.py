"""Scopes: what they set, that they leave nothing behind, and the traps of this field that they close."""

from __future__ import annotations

import contextlib
import copy
import pickle
import threading
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from advnorm._core.errors import AdvnormError, ConfigError, RouteError
from advnorm.norms import (
    RoutedNorm,
    checkpoint_context,
    domains,
    likelihood,
    list_norms,
    make_norm,
    pair,
    recalibrate,
    route,
    routed_modules,
    statistics,
    zero_perturbation,
)
from advnorm.norms.feeding import Flags, without_feeding
from advnorm.norms.plan import Plan
from advnorm.norms.routing import UNSCOPED
from support.norm_oracles import (
    BANKED,
    MODES,
    PAPER,
    along,
    batch,
    build,
    changed,
    domains_of,
    parts_of,
    randomized,
    shares,
    snapshot,
)

#: Norms that treat their domains differently.
ROUTED = [name for name, row in PAPER.items() if row.statistics in ("own", "other", "mixture") or row.affine == "own"]
examples = settings(max_examples=40, deadline=None, derandomize=True, database=None)


def network(name: str, **options: Any) -> nn.Sequential:
    """Two norms behind convolutions, in float64, every bank with values of its own."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), build(name, **options), nn.ReLU(),
        nn.Conv2d(4, 4, 3, padding=1), build(name, **options), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2),
    )  # fmt: skip
    return randomized(model.double())


def images(counts: dict[str, int], seed: int = 1) -> Tensor:
    return batch(counts, channels=3, spatial=(4, 4), seed=seed)


def settings_of(model: nn.Module) -> list[Any]:
    """What the scopes in force have set, per routed module."""
    return [module.state for module in routed_modules(model).values()]


def in_thread(function: Callable[[], Any]) -> Any:
    """Run in another thread; raise here what it raised there."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.extend((True, function()))
        except BaseException as error:
            outcome.extend((False, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if not outcome[0]:
        raise outcome[1]
    return outcome[1]


# -- nesting ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROUTED)
def test_the_inner_route_wins_and_the_outer_one_comes_back(name):
    norm = randomized(build(name).double()).eval()
    x = batch({"all": 4})
    first, second, *_ = domains_of(name)
    with route(norm, first):
        outer = norm(x)
        with route(norm, second):
            inner = norm(x)
        assert torch.equal(norm(x), outer)
    if name != "gmm_bn":  # at test time a mixture weighs all banks, whatever the domain
        assert not torch.equal(inner, outer)
        with pytest.raises(RouteError):
            norm(x)


def test_what_a_statistics_scope_does_not_give_it_inherits():
    norm = randomized(make_norm("dual_bn", 4).double())
    x, before = batch({"adv": 4}), snapshot(norm)
    delta = {"": {"adv": tuple(torch.full((4,), 0.1, dtype=torch.float64) for _ in range(2))}}
    with route(norm, "adv"):
        with statistics(norm, mode="batch_frozen", groups=2, perturbation=delta):
            together = norm(x)
        with statistics(norm, mode="batch_frozen"), statistics(norm, groups=2), statistics(norm, perturbation=delta):
            apart = norm(x)
        with statistics(norm, perturbation=delta), statistics(norm, groups=2, mode="batch_frozen"), route(norm, "adv"):
            turned = norm(x)
        with statistics(norm, mode="batch_frozen"):
            plain = norm(x)
    assert torch.equal(together, apart)
    assert torch.equal(together, turned)
    assert not torch.allclose(together, plain)
    assert changed(norm, before) == set()


def test_a_route_inside_a_pair_replaces_it_and_a_pair_inside_a_route_replaces_that():
    norm = randomized(make_norm("dual_bn", 4).double()).eval()
    x = batch({"all": 4})
    with route(norm, "adv"):
        adv = norm(x)
    with pair(norm, statistics="clean", affine="adv"):
        mixed = norm(x)
        with route(norm, "adv"):
            assert torch.equal(norm(x), adv)
            with pair(norm, statistics="clean", affine="adv"):
                assert torch.equal(norm(x), mixed)
            assert torch.equal(norm(x), adv)
        assert torch.equal(norm(x), mixed)
    assert not torch.equal(mixed, adv)


@pytest.mark.parametrize("name", list_norms())
def test_everything_is_restored_after_an_exception(name):
    model = network(name)
    outside = settings_of(model)
    first, second, *_ = domains_of(name)
    makers = [lambda: route(model, first), lambda: statistics(model, mode="running", groups=2)]
    if name in BANKED:
        makers.append(lambda: statistics(model, perturbation=zero_perturbation(model)))
    makers.append(lambda: likelihood(model) if name == "gmm_bn" else pair(model, statistics=first, affine=second))

    def fail_inside() -> None:
        with contextlib.ExitStack() as stack:
            for maker in makers:
                stack.enter_context(maker())
            assert settings_of(model) != outside
            raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        fail_inside()
    assert settings_of(model) == outside


def test_a_failed_forward_leaves_the_scope_usable():
    norm = make_norm("dual_bn", 4)
    with route(norm, {"clean": 2, "adv": 2}):
        with pytest.raises(RouteError):
            norm(torch.randn(5, 4, 2, 2))
        assert norm(torch.randn(4, 4, 2, 2)).shape == (4, 4, 2, 2)
    assert settings_of(norm) == settings_of(make_norm("dual_bn", 4))


def test_an_open_scope_cannot_be_entered_again_and_survives_the_attempt():
    norm = make_norm("dual_bn", 4)
    outside = settings_of(norm)
    scope = route(norm, "adv")
    with scope:
        inside = settings_of(norm)
        with pytest.raises(RouteError, match="open already"), scope:
            pass
        assert settings_of(norm) == inside
    assert settings_of(norm) == outside


def test_an_open_likelihood_cannot_be_entered_again_and_keeps_what_it_collected():
    norm = make_norm("gmm_bn", 4)
    x = batch({"clean": 4, "adv": 4}).float()
    with route(norm, {"clean": 4, "adv": 4}), likelihood(norm) as nll:
        norm(x)
        loss = nll.loss()
        with pytest.raises(RouteError, match="open already"), nll:
            pass
        assert torch.equal(nll.loss(), loss)


def test_a_likelihood_scope_used_twice_starts_anew():
    norm = make_norm("gmm_bn", 4)
    x = batch({"clean": 4, "adv": 4}).float()
    nll = likelihood(norm)
    losses = []
    for _ in range(2):
        with route(norm, {"clean": 4, "adv": 4}), nll:
            norm(x)
        losses.append(nll.loss())
    assert torch.equal(*losses)


def test_a_scope_of_a_part_touches_only_that_part():
    model, x = network("dual_bn"), images({"all": 4})
    before = snapshot(model)
    with (
        route(model, "clean"),
        route(model[1], "adv"),
        statistics(model[4], mode="batch"),
        statistics(model[4:], groups=2),
    ):
        model(x)
    names = ("running_mean", "running_var", "num_batches_tracked")
    assert changed(model, before) == {f"1.{k}_adv" for k in names} | {f"4.{k}_clean" for k in names}
    with route(model, "clean"), statistics(model[1], mode="running"):
        before = snapshot(model)
        model(x)
        assert changed(model, before) == {f"4.{k}_clean" for k in names}


def test_a_norm_that_a_model_holds_twice_is_set_and_restored_once():
    norm = make_norm("dual_bn", 4)
    model = nn.Sequential(norm, nn.ReLU(), norm)
    outside = settings_of(model)
    assert len(routed_modules(model)) == 1
    with route(model, "adv"):
        model(torch.randn(3, 4, 2, 2))
    assert settings_of(model) == outside
    assert norm.num_batches_tracked_adv == 2


def test_a_perturbation_reaches_the_norms_it_names_in_whatever_order_they_are_held():
    inner, shared = make_norm("bn", 2), make_norm("bn", 2)
    block = nn.ModuleDict(
        {"a": nn.ModuleDict({"late": inner, "shared": shared}), "shared": shared, "z": make_norm("bn", 2)}
    )
    names = list(routed_modules(block))
    x = torch.randn(4, 2, 2, 2)
    plain = {name: norm(x) for name, norm in routed_modules(block).items()}
    for chosen in names:
        delta = zero_perturbation(block, requires_grad=False)
        delta = {
            name: {k: (m, s + 0.5 * (name == chosen)) for k, (m, s) in banks.items()} for name, banks in delta.items()
        }
        with statistics(block, perturbation=delta):
            for name, norm in routed_modules(block).items():
                factor = 1.5 if name == chosen else 1.0
                torch.testing.assert_close(norm(x), factor * plain[name])


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("name", list_norms())
def test_a_copy_made_inside_a_scope_starts_outside_of_it(name, clone):
    model = network(name)
    outside = settings_of(model)
    with contextlib.ExitStack() as stack:
        stack.enter_context(route(model, domains_of(name)[-1]))
        stack.enter_context(statistics(model, mode="running", groups=2))
        if name in BANKED:
            stack.enter_context(statistics(model, perturbation=zero_perturbation(model)))
        if name == "gmm_bn":
            stack.enter_context(likelihood(model))
        twin = clone(model)
        inside = settings_of(model)
        assert settings_of(twin) == outside
        assert settings_of(model) == inside != outside
    assert changed(twin, snapshot(model)) == set()
    assert settings_of(model) == outside


def test_domains_are_those_of_all_norms_in_order():
    assert domains(network("dual_bn")) == ("clean", "adv")
    assert domains(network("triple_bn")) == ("clean", "adv", "adv2")
    assert domains(make_norm("multi_bn", 4, domains=["day", "night"])) == ("day", "night")
    assert domains(nn.Linear(2, 2)) == ()
    assert list(routed_modules(network("dual_bn"))) == ["1", "4"]
    norm = make_norm("dual_bn", 4)
    assert routed_modules(norm) == {"": norm}


# -- train and eval (traps 1, 3, 8) ----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", list_norms())
def test_a_mode_means_the_same_in_train_and_eval(name, mode):
    counts = shares(name)
    x = images(counts)
    outcomes = []
    for training in (True, False):
        model = network(name).train(training)
        with along(model, counts), statistics(model, mode=mode):
            outcomes.append((model(x), snapshot(model)))
        assert all(module.training is training for module in model.modules())
    (y_train, state_train), (y_eval, state_eval) = outcomes
    assert torch.equal(y_train, y_eval)
    assert all(torch.equal(state_train[key], state_eval[key]) for key in state_train)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", list_norms())
def test_without_a_mode_train_uses_and_feeds_the_batch_and_eval_uses_what_is_stored(name, training):
    counts = shares(name)
    x = images(counts)
    implicit, explicit = network(name).train(training), network(name)
    with along(implicit, counts):
        y = implicit(x)
    with along(explicit, counts), statistics(explicit, mode="batch" if training else "running"):
        assert torch.equal(explicit(x), y)
    assert changed(implicit, explicit.state_dict()) == set()


@pytest.mark.parametrize("name", [name for name in ROUTED if name != "gmm_bn"])
def test_the_second_branch_is_honoured_in_eval_as_in_train(name):
    """Trap 8: each domain's output at test time comes from its own banks, so it can be attacked and evaluated."""
    model = network(name).eval()
    x = images({"all": 4})
    outputs = []
    for domain in domains_of(name):
        x_domain = x.clone().requires_grad_()
        with route(model, domain):
            y = model(x_domain)
        y.square().sum().backward()
        assert x_domain.grad is not None and x_domain.grad.any()
        outputs.append(y.detach())
    for i, a in enumerate(outputs):
        for b in outputs[:i]:
            assert not torch.allclose(a, b)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", BANKED)
def test_only_mode_batch_moves_the_running_statistics_and_only_of_the_banks_it_feeds(name, training):
    """Trap 1: the three regimes of an attack."""
    model, counts = network(name).train(training), shares(name)
    x = images(counts)
    before = snapshot(model)
    outputs = {}
    with along(model, counts):
        for mode in ("running", "batch_frozen", "batch"):
            with statistics(model, mode=mode):
                outputs[mode] = model(x)
            moved = changed(model, before)
            if mode != "batch":
                assert moved == set(), mode
    assert moved == {key for key in before if "running" in key or "num_batches" in key}
    assert torch.equal(outputs["batch"], outputs["batch_frozen"])
    assert not torch.allclose(outputs["batch"], outputs["running"])


@pytest.mark.parametrize("name", [n for n in BANKED if PAPER[n].statistics == "own"])
def test_a_single_domain_feeds_its_own_bank_only(name):
    for domain in domains_of(name):
        norm = randomized(build(name).double())
        before = snapshot(norm)
        with route(norm, domain):
            norm(batch({"all": 4}))
        assert changed(norm, before) == {
            f"{k}_{domain}" for k in ("running_mean", "running_var", "num_batches_tracked")
        }


@pytest.mark.parametrize("mode", [*MODES, None])
@pytest.mark.parametrize("name", list_norms())
def test_scopes_touch_no_flag_of_any_module(name, mode):
    """Trap 3: a norm that the user froze stays frozen, a parameter without gradient stays without."""
    model, counts = network(name), shares(name)
    model[1].eval()
    model[2].eval()
    model[3].weight.requires_grad_(False)
    flags = [(m.training, [p.requires_grad for p in m.parameters()]) for m in model.modules()]
    with along(model, counts), statistics(model, mode=mode):
        model(images(counts)).sum().backward()
        assert [(m.training, [p.requires_grad for p in m.parameters()]) for m in model.modules()] == flags
    assert [(m.training, [p.requires_grad for p in m.parameters()]) for m in model.modules()] == flags
    assert model[3].weight.grad is None


@pytest.mark.parametrize("name", BANKED)
def test_a_frozen_norm_in_a_training_model_keeps_its_statistics_and_the_others_learn(name):
    model, counts = network(name).train(), shares(name)
    model[1].eval()
    before = snapshot(model)
    with along(model, counts):
        model(images(counts))
    moved = changed(model, before)
    assert not any(key.startswith("1.") for key in moved)
    assert any(key.startswith("4.") for key in moved)


# -- graphs that are alive (trap 4) ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", list_norms())
def test_a_graph_survives_the_end_of_its_scope_and_an_attack_in_between(name):
    counts = shares(name)
    expected = None
    for interrupted in (False, True):
        model, x = network(name), images(counts).requires_grad_()
        with along(model, counts):
            y = model(x)
            if interrupted:
                with statistics(model, mode="running"), route(model, domains_of(name)[0]):
                    model(images(counts, seed=5))
                with statistics(model, mode="batch_frozen", groups=1):
                    model(images(counts, seed=6))
        y.square().sum().backward()
        found = [x.grad, *(p.grad for p in model.parameters())]
        if expected is None:
            expected = found
    assert expected is not None
    for ours, theirs in zip(found, expected):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("first", MODES)
@pytest.mark.parametrize(
    ("name", "perturbed"), [*((name, False) for name in list_norms()), *((name, True) for name in BANKED)]
)
def test_a_graph_keeps_its_gradient_when_a_later_forward_feeds_the_banks(name, perturbed, first):
    """Two forwards, then one backward: what the second one stores must not reach into the graph of the first.

    The built-in norm gets this wrong in silence: its backward in eval mode reads the running statistics as they are by
    then. (A forward through running statistics, then one that trains them, then the backward of the sum of the losses.)
    """
    counts = shares(name)
    model, x = network(name), images(counts).requires_grad_()
    delta = zero_perturbation(model) if perturbed else None
    with along(model, counts), statistics(model, mode=first, perturbation=delta):
        loss = model(x).square().sum()
    wanted = [x, *model.parameters(), *(delta.tensors if delta is not None else ())]
    before = torch.autograd.grad(loss, wanted, retain_graph=True)
    with along(model, counts), statistics(model, mode="batch"), torch.no_grad():
        model(3 * images(counts, seed=5) + 1)
    after = torch.autograd.grad(loss, wanted)
    for a, b in zip(before, after):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


# -- biased and unbiased (trap 5) ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BANKED)
def test_batches_are_normalized_by_the_biased_variance_and_banks_store_the_unbiased_one(name):
    """Samples 0 and 2 of every part: mean 1, biased variance 1, unbiased n / (n - 1) for n values in a bank."""
    norm = build(name, 3, dim=1, momentum=1.0, eps=0.0).double()
    known, parts = domains_of(name), parts_of(name)
    x = torch.tensor([[0.0] * 3, [2.0] * 3] * len(parts), dtype=torch.float64)
    with along(norm, dict.fromkeys(parts, 2)):
        y = norm(x)
    torch.testing.assert_close(y, x - 1)
    values = 2 * len(known) if PAPER[name].statistics == "mixed" else 2
    variances = [value for key, value in norm.named_buffers() if key.startswith("running_var")]
    assert len(variances) == (1 if PAPER[name].statistics == "mixed" else len(known))
    for variance in variances:
        torch.testing.assert_close(variance, torch.full((3,), values / (values - 1), dtype=torch.float64))
    with along(norm, dict.fromkeys(parts, 2)), statistics(norm, mode="running"):
        torch.testing.assert_close(norm(x), (x - 1) / (values / (values - 1)) ** 0.5)


# -- gradient checkpointing (trap 6) ---------------------------------------------------------------------------


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
def test_recomputation_feeds_nothing_and_gives_the_same_gradients(name, how):
    gradients, state = step_with_checkpoint(name, how)
    expected_gradients, expected_state = step_with_checkpoint(name, "plain")
    for ours, theirs in zip(gradients, expected_gradients):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    for key, value in expected_state.items():
        assert torch.equal(state[key], value), key


@pytest.mark.parametrize("how", ["reentrant", "inside", "context_outside"])
@pytest.mark.parametrize(
    "case", [{"mode": "running"}, {"mode": "batch_frozen"}, {"groups": 2}, {"perturbed": True}], ids=str
)
@pytest.mark.parametrize("name", BANKED)
def test_recomputation_sees_mode_groups_and_perturbation_of_the_forward(name, how, case):
    gradients, state = step_with_checkpoint(name, how, **case)
    expected_gradients, expected_state = step_with_checkpoint(name, "plain", **case)
    for ours, theirs in zip(gradients, expected_gradients):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    for key, value in expected_state.items():
        assert torch.equal(state[key], value), key


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputation_outside_of_its_scope_is_refused_with_the_cure(reentrant):
    model, counts = network("dual_bn"), shares("dual_bn")
    x = images(counts).requires_grad_()
    with route(model, counts):
        loss = checkpoint(model, x, use_reentrant=reentrant).sum()
    with pytest.raises(RouteError, match="checkpoint_context"):
        loss.backward()


@pytest.mark.parametrize("how", ["plain", "inside", "context_inside", "context_outside"])
def test_the_likelihood_of_checkpointed_layers_counts_every_layer_once(how):
    model, counts = network("gmm_bn"), shares("gmm_bn")
    x, unchecked = images(counts).requires_grad_(), images(counts).requires_grad_()
    reference = copy.deepcopy(model)
    with route(reference, counts), likelihood(reference) as expected:
        reference(unchecked)
    expected.loss().backward()
    context = {"context_fn": checkpoint_context(model)} if "context" in how else {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(route(model, counts))
        nll = stack.enter_context(likelihood(model))
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


def test_a_second_pass_as_sam_and_apart_make_it_leaves_no_trace():
    """Trap 6: the second pass uses batch statistics (perturbed, in groups) and feeds none."""
    model = network("bn")
    x, delta = images({"all": 4}), zero_perturbation(model)
    loss = None
    with statistics(model, perturbation=delta):
        loss = model(x).square().sum()
    gradients = torch.autograd.grad(loss, delta.tensors)
    before = snapshot(model)
    with statistics(model, mode="batch_frozen", groups=2, perturbation=delta.ascend(gradients, 0.1)):
        model(x).square().sum().backward()
    assert changed(model, before) == set()
    assert model[1].num_batches_tracked == 1


# -- threads ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list_norms())
def test_a_forward_of_another_thread_inside_a_scope_is_refused(name):
    norm = build(name)
    before = snapshot(norm)
    with route(norm, domains_of(name)[0]), statistics(norm, mode="running"):
        with pytest.raises(RouteError, match=r"another thread.*deepcopy"):
            in_thread(lambda: norm(torch.randn(4, 4, 2, 2)))
        norm(torch.randn(4, 4, 2, 2))
    assert changed(norm, before) == set()


@pytest.mark.parametrize("name", list_norms())
def test_a_scope_of_another_thread_is_refused_and_leaves_ours_alone(name):
    norm = build(name)
    with route(norm, domains_of(name)[0]):
        inside = settings_of(norm)
        with pytest.raises(RouteError, match=r"another thread.*deepcopy"):
            in_thread(lambda: route(norm, domains_of(name)[-1]).__enter__())
        assert settings_of(norm) == inside
    with route(norm, domains_of(name)[0]):
        pass


def test_threads_that_race_for_a_model_are_served_or_refused_and_leave_nothing_behind(monkeypatch):
    model = nn.Sequential(*(make_norm("dual_bn", 2) for _ in range(3)))
    served, torn = [], []

    def slowly() -> int:  # lets the others in between a look at the model and what comes of it
        time.sleep(0.002)
        return threading.get_ident()

    monkeypatch.setattr("advnorm.norms.routing.threading", SimpleNamespace(get_ident=slowly))

    def race(domain: str) -> None:
        for _ in range(10):
            with contextlib.suppress(RouteError), route(model, domain):
                time.sleep(0.001)
                torn.extend(norm for norm in model if norm.state.route != ((domain, None),))
                served.append(domain)

    threads = [threading.Thread(target=race, args=(domain,)) for domain in ("clean", "adv", "clean", "adv")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert served and not torn
    assert all(norm.state == UNSCOPED and not norm.scopes for norm in model)


def test_threads_may_take_turns_and_may_have_copies():
    norm = make_norm("dual_bn", 4)
    x = torch.randn(4, 4, 2, 2)

    def forward(model: nn.Module) -> Tensor:
        with route(model, "adv"), statistics(model, mode="running"):
            return model(x)

    ours = forward(norm)
    assert torch.equal(in_thread(lambda: forward(norm)), ours)
    with route(norm, "clean"):
        assert torch.equal(in_thread(lambda: forward(copy.deepcopy(norm))), ours)
    single = make_norm("bn", 4).eval()
    assert torch.equal(in_thread(lambda: single(x)), single(x))


# -- pair: swapped NS and AP (paper A, table 5) ----------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in BANKED if name != "gmm_bn"])
def test_pair_takes_the_statistics_of_one_domain_and_the_affine_parameters_of_another(name):
    x = batch({"all": 4})
    row = PAPER[name]
    for statistics_of in domains_of(name):
        for affine_of in domains_of(name):
            norm = randomized(build(name).double())
            state = snapshot(norm)
            ns = "" if row.statistics == "mixed" else f"_{statistics_of}"
            ap = "" if row.affine == "one" else f"_{affine_of}"
            plain = nn.BatchNorm2d(4).double()
            names = {k: k + (ap if k in ("weight", "bias") else ns) for k in plain.state_dict()}
            plain.load_state_dict({key: state[value] for key, value in names.items()})
            with pair(norm, statistics=statistics_of, affine=affine_of):
                with statistics(norm, mode="running"):
                    torch.testing.assert_close(norm(x), plain.eval()(x), rtol=1e-10, atol=1e-12)
                assert changed(norm, state) == set()
                with statistics(norm, mode="batch_frozen"):
                    y = norm(x)
                assert changed(norm, state) == set()
                with statistics(norm, mode="batch"):
                    torch.testing.assert_close(norm(x), y)
            torch.testing.assert_close(y, plain.train()(x), rtol=1e-10, atol=1e-12)
            fed = {"running_mean" + ns, "running_var" + ns, "num_batches_tracked" + ns}
            assert changed(norm, state) == fed
            for key in fed:
                torch.testing.assert_close(norm.state_dict()[key], plain.state_dict()[key.removesuffix(ns)])


@pytest.mark.parametrize("name", ["dual_affine_ln", "dual_affine_gn", "dual_affine_in", "ln", "none"])
def test_pair_of_a_per_sample_norm_chooses_the_affine_parameters(name):
    norm = randomized(build(name).double())
    x = batch({"all": 4})
    with pair(norm, statistics="clean", affine="adv"):
        y = norm(x)
    with route(norm, "adv"):
        assert torch.equal(norm(x), y)


def test_pair_perturbs_the_bank_it_names():
    norm = randomized(make_norm("dual_bn", 4).double())
    x = batch({"all": 4})
    deltas = {
        b: tuple(torch.full((4,), v, dtype=torch.float64) for _ in range(2)) for b, v in (("clean", 0.1), ("adv", 0.9))
    }
    with pair(norm, statistics="clean", affine="adv"), statistics(norm, mode="running", perturbation={"": deltas}):
        y = norm(x)
    mean, var = (t.view(4, 1, 1) for t in (norm.running_mean_clean, norm.running_var_clean))
    z = 1.1 * (x - 1.1 * mean) / (var + norm.eps).sqrt()
    torch.testing.assert_close(y, z * norm.weight_adv.view(4, 1, 1) + norm.bias_adv.view(4, 1, 1))


# -- recalibration (paper A, table 5) --------------------------------------------------------------------------


def moments_layer_by_layer(
    model: nn.Sequential, batches: list[Tensor], affine_suffix: str
) -> list[tuple[Tensor, Tensor]]:
    """Pooled mean and unbiased variance of what reaches every norm, each batch normalized by its own moments."""
    seen: dict[int, list[np.ndarray]] = {}
    for hidden in batches:
        for index, layer in enumerate(model):
            if isinstance(layer, RoutedNorm):
                seen.setdefault(index, []).append(hidden.detach().numpy().transpose(1, 0, 2, 3).reshape(4, -1))
                mean, var = hidden.mean((0, 2, 3), keepdim=True), hidden.var((0, 2, 3), keepdim=True, correction=0)
                weight, bias = (layer.get_parameter(k + affine_suffix).view(4, 1, 1) for k in ("weight", "bias"))
                hidden = (hidden - mean) / (var + layer.eps).sqrt() * weight + bias
            else:
                hidden = layer(hidden)
    values = [np.concatenate(parts, 1) for parts in seen.values()]
    return [(torch.from_numpy(v.mean(1)), torch.from_numpy(v.var(1, ddof=1))) for v in values]


def assert_bank_holds(model: nn.Sequential, suffix: str, expected: list[tuple[Tensor, Tensor]]) -> None:
    for norm, (mean, var) in zip(routed_modules(model).values(), expected):
        torch.testing.assert_close(norm.get_buffer("running_mean" + suffix), mean, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(norm.get_buffer("running_var" + suffix), var, rtol=1e-9, atol=1e-11)


def odd_batches() -> list[Tensor]:
    return [images({"all": size}, seed=size) for size in (5, 3, 1, 2)]


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(
    ("name", "route_", "into", "written"),
    [
        ("bn", None, None, ""),
        ("bn", "adv", None, ""),
        ("dual_bn", "adv", None, "_adv"),
        ("dual_bn", "clean", None, "_clean"),
        ("dual_bn", "adv", "clean", "_clean"),
        ("dual_bn", "clean", "adv", "_adv"),
        ("dual_affine_bn", "adv", None, ""),
        ("dual_stats_bn", "adv", None, "_adv"),
        ("dual_stats_bn", "adv", "clean", "_clean"),
        ("cross_bn", "adv", None, "_clean"),
        ("cross_bn", "adv", "adv", "_adv"),
        ("triple_bn", "adv2", "adv", "_adv"),
        ("multi_bn", "noise", None, "_noise"),
    ],
)
def test_recalibration_stores_the_pooled_moments_and_nothing_else(name, route_, into, written, training):
    model = network(name).train(training)
    model[2].train(not training)
    flags = [module.training for module in model.modules()]
    before = snapshot(model)
    affine = f"_{route_}" if PAPER[name].affine == "own" else ""
    expected = moments_layer_by_layer(model, odd_batches(), affine)
    assert recalibrate(model, iter(odd_batches()), route=route_, into=into) == 11
    assert_bank_holds(model, written, expected)
    assert changed(model, before) <= {
        f"{i}.{k}{written}" for i in (1, 4) for k in ("running_mean", "running_var", "num_batches_tracked")
    }
    assert [module.training for module in model.modules()] == flags
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert all(not module._forward_pre_hooks for module in model.modules())


def test_recalibration_takes_tensors_tuples_and_mappings():
    x = images({"all": 7})
    expected = None
    for data in (
        x,
        [x[:4], x[4:]],
        [(x[:4], 0), (x[4:], 1)],
        [{"image": x[:4], "label": 0}, {"image": x[4:], "label": 1}],
    ):
        model = network("dual_bn")
        assert recalibrate(model, data, route="adv", batch_size=4) == 7
        if expected is None:
            expected = snapshot(model)
        assert changed(model, expected) == set()


@pytest.mark.parametrize("surroundings", ["running", "route", "groups", "pair", "perturbation"])
def test_recalibration_does_not_depend_on_the_scopes_around_it(surroundings):
    free, enclosed = network("dual_bn"), network("dual_bn")
    recalibrate(free, odd_batches(), route="adv")
    scope = {
        "running": lambda: statistics(enclosed, mode="running"),
        "route": lambda: route(enclosed, "clean"),
        "groups": lambda: statistics(enclosed, groups=3),
        "pair": lambda: pair(enclosed, statistics="clean", affine="clean"),
        "perturbation": lambda: statistics(
            enclosed, perturbation=zero_perturbation(enclosed).map(lambda d: d.detach() + 0.5)
        ),
    }[surroundings]()
    with scope:
        inside = settings_of(enclosed)
        recalibrate(enclosed, odd_batches(), route="adv")
        assert settings_of(enclosed) == inside
    for key, value in free.state_dict().items():
        torch.testing.assert_close(enclosed.state_dict()[key], value)


def test_recalibration_changes_nothing_when_the_data_break_off():
    model = network("dual_bn").train()
    outside, before = settings_of(model), snapshot(model)

    def broken():
        yield images({"all": 4})
        yield images({"all": 4})
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        recalibrate(model, broken(), route="adv")
    assert changed(model, before) == set()
    assert settings_of(model) == outside
    assert all(not module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_recalibration_stores_nothing_of_what_is_no_number(bad):
    model = network("dual_bn").train()
    before, x = snapshot(model), images({"all": 4})
    x[1, 0, 0, 0] = bad
    with pytest.raises(ConfigError, match="has no finite mean and variance, and nothing was changed"):
        recalibrate(model, [images({"all": 4}), x], route="adv")
    assert changed(model, before) == set()


def test_recalibration_leaves_the_random_state_and_the_users_hooks_alone():
    calls = []
    model = nn.Sequential(nn.Dropout(0.5), network("dual_bn")).train()
    handle = model[1][1].register_forward_pre_hook(lambda module, args: calls.append(len(args[0])))
    state = torch.get_rng_state()
    recalibrate(model, odd_batches(), route="adv")
    assert torch.equal(torch.get_rng_state(), state), "dropout moved the random state of the caller"
    assert calls == [5, 3, 1, 2]
    assert list(model[1][1]._forward_pre_hooks) == [handle.id]


def test_recalibration_cuts_a_tensor_into_equally_large_batches():
    model, sizes = network("dual_bn"), []
    model[0].register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    recalibrate(model, images({"all": 9}), route="adv", batch_size=4)
    assert sizes == [3, 3, 3]
    assert model[1].num_batches_tracked_adv == 3


def test_recalibration_leaves_a_builtin_norm_beside_it_alone():
    model = nn.Sequential(nn.BatchNorm2d(3).double(), network("dual_bn")).train()
    before = snapshot(model)
    recalibrate(model, odd_batches(), route="adv")
    assert {key for key in changed(model, before) if key.startswith("0.")} == set()


def test_recalibration_pools_a_norm_that_runs_twice_in_one_forward():
    norm = make_norm("bn", 3, dim=1).double()
    model = nn.Sequential(norm, nn.Tanh(), norm)
    x = torch.randn(6, 3, dtype=torch.float64)
    recalibrate(model, x)
    z = torch.tanh((x - x.mean(0)) / (x.var(0, correction=0) + norm.eps).sqrt())
    torch.testing.assert_close(norm.running_mean, torch.cat([x, z]).mean(0))
    torch.testing.assert_close(norm.running_var, torch.cat([x, z]).var(0))


def test_recalibration_pools_in_float64():
    """Many batches far from zero: sums in single precision would drift."""
    norm = make_norm("bn", 3, dim=1)
    x = (torch.randn(4095, 3, dtype=torch.float64) + 100).float()
    recalibrate(norm, x, batch_size=7)
    torch.testing.assert_close(norm.running_mean.double(), x.double().mean(0), rtol=1e-6, atol=0)
    torch.testing.assert_close(norm.running_var.double(), x.double().var(0), rtol=1e-4, atol=0)


def bn_then_dual_bn() -> nn.Module:
    return nn.Sequential(make_norm("bn", 3).double(), network("dual_bn"))


@pytest.mark.parametrize(
    ("model", "data", "options", "message"),
    [
        ("dual_bn", [], {"route": "adv"}, "no data"),
        ("dual_bn", iter(()), {"route": "adv"}, "no data"),
        ("dual_bn", None, {}, "route=.*clean, adv"),
        ("dual_bn", None, {"route": "adb"}, "did you mean 'adv'"),
        ("dual_bn", None, {"route": "adv", "into": "claen"}, "did you mean 'clean'"),
        ("dual_bn", [np.zeros((2, 3, 4, 4))], {"route": "adv"}, "tensors.*ndarray"),
        ("ln", None, {}, "no batch-fed routed norm.*convert_norm"),
        (lambda: nn.Conv2d(3, 3, 1), None, {}, "no batch-fed routed norm.*convert_norm"),
        (lambda: network("dual_bn", track_running_stats=False), None, {"route": "adv"}, "no running statistics"),
        ("gmm_bn", None, {"route": "adv"}, "mixture"),
        (bn_then_dual_bn, None, {}, "route=.*clean, adv"),
    ],
    ids=[
        "empty",
        "used_up",
        "no_route",
        "route",
        "into",
        "arrays",
        "ln",
        "plain",
        "untracked",
        "mixture",
        "bn_then_dual",
    ],
)
def test_recalibration_says_what_is_wrong_and_changes_nothing(model, data, options, message):
    model = network(model) if isinstance(model, str) else model()
    before = snapshot(model)
    with pytest.raises(ConfigError, match=message):
        recalibrate(model, odd_batches() if data is None else data, **options)
    assert changed(model, before) == set()


def test_recalibration_refuses_a_tensor_without_images():
    model = network("dual_bn")
    before = snapshot(model)
    with pytest.raises(AdvnormError, match="empty"):
        recalibrate(model, torch.zeros(0, 3, 4, 4, dtype=torch.float64), route="adv")
    assert changed(model, before) == set()


@examples
@given(sizes=st.lists(st.integers(2, 6), min_size=1, max_size=5))
def test_recalibration_of_a_lone_norm_does_not_depend_on_how_the_data_are_cut(sizes):
    norm = make_norm("dual_bn", 3, dim=1).double()
    x = torch.randn(sum(sizes), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(len(sizes)))
    assert recalibrate(norm, x.split(sizes), route="clean") == len(x)
    torch.testing.assert_close(norm.running_mean_clean, x.mean(0), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(norm.running_var_clean, x.var(0), rtol=1e-10, atol=1e-12)
    assert torch.equal(norm.running_var_adv, torch.ones(3, dtype=torch.float64))


# -- names, checkpoints of others, sync conversion (trap 9) ----------------------------------------------------


def test_bn_has_exactly_the_state_of_the_builtin_norm():
    assert list(make_norm("bn", 4).state_dict()) == list(nn.BatchNorm2d(4).state_dict())
    builtin = randomized(nn.BatchNorm2d(4)).eval()
    norm = make_norm("bn", 4).eval()
    norm.load_state_dict(builtin.state_dict(), strict=True)
    x = torch.randn(3, 4, 2, 2)
    assert torch.equal(norm(x), builtin(x))
    builtin.load_state_dict(randomized(norm, seed=3).state_dict(), strict=True)
    assert torch.equal(norm(x), builtin(x))


@pytest.mark.parametrize("name", list_norms())
def test_state_names_are_the_builtin_names_with_the_domain_where_there_are_several_banks(name):
    row, known = PAPER[name], domains_of(name)
    affine = [f"_{d}" for d in known] if row.affine == "own" else [""]
    banks = {"mixed": [""], "sample": [], "nothing": []}.get(row.statistics, [f"_{d}" for d in known])
    expected = {f"{k}{s}" for k in ("weight", "bias") for s in affine if row.statistics != "nothing"}
    expected |= {f"{k}{s}" for k in ("running_mean", "running_var", "num_batches_tracked") for s in banks}
    norm = build(name)
    assert set(norm.state_dict()) == expected
    assert {k for k, _ in norm.named_parameters()} == {k for k in expected if k.startswith(("weight", "bias"))}
    twin = build(name)
    twin.load_state_dict(randomized(norm).state_dict())
    assert changed(twin, snapshot(norm)) == set()


@pytest.mark.parametrize("name", list_norms())
def test_convert_sync_batchnorm_leaves_routed_norms_alone(name):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), build(name), nn.BatchNorm2d(4))
    norm = model[1]
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert converted[1] is norm
    assert isinstance(converted[2], nn.SyncBatchNorm)
    assert not isinstance(norm, nn.modules.batchnorm._NormBase)


@pytest.mark.parametrize("name", list_norms())
def test_reset_parameters_is_a_fresh_norm(name):
    norm = randomized(build(name))
    for key, buffer in norm.named_buffers():
        buffer += "num_batches_tracked" in key
    norm.reset_parameters()
    assert changed(norm, snapshot(build(name))) == set()


# -- properties ------------------------------------------------------------------------------------------------

counts_of_two = st.fixed_dictionaries({"clean": st.integers(0, 6), "adv": st.integers(0, 6)})
counts_of_three = st.fixed_dictionaries({d: st.integers(0, 5) for d in ("adv2", "clean", "adv")})  # in an odd order


@pytest.mark.parametrize("name", list_norms())
@examples
@given(data=st.data())
def test_any_concatenation_equals_its_domains_one_by_one(name, data):
    """Sizes odd, zero or one; running statistics, where no sample sees another."""
    known = domains_of(name)
    counts = data.draw(st.fixed_dictionaries({d: st.integers(0, 5) for d in data.draw(st.permutations(known))}))
    norm = randomized(build(name).double())
    before = snapshot(norm)
    if sum(counts.values()) == 0:
        with route(norm, counts), pytest.raises(RouteError, match="empty"):
            norm(torch.zeros(0, 4, 2, 2, dtype=torch.float64))
        return
    x = batch({"all": sum(counts.values())}, spatial=(2, 2))
    with statistics(norm, mode="running"):
        with route(norm, counts):
            y = norm(x)
        for domain, ours, piece in zip(counts, y.split(list(counts.values())), x.split(list(counts.values()))):
            if len(piece):
                with route(norm, domain):
                    torch.testing.assert_close(ours, norm(piece), rtol=1e-10, atol=1e-12)
    assert changed(norm, before) == set()


@examples
@given(counts=counts_of_three)
def test_in_batch_mode_every_domain_is_normalized_and_counted_apart_whatever_the_sizes(counts):
    norm = randomized(make_norm("triple_bn", 3).double())
    before = snapshot(norm)
    if sum(counts.values()) == 0:
        return
    x = batch({"all": sum(counts.values())}, channels=3, spatial=(2, 1))
    with route(norm, counts):
        y = norm(x)
    for domain, ours, piece in zip(counts, y.split(list(counts.values())), x.split(list(counts.values()))):
        names = {k: f"{k}_{domain}" for k in nn.BatchNorm2d(3).state_dict()}
        plain = nn.BatchNorm2d(3).double()
        plain.load_state_dict({key: before[value] for key, value in names.items()})
        if len(piece):
            torch.testing.assert_close(ours, plain(piece), rtol=1e-10, atol=1e-12)
        for key, value in names.items():
            torch.testing.assert_close(norm.state_dict()[value], plain.state_dict()[key], rtol=1e-10, atol=1e-12)
            assert len(piece) or torch.equal(norm.state_dict()[value], before[value])


@examples
@given(counts=counts_of_two, size=st.integers(1, 12))
def test_a_route_that_does_not_cover_the_batch_is_refused_and_nothing_moves(counts, size):
    norm = make_norm("dual_bn", 3, dim=1)
    before = snapshot(norm)
    x = torch.randn(size, 3)
    with route(norm, counts):
        if sum(counts.values()) != size:
            with pytest.raises(RouteError, match=rf"covers {sum(counts.values())} samples and the batch has {size}"):
                norm(x)
        elif 1 in counts.values():
            with pytest.raises(RouteError, match="more than one value"):
                norm(x)
        else:
            assert norm(x).shape == x.shape
            return
    assert changed(norm, before) == set()


@examples
@given(
    choices=st.lists(st.sampled_from(["clean", "adv", "both", "pair", "groups", *MODES]), max_size=6),
    fail=st.booleans(),
)
def test_any_nest_of_scopes_ends_where_it_began(choices, fail):
    model = nn.Sequential(make_norm("dual_bn", 2), make_norm("dual_affine_ln", 2))
    outside = settings_of(model)
    trail = []

    def scope(choice: str):
        if choice in MODES:
            return statistics(model, mode=choice)
        if choice == "groups":
            return statistics(model, groups=3)
        if choice == "pair":
            return pair(model, statistics="clean", affine="adv")
        return route(model, {"clean": 1, "adv": 2} if choice == "both" else choice)

    try:
        with contextlib.ExitStack() as stack:
            for choice in choices:
                stack.enter_context(scope(choice))
                trail.append(settings_of(model))
            if fail:
                raise KeyError
    except KeyError:
        assert fail
    assert settings_of(model) == outside
    assert len(trail) == len(choices)


# -- scopes that close in another order ------------------------------------------------------------------------------


def test_a_generator_that_closes_late_is_told_and_leaves_nothing():
    model = network("dual_bn")

    def held():
        with route(model, "adv"):
            yield

    generator = held()
    next(generator)
    with route(model, "clean"):
        with pytest.raises(RouteError, match="reverse order"):
            generator.close()
        with statistics(model, mode="running"):
            assert all(m.state.route == (("clean", None),) for m in routed_modules(model).values())
    assert all(m.state == type(m.state)() and m.scopes == () for m in routed_modules(model).values())
    with pytest.raises(RouteError, match="no route is set"):
        model(images({"clean": 4}))


def test_tasks_that_share_a_model_are_told():
    import asyncio

    model = network("dual_bn")

    async def task(domain, begin, opened, finish):
        await begin.wait()
        with route(model, domain):
            opened.set()
            await finish.wait()

    async def both():
        start, first, second, over = (asyncio.Event() for _ in range(4))
        start.set()
        inner = asyncio.create_task(task("adv", first, second, over))
        outcome = (await asyncio.gather(task("clean", start, first, second), return_exceptions=True))[0]
        over.set()
        return [outcome, *await asyncio.gather(inner, return_exceptions=True)]

    outcomes = asyncio.run(both())
    assert isinstance(outcomes[0], RouteError) and outcomes[1] is None
    assert all(m.state == type(m.state)() for m in routed_modules(model).values())


@pytest.mark.parametrize("stripped", [False, True])
def test_a_mixture_of_bfloat16_banks_is_computed_in_float32(stripped):
    torch.manual_seed(3)
    norm = make_norm("gmm_bn", 256).eval()
    with torch.no_grad():
        for bank in ("clean", "adv"):
            mean, var, _ = norm.statistics_bank(bank)
            mean.normal_(std=0.05)
            var.uniform_(0.9, 1.1)
    norm = norm.bfloat16()
    x = torch.randn(4, 256, 2, 2).bfloat16()
    wide = copy.deepcopy(norm).double()
    if stripped:
        from advnorm import strip

        norm = strip(norm)
    torch.testing.assert_close(norm(x).double(), wide(x.double()), rtol=0.02, atol=0.02)


def test_recalibration_refuses_what_it_cannot_mean():
    model = network("dual_bn")
    x = images({"clean": 4})
    for data, options, message in (
        (x, {"route": {"clean": 2, "adv": 2}}, "one domain as its route"),
        (x, {"route": "adv", "batch_size": 0}, "batch_size must be"),
        ((x * 255).byte(), {"route": "adv"}, "float tensors"),
        ([(x * 255).byte()], {"route": "adv"}, "float tensors"),
    ):
        with pytest.raises(ConfigError, match=message):
            recalibrate(model, data, **options)
    recalibrate(model, [x, x, x], route="adv")
    assert {int(m.num_batches_tracked_adv) for m in routed_modules(model).values()} == {3}


def test_a_perturbation_fits_a_compiled_or_wrapped_model():
    model = network("dual_bn").eval()
    delta = zero_perturbation(model).map(lambda d: d.detach() + 0.1)
    x = images({"adv": 4})
    outputs = []
    for wrapped in (model, torch.compile(model, backend="eager"), nn.DataParallel(model)):
        with route(wrapped, "adv"), statistics(wrapped, perturbation=delta), torch.no_grad():
            outputs.append(model(x))
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
    for wrong in (3, {"0": 3}, {next(iter(delta)): {"clean": (torch.zeros(4),)}}, {next(iter(delta)): 3}):
        with pytest.raises(ConfigError, match="bad statistics scope"):
            statistics(model, perturbation=wrong)


@pytest.mark.parametrize("mode", ["batch", "batch_frozen"])
def test_crossed_samples_without_forwarded_ones_give_each_other_their_moments(mode):
    norm = randomized(make_norm("cross_bn", 3).double())
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 3, 2, 2, generator=generator, dtype=torch.float64).mul(2).add(1).requires_grad_()
    parts = dict(zip(("clean", "adv"), x.split([4, 3])))
    with route(norm, {"clean": 4, "adv": 3}), statistics(norm, mode=mode):
        y = norm(x)
    expected = []
    for domain, other in (("clean", "adv"), ("adv", "clean")):
        mean, var = (f(parts[other], (0, 2, 3))[:, None, None] for f in (torch.mean, partial(torch.var, correction=0)))
        weight, bias = (before[f"{name}_{domain}"][:, None, None] for name in ("weight", "bias"))
        expected.append((parts[domain] - mean) / (var + norm.eps).sqrt() * weight + bias)
        moved = before[f"running_mean_{domain}"].lerp(parts[domain].detach().mean((0, 2, 3)), norm.momentum)
        kept = moved if mode == "batch" else before[f"running_mean_{domain}"]
        torch.testing.assert_close(norm.state_dict()[f"running_mean_{domain}"], kept, rtol=1e-12, atol=1e-12)
    expected = torch.cat(expected)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn(y.shape, generator=generator, dtype=torch.float64)
    found, known = (torch.autograd.grad((out * weights).sum(), x)[0] for out in (y, expected))
    torch.testing.assert_close(found, known, rtol=1e-10, atol=1e-12)


def test_a_perturbation_is_where_the_model_is_also_for_norms_without_a_tensor():
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 4, 1), make_norm("dual_bn", 4, affine=False, track_running_stats=False))
    assert {tensor.device.type for tensor in zero_perturbation(model).tensors} == {"meta"}


# -- forwards that feed nothing --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [None, *MODES])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_without_feeding_a_norm_computes_what_it_would_and_stores_nothing(mode, training):
    model, x = network("dual_bn").train(training), images({"all": 6})
    with route(model, "adv"), statistics(model, mode=mode):
        expected = copy.deepcopy(model).train(training)
        before, outside = snapshot(model), settings_of(model)
        with without_feeding(model):
            output = model(x)
        assert changed(model, before) == set() and settings_of(model) == outside
    with route(expected, "adv"), statistics(expected, mode=mode):
        assert torch.equal(output, expected(x))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("kind", [nn.BatchNorm2d, nn.InstanceNorm2d])
def test_without_feeding_a_builtin_norm_computes_what_it_would_and_stores_nothing(kind, training):
    norm = randomized(kind(3, track_running_stats=True).double()).train(training)
    before, x = snapshot(norm), images({"all": 6})
    with without_feeding(norm):
        output = norm(x)
    assert changed(norm, before) == set() and norm.track_running_stats
    assert torch.equal(output, norm(x))


def test_flags_that_were_set_twice_go_back_to_the_first_value():
    flags, owner = Flags(), SimpleNamespace(training=True)
    flags.set(owner, "training", False)
    flags.set(owner, "training", None)
    flags.restore()
    assert owner.training is True


def test_a_perturbation_may_name_some_banks_and_leaves_the_others_as_they_are():
    norm = randomized(make_norm("dual_bn", 3).double())
    x, counts = images({"clean": 4, "adv": 3}), {"clean": 4, "adv": 3}
    delta = (torch.full((3,), 0.5, dtype=torch.float64),) * 2
    with route(norm, counts), statistics(norm, mode="batch_frozen"):
        plain = norm(x)
        with statistics(norm, perturbation={"": {"adv": delta}}):
            moved = norm(x)
    torch.testing.assert_close(moved[:4], plain[:4])
    assert not torch.isclose(moved[4:], plain[4:]).all()


def test_groups_are_formed_anew_for_a_batch_like_the_one_before():
    norm, x = randomized(make_norm("bn", 3).double()), images({"clean": 4, "adv": 2})
    fresh = copy.deepcopy(norm)
    with route(norm, {"clean": 4, "adv": 2}), statistics(norm, mode="batch_frozen"):
        norm(x)
        with statistics(norm, groups=2):
            found = norm(x)
        whole = norm(x)
    with route(fresh, {"clean": 4, "adv": 2}), statistics(fresh, mode="batch_frozen", groups=2):
        assert torch.equal(found, fresh(x))
    assert not torch.equal(found, whole)


def test_a_mixture_that_evaluated_without_a_route_still_asks_for_one_to_train():
    norm, x = make_norm("gmm_bn", 3).double(), images({"all": 4})
    norm.eval()(x)
    with pytest.raises(RouteError, match="no route is set"):
        norm.train()(x)


def test_forwarded_samples_belong_to_their_route_and_not_to_one_inside_or_before():
    norm, x = randomized(make_norm("dual_bn", 3).double()).eval(), images({"all": 5})

    def only(domain: str, rows: Tensor) -> Tensor:
        with route(copied, domain):
            return copied(rows)

    copied = copy.deepcopy(norm)
    adv, parts = only("adv", x), torch.cat([only("clean", x[:2]), only("adv", x[2:])])
    with route(norm, "adv"):
        assert torch.equal(norm(x), adv)
    with route(norm, "adv", forwarded={"clean": 2}):
        assert torch.equal(norm(x), parts)
        with route(norm, "adv"):
            assert torch.equal(norm(x), adv)
        assert torch.equal(norm(x), parts)


def test_the_perturbation_of_bfloat16_banks_is_in_float32():
    assert {delta.dtype for delta in zero_perturbation(make_norm("dual_bn", 3).bfloat16()).tensors} == {torch.float32}


def test_an_ascent_is_detached_even_from_gradients_with_a_graph():
    norm = make_norm("bn", 3).double()
    zero = zero_perturbation(norm)
    with statistics(norm, perturbation=zero):
        loss = norm(images({"all": 4})).pow(3).sum()
    worst = zero.ascend(torch.autograd.grad(loss, zero.tensors, create_graph=True), radius=0.1)
    assert not any(delta.requires_grad for delta in worst.tensors)


def test_a_perturbation_takes_part_in_gradients_only_when_asked():
    assert not any(delta.requires_grad for delta in zero_perturbation(make_norm("bn", 3), requires_grad=False).tensors)


def test_only_what_is_not_routed_itself_must_be_forwarded():
    plan = Plan(name="half", domains=("a", "b"), normalized_by=("a", "a"), feeds=("a", "b"), affine=("a", "b"))
    assert plan.forwarded_for(["b"]) == ("a",)
    assert plan.forwarded_for(["a", "b"]) == plan.forwarded_for(["a"]) == ()


@pytest.mark.parametrize(("norm", "options"), [("dual_affine_bn", {}), ("bn", {"affine": False}), ("dual_bn", {})])
def test_moments_of_half_precision_batches_are_float32_in_every_mode(norm, options):
    """Without a float32 tensor beside them the kernel rounded the moments too."""
    torch.manual_seed(0)
    module = make_norm(norm, 4, **options)
    x = (2 * torch.randn(6, 4, 3, 5) + 100).bfloat16()
    parts = (x[:2], x[2:]) if norm == "dual_bn" else (x,)
    expected = torch.cat([nn.functional.batch_norm(part.double(), None, None, training=True) for part in parts])
    for mode in ("batch_frozen", "batch"):
        with route(module, {"clean": 2, "adv": 4}), statistics(module, mode=mode):
            assert (module(x).double() - expected).abs().max() < 0.01
