"""Distances between the branches of a network."""

import json

import pytest
import torch
from torch import nn

import advnorm
from advnorm._core.shapes import with_digest
from advnorm.analysis import ANALYSES, branch_gap, collect_moments
from support.problems import raises_problem


def test_the_gap_of_branches_compares_statistics_under_one_bank_and_the_banks(digits, untouched, tmp_path):
    model = digits.networks["dual_bn"]
    x_adv = (digits.x + 0.1).clamp(0, 1)
    with untouched(model):
        found = branch_gap(model, digits.x, x_adv, batch_size=300)
    state = {name: value.double() for name, value in model.state_dict().items()}
    for layer in ("bn1", "bn2", "bn3"):
        weight, bias = ((state[f"{layer}.{k}_clean"] - state[f"{layer}.{k}_adv"]).numpy() for k in ("weight", "bias"))
        assert found.layers["AP"][layer].std == pytest.approx((weight**2).sum())
        assert found.layers["AP"][layer].mean == pytest.approx((bias**2).sum())
    compared = {"NS under adv": ("adv", "adv"), "NS under clean": ("clean", "clean"), "NS": ("clean", "adv")}
    for name, banks in compared.items():
        one, other = (
            collect_moments(model, images, pair=(bank, bank), statistics="batch_frozen", batch_size=300)["bn2"]
            for images, bank in zip((digits.x, x_adv), banks)
        )
        assert found.layers[name]["bn2"].mean == pytest.approx((one.mean - other.mean).square().sum().item())
    figure = found.figure()
    assert len(figure.axes) == 4 and all(len(axes.get_lines()) == 4 for axes in figure.axes)
    assert len(figure.legends[0].get_texts()) == 4
    assert json.loads(found.save(tmp_path / "branches")[0].read_text()) == with_digest(found.record())
    with raises_problem("wrong_route", "domains"):
        branch_gap(digits.networks["bn"], digits.x, x_adv)


def test_a_run_of_two_branches_is_compared(digits):
    found = ANALYSES.get("branch_gap").run(digits.target("dual_bn"))
    assert set(found.layers) == {"NS under adv", "NS under clean", "NS", "AP"}
    assert found.conditions["crafted_through"] == "adv"


def test_a_norm_without_parameters_keeps_its_place_in_the_figure_of_branches(digits):
    """AP have a layer less than NS and must not shift to the left."""
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
