"""Selected channels against buffers and activations, and batches against running statistics."""

import json

import pytest
import torch

from advnorm._core.shapes import with_digest
from advnorm.analysis import ANALYSES, batch_channels, channel_statistics, collect_moments, stored_channels
from advnorm.analysis.channel_statistics import _channel_numbers
from support.problems import raises_problem


def test_channels_are_drawn_once_each_by_the_seed():
    drawn = _channel_numbers(64, 20, 0)
    assert drawn == sorted(set(drawn)) and len(drawn) == 20 and set(drawn) <= set(range(64))
    assert drawn == _channel_numbers(64, 20, 0) != _channel_numbers(64, 20, 1)
    assert _channel_numbers(16, 20, 0) == list(range(16))
    assert _channel_numbers(64, [5, 3], 0) == [5, 3]
    for wrong in (0, [64], []):
        with raises_problem("out_of_range", "channels"):
            _channel_numbers(64, wrong, 0)


def test_statistics_and_affine_parameters_of__channel_numbers(digits, untouched):
    model = digits.networks["dual_bn"]
    with untouched(model):
        found = channel_statistics(
            model, {"clean": digits.x, "adv": digits.x.flip(2)}, layer="bn3", channels=[7, 0], batch_size=300
        )
    assert list(found.statistics) == ["NS^clean_clean", "NS^clean_adv", "NS^adv_clean", "NS^adv_adv"]
    moments = collect_moments(model, digits.x, pair=("adv", "adv"), statistics="batch_frozen", batch_size=300)["bn3"]
    assert torch.equal(found.statistics["NS^adv_clean"].mean, moments.mean[[7, 0]])
    assert torch.equal(found.statistics["NS^adv_clean"].std, moments.unbiased_variance.sqrt()[[7, 0]])
    assert found.affine["AP_clean"].weight.tolist() == model.bn3.weight_clean[[7, 0]].double().tolist()
    assert found.affine["AP_adv"].bias.tolist() == model.bn3.bias_adv[[7, 0]].double().tolist()


def test_stored_statistics_of_both_banks(digits):
    model = digits.networks["dual_bn"]
    found = stored_channels(model, channels=4)
    assert found.layer == "bn2" and len(found.channels) == 4
    assert list(found.statistics) == ["NS^clean_running", "NS^adv_running"]
    expected = model.bn2.running_mean_adv[found.channels].double()
    assert torch.equal(found.statistics["NS^adv_running"].mean, expected)
    single = stored_channels(digits.networks["bn"], layer="bn1")
    assert list(single.statistics) == ["NS_running"] and list(single.affine) == ["AP"]
    with raises_problem("not_supported", "layer"):
        stored_channels(digits.networks["none"])


def test_random_batches_are_compared_with_the_running_statistics(digits):
    model = digits.networks["bn"]
    found = batch_channels(model, digits.x, count=2, layer="bn1", channels=[1, 2], batch_size=150)
    assert list(found.statistics) == ["running", "batch 1", "batch 2"] and not found.affine
    order = torch.randperm(300, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        rows = model.conv1(digits.x[order[150:]]).double()[:, [1, 2]]
    torch.testing.assert_close(found.statistics["batch 2"].mean, rows.mean((0, 2, 3)), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(found.statistics["batch 2"].std, rows.std((0, 2, 3)), rtol=1e-5, atol=1e-7)
    with raises_problem("conflict", "count"):
        batch_channels(model, digits.x)


@pytest.mark.parametrize(
    ("name", "norm"),
    [
        ("channels", "dual_bn"),
        ("stored_channels", "bn"),
        ("batch_channels", "dual_bn"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("channels", "bn"), ("stored_channels", "dual_bn"), ("batch_channels", "bn"))
        ),
    ],
)
def test_channels_of_a_run_are_drawn_and_saved(digits, untouched, tmp_path, name, norm):
    target = digits.target(norm)
    with untouched(target.model):
        found = ANALYSES.get(name).run(target)
    assert len(found.channels) == 20
    figure = found.figure()
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == ["Mean μ", "Deviation σ", "Bias β", "Weight γ"][: 2 if name == "batch_channels" else 4]
    assert [len(axes.get_lines()) for axes in figure.axes[:2]] == [len(found.statistics)] * 2
    paths = found.save(tmp_path / name)
    assert [path.suffix for path in paths] == [".json", ".svg", ".png"]
    assert json.loads(paths[0].read_text()) == with_digest(found.record())
    assert found.record()["conditions"]["subject"] == norm


@pytest.mark.parametrize("domain", ["clean", "adv"])
@pytest.mark.parametrize("norm", ["dual_bn", "cross_bn"])
def test_a_batch_equals_the_bank_that_it_updated(digits, updated_once, norm, domain):
    inputs = {"clean": digits.x[:100], "adv": digits.x[:100].flip(2)}
    model = updated_once(norm, *inputs.values(), "concatenated")
    found = batch_channels(model, inputs[domain], count=1, layer="bn3", route=domain, batch_size=100).statistics
    torch.testing.assert_close(found["batch 1"], found["running"], rtol=1e-4, atol=1e-5)
