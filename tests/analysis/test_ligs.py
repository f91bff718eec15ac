"""LIGS against gradients of single images in float64 (paper D, eq. 1), its finding and its trend along training."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import advnorm
from advnorm._core.records import read_json
from advnorm._core.seeding import ImageNoise
from advnorm._core.shapes import with_digest
from advnorm.analysis import ANALYSES, ligs, ligs_along
from advnorm.analysis.base import to_record
from advnorm.analysis.ligs import SHIFTS, GradientSimilarities, LIGSComparison
from advnorm.attacks import FGSM, PGD, predicting
from support.confident import DEVICES, confident_network, exact_direction
from support.problems import raises_problem


def shifted_by_hand(model: nn.Module, x: Tensor, y: Tensor, shift: str, size: float, route: str | None) -> Tensor:
    """App. B.4; the attacks are the public ones, whose noise is the image's."""
    noise = ImageNoise(0, torch.arange(len(x), device=x.device)).fold("ligs")
    if shift == "gaussian":
        return x + size * noise.normal(x.shape[1:], "ligs")
    if shift == "uniform":
        return x + size * (2 * noise.uniform(x.shape[1:], "ligs") - 1)
    threat = advnorm.ThreatModel(eps=size)
    if shift == "fgsm":
        return FGSM(threat=threat, route=route)(model, x, y)

    class OfLigs(PGD):
        def noise(self, index: Tensor) -> ImageNoise:
            return noise

    return OfLigs(threat=threat, steps=7, route=route)(model, x, y)


def one_by_one(model: nn.Module, x: Tensor, near: Tensor, y: Tensor, route: str | None = None) -> Tensor:
    """Eq. 1 with a forward and a backward for each image alone, in float64, on what the branch is as a plain model."""
    plain = advnorm.strip(model, route).double().eval()
    values = []
    for i in range(len(x)):
        gradients = []
        for at in (x, near):
            leaf = at[i : i + 1].double().requires_grad_()
            (gradient,) = torch.autograd.grad(F.nll_loss(plain(leaf).log_softmax(1), y[i : i + 1]), leaf)
            gradients.append(gradient.flatten())
        a, b = gradients
        values.append(a @ b / (a @ a).sqrt() / (b @ b).sqrt())
    return torch.stack(values)


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize(("norm", "route"), [("bn", None), ("dual_bn", "clean"), ("dual_bn", "adv"), ("none", None)])
def test_each_value_is_the_cosine_of_the_gradients_of_one_image(digits, norm, route, shift, untouched):
    model, x, y = digits.networks[norm], digits.x[:24], digits.y[:24]
    with untouched(model):
        found = ligs(model, x, y, shift=shift, size=0.05, route=route)
    expected = one_by_one(model, x, shifted_by_hand(model, x, y, shift, 0.05, route), y, route)
    assert found.per_image.dtype == torch.float64 and found.per_image.shape == (24,)
    torch.testing.assert_close(found.per_image, expected, rtol=1e-4, atol=1e-5)
    assert found.mean == pytest.approx(float(found.per_image.mean())) and 0.3 < found.mean < 0.9999
    assert found.without_gradient == 0


def test_branches_have_different_values(digits):
    model = digits.networks["dual_bn"]
    clean, adv = (ligs(model, digits.x, digits.y, size=0.05, route=route) for route in ("clean", "adv"))
    assert abs(clean.mean - adv.mean) > 1e-4
    with advnorm.route(model, "adv"):
        assert torch.equal(ligs(model, digits.x, digits.y, size=0.05).per_image, adv.per_image)


@settings(deadline=None, max_examples=10, derandomize=True)
@given(batch_size=st.integers(1, 40), shift=st.sampled_from(SHIFTS), seed=st.integers(0, 3))
def test_values_do_not_depend_on_the_batch_size(batch_size, shift, seed):
    torch.manual_seed(1)
    model = advnorm.create_model("small_cnn", num_classes=10, norm="bn", in_channels=1, normalize=False).double()
    x, y = torch.rand(17, 1, 8, 8), torch.arange(17) % 10
    one, other = (ligs(model, x, y, shift=shift, seed=seed, batch_size=size) for size in (17, batch_size))
    torch.testing.assert_close(one.per_image, other.per_image, rtol=1e-5, atol=1e-6)


def test_a_plain_model_gives_the_same_values_as_a_routed_one(digits):
    routed = digits.networks["bn"]
    plain = advnorm.strip(routed)
    assert any(isinstance(module, nn.BatchNorm2d) for module in plain.modules())
    a, b = (ligs(model, digits.x, digits.y, shift="pgd") for model in (routed, plain))
    torch.testing.assert_close(a.per_image, b.per_image, rtol=1e-5, atol=1e-6)


def test_the_mode_of_the_model_does_not_matter(digits, untouched):
    model = copy.deepcopy(digits.networks["bn"]).train()
    with untouched(model), torch.no_grad():
        found = ligs(model, digits.x, digits.y)
    assert torch.equal(found.per_image, ligs(digits.networks["bn"], digits.x, digits.y).per_image)


def test_batch_statistics_give_the_value_of_the_regularizer(digits):
    model = copy.deepcopy(digits.networks["bn"]).train()
    x, y = digits.x[:64], digits.y[:64]
    noise = ImageNoise(0, torch.arange(64)).fold("ligs")
    wanted = advnorm.objectives.LIGS(advnorm.objectives.Standard(model), size=0.05).similarity(x, y, noise)
    found = ligs(model, x, y, size=0.05, statistics="batch_frozen")
    assert found.mean == pytest.approx(float(wanted.detach()), abs=1e-5)
    assert found.mean != pytest.approx(ligs(model, x, y, size=0.05).mean, abs=1e-5)


def test_a_linear_network_of_two_classes_has_ligs_1():
    """Its input gradient has one direction everywhere, towards the other class."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    found = ligs(model, torch.rand(9, 1, 2, 2), torch.arange(9) % 2, size=0.5)
    torch.testing.assert_close(found.per_image, torch.ones(9, dtype=torch.float64))


def test_a_shift_to_where_the_gradient_turns_has_ligs_minus_1():
    """``|x - 1/2|``: the gradient has opposite signs on the two sides."""

    class Fold(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            bend = (x.flatten(1) - 0.5).abs().sum(1)
            return torch.stack([bend, -bend], 1)

    x = torch.full((3, 1, 1, 1), 0.45)
    found = ligs(Fold(), x, torch.zeros(3, dtype=torch.long), shift="fgsm", size=0.2)
    # Class 0 grows with the distance from 1/2: the attack goes towards 1/2 and beyond.
    torch.testing.assert_close(found.per_image, -torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("gap", [10.0, 60.0])
def test_a_confident_network_has_a_gradient_direction(gap):
    """Float32, and with a gap of 60 float64 too, rounds ``p_y - 1`` to 0, and a third of the gradient with it."""
    torch.manual_seed(0)
    first = nn.Linear(6, 3)
    model = nn.Sequential(nn.Flatten(), first)
    with torch.no_grad():
        first.weight *= 4
        first.bias[0] += gap
    x, y = torch.rand(5, 1, 2, 3), torch.zeros(5, dtype=torch.long)
    near = shifted_by_hand(model, x, y, "gaussian", 0.5, None)
    found = ligs(model, x, y, size=0.5)
    expected = (exact_direction(model, x, y) * exact_direction(model, near, y)).flatten(1).sum(1)
    torch.testing.assert_close(found.per_image, expected, rtol=1e-5, atol=1e-5)
    assert float(expected.min()) < 0.99


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("scale", "near_enough"), [(1, 1e-5), (10, 1e-4)]
)  # float32 logits of 1,000 have steps of 6e-5
def test_the_value_of_a_confident_network_is_exact_however_large_its_margins(scale, near_enough, device):
    model, x, y = confident_network(device)
    model = copy.deepcopy(model)
    with torch.no_grad():
        model[-1].weight *= scale
        model[-1].bias *= scale
    near = shifted_by_hand(model, x, y, "gaussian", 0.05, None)
    expected = (exact_direction(model, x, y) * exact_direction(model, near, y)).flatten(1).sum(1)
    found = ligs(model, x, y, size=0.05)
    assert found.without_gradient == 0
    torch.testing.assert_close(found.per_image, expected.cpu(), rtol=0, atol=near_enough)
    noise = ImageNoise(0, torch.arange(len(x), device=device)).fold("ligs")
    regularizer = advnorm.objectives.LIGS(advnorm.objectives.Standard(model), size=0.05).similarity(x, y, noise)
    assert float(regularizer.detach()) == pytest.approx(float(expected.mean()), abs=1e-5)


def test_images_without_a_gradient_are_counted_and_left_out():
    class Dead(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            alive = (x.flatten(1) - 0.5).clamp_min(0).square().sum(1)
            return torch.stack([alive, -alive], 1)

    x = torch.cat([torch.full((2, 1, 2, 2), 0.1), torch.full((3, 1, 2, 2), 0.9)])
    found = ligs(Dead(), x, torch.zeros(5, dtype=torch.long))
    assert found.without_gradient == 2 and found.per_image.isnan().tolist() == [True, True, False, False, False]
    assert found.mean == pytest.approx(float(found.per_image[2:].mean()))
    assert to_record(found)["per_image"][:2] == [None, None]
    assert str(found) == f"LIGS {found.mean:.4f} over 5 images, 2 of them without a gradient"
    nothing = ligs(Dead(), x[:2], torch.zeros(2, dtype=torch.long))
    assert math.isnan(nothing.mean) and to_record(nothing)["mean"] is None


def test_all_problems_are_reported_at_once(digits):
    model = advnorm.strip(digits.networks["bn"])
    wrong: dict[str, Any] = {"shift": "gausian", "size": -1, "route": "adv", "statistics": "batch", "batch_size": 0}
    with raises_problem("unknown_name", "shift") as caught:
        ligs(model, digits.x, digits.y, **wrong)
    fields = [problem.field for problem in caught.value.problems]
    assert fields == ["shift", "statistics", "batch_size", "route", "size"]
    with pytest.raises(advnorm.ConfigError):
        ligs(model, digits.x, digits.y * 10)
    with raises_problem("unknown_name", "shifts"):
        ANALYSES.get("ligs").run([digits.target("bn")], shifts="fgms")


def test_a_failure_leaves_the_model_unchanged(digits, untouched):
    model = copy.deepcopy(digits.networks["bn"]).train()

    def fails(*_: Any) -> None:
        raise RuntimeError("in the middle")

    model.fc.register_forward_hook(fails)
    with untouched(model), pytest.raises(advnorm.ConfigError, match="in the middle"):
        ligs(model, digits.x, digits.y)


# -- of runs -----------------------------------------------------------------------------------------------------------


def test_the_finding_shows_every_branch_of_every_network(digits, tmp_path):
    steps = []
    finding = ANALYSES.get("ligs").run(
        [digits.target("bn"), digits.target("dual_bn"), digits.target("bn")],
        size=0.05,
        progress=lambda done, total: steps.append((done, total)),
    )
    names = ["bn", "dual_bn (clean)", "dual_bn (adv)", "bn #2"]
    assert list(finding.similarities) == names and steps == [(i, 4) for i in range(1, 5)]
    own = ligs(digits.networks["dual_bn"], digits.x, digits.y, shift="uniform", size=0.05, route="adv")
    assert torch.allclose(finding.similarities["dual_bn (adv)"]["uniform"].per_image, own.per_image, atol=1e-5)
    figure = finding.figure()
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.get_xticklabels()][:2] == ["Gaussian noise", "uniform noise"]
    assert len(axes.lines) == 4 and len(axes.lines[0].get_xdata()) == 4 and "0.05" in axes.get_title("left")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == names
    assert axes.lines[2].get_ydata()[1] == pytest.approx(own.mean, abs=1e-5)

    paths = finding.save(tmp_path / "ligs")
    assert [path.name for path in paths] == ["ligs.json", "ligs.svg", "ligs.png"]
    assert all(path.stat().st_size > 500 for path in paths)
    record = read_json(paths[0])
    assert record == with_digest(finding.record())
    assert record["networks"]["dual_bn (adv)"]["conditions"]["route"] == "adv"
    assert len(record["networks"]["bn"]["shifts"]["pgd"]["per_image"]) == len(digits.x)


def test_a_given_branch_is_the_only_one(digits):
    finding = ANALYSES.get("ligs").run([digits.target("dual_bn")], route="adv", shifts=["gaussian"])
    assert list(finding.similarities) == ["dual_bn"] and list(finding.similarities["dual_bn"]) == ["gaussian"]


def test_no_network_is_an_error():
    with raises_problem("empty", "targets"):
        ANALYSES.get("ligs").run([])


def test_the_bar_spans_the_middle_half_of_the_images():
    values = GradientSimilarities(per_image=torch.linspace(0, 1, 101, dtype=torch.float64))
    finding = LIGSComparison(similarities={"net": {"gaussian": values}}, size=0.01, statistics="running", seed=0)
    (bars,) = finding.figure().axes[0].collections
    (segment,) = bars.get_segments()
    assert sorted(segment[:, 1]) == pytest.approx([0.25, 0.75])


# -- along training ----------------------------------------------------------------------------------------------------


def test_models_of_a_training_are_evaluated_in_order(digits, tmp_path):
    """A generator may continue training one model: each stage is evaluated before the next is requested."""
    x, y = digits.x[:100], digits.y[:100]
    attack = PGD(threat=advnorm.ThreatModel(eps=0.1), steps=2)

    def training(norm: str):
        torch.manual_seed(0)
        model = advnorm.create_model("small_cnn", num_classes=10, norm=norm, in_channels=1, normalize=False)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for epoch in range(3):
            yield epoch, model
            for _ in range(5):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()

    finding = ligs_along(
        {"with": training("bn"), "without": training("none")},
        x,
        y,
        shifts=["gaussian", "fgsm"],
        attack=attack,
        batch_size=64,
    )
    assert [stage.epoch for stage in finding.series["with"]] == [0, 1, 2]
    for norm, name in (("bn", "with"), ("none", "without")):
        for (epoch, model), stage in zip(training(norm), finding.series[name]):
            plain = advnorm.strip(model).eval()
            assert stage.ligs["fgsm"] == pytest.approx(ligs(plain, x, y, shift="fgsm").mean, abs=1e-5), epoch
            with torch.no_grad():
                assert stage.clean_accuracy == pytest.approx(float((plain(x).argmax(1) == y).double().mean()))
                x_adv = attack(plain, x, y)
                assert stage.robust_accuracy == pytest.approx(
                    float((plain(x_adv).argmax(1) == y).double().mean()), abs=0.011
                )
    assert len({stage.ligs["gaussian"] for stage in finding.series["with"]}) == 3

    figure = finding.figure()
    titles = [axes.get_title("left") for axes in figure.axes]
    assert titles == ["Clean accuracy", "Robust accuracy", "LIGS, Gaussian noise", "LIGS, FGSM"]
    assert all(len(axes.lines) == 2 and axes.get_xlabel() == "epoch" for axes in figure.axes)
    assert figure.axes[3].lines[1].get_ydata().tolist() == [stage.ligs["fgsm"] for stage in finding.series["without"]]
    record = read_json(finding.save(tmp_path / "trend")[0])
    assert record == with_digest(finding.record()) and record["conditions"]["attack"] == repr(attack)


def test_without_an_attack_there_is_no_robust_accuracy(digits):
    finding = ligs_along({"bn": [(1, digits.networks["bn"])]}, digits.x, digits.y)
    assert finding.series["bn"][0].robust_accuracy is None
    assert [axes.get_title("left") for axes in finding.figure().axes] == ["Clean accuracy", "LIGS, Gaussian noise"]
    with raises_problem("empty", "models"):
        ligs_along({}, digits.x, digits.y)


def test_a_size_may_be_a_fraction_and_the_batch_size_is_recorded(digits):
    found = ANALYSES.get("ligs").run([digits.target("bn")], shifts="uniform", size="2/255")
    record = found.record()
    assert record["size"] == 2 / 255 and record["networks"]["bn"]["conditions"]["batch_size"] == 64


def test_robust_accuracy_along_training_is_that_of_an_attack_on_the_same_statistics(digits):
    model, attack = digits.networks["bn"], PGD(threat=advnorm.ThreatModel(eps=0.1), steps=2)
    found = {
        mode: ligs_along({"bn": [(1, model)]}, digits.x, digits.y, attack=attack, statistics=mode, batch_size=150)
        for mode in ("running", "batch_frozen")
    }
    for mode, trend in found.items():
        right = 0
        for rows in (slice(0, 150), slice(150, 300)):
            x, y = digits.x[rows], digits.y[rows]
            own = dataclasses.replace(attack, statistics=mode)
            x_adv = own(model, x, y, index=torch.arange(rows.start, rows.stop))
            with predicting(model, statistics=mode) as predict, torch.no_grad():
                right += int((predict(x_adv).argmax(1) == y).sum())
        assert trend.series["bn"][0].robust_accuracy == right / 300
    assert found["running"].series["bn"][0].robust_accuracy != found["batch_frozen"].series["bn"][0].robust_accuracy
