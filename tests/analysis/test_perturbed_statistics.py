"""Accuracy under perturbed statistics (paper B, fig. 1 and 2) against buffers and moments changed by hand."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import advnorm
from advnorm._core.errors import ConfigError
from advnorm._core.records import read_json
from advnorm._core.shapes import with_digest
from advnorm.analysis import ANALYSES, corruption_accuracy, landscape, perturbed_accuracy
from advnorm.analysis.perturbed_statistics import StatisticsPerturbation, _equal_batches
from support.problems import raises_problem

KINDS = ("gradient", "uniform", "binary")


def attacks(**settings: Any) -> dict[str, StatisticsPerturbation]:
    return {kind: StatisticsPerturbation(radius=0.0, kind=kind, **settings) for kind in KINDS}


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return float((model(x).argmax(1) == y).double().mean())


@pytest.mark.parametrize(("norm", "route"), [("bn", None), ("dual_bn", "clean"), ("dual_bn", "adv")])
def test_radius_0_gives_the_plain_accuracy(digits, norm, route, untouched):
    model = digits.networks[norm]
    with untouched(model):
        found = perturbed_accuracy(
            model, digits.x, digits.y, attacks(statistics="running", route=route), radii=(0.0, 0.3), batch_size=77
        )
    plain = advnorm.strip(model, route).eval()
    assert [values[0] for values in found.accuracy.values()] == [accuracy(plain, digits.x, digits.y)] * 3
    assert found.images == len(digits.x) and found.radii == (0.0, 0.3)


def test_batch_statistics_give_the_accuracy_in_train_mode_by_batches_and_groups(digits):
    model, x, y = digits.networks["bn"], digits.x[:300], digits.y[:300]
    plain = advnorm.strip(model).train()
    accuracies = []
    for groups, size in ((1, 100), (25, 4)):
        attack = {"g": StatisticsPerturbation(radius=0.0, groups=groups)}
        found = perturbed_accuracy(model, x, y, attack, radii=(0.0,), batch_size=100)
        parts = [accuracy(copy.deepcopy(plain), a, b) for a, b in zip(x.split(size), y.split(size))]
        assert found.accuracy["g"][0] == pytest.approx(sum(parts) / len(parts), abs=0.004)
        assert found.images == 300 and found.batch_size == 100
        accuracies += found.accuracy["g"]
    assert accuracies[1] < accuracies[0] - 0.02


def test_a_perturbation_by_hand_on_a_tiny_network():
    """One channel with stored mean 1/2 and variance 1, and a threshold, so that each prediction is known.

    The logits are ``(z, -z)`` with ``z = (x - (1 + δ) / 2) · …``: an image is of class 0 when it is above the mean.
    """

    class Threshold(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(1, affine=False, eps=0)
            self.norm.running_mean.fill_(0.5)

        def forward(self, x: Tensor) -> Tensor:
            z = self.norm(x).mean((1, 2, 3))
            return torch.stack([z, -z], 1)

    x = torch.tensor([0.1, 0.4, 0.45, 0.52, 0.56, 0.9]).view(6, 1, 1, 1)
    y = torch.tensor([1, 1, 1, 0, 0, 0])
    model = Threshold().eval()
    kinds = {
        "mean": StatisticsPerturbation(radius=0.0, kind="gradient", which="mean", statistics="running"),
        "std": StatisticsPerturbation(radius=0.0, kind="gradient", which="std", statistics="running"),
    }
    radii = (0.0, 0.05, 0.15, 0.5)
    # The loss is steeper for images on the wrong side of their class's logit, here the three of class 0 together:
    # p_wrong of (0.52, 0.56, 0.9) against that of (0.1, 0.4, 0.45) decides where the mean goes.
    p_wrong = torch.sigmoid(-2 * (x.flatten() - 0.5).abs())
    up = bool(p_wrong[3:].sum() > p_wrong[:3].sum())
    expected = []
    for radius in radii:
        mean = 0.5 * (1 + (radius if up else -radius))
        expected.append(float(((x.flatten() > mean).long() == 1 - y).double().mean()))
    found = perturbed_accuracy(model, x, y, kinds, radii=radii)
    assert found.accuracy["mean"] == pytest.approx(expected) and expected[0] == 1 and expected[-1] < 0.9
    assert found.accuracy["std"] == (1.0,) * 4  # a scale never changes the side
    assert isinstance(model.norm, nn.BatchNorm2d)  # the conversion was in a copy


@pytest.mark.parametrize("which", ["mean", "std"])
def test_running_statistics_perturbed_as_in_section_4_5(digits, which):
    """``μ ← (1 + εv) μ`` or ``σ ← (1 + εv) σ``, done by hand to the buffers of the plain network."""
    model = digits.networks["bn"]
    attack = StatisticsPerturbation(radius=0.0, kind="binary", which=which, scaling="std", statistics="running", seed=3)
    radii = (0.2, 0.5, 0.8)
    found = perturbed_accuracy(model, digits.x, digits.y, {"v": attack}, radii=radii)
    direction = attack.direction(model)
    for radius, value in zip(radii, found.accuracy["v"]):
        by_hand = advnorm.strip(model).double().eval()
        for name, module in by_hand.named_modules():
            if isinstance(module, nn.BatchNorm2d):
                v_mean, v_std = direction[name]["shared"]
                assert set(v_mean.tolist()) | set(v_std.tolist()) == {-1.0, 1.0}
                if which == "mean":
                    module.running_mean *= 1 + radius * v_mean
                else:
                    module.running_var.add_(module.eps).mul_((1 + radius * v_std) ** 2).sub_(module.eps)
        assert value == pytest.approx(accuracy(by_hand, digits.x.double(), digits.y), abs=1.1 / len(digits.x))
    assert len(set(found.accuracy["v"])) == 3


def test_the_curves_fall_in_the_papers_order(digits):
    """Fig. 1: a gradient of one batch hurts more than random signs, these more than uniform noise."""
    found = perturbed_accuracy(digits.networks["bn"], digits.x, digits.y, attacks(), radii=(0.0, 0.3, 0.6))
    gradient, uniform, binary = (found.accuracy[kind] for kind in KINDS)
    assert gradient[0] > gradient[1] > gradient[2] and gradient[0] == uniform[0] == binary[0]
    assert gradient[2] < binary[2] - 0.05 and binary[2] <= uniform[2]


def test_a_plain_network_is_converted_in_a_copy(digits, untouched):
    plain = advnorm.strip(digits.networks["bn"])
    with untouched(plain):
        found = perturbed_accuracy(plain, digits.x, digits.y, attacks(), radii=(0.0, 0.4))
    assert found == perturbed_accuracy(digits.networks["bn"], digits.x, digits.y, attacks(), radii=(0.0, 0.4))


@settings(deadline=None, max_examples=25, derandomize=True)
@given(
    count=st.integers(20, 3000),
    size=st.integers(20, 300),
    groups=st.lists(st.sampled_from([1, 2, 4, 5]), min_size=1, max_size=3),
)
def test_batches_are_equal_and_divisible_and_leave_few_images_out(count, size, groups):
    try:
        rows = _equal_batches(count, size, groups)
    except ConfigError:
        assert min(size, count) < 80
        return
    sizes = {part.stop - part.start for part in rows}
    assert len(sizes) == 1 and max(sizes) <= size and all(max(sizes) % n == 0 for n in groups)
    assert [part.start for part in rows] == list(range(0, rows[-1].stop, max(sizes))) and rows[-1].stop <= count
    if groups == [1]:
        assert count - rows[-1].stop < len(rows)


def test_inputs_that_cannot_be_perturbed_raise(digits):
    x, y = digits.x, digits.y
    with raises_problem("not_supported", "model"):
        perturbed_accuracy(digits.networks["none"], x, y, attacks())
    with raises_problem("not_supported", "model"):
        perturbed_accuracy(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), x, y, attacks())
    with raises_problem("out_of_range", "radii") as caught:
        perturbed_accuracy(digits.networks["bn"], x, y, {}, radii=(0.1, 1.5))
    assert (caught.value.problems[1].code, caught.value.problems[1].field) == ("empty", "attacks")
    with raises_problem("conflict", "groups"):
        perturbed_accuracy(digits.networks["bn"], x, y, attacks(groups=8), batch_size=12)
    with raises_problem("empty", "radii"):
        perturbed_accuracy(digits.networks["bn"], x, y, attacks(), radii=())


# -- of runs -----------------------------------------------------------------------------------------------------------


def test_the_attack_on_a_run_shows_every_branch_with_every_number_of_groups(digits, tmp_path):
    finding = ANALYSES.get("statistics_attack").run([digits.target("dual_bn")], radii=[0.0, 0.3, 0.6], groups=[1, 4])
    assert list(finding.accuracy) == ["dual_bn (clean)", "dual_bn (adv)"]
    lines = ["uniform random", "binary random", "gradient, 1 group", "gradient, 4 groups"]
    assert all(list(panel) == lines for panel in finding.accuracy.values())
    own = {"g": StatisticsPerturbation(radius=0.0, groups=4, route="adv")}
    model, radii = digits.networks["dual_bn"], (0.0, 0.3, 0.6)
    expected = perturbed_accuracy(model, digits.x, digits.y, own, radii=radii, batch_size=64).accuracy["g"]
    assert finding.accuracy["dual_bn (adv)"]["gradient, 4 groups"] == expected
    figure = finding.figure()
    assert [axes.get_title("left") for axes in figure.axes] == ["dual_bn (clean)", "dual_bn (adv)"]
    assert all(len(axes.lines) == 4 and "radius" in axes.get_xlabel() for axes in figure.axes)
    assert figure.axes[1].lines[3].get_ydata().tolist() == [100 * value for value in expected]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == lines
    record = read_json(finding.save(tmp_path / "attack")[0])
    assert record == with_digest(finding.record())
    assert record["attacks"]["gradient, 4 groups"]["groups"] == 4
    assert record["conditions"]["dual_bn (adv)"]["images_used"] == 300
    assert record["conditions"]["dual_bn (adv)"]["route"] == "adv"


def test_the_robustness_of_runs_is_shown_for_means_and_deviations(digits, tmp_path):
    done = []
    targets = [digits.target("bn"), dataclasses.replace(digits.target("bn"), name="other")]
    finding = ANALYSES.get("perturbed_statistics").run(
        targets, radii=[0.0, 0.5], seed=3, progress=lambda *counts: done.append(counts)
    )
    assert done == [(1, 2), (2, 2)]
    assert list(finding.accuracy) == ["means perturbed", "standard deviations perturbed"]
    for panel, which in zip(finding.accuracy.values(), ("mean", "std")):
        own = StatisticsPerturbation(
            radius=0.0, kind="binary", which=which, scaling="std", statistics="running", seed=3
        )
        expected = perturbed_accuracy(digits.networks["bn"], digits.x, digits.y, {"v": own}, radii=(0.0, 0.5))
        assert panel["bn"] == panel["other"] == expected.accuracy["v"]
    figure = finding.figure()
    assert len(figure.axes) == 2 and figure.get_suptitle().startswith("Accuracy under randomly perturbed")
    paths = finding.save(tmp_path / "perturbed")
    assert len(paths) == 3 and read_json(paths[0]) == with_digest(finding.record())


def test_one_number_needs_no_list(digits):
    found = ANALYSES.get("statistics_attack").run([digits.target("bn")], radii=0.2, groups=4)
    assert found.radii == (0.2,) and list(found.accuracy["bn"])[2:] == ["gradient, 4 groups"]
    assert landscape(digits.networks["bn"], digits.x, digits.y, steps=0.1).steps == (0.1,)
    score = corruption_accuracy(digits.networks["bn"], digits.x, digits.y, corruptions="fog", severities=5)
    assert score.severities == (5,) and list(score.accuracy) == ["fog"]


def test_long_names_of_runs_fit_above_their_panels(digits, apart):
    target = digits.target("dual_bn", name="cifar10-preact_resnet18-dual_bn-hybrid-eps16_255-fb58506a-seed0")
    figure = ANALYSES.get("statistics_attack").run([target], radii=0.2, groups=1).figure()
    apart(figure, [axes._left_title for axes in figure.axes])


def test_one_draw_serves_every_bank_and_so_networks_of_one_architecture_with_other_norms():
    """Paper B, sec. 4.5: the same seed shared across each experiment."""
    plain, dual = (advnorm.create_model("small_cnn", norm=norm, in_channels=1) for norm in ("bn", "dual_bn"))
    for kind in ("binary", "uniform"):
        attack = StatisticsPerturbation(kind=kind, radius=0.1, seed=3)
        one, two = attack.direction(plain), attack.direction(dual)
        assert set(one) == set(two) and len({tuple(banks["shared"][0].tolist()) for banks in one.values()}) == len(one)
        for name, banks in two.items():
            for bank in ("clean", "adv"):
                assert all(torch.equal(a, b) for a, b in zip(one[name]["shared"], banks[bank], strict=True))
            assert not torch.equal(*one[name]["shared"])


def test_no_groups_raise(digits):
    with raises_problem("empty", "groups"):
        ANALYSES.get("statistics_attack").run([digits.target("bn")], groups=[])
