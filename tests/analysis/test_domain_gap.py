"""Distances between kinds of images against their activations."""

import copy
import json

import numpy as np
import pytest
import torch

import advnorm
from advnorm._core.shapes import with_digest
from advnorm.analysis import ANALYSES, domain_gap
from support.problems import raises_problem


def test_the_relative_distance_does_not_depend_on_the_scale_of_the_weights_before_a_norm(digits):
    model = digits.networks["bn"]
    scaled = copy.deepcopy(model)
    with torch.no_grad():
        scaled.conv2.weight.mul_(10)
        scaled.bn2.running_mean.mul_(10)
        scaled.bn2.running_var.mul_(100)
    noisy = (digits.x + 0.2).clamp(0, 1)
    before, after = (domain_gap(network, digits.x, noisy) for network in (model, scaled))
    pair = ("clean", "adv")
    assert after.layers[pair]["bn2"].total == pytest.approx(100 * before.layers[pair]["bn2"].total, rel=1e-3)
    assert after.relative_layers[pair]["bn2"].total == pytest.approx(
        before.relative_layers[pair]["bn2"].total, rel=1e-3
    )
    assert after.relative_layers[pair]["bn3"].total == pytest.approx(
        before.relative_layers[pair]["bn3"].total, rel=1e-2
    )


def test_the_gap_of_a_network_is_that_of_its_activations(digits, untouched):
    model = digits.networks["dual_bn"]
    inputs = {"clean": digits.x, "adv": (digits.x + 0.1).clamp(0, 1), "noise": digits.x.flip(3)}
    with untouched(model):
        found = domain_gap(
            model, inputs["clean"], inputs["adv"], others={"noise": inputs["noise"]}, labels=digits.y, route="adv"
        )
    assert list(found.layers) == [("clean", "adv"), ("clean", "noise"), ("adv", "noise")]
    rows = {}
    handle = model.bn3.register_forward_pre_hook(lambda _, args: rows.__setitem__(name, args[0].double().numpy()))
    with advnorm.route(model, "adv"), torch.no_grad():
        for name, images in inputs.items():
            right = (model(images).argmax(1) == digits.y).double().mean().item()
            assert found.accuracy[name] == pytest.approx(right)
    handle.remove()
    for (a, b), layers in found.layers.items():
        expected = sum(
            ((f(rows[a], axis=(0, 2, 3)) - f(rows[b], axis=(0, 2, 3))) ** 2).sum() for f in (np.mean, np.std)
        )
        assert layers["bn3"].total == pytest.approx(expected, rel=1e-4)
    assert found.sums["clean", "adv"] == pytest.approx(sum(d.total for d in found.layers["clean", "adv"].values()))


def test_equal_images_have_distance_zero(digits):
    found = domain_gap(digits.networks["none"], digits.x, digits.x.clone())
    assert found.sums == {("clean", "adv"): 0.0}


def test_the_gap_of_a_run_is_drawn_and_saved(digits, tmp_path, untouched):
    target = digits.target("dual_bn")
    with untouched(target.model):
        found = ANALYSES.get("domain_gap").run(target)
    figure = found.figure()
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["Means μ", "Deviations σ"] * 2
    for axes, part in zip(figure.axes, ("mean", "std") * 2):
        gaps = found.layers if axes in figure.axes[:2] else found.relative_layers
        expected = [getattr(distance, part) for distance in gaps["clean", "noise"].values()]
        assert axes.get_lines()[1].get_ydata().tolist() == expected and axes.get_ylim()[1] > max(expected)
    assert all(len(axes.get_lines()) == 3 for axes in figure.axes)
    assert [text.get_text().split(" (")[0] for text in figure.legends[0].get_texts()] == [
        "clean – adv",
        "clean – noise",
        "adv – noise",
    ]
    paths = found.save(tmp_path / "gap")
    record = json.loads(paths[0].read_text())
    assert [path.suffix for path in paths] == [".json", ".svg", ".png"] and record == with_digest(found.record())
    assert record["sums"]["clean-adv"] == found.sums["clean", "adv"] > 0
    assert set(record["accuracy"]) == {"clean", "adv", "noise"} and record["conditions"]["route"] == "adv"
    with raises_problem("missing_option", "inputs"):
        ANALYSES.get("domain_gap").run(target, inputs=["noise"])


def test_several_runs_make_a_table(digits, tmp_path):
    targets = [digits.target(norm) for norm in ("bn", "dual_bn", "none")]
    found = ANALYSES.get("domain_gap_table").run(targets, inputs=["adv", "autoattack-steps2-queries3"])
    assert list(found.runs) == ["bn", "dual_bn", "none"]
    axes = found.figure().axes[0]
    assert len(axes.patches) == 9
    assert [text.get_text().split("\n")[0] for text in axes.get_yticklabels()] == ["bn", "dual_bn", "none"]
    assert json.loads(found.save(tmp_path / "table")[0].read_text()) == with_digest(found.record())
    many = ANALYSES.get("domain_gap_table").run(targets[:1], inputs=["adv", "noise", "fgsm", "pgd2"])  # ten pairs
    styles = {(patch.get_facecolor(), patch.get_hatch()) for patch in many.figure().axes[0].patches}
    assert len(styles) == 10
    with raises_problem("conflict", "targets"):
        ANALYSES.get("domain_gap_table").run(targets[:1] * 2, inputs=["adv"])


def test_runs_of_one_name_raise_before_any_work(digits):
    def never(*_):
        raise AssertionError("an attack has started")

    twice = [digits.target("bn")] * 2
    with raises_problem("conflict", "targets"):
        ANALYSES.get("domain_gap_table").run(twice, inputs=["adv"], progress=never)


def test_labels_of_another_shape_raise(digits):
    for labels in (digits.y[:, None], digits.y[:7]):
        with raises_problem("wrong_shape", "labels"):
            domain_gap(digits.networks["bn"], digits.x, digits.x, labels=labels)


def test_the_table_of_runs_uses_the_given_statistics(digits):
    found = ANALYSES.get("domain_gap_table").run([digits.target("bn")], inputs=["adv"], statistics="batch_frozen")
    own = ANALYSES.get("domain_gap").run(digits.target("bn"), inputs=["adv"], statistics="batch_frozen")
    other = ANALYSES.get("domain_gap").run(digits.target("bn"), inputs=["adv"])
    assert found.runs["bn"].sums == own.sums != other.sums
