"""Images that are crafted from an evaluation target, and the conditions in a record."""

import json

import pytest
import torch

import advnorm
from advnorm.analysis import ANALYSES
from advnorm.analysis.images import craft_inputs
from advnorm.attacks import PGD


def test_inputs_are_crafted_by_name_inside_the_ball(digits, untouched):
    target = digits.target("dual_bn")
    names = ("clean", "adv", "noise", "pgd3", "autoattack-steps2-queries3")
    with untouched(target.model):
        found = craft_inputs(target, names, route="clean")
    assert tuple(found) == names
    assert torch.equal(found["clean"], digits.x)
    for name in names[1:]:
        distance = (found[name] - digits.x).abs().amax()
        assert 0 < distance <= target.attack.threat.eps
    with advnorm.route(target.model, "clean"):
        whole = target.attack(target.model, digits.x, digits.y)
    assert (found["adv"] - whole).abs().amax() <= 2 * target.attack.threat.eps
    assert (found["adv"] == whole).double().mean() > 0.99, "noise belongs to an image, not to its batch"
    with pytest.raises(advnorm.ConfigError):
        craft_inputs(target, ["pdg"])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("domain_gap", {}),
        ("channels", {}),
        ("moments", {}),
        ("branch_gap", {}),
        ("swap_table", {"attacks": ["pgd1"]}),
        ("statistics_shift", {}),
        ("projection", {"inputs": ["clean", "adv"], "samples": 20}),
        ("batch_channels", {}),
    ],
)
def test_crafting_images_changes_no_statistics_for_any_attack(digits, untouched, name, options):
    attack = PGD(threat=advnorm.ThreatModel(eps=0.1), steps=1, statistics="batch")
    target = digits.target("dual_bn", attack=attack)
    with untouched(target.model):
        found = ANALYSES.get(name).run(target, **options)
    assert json.dumps(found.record(), allow_nan=False)


def test_a_record_names_the_attack_of_each_kind_of_images(digits):
    for name, inputs in (("domain_gap", ["adv", "noise", "fgsm"]), ("moments", ["clean", "noise"])):
        conditions = ANALYSES.get(name).run(digits.target("dual_bn"), inputs=inputs).record()["conditions"]
        assert set(conditions["inputs"]) == {"clean", *inputs} and conditions["inputs"]["clean"] is None
        assert conditions["crafted_through"] == "adv"
        assert all("eps=0.1" in made and "route='adv'" in made for made in conditions["inputs"].values() if made)
    assert conditions["inputs"]["noise"].startswith("RandomNoise(")
