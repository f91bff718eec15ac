"""Chosen channels against buffers and activations; batches against the statistics that they would feed."""

import json

import pytest
import torch

import advnorm
from advnorm.analysis.base import ANALYSES
from advnorm.analysis.channels import (
    ShiftAlongTraining,
    batch_channels,
    channel_statistics,
    chosen_channels,
    statistics_shift,
    stored_channels,
)
from advnorm.analysis.moments import collect_moments
from advnorm.norms import routed_modules
from advnorm.objectives import Hybrid


def test_channels_are_drawn_by_lot_once_each_and_by_seed():
    drawn = chosen_channels(64, 20, 0)
    assert drawn == sorted(set(drawn)) and len(drawn) == 20 and set(drawn) <= set(range(64))
    assert drawn == chosen_channels(64, 20, 0) != chosen_channels(64, 20, 1)
    assert chosen_channels(16, 20, 0) == list(range(16))
    assert chosen_channels(64, [5, 3], 0) == [5, 3]
    for wrong in (0, [64], []):
        with pytest.raises(advnorm.ConfigError, match="channels"):
            chosen_channels(64, wrong, 0)


def test_statistics_and_affine_parameters_of_chosen_channels(digits, untouched):
    model = digits.networks["dual_bn"]
    with untouched(model):
        found = channel_statistics(
            model, {"clean": digits.x, "adv": digits.x.flip(2)}, layer="bn3", channels=[7, 0], batch_size=300
        )
    assert list(found.statistics) == ["NS^clean_clean", "NS^clean_adv", "NS^adv_clean", "NS^adv_adv"]
    moments = collect_moments(model, digits.x, pair=("adv", "adv"), statistics="batch_frozen", batch_size=300)["bn3"]
    assert torch.equal(found.statistics["NS^adv_clean"].mean, moments.mean[[7, 0]])
    assert torch.equal(found.statistics["NS^adv_clean"].std, moments.unbiased.sqrt()[[7, 0]])
    assert found.affine["AP_clean"].std.tolist() == model.bn3.weight_clean[[7, 0]].double().tolist()
    assert found.affine["AP_adv"].mean.tolist() == model.bn3.bias_adv[[7, 0]].double().tolist()


def test_stored_statistics_of_both_banks(digits):
    model = digits.networks["dual_bn"]
    found = stored_channels(model, channels=4)
    assert found.layer == "bn2" and len(found.channels) == 4
    assert list(found.statistics) == ["NS^clean_running", "NS^adv_running"]
    expected = model.bn2.running_mean_adv[found.channels].double()
    assert torch.equal(found.statistics["NS^adv_running"].mean, expected)
    single = stored_channels(digits.networks["bn"], layer="bn1")
    assert list(single.statistics) == ["NS_running"] and list(single.affine) == ["AP"]
    with pytest.raises(advnorm.ConfigError, match="stores no statistics"):
        stored_channels(digits.networks["none"])


def test_batches_stand_beside_the_running_statistics(digits):
    model = digits.networks["bn"]
    found = batch_channels(model, digits.x, count=2, layer="bn1", channels=[1, 2], batch_size=150)
    assert list(found.statistics) == ["running", "batch 1", "batch 2"] and not found.affine
    order = torch.randperm(300, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        rows = model.conv1(digits.x[order[150:]]).double()[:, [1, 2]]
    torch.testing.assert_close(found.statistics["batch 2"].mean, rows.mean((0, 2, 3)), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(found.statistics["batch 2"].std, rows.std((0, 2, 3)), rtol=1e-5, atol=1e-7)
    with pytest.raises(advnorm.ConfigError, match="need 512 images"):
        batch_channels(model, digits.x)


@pytest.mark.parametrize("name", ["channels", "stored_channels", "batch_channels"])
@pytest.mark.parametrize("norm", ["bn", "dual_bn"])
def test_channels_of_a_run_are_drawn_and_saved(digits, untouched, tmp_path, name, norm):
    subject = digits.subject(norm)
    with untouched(subject.model):
        found = ANALYSES.get(name).run(subject)
    assert len(found.channels) == 20
    figure = found.figure()
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == ["Mean μ", "Deviation σ", "Bias β", "Weight γ"][: 2 if name == "batch_channels" else 4]
    assert [len(axes.get_lines()) for axes in figure.axes[:2]] == [len(found.statistics)] * 2
    paths = found.save(tmp_path / name)
    assert [path.suffix for path in paths] == [".json", ".svg", ".png"]
    assert json.loads(paths[0].read_text()) == found.record()
    assert found.record()["conditions"]["subject"] == norm


def test_a_batch_whose_moments_are_stored_lies_at_distance_zero(digits, untouched):
    model = advnorm.create_model("small_cnn", num_classes=10, norm="dual_bn", in_channels=1, normalize=False)
    advnorm.recalibrate(model, digits.x[:128], route="clean", batch_size=128)
    with untouched(model):
        found = statistics_shift(model, {"clean": [digits.x[:128], digits.x[128:256]], "adv": digits.x}, batch_size=100)
    assert [len(values) for values in found.layers["clean"].values()] == [2, 2, 2]
    assert [len(values) for values in found.layers["adv"].values()] == [3, 3, 3]
    for stored, other in found.layers["clean"].values():
        assert stored < 1e-8 < 1e-5 < other
    # An untrained bank holds mean 0 and deviation 1.
    moments = collect_moments(model, digits.x[:100], pair=("adv", "adv"), statistics="batch_frozen")["bn2"]
    expected = moments.mean.square().sum() + (moments.unbiased.sqrt() - 1).square().sum()
    assert found.layers["adv"]["bn2"][0] == pytest.approx(expected.item())


def test_shifts_along_training_become_a_trend(digits, tmp_path):
    subject = digits.subject("dual_bn")
    shift = ANALYSES.get("statistics_shift").run(subject)
    assert shift.conditions["routes"] == {"clean": "clean", "adv": "adv"}
    single = shift.figure().axes[0]
    assert single.get_title(loc="left") == "Batches against running statistics" and len(single.get_lines()) == 2
    trend = ShiftAlongTraining(shifts={20: shift, 0: shift})
    axes = trend.figure().axes[0]
    assert [line.get_xdata().tolist() for line in axes.get_lines()] == [[0, 20], [0, 20]]
    assert axes.get_lines()[1].get_ydata().tolist() == [shift.sums["adv"]] * 2
    for found in (shift, trend):
        paths = found.save(tmp_path / type(found).__name__)
        assert json.loads(paths[0].read_text()) == found.record()


def fed_once(norm, x, x_adv, layout):
    """A network whose running statistics are those of one training step, and whose affine banks differ."""
    torch.manual_seed(0)
    model = advnorm.create_model("small_cnn", num_classes=10, norm=norm, in_channels=1, normalize=False)
    for module in routed_modules(model).values():
        module.momentum = 1.0
        for parameter in module.parameters():
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    attack = advnorm.attacks.PGD(threat=advnorm.ThreatModel(eps=0.1), steps=1)
    Hybrid(model.train(), attack).domain_logits({"clean": x, "adv": x_adv}, layout)
    return model


@pytest.mark.parametrize("norm", ["bn", "dual_bn", "dual_affine_bn", "dual_stats_bn", "cross_bn", "gmm_bn"])
def test_batches_that_a_concatenated_step_fed_lie_at_distance_zero_in_its_layout(digits, untouched, norm):
    inputs = {"clean": digits.x[:100], "adv": digits.x[:100].flip(2)}
    model = fed_once(norm, *inputs.values(), "concatenated")
    with untouched(model):
        found = statistics_shift(model, inputs, layout="concatenated", batch_size=100)
    assert found.sums["clean"] < 1e-8 and found.sums["adv"] < 1e-8
    others = {"clean": inputs["clean"] / 2, "adv": inputs["adv"] / 2}
    assert statistics_shift(model, others, layout="concatenated").sums["adv"] > 1e-3
    if norm in ("bn", "dual_affine_bn"):  # a batch alone has other moments than both together
        assert statistics_shift(model, inputs, routes=found.conditions["routes"]).sums["clean"] > 1e-3


def test_a_sequential_step_leaves_the_statistics_of_its_last_batch(digits):
    inputs = {"clean": digits.x[:100], "adv": digits.x[:100].flip(2)}
    found = statistics_shift(fed_once("bn", *inputs.values(), "sequential"), inputs, batch_size=100)
    assert found.sums["adv"] < 1e-8 < 1e-3 < found.sums["clean"]


@pytest.mark.parametrize("domain", ["clean", "adv"])
@pytest.mark.parametrize("norm", ["dual_bn", "cross_bn"])
def test_a_batch_is_set_beside_the_bank_as_it_fed_it(digits, norm, domain):
    inputs = {"clean": digits.x[:100], "adv": digits.x[:100].flip(2)}
    model = fed_once(norm, *inputs.values(), "concatenated")
    found = batch_channels(model, inputs[domain], count=1, layer="bn3", route=domain, batch_size=100).statistics
    torch.testing.assert_close(found["batch 1"], found["running"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("objective", "layout"),
    [
        ({"name": "hybrid"}, "concatenated"),
        ({"name": "trades", "layout": "sequential"}, "sequential"),
        ({"name": "standard"}, "sequential"),
        (None, "sequential"),
    ],
)
def test_the_layout_of_a_run_is_that_of_its_training(digits, objective, layout):
    told = {} if objective is None else {"training": {"objective": objective}}
    found = ANALYSES.get("statistics_shift").run(digits.subject("bn", origin=told))
    assert found.conditions["layout"] == layout
    other = ANALYSES.get("statistics_shift").run(digits.subject("bn", origin=told), inputs=["clean", "noise"])
    assert other.conditions["layout"] == "sequential"
    assert (found.sums["clean"] == found.sums["adv"]) == (layout == "concatenated")


def test_what_is_wrong_with_a_layout_is_told_at_once(digits):
    inputs = {"clean": digits.x, "adv": digits.x}
    both = {"clean": "adv", "adv": "adv"}
    with pytest.raises(advnorm.ConfigError, match="unknown layout 'concat', did you mean 'concatenated'"):
        statistics_shift(digits.networks["bn"], inputs, layout="concat")
    with pytest.raises(advnorm.ConfigError, match="one kind of images for each branch"):
        statistics_shift(digits.networks["dual_bn"], inputs, routes=both, layout="concatenated")
    with pytest.raises(advnorm.ConfigError, match="as many of each kind of images: clean, adv"):
        statistics_shift(digits.networks["bn"], {**inputs, "adv": digits.x[:10]}, layout="concatenated", batch_size=100)
    mixture = advnorm.create_model("small_cnn", num_classes=10, norm="gmm_bn", in_channels=1, normalize=False)
    with pytest.raises(advnorm.ConfigError, match="use layout='concatenated'"):
        statistics_shift(mixture, inputs)
    with pytest.raises(advnorm.ConfigError, match=r"count must be .* got 0; a mixture norm .* stored_channels"):
        batch_channels(mixture, digits.x, count=0)
    with pytest.raises(advnorm.ConfigError, match="count must be a number of batches"):
        ANALYSES.get("batch_channels").run(digits.subject("bn"), count=0)


def test_a_shift_needs_a_branch_for_every_kind_of_images(digits):
    with pytest.raises(advnorm.ConfigError, match="no branch for 'noise'.*clean, adv"):
        statistics_shift(digits.networks["dual_bn"], {"noise": digits.x})
    found = statistics_shift(digits.networks["dual_bn"], {"noise": digits.x}, routes={"noise": "adv"})
    assert list(found.layers) == ["noise"]
