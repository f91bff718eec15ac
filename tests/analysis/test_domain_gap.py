"""Distances against a closed form in NumPy and against samples; swapped statistics against swapped buffers."""

import copy
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import advnorm
from advnorm.analysis.base import ANALYSES
from advnorm.analysis.domain_gap import Distance, branch_gap, domain_gap, swap_table, wasserstein
from advnorm.analysis.moments import Gaussian, collect_moments
from advnorm.attacks import PGD

THREAT = advnorm.ThreatModel(eps=0.1)


def gaussian(rng, channels):
    return rng.normal(size=channels), rng.uniform(0.1, 2, size=channels)


@settings(deadline=None, max_examples=25, derandomize=True)
@given(channels=st.integers(1, 40), seed=st.integers(0, 999))
def test_the_distance_is_the_closed_form(channels, seed):
    rng = np.random.default_rng(seed)
    (m1, s1), (m2, s2) = gaussian(rng, channels), gaussian(rng, channels)
    first, second = (Gaussian(torch.tensor(m), torch.tensor(s)) for m, s in ((m1, s1), (m2, s2)))
    # Bures' form for any covariance; diagonal ones commute.
    cross = np.sqrt(np.sqrt(np.diag(s1**2)) @ np.diag(s2**2) @ np.sqrt(np.diag(s1**2)))
    bures = np.sum((m1 - m2) ** 2) + np.trace(np.diag(s1**2) + np.diag(s2**2) - 2 * cross)
    assert wasserstein(first, second).total == pytest.approx(bures, rel=1e-9, abs=1e-12)
    assert wasserstein(first, second) == wasserstein(second, first)
    assert wasserstein(first, first) == Distance(0.0, 0.0)


def test_the_distance_is_what_sorted_samples_show():
    rng = np.random.default_rng(0)
    (m1, s1), (m2, s2) = gaussian(rng, 5), gaussian(rng, 5)
    estimate = 0.0
    for channel in range(5):  # in one dimension the best transport keeps the order
        a, b = (np.sort(rng.normal(m[channel], s[channel], 200_000)) for m, s in ((m1, s1), (m2, s2)))
        estimate += np.mean((a - b) ** 2)
    exact = wasserstein(*(Gaussian(torch.tensor(m), torch.tensor(s)) for m, s in ((m1, s1), (m2, s2)))).total
    assert exact == pytest.approx(estimate, rel=0.01)


def test_the_relative_distance_does_not_see_the_scale_of_the_weights_before_a_norm(digits):
    model = digits.networks["bn"]
    scaled = copy.deepcopy(model)
    with torch.no_grad():
        scaled.conv2.weight.mul_(10)
        scaled.bn2.running_mean.mul_(10)
        scaled.bn2.running_var.mul_(100)
    noisy = (digits.x + 0.2).clamp(0, 1)
    before, after = (domain_gap(network, digits.x, noisy) for network in (model, scaled))
    pair = ("clean", "adv")
    assert after.absolute[pair]["bn2"].total == pytest.approx(100 * before.absolute[pair]["bn2"].total, rel=1e-3)
    assert after.relative[pair]["bn2"].total == pytest.approx(before.relative[pair]["bn2"].total, rel=1e-3)
    assert after.relative[pair]["bn3"].total == pytest.approx(before.relative[pair]["bn3"].total, rel=1e-2)


def test_the_gap_of_a_network_is_that_of_its_activations(digits, untouched):
    model = digits.networks["dual_bn"]
    inputs = {"clean": digits.x, "adv": (digits.x + 0.1).clamp(0, 1), "noise": digits.x.flip(3)}
    with untouched(model):
        found = domain_gap(
            model, inputs["clean"], inputs["adv"], others={"noise": inputs["noise"]}, labels=digits.y, route="adv"
        )
    assert list(found.absolute) == [("clean", "adv"), ("clean", "noise"), ("adv", "noise")]
    rows = {}
    handle = model.bn3.register_forward_pre_hook(lambda _, args: rows.__setitem__(name, args[0].double().numpy()))
    with advnorm.route(model, "adv"), torch.no_grad():
        for name, images in inputs.items():
            right = (model(images).argmax(1) == digits.y).double().mean().item()
            assert found.accuracy[name] == pytest.approx(right)
    handle.remove()
    for (a, b), layers in found.absolute.items():
        expected = sum(
            ((f(rows[a], axis=(0, 2, 3)) - f(rows[b], axis=(0, 2, 3))) ** 2).sum() for f in (np.mean, np.std)
        )
        assert layers["bn3"].total == pytest.approx(expected, rel=1e-4)
    assert found.sums["clean", "adv"] == pytest.approx(sum(d.total for d in found.absolute["clean", "adv"].values()))


def test_equal_images_lie_at_distance_zero(digits):
    found = domain_gap(digits.networks["none"], digits.x, digits.x.clone())
    assert found.sums == {("clean", "adv"): 0.0}


def test_the_gap_of_a_run_is_drawn_and_saved(digits, tmp_path, untouched):
    subject = digits.subject("dual_bn")
    with untouched(subject.model):
        found = ANALYSES.get("domain_gap").run(subject)
    figure = found.figure()
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "Distance between the inputs of each norm",
        "The same, each channel in units of its deviation",
    ]
    assert all(len(axes.get_lines()) == 3 for axes in figure.axes)
    assert [text.get_text().split(" (")[0] for text in figure.legends[0].get_texts()] == [
        "clean – adv",
        "clean – noise",
        "adv – noise",
    ]
    paths = found.save(tmp_path / "gap")
    record = json.loads(paths[0].read_text())
    assert [path.suffix for path in paths] == [".json", ".svg", ".png"] and record == found.record()
    assert record["sums"]["clean-adv"] == found.sums["clean", "adv"] > 0
    assert set(record["accuracy"]) == {"clean", "adv", "noise"} and record["conditions"]["route"] == "adv"
    with pytest.raises(advnorm.ConfigError, match="must have 'adv'"):
        ANALYSES.get("domain_gap").run(subject, inputs=["noise"])


def test_several_runs_make_a_table(digits, tmp_path):
    subjects = [digits.subject(norm) for norm in ("bn", "dual_bn", "none")]
    found = ANALYSES.get("domain_gap_table").run(subjects, inputs=["adv", "autoattack-steps2-queries3"])
    assert list(found.rows) == ["bn", "dual_bn", "none"]
    axes = found.figure().axes[0]
    assert len(axes.patches) == 9
    assert [text.get_text().split("\n")[0] for text in axes.get_yticklabels()] == ["bn", "dual_bn", "none"]
    assert json.loads(found.save(tmp_path / "table")[0].read_text()) == found.record()
    many = ANALYSES.get("domain_gap_table").run(subjects[:1], inputs=["adv", "noise", "fgsm", "pgd2"])  # ten pairs
    looks = {(patch.get_facecolor(), patch.get_hatch()) for patch in many.figure().axes[0].patches}
    assert len(looks) == 10
    with pytest.raises(advnorm.ConfigError, match="names of their own"):
        ANALYSES.get("domain_gap_table").run(subjects[:1] * 2, inputs=["adv"])


def test_the_gap_of_branches_compares_statistics_under_one_bank_and_the_banks(digits, untouched, tmp_path):
    model = digits.networks["dual_bn"]
    x_adv = (digits.x + 0.1).clamp(0, 1)
    with untouched(model):
        found = branch_gap(model, digits.x, x_adv, batch_size=300)
    state = {name: value.double() for name, value in model.state_dict().items()}
    for layer in ("bn1", "bn2", "bn3"):
        weight, bias = ((state[f"{layer}.{k}_clean"] - state[f"{layer}.{k}_adv"]).numpy() for k in ("weight", "bias"))
        assert found.absolute["AP"][layer].std == pytest.approx((weight**2).sum())
        assert found.absolute["AP"][layer].mean == pytest.approx((bias**2).sum())
    compared = {"NS under adv": ("adv", "adv"), "NS under clean": ("clean", "clean"), "NS": ("clean", "adv")}
    for name, banks in compared.items():
        one, other = (
            collect_moments(model, images, pair=(bank, bank), statistics="batch_frozen", batch_size=300)["bn2"]
            for images, bank in zip((digits.x, x_adv), banks)
        )
        assert found.absolute[name]["bn2"].mean == pytest.approx((one.mean - other.mean).square().sum().item())
    figure = found.figure()
    assert len(figure.axes) == 4 and all(len(axes.get_lines()) == 4 for axes in figure.axes)
    assert len(figure.legends[0].get_texts()) == 4
    assert json.loads(found.save(tmp_path / "branches")[0].read_text()) == found.record()
    with pytest.raises(advnorm.ConfigError, match="it has: none"):
        branch_gap(digits.networks["bn"], digits.x, x_adv)


def test_a_run_of_two_branches_is_compared(digits):
    found = ANALYSES.get("branch_gap").run(digits.subject("dual_bn"))
    assert set(found.absolute) == {"NS under adv", "NS under clean", "NS", "AP"}
    assert found.conditions["crafted_through"] == "adv"


def swapped_by_hand(model):
    """A copy whose statistics banks have changed places."""
    fresh = copy.deepcopy(model)
    state = model.state_dict()
    for kind in ("running_mean", "running_var"):
        for layer in ("bn1", "bn2", "bn3"):
            for one, other in (("clean", "adv"), ("adv", "clean")):
                fresh.state_dict()[f"{layer}.{kind}_{one}"].copy_(state[f"{layer}.{kind}_{other}"])
    return fresh


def test_swapped_and_recalibrated_statistics_are_those_put_in_by_hand(digits, untouched):
    model = digits.networks["dual_bn"]
    x, y = digits.x[:96], digits.y[:96]
    attack = PGD(threat=THREAT, steps=2)
    x_adv = (x + 0.1).clamp(0, 1)
    steps = []
    with untouched(model):
        found = swap_table(
            model, x, y, {"pgd": attack}, x_adv=x_adv, batch_size=96, progress=lambda *at: steps.append(at)
        )
    assert steps == [(n, 6) for n in range(1, 7)]
    assert [(row.setup, row.ns, row.ap) for row in found.rows] == [
        ("default", ("adv", "adv"), "adv"),
        ("default", ("clean", "clean"), "clean"),
        ("swapped", ("clean", "clean"), "adv"),
        ("swapped", ("adv", "adv"), "clean"),
        ("re-calibrated", ("adv", "clean"), "adv"),
        ("re-calibrated", ("clean", "adv"), "clean"),
    ]
    calibrated = copy.deepcopy(model)
    advnorm.recalibrate(calibrated, x, route="adv", into="adv", batch_size=96)
    advnorm.recalibrate(calibrated, x_adv, route="clean", into="clean", batch_size=96)
    by_hand = {"default": model, "swapped": swapped_by_hand(model), "re-calibrated": calibrated}
    for row in found.rows:
        judged = by_hand[row.setup]
        with advnorm.route(judged, row.ap):
            images = attack(judged, x, y)
            with torch.no_grad():
                clean, robust = (judged(v).argmax(1) == y for v in (x, images))
        assert row.accuracy["clean"] == pytest.approx(clean.double().mean().item())
        assert row.accuracy["pgd"] == pytest.approx((clean & robust).double().mean().item(), abs=0.011)


def test_the_swap_table_of_a_run_is_drawn_and_saved(digits, tmp_path):
    few = {"images": digits.x[:64], "labels": digits.y[:64]}
    found = ANALYSES.get("swap_table").run(digits.subject("dual_bn", **few), attacks=["pgd2", "fgsm"])
    axes = found.figure().axes[0]
    assert len(axes.patches) == 18 and len(axes.get_yticklabels()) == 6
    assert json.loads(found.save(tmp_path / "swap")[0].read_text()) == found.record()
    assert set(found.rows[0].accuracy) == {"clean", "pgd2", "fgsm"}


def test_a_swap_needs_two_branches_and_attacks_that_go_through_both(digits):
    routed = PGD(threat=THREAT, steps=1, route="adv")
    with pytest.raises(advnorm.ConfigError, match=r"it has none; a norm .* dual_bn.*'pgd' must have no route"):
        swap_table(digits.networks["bn"], digits.x, digits.y, {"pgd": routed}, x_adv=digits.x)


@pytest.mark.parametrize("norm", ["cross_bn", "dual_affine_bn", "dual_affine_ln"])
def test_without_statistics_of_its_own_images_for_each_branch_there_is_nothing_to_swap(digits, norm):
    model = advnorm.create_model("small_cnn", num_classes=10, norm=norm, in_channels=1, normalize=False)
    with pytest.raises(advnorm.ConfigError, match=f"{norm} does not normalize each branch.*use dual_bn"):
        swap_table(model, digits.x, digits.y, {"pgd": PGD(threat=THREAT, steps=1)}, x_adv=digits.x)


def test_runs_of_one_name_are_refused_before_any_work(digits):
    def never(*_):
        raise AssertionError("an attack has begun")

    twice = [digits.subject("bn")] * 2
    with pytest.raises(advnorm.ConfigError, match="names of their own"):
        ANALYSES.get("domain_gap_table").run(twice, inputs=["adv"], progress=never)


def test_labels_of_another_shape_are_refused(digits):
    for labels in (digits.y[:, None], digits.y[:7]):
        with pytest.raises(advnorm.AdvnormError, match="one per clean image"):
            domain_gap(digits.networks["bn"], digits.x, digits.x, labels=labels)


def test_a_norm_without_parameters_keeps_its_place_in_the_figure_of_branches(digits):
    """AP have a layer less than NS: they were drawn one place too far to the left, and named wrongly."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, affine=False), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 10)).eval()
    advnorm.convert_norm(model, "dual_bn")
    figure = branch_gap(model, digits.x, digits.x).figure()
    axes = figure.axes[2]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1", "3"]
    by_label = {line.get_label(): list(line.get_xdata()) for line in axes.get_lines()}
    assert sorted(map(tuple, by_label.values())) == [(0, 1), (0, 1), (0, 1), (1,)]
    assert next(places for label, places in by_label.items() if label.startswith("AP")) == [1]


def test_the_table_of_runs_looks_at_the_statistics_that_are_asked_for(digits):
    found = ANALYSES.get("domain_gap_table").run([digits.subject("bn")], inputs=["adv"], statistics="batch_frozen")
    own = ANALYSES.get("domain_gap").run(digits.subject("bn"), inputs=["adv"], statistics="batch_frozen")
    other = ANALYSES.get("domain_gap").run(digits.subject("bn"), inputs=["adv"])
    assert found.rows["bn"].sums == own.sums != other.sums
