"""The three statistics modes: which statistics normalize and which banks a forward updates."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from advnorm._core.errors import RouteError
from advnorm.norms import list_norms, make_norm, route, statistics, zero_perturbation
from support.norm_cases import ROUTED, images, network, rejects
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

examples = settings(max_examples=40, deadline=None, derandomize=True, database=None)


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
def test_without_a_mode_train_uses_the_batch_and_updates_and_eval_uses_the_stored_statistics(name, training):
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
def test_only_mode_batch_moves_the_running_statistics_and_only_of_the_banks_of_its_samples(name, training):
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
def test_a_single_domain_updates_only_its_own_bank(name):
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
def test_a_graph_keeps_its_gradient_when_a_later_forward_updates_the_banks(name, perturbed, first):
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
        with route(norm, counts), rejects("empty", kind=RouteError):
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
def test_a_route_that_does_not_cover_the_batch_is_rejected_and_nothing_moves(counts, size):
    norm = make_norm("dual_bn", 3, dim=1)
    before = snapshot(norm)
    x = torch.randn(size, 3)
    with route(norm, counts):
        if sum(counts.values()) != size:
            with rejects("wrong_route", "route", RouteError):
                norm(x)
        elif 1 in counts.values():
            with rejects("too_few_samples", kind=RouteError):
                norm(x)
        else:
            assert norm(x).shape == x.shape
            return
    assert changed(norm, before) == set()
