"""Parameter groups and optimizers."""

from __future__ import annotations

import copy
from typing import get_args

import pytest
import torch
import torch.distributed as dist
from torch import nn

import advnorm
from advnorm.config.fields import OptimizerName, TrainingSettings
from advnorm.norms import RoutedNorm
from advnorm.norms.mixture import MixtureNorm
from advnorm.training.optimizer import make_optimizer, norm_parameters, only_norms, parameter_groups
from advnorm.training.ranks import Ranks
from advnorm.training.sharding import full_tensor, shard_model
from support.problems import raises_problem

# -- parameters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", advnorm.list_norms())
def test_norm_parameters_are_those_of_the_norm_layers_of_any_plan(norm):
    model = advnorm.create_model("preact_resnet18", norm=norm, width=0.25)
    expected = {
        name
        for name, _ in model.named_parameters()
        if isinstance(model.get_submodule(name.rpartition(".")[0]), RoutedNorm)
    }
    norms = set(norm_parameters(model))
    assert {name for name, value in model.named_parameters() if value in norms} == expected
    assert bool(expected) == (norm != "none")


def test_built_in_norms_count_and_biases_of_other_layers_do_not():
    model = nn.Sequential(
        nn.Conv1d(3, 4, 1),
        nn.BatchNorm1d(4),
        nn.InstanceNorm1d(4, affine=True),
        nn.GroupNorm(2, 4),
        nn.LayerNorm(5),
        nn.RMSNorm(5),
        nn.Linear(5, 2),
    )
    expected = [value for layer in model[1:6] for value in layer.parameters()]
    assert [id(value) for value in norm_parameters(model)] == [id(value) for value in expected]


def test_a_mixture_that_was_taken_out_still_has_its_norm_parameters():
    model = advnorm.create_model("small_cnn", norm="gmm_bn")
    count = len(norm_parameters(model))
    plain = advnorm.strip(model)
    assert any(isinstance(module, MixtureNorm) for module in plain.modules())
    assert len(norm_parameters(plain)) == count > 0


@pytest.mark.parametrize("decay_norms", [True, False])
def test_groups_hold_every_trainable_parameter_once_in_the_order_of_the_model(decay_norms):
    shared = nn.BatchNorm2d(4)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), shared, nn.Conv2d(4, 4, 1), shared, nn.Conv2d(4, 2, 1))
    model[2].weight.requires_grad_(False)
    groups = parameter_groups(model, TrainingSettings(weight_decay=0.1, norm_weight_decay=decay_norms))
    names = {value: name for name, value in model.named_parameters()}
    by_decay = [(group["weight_decay"], [names[value] for value in group["params"]]) for group in groups]
    others = ["0.weight", "0.bias", "2.bias", "4.weight", "4.bias"]
    if decay_norms:
        assert by_decay == [(0.1, ["0.weight", "0.bias", "1.weight", "1.bias", *others[2:]])]
    else:
        assert by_decay == [(0.1, others), (0.0, ["1.weight", "1.bias"])]


def test_a_group_without_parameters_is_left_out():
    assert len(parameter_groups(nn.Linear(2, 2), TrainingSettings(norm_weight_decay=False))) == 1


def test_training_only_the_norms_changes_nothing_else():
    model = advnorm.create_model("small_cnn", norm="dual_bn")
    only_norms(model)
    before = {name: value.clone() for name, value in model.named_parameters()}
    optimizer = make_optimizer(
        model, TrainingSettings(optimizer="sgd", lr=0.1, weight_decay=0.1, norm_weight_decay=True)
    )
    with advnorm.route(model, {"clean": 4, "adv": 4}):
        model(torch.rand(8, 3, 32, 32)).square().sum().backward()
    optimizer.step()
    norms = set(norm_parameters(model))
    for name, value in model.named_parameters():
        assert torch.equal(value, before[name]) == (value not in norms), name


def test_a_frozen_norm_stays_frozen_and_a_model_without_norms_is_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.LayerNorm(2))
    model[1].requires_grad_(False)
    only_norms(model)
    assert [value.requires_grad for value in model.parameters()] == [False] * 4 + [True] * 2
    plain = nn.Linear(2, 2)
    with raises_problem("empty", "train_only"):
        only_norms(plain)
    assert plain.weight.requires_grad  # an error changes nothing


# -- optimizers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_is_the_equation(nesterov):
    model = nn.Linear(3, 2).double()
    settings = TrainingSettings(optimizer="sgd", lr=0.1, momentum=0.9, nesterov=nesterov, weight_decay=0.01)
    optimizer = make_optimizer(model, settings)
    x = torch.rand(5, 3, dtype=torch.float64)
    weight, velocity = model.weight.detach().clone(), torch.zeros(2, 3, dtype=torch.float64)
    for _ in range(4):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        gradient = model.weight.grad + 0.01 * weight
        velocity = 0.9 * velocity + gradient
        weight = weight - 0.1 * (gradient + 0.9 * velocity if nesterov else velocity)
        optimizer.step()
    assert torch.allclose(model.weight, weight, rtol=1e-12)


def test_adam_takes_momentum_as_its_beta1_and_adagrad_takes_none():
    model = nn.Linear(3, 2)
    adam = make_optimizer(model, TrainingSettings(optimizer="adam", lr=0.1, momentum=0.8, weight_decay=0.1))
    assert isinstance(adam, torch.optim.Adam) and adam.param_groups[0]["betas"] == (0.8, 0.999)
    adagrad = make_optimizer(model, TrainingSettings(optimizer="adagrad", lr=0.2, weight_decay=0.1))
    assert isinstance(adagrad, torch.optim.Adagrad) and adagrad.param_groups[0]["lr"] == 0.2
    assert adagrad.param_groups[0]["weight_decay"] == 0.1


def test_adamw_subtracts_the_decay_from_the_weight():
    model = nn.Linear(3, 2, bias=False).double()
    settings = TrainingSettings(optimizer="adamw", lr=0.1, momentum=0.8, weight_decay=0.2)
    optimizer, weight = make_optimizer(model, settings), model.weight.detach().clone()
    x = torch.rand(5, 3, dtype=torch.float64)
    mean = square = torch.zeros_like(weight)
    for step in range(1, 5):
        optimizer.zero_grad()
        model(x).pow(3).sum().backward()
        mean = 0.8 * mean + 0.2 * model.weight.grad
        square = 0.999 * square + 0.001 * model.weight.grad**2
        weight = weight - 0.1 * 0.2 * weight
        weight = weight - 0.1 * (mean / (1 - 0.8**step)) / ((square / (1 - 0.999**step)).sqrt() + 1e-8)
        optimizer.step()
    assert torch.allclose(model.weight, weight, rtol=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_rmsprop_is_the_equation_and_norms_do_not_decay(momentum):
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2)).double()
    settings = TrainingSettings(
        optimizer="rmsprop", lr=0.1, momentum=momentum, weight_decay=0.01, norm_weight_decay=False
    )
    optimizer = make_optimizer(model, settings)
    decay = {"0.weight": 0.01, "0.bias": 0.01, "1.weight": 0.0, "1.bias": 0.0}
    x = torch.rand(5, 3, dtype=torch.float64)
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    squares, buffers = ({name: torch.zeros_like(value) for name, value in weights.items()} for _ in range(2))
    for _ in range(4):
        optimizer.zero_grad()
        model(x).pow(3).sum().backward()
        for name, value in model.named_parameters():
            gradient = value.grad + decay[name] * weights[name]
            squares[name] = 0.9 * squares[name] + 0.1 * gradient**2
            buffers[name] = momentum * buffers[name] + gradient / (squares[name].sqrt() + 1)
            weights[name] = weights[name] - 0.1 * buffers[name]
        optimizer.step()
    for name, value in model.named_parameters():
        assert torch.allclose(value, weights[name], rtol=1e-12), name


@pytest.mark.parametrize("kind", get_args(OptimizerName))
def test_sharded_parameters_on_a_gpu_step_although_torch_has_no_fused_sgd_for_them(kind, tmp_path, monkeypatch):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        plain = nn.Linear(3, 2)
        sharded = copy.deepcopy(plain)
        shard_model(sharded, Ranks(device=torch.device("cpu"), world=1))
        monkeypatch.setattr(type(sharded.weight), "is_cuda", property(lambda _: True))  # choices as on a GPU
        for model in (plain, sharded):
            optimizer = make_optimizer(model, TrainingSettings(optimizer=kind, lr=0.1))
            model(torch.ones(4, 3)).square().sum().backward()
            optimizer.step()
        assert torch.equal(full_tensor(sharded.weight), plain.weight)
    finally:
        dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", get_args(OptimizerName))
def test_parameters_on_a_gpu_get_the_fused_kernel_where_there_is_one_and_the_same_step(kind):
    steps = {}
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = nn.Linear(3, 2).to(device)
        optimizer = make_optimizer(model, TrainingSettings(optimizer=kind, lr=0.1))
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 3, device=device)).square().sum().backward()
            optimizer.step()
        steps[device] = model.weight.detach().cpu()
        assert bool(optimizer.param_groups[0].get("fused")) == (device == "cuda" and kind in ("sgd", "adam", "adamw"))
    torch.testing.assert_close(steps["cuda"], steps["cpu"])
