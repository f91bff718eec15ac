"""Forwards that do not update running statistics."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from advnorm.norms import make_norm, route, statistics, zero_perturbation
from advnorm.norms.norm_layers import batch_norms, override, without_updates
from support.norm_cases import images, network, scope_states
from support.norm_oracles import MODES, changed, randomized, snapshot
from support.problems import raises_problem


@pytest.mark.parametrize("mode", [None, *MODES])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_without_updates_a_norm_computes_what_it_would_and_stores_nothing(mode, training):
    model, x = network("dual_bn").train(training), images({"all": 6})
    with route(model, "adv"), statistics(model, mode=mode):
        expected = copy.deepcopy(model).train(training)
        before, outside = snapshot(model), scope_states(model)
        with without_updates(model):
            output = model(x)
        assert changed(model, before) == set() and scope_states(model) == outside
    with route(expected, "adv"), statistics(expected, mode=mode):
        assert torch.equal(output, expected(x))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("kind", [nn.BatchNorm2d, nn.InstanceNorm2d])
def test_without_updates_a_builtin_norm_computes_what_it_would_and_stores_nothing(kind, training):
    norm = randomized(kind(3, track_running_stats=True).double()).train(training)
    before, x = snapshot(norm), images({"all": 6})
    with without_updates(norm):
        output = norm(x)
    assert changed(norm, before) == set() and norm.track_running_stats
    assert torch.equal(output, norm(x))


def test_attributes_that_were_set_twice_go_back_to_the_first_value():
    owner = SimpleNamespace(training=True)
    with ExitStack() as stack:
        override(stack, owner, "training", False)
        override(stack, owner, "training", None)
    assert owner.training is True


def test_a_second_pass_as_sam_and_apart_make_it_leaves_no_trace():
    """Trap 6: the second pass uses batch statistics (perturbed, in groups) and updates none."""
    model = network("bn")
    x, delta = images({"all": 4}), zero_perturbation(model)
    loss = None
    with statistics(model, perturbation=delta):
        loss = model(x).square().sum()
    gradients = torch.autograd.grad(loss, delta.tensors)
    before = snapshot(model)
    with statistics(model, mode="batch_frozen", groups=2, perturbation=delta.sign_step(gradients, 0.1)):
        model(x).square().sum().backward()
    assert changed(model, before) == set()
    assert model[1].num_batches_tracked == 1


def test_the_batch_norms_of_a_model_are_its_norms_with_statistics_banks():
    model = nn.ModuleDict({name: make_norm(name, 4) for name in ("dual_bn", "dual_affine_ln", "gmm_bn", "rms", "none")})
    assert list(batch_norms(model)) == ["dual_bn", "gmm_bn"]
    with raises_problem("no_statistics_bank", "model"):
        batch_norms(nn.ModuleDict({"ln": make_norm("dual_affine_ln", 4)}))
