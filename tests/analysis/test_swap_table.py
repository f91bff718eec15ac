"""Swapped and re-calibrated statistics against buffers that are changed by hand."""

import copy
import json

import pytest
import torch

import advnorm
from advnorm._core.shapes import with_digest
from advnorm.analysis import ANALYSES, reporting_progress, swap_table
from advnorm.attacks import PGD
from support.problems import raises_problem

THREAT = advnorm.ThreatModel(eps=0.1)


def swapped_by_hand(model):
    """Return a copy with exchanged statistics banks."""
    fresh = copy.deepcopy(model)
    state = model.state_dict()
    for kind in ("running_mean", "running_var"):
        for layer in ("bn1", "bn2", "bn3"):
            for one, other in (("clean", "adv"), ("adv", "clean")):
                fresh.state_dict()[f"{layer}.{kind}_{one}"].copy_(state[f"{layer}.{kind}_{other}"])
    return fresh


def test_swapped_and_recalibrated_statistics_equal_those_set_by_hand(digits, untouched):
    model = digits.networks["dual_bn"]
    x, y = digits.x[:96], digits.y[:96]
    attack = PGD(threat=THREAT, steps=2)
    x_adv = (x + 0.1).clamp(0, 1)
    steps = []
    with untouched(model), reporting_progress(lambda *at: steps.append(at)):
        found = swap_table(model, x, y, {"pgd": attack}, x_adv=x_adv, batch_size=96)
    assert steps == [(n, 8) for n in range(1, 9)]
    assert [(row.setup, row.ns, row.ap) for row in found.rows] == [
        ("default", ("adv", "adv"), "adv"),
        ("default", ("clean", "clean"), "clean"),
        ("swapped", ("clean", "clean"), "adv"),
        ("swapped", ("adv", "adv"), "clean"),
        ("re-calibrated", ("adv", "clean"), "adv"),
        ("re-calibrated", ("clean", "adv"), "clean"),
        ("control", ("adv", "adv"), "adv"),
        ("control", ("clean", "clean"), "clean"),
    ]
    calibrated = copy.deepcopy(model)
    advnorm.recalibrate(calibrated, x, route="adv", into="adv", batch_size=96)
    advnorm.recalibrate(calibrated, x_adv, route="clean", into="clean", batch_size=96)
    control = copy.deepcopy(model)
    advnorm.recalibrate(control, x_adv, route="adv", into="adv", batch_size=96)
    advnorm.recalibrate(control, x, route="clean", into="clean", batch_size=96)
    by_hand = {
        "default": model,
        "swapped": swapped_by_hand(model),
        "re-calibrated": calibrated,
        "control": control,
    }
    for row in found.rows:
        network = by_hand[row.setup]
        with advnorm.route(network, row.ap):
            images = attack(network, x, y)
            with torch.no_grad():
                clean, robust = (network(v).argmax(1) == y for v in (x, images))
        assert row.accuracy["clean"] == pytest.approx(clean.double().mean().item())
        assert row.accuracy["pgd"] == pytest.approx((clean & robust).double().mean().item(), abs=0.011)


def test_the_swap_table_of_a_run_is_drawn_and_saved(digits, tmp_path):
    few = {"images": digits.x[:64], "labels": digits.y[:64]}
    found = ANALYSES.get("swap_table").run(digits.target("dual_bn", **few), attacks=["pgd2", "fgsm"])
    axes = found.figure().axes[0]
    assert len(axes.patches) == 24 and len(axes.get_yticklabels()) == 8
    assert json.loads(found.save(tmp_path / "swap")[0].read_text()) == with_digest(found.record())
    assert set(found.rows[0].accuracy) == {"clean", "pgd2", "fgsm"}


def test_a_swap_needs_two_branches_and_attacks_without_a_route(digits):
    routed = PGD(threat=THREAT, steps=1, route="adv")
    with raises_problem("wrong_route", "domains") as caught:
        swap_table(digits.networks["bn"], digits.x, digits.y, {"pgd": routed}, x_adv=digits.x)
    assert (caught.value.problems[1].code, caught.value.problems[1].field) == ("conflict", "attacks")
    with raises_problem("empty", "attacks"):
        swap_table(digits.networks["dual_bn"], digits.x, digits.y, {}, x_adv=digits.x)


@pytest.mark.parametrize("norm", ["cross_bn", "dual_affine_bn", "dual_affine_ln"])
def test_norms_without_own_statistics_for_each_branch_raise(digits, norm):
    model = advnorm.create_model("small_cnn", num_classes=10, norm=norm, in_channels=1, normalize=False)
    with raises_problem("not_supported", "model"):
        swap_table(model, digits.x, digits.y, {"pgd": PGD(threat=THREAT, steps=1)}, x_adv=digits.x)
