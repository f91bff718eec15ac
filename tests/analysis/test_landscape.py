"""The landscape against a quadratic whose smoothness is known, a softmax in closed form, and steps done by hand."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import advnorm
from advnorm._core.records import read_json
from advnorm._core.shapes import with_digest
from advnorm.analysis import ANALYSES, LandscapeRecorder, LandscapeTrend, landscape
from advnorm.analysis.base import to_record
from advnorm.analysis.landscape import STEPS, LandscapePoint
from support.problems import raises_problem


def linear(inputs: int, outputs: int, seed: int = 0, bias: bool = False) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, outputs, bias=bias)).double()


def squares(logits: Tensor, y: Tensor) -> Tensor:
    """``1/2 mean_i ||W x_i - e_y||²``: a quadratic of W."""
    return 0.5 * (logits - F.one_hot(y, logits.shape[1])).square().sum(1).mean()


# -- known landscapes --------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=25, derandomize=True)
@given(inputs=st.integers(1, 5), classes=st.integers(2, 4), count=st.integers(1, 8), seed=st.integers(0, 5))
def test_on_a_quadratic_everything_follows_from_the_hessian(inputs, classes, count, seed):
    """With ``C = mean x xᵀ``, ``∇l(W) = W C - B`` and the gradient changes by ``t ∇l C`` exactly."""
    model = linear(inputs, classes, seed)
    x, y = torch.rand(count, 1, 1, inputs), torch.arange(count) % classes
    steps = (0.01, 0.5, 3.0)
    found = landscape(model, x, y, steps=steps, loss=squares)
    w, xs, targets = model[1].weight.detach().numpy(), x.reshape(count, -1).double().numpy(), np.eye(classes)[y.numpy()]
    c = xs.T @ xs / count
    gradient = w @ c - targets.T @ xs / count
    assert found.gradient_norm == pytest.approx(np.linalg.norm(gradient))
    for i, t in enumerate(steps):
        assert found.distances[i] == pytest.approx(t * np.linalg.norm(gradient))
        assert found.gradient_changes[i] == pytest.approx(t * np.linalg.norm(gradient @ c))
        moved = w - t * gradient
        assert found.losses[i] == pytest.approx(0.5 * ((xs @ moved.T - targets) ** 2).sum(1).mean())
    expected = np.linalg.norm(gradient @ c) / np.linalg.norm(gradient)
    assert found.smoothness == pytest.approx(expected)
    assert found.smoothness <= np.linalg.eigvalsh(c).max() * (1 + 1e-9)


@pytest.mark.parametrize("curvature", [0.25, 4.0])
def test_the_smoothness_of_a_parabola_is_its_curvature(curvature):
    """``x = 1`` in one dimension and the loss scaled: the largest eigenvalue is the only one."""
    model = linear(1, 2)
    found = landscape(
        model, torch.ones(3, 1, 1, 1), torch.tensor([0, 0, 0]), loss=lambda z, y: curvature * squares(z, y)
    )
    assert found.steps == STEPS and found.smoothness_at == pytest.approx([curvature] * len(STEPS))
    assert found.smoothness == pytest.approx(curvature)
    best = found.loss - found.gradient_norm**2 / (2 * curvature)
    assert best == pytest.approx(0)  # the minimum of the parabola


def test_a_linear_model_under_cross_entropy_is_the_closed_form():
    """``∇l = mean (p - e_y) xᵀ`` for weight and ``mean (p - e_y)`` for bias, in NumPy."""
    model = linear(6, 3, bias=True)
    x, y = torch.rand(10, 1, 2, 3), torch.arange(10) % 3
    found = landscape(model, x, y, steps=(0.3, 2.0))
    xs, targets = np.c_[x.reshape(10, -1).double().numpy(), np.ones(10)], np.eye(3)[y.numpy()]

    def at(w: np.ndarray) -> tuple[float, np.ndarray]:
        z = xs @ w.T
        p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
        return float(-np.log((p * targets).sum(1)).mean()), (p - targets).T @ xs / 10

    w = np.c_[model[1].weight.detach().numpy(), model[1].bias.detach().numpy()]
    value, gradient = at(w)
    assert found.loss == pytest.approx(value) and found.gradient_norm == pytest.approx(np.linalg.norm(gradient))
    for i, t in enumerate(found.steps):
        there, moved = at(w - t * gradient)
        assert found.losses[i] == pytest.approx(there)
        assert found.gradient_changes[i] == pytest.approx(np.linalg.norm(moved - gradient))
        assert found.smoothness_at[i] == pytest.approx(np.linalg.norm(moved - gradient) / t / np.linalg.norm(gradient))
    assert found.smoothness == max(found.smoothness_at)
    assert found.loss_range == (min(found.loss, *found.losses), max(found.loss, *found.losses))


def test_smoothness_is_undefined_if_the_gradient_is_zero():
    model = nn.Sequential(nn.Flatten(), nn.Linear(1, 2, bias=False))
    with torch.no_grad():
        model[1].weight.zero_()
    found = landscape(model, torch.ones(2, 1, 1, 1), torch.tensor([0, 1]))
    assert found.gradient_norm == 0 and math.isnan(found.smoothness) and to_record(found)["smoothness"] is None
    assert found.losses == pytest.approx([math.log(2)] * len(STEPS))


def test_a_step_with_a_loss_of_nan_is_visible():
    point = LandscapePoint(
        steps=(1.0, 2.0),
        loss=1.0,
        gradient_norm=1.0,
        losses=(2.0, math.nan),
        distances=(1.0, 2.0),
        gradient_changes=(3.0, math.nan),
    )
    assert math.isnan(point.smoothness) and all(map(math.isnan, point.loss_range))
    assert to_record(point)["losses"] == [2.0, None]


# -- networks ----------------------------------------------------------------------------------------------------------


def moved_by_hand(model: nn.Module, x: Tensor, y: Tensor, t: float) -> tuple[float, float, float]:
    """The loss after one step of plain gradient descent by torch's optimizer on a copy, distance and change."""
    model = copy.deepcopy(model).double()
    optimizer = torch.optim.SGD(model.parameters(), t)
    before = [p.detach().clone() for p in model.parameters()]
    gradients = []
    for _ in range(2):
        optimizer.zero_grad(set_to_none=False)
        loss = F.cross_entropy(model(x.double()), y)
        loss.backward()
        gradients.append([torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()])
        if len(gradients) == 1:
            optimizer.step()
    pairs = ((before, [p.detach() for p in model.parameters()]), gradients)
    distance, change = (math.sqrt(sum(float((a - b).square().sum()) for a, b in zip(*pair))) for pair in pairs)
    return float(loss.detach()), distance, change


@pytest.mark.parametrize(("norm", "route"), [("bn", None), ("dual_bn", "adv"), ("none", None)])
def test_a_trained_network_moves_as_an_optimizer_moves_it(digits, norm, route, untouched):
    """With statistics of the batch, as in train mode, and not a bit of the network changed."""
    model, x, y = digits.networks[norm], digits.x[:64], digits.y[:64]
    with untouched(model):
        found = landscape(model, x, y, steps=(0.1, 0.4), route=route)
    plain = advnorm.strip(model, route).train()
    for i, t in enumerate(found.steps):
        loss, distance, change = moved_by_hand(plain, x, y, t)
        assert found.losses[i] == pytest.approx(loss, rel=1e-4)
        assert found.distances[i] == pytest.approx(distance, rel=1e-4)
        assert found.gradient_changes[i] == pytest.approx(change, rel=1e-3)
    again = landscape(plain, x, y, steps=(0.1, 0.4))
    assert again.losses == pytest.approx(found.losses, rel=1e-4)


def test_running_statistics_are_the_stored_ones(digits):
    model, x, y = digits.networks["bn"], digits.x[:64], digits.y[:64]
    found = landscape(model, x, y, steps=(0.1,), statistics="running")
    loss, distance, _ = moved_by_hand(advnorm.strip(model).eval(), x, y, 0.1)
    assert found.losses == pytest.approx([loss], rel=1e-4) and found.distances == pytest.approx([distance], rel=1e-4)


def test_frozen_parameters_do_not_move(digits, untouched):
    model = copy.deepcopy(digits.networks["bn"])
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.fc.bias.requires_grad_()
    with untouched(model):
        found = landscape(model, digits.x, digits.y, steps=(1.0,))
    with torch.no_grad(), advnorm.statistics(model, mode="batch_frozen"):
        p = model(digits.x).double().softmax(1)
    gradient = (p - F.one_hot(digits.y, 10)).mean(0)
    assert found.gradient_norm == pytest.approx(float(gradient.norm()), rel=1e-4)
    model.fc.bias.requires_grad_(False)
    with raises_problem("not_supported", "model"):
        landscape(model, digits.x, digits.y)


def test_a_model_in_training_with_gradients_and_under_no_grad_stays_unchanged(digits, untouched):
    model = copy.deepcopy(digits.networks["bn"]).train()
    F.cross_entropy(model(digits.x), digits.y).backward()
    with untouched(model), torch.no_grad():
        found = landscape(model, digits.x, digits.y)
    assert found.gradient_norm > 0

    def fails(*_: Any) -> None:
        raise RuntimeError("in the middle")

    handle = model.fc.register_forward_hook(fails)
    with untouched(model), pytest.raises(RuntimeError, match="in the middle"):
        landscape(model, digits.x, digits.y)
    handle.remove()


def test_tied_weights_move_together():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
            self.two.weight = self.one.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x.flatten(1)).tanh())

    model, x, y = Tied().double(), torch.rand(5, 1, 1, 3), torch.arange(5) % 3
    found = landscape(model, x, y, steps=(0.5,))
    assert found.losses == pytest.approx([moved_by_hand(model, x, y, 0.5)[0]])


@pytest.mark.parametrize("steps", [(), (0.0,), (0.1, -1), ("a",), "0.1", (math.inf,)])
def test_wrong_steps_are_reported_with_all_other_problems(digits, steps):
    with raises_problem("unknown_name", "statistics") as caught:
        landscape(digits.networks["bn"], digits.x, digits.y, steps=steps, statistics="runing")
    assert "steps" in [problem.field for problem in caught.value.problems]


# -- findings ----------------------------------------------------------------------------------------------------------


def test_a_recorder_in_a_loop_changes_nothing_and_draws_the_trend(digits, tmp_path):
    def trained(recorder: LandscapeRecorder | None) -> nn.Module:
        torch.manual_seed(0)
        model = advnorm.create_model("small_cnn", num_classes=10, norm="bn", in_channels=1, normalize=False)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        for step in range(6):
            x, y = digits.x[step * 40 : step * 40 + 40], digits.y[step * 40 : step * 40 + 40]
            if recorder is not None:
                seen = recorder(step, model, x, y)
                assert (seen is None) == bool(step % 2)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        return model

    recorder = LandscapeRecorder(every=2, steps=(0.1, 0.2))
    one, other = trained(recorder), trained(None)
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values()))
    assert [step for step, _ in recorder.points] == [0, 2, 4]

    finding = LandscapeTrend(series={"bn": recorder.points, "again": recorder.points[:2]})
    figure = finding.figure()
    loss, change, smooth = figure.axes
    assert [axes.get_title("left") for axes in figure.axes] == [
        "Loss along gradient",
        "Change of gradient",
        "β-smoothness",
    ]
    assert len(loss.collections) == len(change.collections) == 2 and len(smooth.lines) == 2
    assert smooth.lines[0].get_ydata().tolist() == [point.smoothness for _, point in recorder.points]
    for axes, values in (
        (loss, [(point.loss, *point.losses) for _, point in recorder.points]),
        (change, [point.gradient_changes for _, point in recorder.points]),
    ):
        edges = axes.collections[0].get_paths()[0].vertices[:, 1].tolist()
        assert {*map(min, values), *map(max, values)} == set(edges)
        assert axes.lines[0].get_ydata().tolist() == pytest.approx([sum(one) / len(one) for one in values])
    assert loss.get_xlabel() == "training step"
    paths = finding.save(tmp_path / "trend")
    assert len(paths) == 3 and read_json(paths[0]) == with_digest(finding.record())
    with raises_problem("out_of_range", "every"):
        LandscapeRecorder(every=0)


def test_the_landscape_of_runs_is_drawn_over_the_step_size(digits, tmp_path):
    targets = [digits.target("bn"), digits.target("dual_bn")]
    finding = ANALYSES.get("landscape").run(targets, steps=[0.1, 0.2], count=3)
    assert list(finding.points) == ["bn", "dual_bn (clean)", "dual_bn (adv)"]
    size = finding.record()["networks"]["bn"]["conditions"]["batch_size"]
    assert size == len(digits.x) // -(-len(digits.x) // targets[0].batch_size)  # equally large
    second = slice(len(digits.x) // 5, 2 * len(digits.x) // 5)
    own = landscape(digits.networks["dual_bn"], digits.x[second], digits.y[second], steps=(0.1, 0.2), route="adv")
    assert finding.points["dual_bn (adv)"][1] == own and len(finding.points["bn"]) == 3
    assert finding.record()["networks"]["bn"]["conditions"]["images_used"] == 3 * len(digits.x) // 5
    figure = finding.figure()
    assert all(len(axes.lines) == len(axes.collections) == 3 for axes in figure.axes)
    losses = figure.axes[0].lines[2].get_ydata()
    assert losses[0] == pytest.approx(sum(point.loss for point in finding.points["dual_bn (adv)"]) / 3)
    record = read_json(finding.save(tmp_path / "landscape")[0])
    assert record == with_digest(finding.record()) and record["networks"]["bn"]["steps"] == [0.1, 0.2]
    with raises_problem("out_of_range", "count"):
        ANALYSES.get("landscape").run(targets, count=0)
