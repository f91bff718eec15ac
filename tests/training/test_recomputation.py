"""Activation checkpointing: the same outputs, gradients and statistics, and less memory in between."""

import copy

import pytest
import torch
from torch import nn

import advnorm
from advnorm import Config
from advnorm.training.build import build_model, build_objective
from advnorm.training.ranks import Ranks
from advnorm.training.recomputation import recompute_blocks
from advnorm.training.step_program import StepProgram
from support.problems import raises_problem
from support.small_runs import small, tensors, train

DATA = {"image_shape": [1, 8, 8], "num_classes": 4}
RANKS = Ranks(device=torch.device("cpu"))


def step(recompute: bool, **settings) -> dict[str, torch.Tensor]:
    """Gradients, statistics and loss of a step."""
    config = Config(model={"name": "resnet18", "width": 0.05}, eps=0.1, attack={"steps": 2}, **settings)
    torch.manual_seed(0)
    model = build_model(config, DATA).train()
    if recompute:
        assert recompute_blocks(model) == 8
    program = StepProgram(build_objective(config, model), RANKS)
    x = torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    found = {}
    for number in range(2):  # the second one shows what the first left behind
        output = program(x, torch.arange(8) % 4, torch.arange(8) + 8 * number)
        found |= {f"loss{number}": output.loss.detach()}
        found |= {f"{name}.grad{number}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return found | {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("norm", ["bn", "dual_bn", "cross_bn", "gmm_bn", "dual_affine_ln", "none"])
@pytest.mark.parametrize("layout", ["concatenated", "sequential"])
def test_recomputation_changes_no_bit(norm, layout):
    if layout == "sequential" and norm in ("cross_bn", "gmm_bn"):
        pytest.skip("needs both domains in one forward")
    objective = {"name": "hybrid", "layout": layout}
    expected, found = (step(recompute, norm=norm, objective=objective) for recompute in (False, True))
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(
    "settings",
    [
        {"second_pass": "sam"},
        {"second_pass": {"name": "apart", "groups": 2}},
        {"regularizer": "ligs"},
        {"objective": "trades", "attack": {"steps": 1, "statistics": "batch"}},
    ],
    ids=str,
)
def test_second_passes_and_attacks_on_batch_statistics_are_the_same_too(settings):
    settings = {"attack": {"steps": 2}} | settings
    attack = settings.pop("attack")

    def run(recompute):
        config = Config(
            norm="dual_bn", model={"name": "resnet18", "width": 0.05}, eps=0.1, attack=attack, batch_size=8, **settings
        )
        torch.manual_seed(0)
        model = build_model(config, DATA).train()
        if recompute:
            recompute_blocks(model)
        objective = build_objective(config, model)
        x = torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(1))
        torch.manual_seed(5)
        StepProgram(objective, RANKS)(x, torch.arange(8) % 4, torch.arange(8))
        grads = {f"{name}.grad": p.grad for name, p in model.named_parameters() if p.grad is not None}
        return grads | model.state_dict()

    expected, found = run(False), run(True)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7, msg=name)


def test_a_block_keeps_its_input_only():
    kept = {}
    for recompute in (False, True):
        torch.manual_seed(0)
        model = advnorm.create_model("resnet18", width=0.05, in_channels=1, normalize=False).train()
        if recompute:
            recompute_blocks(model)
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, into=sizes: into.append(t.numel()) or t, lambda t: t):
            model(torch.rand(8, 1, 8, 8))
        kept[recompute] = sum(sizes)
    assert kept[True] < kept[False] / 3


def test_names_copies_and_evaluations_do_not_change(tmp_path):
    model = advnorm.create_model("resnet18", width=0.05, in_channels=1, norm="dual_bn", normalize=False)
    before, words = list(model.state_dict()), repr(model)
    recompute_blocks(model)
    assert list(model.state_dict()) == before and repr(model) == words
    twin, x = copy.deepcopy(model).eval(), torch.rand(4, 1, 8, 8)
    with advnorm.route(model.eval(), "adv"), advnorm.route(twin, "adv"):
        assert torch.equal(model(x), twin(x))
    assert torch.equal(advnorm.strip(model, "adv")(x), advnorm.strip(twin, "adv")(x))


def test_a_training_with_recomputation_ends_with_the_same_bits(tmp_path):
    settings = {"model": {"name": "resnet18", "width": 0.05}, "norm": "dual_bn", "epochs": 1}
    one, other = (train(small(**settings, recompute=recompute), tmp_path) for recompute in (False, True))
    expected = tensors(one)
    assert all(torch.equal(value, expected[name]) for name, value in tensors(other).items())


def test_networks_that_cannot_be_recomputed_are_an_error(tmp_path):
    with raises_problem("not_supported", "recompute"):
        train(small(recompute=True), tmp_path)
    with raises_problem("not_supported", "recompute"):
        recompute_blocks(nn.Sequential(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))))
    with raises_problem("conflict", "compile"):
        Config(recompute=True, compile=True)
