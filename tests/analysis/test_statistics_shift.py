"""The moments of batches against the running statistics that they update."""

import json

import pytest

import advnorm
from advnorm._core.shapes import with_digest
from advnorm.analysis import ANALYSES, ShiftAlongTraining, batch_channels, collect_moments, statistics_shift
from support.problems import raises_problem


def test_a_batch_whose_moments_are_stored_has_distance_zero(digits, untouched):
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
    expected = moments.mean.square().sum() + (moments.unbiased_variance.sqrt() - 1).square().sum()
    assert found.layers["adv"]["bn2"][0] == pytest.approx(expected.item())


def test_shifts_along_training_become_a_trend(digits, tmp_path):
    target = digits.target("dual_bn")
    shift = ANALYSES.get("statistics_shift").run(target)
    assert shift.conditions["routes"] == {"clean": "clean", "adv": "adv"}
    single = shift.figure().axes[0]
    assert single.get_title(loc="left") == "Batches against running statistics" and len(single.get_lines()) == 2
    trend = ShiftAlongTraining(shifts={20: shift, 0: shift})
    axes = trend.figure().axes[0]
    assert [line.get_xdata().tolist() for line in axes.get_lines()] == [[0, 20], [0, 20]]
    assert axes.get_lines()[1].get_ydata().tolist() == [shift.sums["adv"]] * 2
    for found in (shift, trend):
        paths = found.save(tmp_path / type(found).__name__)
        assert json.loads(paths[0].read_text()) == with_digest(found.record())


@pytest.mark.parametrize("norm", ["bn", "dual_bn", "dual_affine_bn", "dual_stats_bn", "cross_bn", "gmm_bn"])
def test_batches_of_a_concatenated_step_have_distance_zero_in_its_layout(digits, untouched, updated_once, norm):
    inputs = {"clean": digits.x[:100], "adv": digits.x[:100].flip(2)}
    model = updated_once(norm, *inputs.values(), "concatenated")
    with untouched(model):
        found = statistics_shift(model, inputs, layout="concatenated", batch_size=100)
    assert found.sums["clean"] < 1e-8 and found.sums["adv"] < 1e-8
    others = {"clean": inputs["clean"] / 2, "adv": inputs["adv"] / 2}
    assert statistics_shift(model, others, layout="concatenated").sums["adv"] > 1e-3
    if norm in ("bn", "dual_affine_bn"):  # one batch has other moments than both together
        assert statistics_shift(model, inputs, routes=found.conditions["routes"]).sums["clean"] > 1e-3


def test_each_kind_of_images_in_a_concatenated_batch_has_a_curve_of_its_own(digits, untouched, updated_once):
    """Together both halves have the moments that the bank stores; alone each is as far from it as the other."""
    inputs = {"clean": digits.x[:100], "adv": (digits.x[:100] + 0.3).clamp(0, 1)}
    model = updated_once("bn", *inputs.values(), "concatenated")
    with untouched(model):
        found = statistics_shift(model, inputs, layout="concatenated", moments="own", batch_size=100)
    moments = collect_moments(model, inputs["clean"], statistics="running")["bn1"]  # the first norm's inputs
    stored = model.bn1
    mean, std = (part.double().flatten() for part in (stored.running_mean, stored.running_var.sqrt()))
    expected = (moments.mean - mean).square().sum() + (moments.unbiased_variance.sqrt() - std).square().sum()
    assert found.layers["clean"]["bn1"][0] == pytest.approx(expected.item(), rel=1e-5)
    assert found.sums["clean"] != pytest.approx(found.sums["adv"], rel=1e-3) and min(found.sums.values()) > 1e-3
    run = ANALYSES.get("statistics_shift").run(digits.target("bn"), layout="concatenated", moments="own")
    assert run.conditions["moments"] == "own" and run.sums["clean"] != run.sums["adv"]


def test_a_sequential_step_stores_the_statistics_of_its_last_batch(digits, updated_once):
    inputs = {"clean": digits.x[:100], "adv": digits.x[:100].flip(2)}
    found = statistics_shift(updated_once("bn", *inputs.values(), "sequential"), inputs, batch_size=100)
    assert found.sums["adv"] < 1e-8 < 1e-3 < found.sums["clean"]


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
    origin = {} if objective is None else {"training": {"objective": objective}}
    found = ANALYSES.get("statistics_shift").run(digits.target("bn", origin=origin))
    assert found.conditions["layout"] == layout
    other = ANALYSES.get("statistics_shift").run(digits.target("bn", origin=origin), inputs=["clean", "noise"])
    assert other.conditions["layout"] == "sequential"
    assert (found.sums["clean"] == found.sums["adv"]) == (layout == "concatenated")


def test_a_layout_that_does_not_fit_raises(digits):
    inputs = {"clean": digits.x, "adv": digits.x}
    both = {"clean": "adv", "adv": "adv"}
    with raises_problem("unknown_name", "layout"):
        statistics_shift(digits.networks["bn"], inputs, layout="concat")
    with raises_problem("conflict", "routes"):
        statistics_shift(digits.networks["dual_bn"], inputs, routes=both, layout="concatenated")
    with raises_problem("wrong_shape", "inputs"):
        statistics_shift(digits.networks["bn"], {**inputs, "adv": digits.x[:10]}, layout="concatenated", batch_size=100)
    mixture = advnorm.create_model("small_cnn", num_classes=10, norm="gmm_bn", in_channels=1, normalize=False)
    with raises_problem("conflict", "layout"):
        statistics_shift(mixture, inputs)
    with raises_problem("out_of_range", "count") as caught:
        batch_channels(mixture, digits.x, count=0)
    assert caught.value.problems[1].code == "not_supported"
    with raises_problem("out_of_range", "count"):
        ANALYSES.get("batch_channels").run(digits.target("bn"), count=0)


def test_a_shift_needs_a_branch_for_every_kind_of_images(digits):
    with raises_problem("missing_route", "routes"):
        statistics_shift(digits.networks["dual_bn"], {"noise": digits.x})
    found = statistics_shift(digits.networks["dual_bn"], {"noise": digits.x}, routes={"noise": "adv"})
    assert list(found.layers) == ["noise"]
