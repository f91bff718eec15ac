"""Gradient accumulation: the parts of a batch give the gradient of the whole, as far as its statistics allow."""

import pytest
import torch
from torch import nn

import advnorm
from advnorm import Config
from advnorm.objectives.execution import EAGER
from advnorm.training import loop
from advnorm.training.build import build_model, build_objective
from advnorm.training.ranks import Ranks
from advnorm.training.step_program import StepProgram
from support.problems import raises_problem
from support.small_runs import small, tensors, train

RANKS = Ranks(device=torch.device("cpu"))
DATA = {"image_shape": [1, 8, 8], "num_classes": 4}


def step(accumulate: int, **settings) -> tuple[nn.Module, dict[str, torch.Tensor], object]:
    """The model after a step in float64, its gradients, and the output."""
    config = Config(eps=0.1, attack={"steps": 2}, batch_size=12, **settings)
    torch.manual_seed(0)
    objective = build_objective(config, build_model(config, DATA).double().train())
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(12, 1, 8, 8, generator=generator)
    output = StepProgram(objective, RANKS, accumulate=accumulate)(x, torch.arange(12) % 4, torch.arange(12))
    return objective.model, {name: p.grad for name, p in objective.model.named_parameters()}, output


@pytest.mark.parametrize("accumulate", [2, 3, 12])
@pytest.mark.parametrize("norm", ["ln", "dual_affine_ln", "dual_affine_gn", "in"])
@pytest.mark.parametrize("objective", ["hybrid", "trades", "classical"])
def test_with_norms_of_each_sample_the_parts_equal_the_whole(norm, objective, accumulate):
    _, whole, expected = step(1, norm=norm, objective=objective)
    _, parts, found = step(accumulate, norm=norm, objective=objective)
    for name, gradient in whole.items():
        if gradient is None:
            assert parts[name] is None
        else:
            torch.testing.assert_close(parts[name], gradient, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.loss, expected.loss)
    assert found.terms.keys() == expected.terms.keys()
    for domain, logits in expected.logits.items():
        torch.testing.assert_close(found.logits[domain], logits)
        assert torch.equal(found.labels[domain], expected.labels[domain])


@pytest.mark.parametrize("norm", ["bn", "dual_bn", "dual_affine_bn", "gmm_bn"])
@pytest.mark.parametrize("accumulate", [2, 3])
def test_with_batch_norms_the_parts_equal_groups_of_the_whole(norm, accumulate):
    """``advnorm.statistics(groups=n)`` normalizes each n-th of each domain by itself, in the same order."""
    config = Config(norm=norm, eps=0.1, attack={"steps": 2}, batch_size=12)
    torch.manual_seed(0)
    objective = build_objective(config, build_model(config, DATA).double().train())
    x = torch.rand(12, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    batch = objective.craft_batch(x, torch.arange(12) % 4, torch.arange(12))
    if norm in ("bn", "dual_affine_bn", "gmm_bn"):  # both domains share their moments: no groups of one domain
        parts = [batch.take(rows) for rows in torch.arange(12).chunk(accumulate)]
        loss = sum(objective.compute_loss(part, EAGER).loss for part in parts) / accumulate
    else:
        with advnorm.statistics(objective.model, groups=accumulate):
            loss = objective.compute_loss(batch, EAGER).loss
    expected = torch.autograd.grad(loss, list(objective.model.parameters()))
    _, found, _ = step(accumulate, norm=norm)
    for (name, gradient), value in zip(found.items(), expected, strict=True):
        torch.testing.assert_close(gradient, value, rtol=1e-9, atol=1e-12, msg=name)


def test_every_part_updates_the_statistics_and_is_attacked_before(tmp_path):
    model, _, _ = step(3, norm="dual_bn")
    assert {int(v) for name, v in model.state_dict().items() if "num_batches" in name} == {3}


@pytest.mark.parametrize("norm", ["dual_affine_ln", "dual_affine_gn"])
def test_a_training_in_parts_ends_like_one_in_whole_batches(norm, tmp_path, monkeypatch):
    make = loop.build_model
    monkeypatch.setattr(loop, "build_model", lambda *given: make(*given).double())
    one, parts = (
        train(small(norm=norm, accumulate=count, mix=mix), tmp_path / f"{count}{mix}")
        for count, mix in ((1, "cutmix"), (4, "cutmix"))
    )
    expected = tensors(one)
    for name, value in tensors(parts).items():
        if value.is_floating_point():
            torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-9)


def test_parts_must_be_equal(tmp_path):
    for settings, field in (
        ({"batch_size": 12, "accumulate": 5}, "accumulate"),
        ({"accumulate": 2, "second_pass": "sam"}, "accumulate"),
        ({"accumulate": 0}, "accumulate"),
    ):
        with raises_problem("out_of_range" if settings["accumulate"] == 0 else "conflict", field):
            Config(**settings)
    with raises_problem("conflict", "objective.clean_share"):
        train(small(accumulate=4, objective={"name": "hybrid", "clean_share": 0.5}), tmp_path)
