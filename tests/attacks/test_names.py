"""Attacks by name: the grammar, its errors, and an attack that is registered from outside."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from advnorm import attacks
from advnorm._core.errors import ConfigError
from advnorm._core.settings import describe
from advnorm.attacks.base import Attack
from advnorm.attacks.names import ATTACKS, NameOption, parse_name, register_attack
from advnorm.threat import ThreatModel
from support.attack_contract import LINF, SMALL, assert_inside, pictures
from support.problems import raises_problem


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("pgd10", attacks.PGD(threat=LINF, steps=10)),
        ("pgd", attacks.PGD(threat=LINF, steps=10)),
        ("pgd20-restarts5", attacks.PGD(threat=LINF, steps=20, restarts=5)),
        ("pgd2000-targeted", attacks.PGD(threat=LINF, steps=2000, target="random")),
        ("pgd50-dlr-worst-momentum0.9", attacks.PGD(threat=LINF, steps=50, loss="dlr", keep="worst", momentum=0.9)),
        ("pgd10-step2", attacks.PGD(threat=LINF, steps=10, step_size="2/255")),
        ("cw20-step0.5", attacks.PGD(threat=LINF, steps=20, loss="cw", step_size="0.5/255")),
        ("cw20", attacks.PGD(threat=LINF, steps=20, loss="cw")),
        ("fgsm", attacks.FGSM(threat=LINF)),
        ("autoattack-bf16", attacks.AutoAttack(threat=LINF, precision="bf16")),
        ("autoattack-float32-rand", attacks.AutoAttack(threat=LINF, version="rand")),
        ("noise-binary", attacks.RandomNoise(threat=LINF, kind="binary")),
        ("noise-uniform-restarts10", attacks.RandomNoise(threat=LINF, kind="uniform", restarts=10)),
    ],
)
def test_a_name_creates_the_attack(name, expected):
    assert attacks.get(name, threat=LINF) == expected


def test_keywords_set_what_the_name_leaves_open():
    attack = attacks.get("pgd10", threat=LINF, step_size="2/255", route="adv", seed=3)
    assert attack == attacks.PGD(threat=LINF, steps=10, step_size="2/255", route="adv", seed=3)


@pytest.mark.parametrize("name", ATTACKS)
def test_every_setting_declares_its_help_and_rejects_nan(name):
    attack = ATTACKS.get(name).attack
    settings = {row.name: row for row in describe(attack)}
    assert all(row.help.endswith(".") for row in settings.values())
    assert {field.name for field in dataclasses.fields(attack)} == {*settings, "threat", "progress"}
    for setting in settings:
        for value in (float("nan"), float("inf")):
            with raises_problem("wrong_type", setting):
                attack(threat=LINF, **{setting: value})


@pytest.mark.parametrize(
    ("name", "settings", "code", "field"),
    [
        ("pdg10", {}, "unknown_name", "attack"),
        ("pgdd", {}, "unknown_name", "attack"),
        ("", {}, "unknown_name", "attack"),
        ("pgd10-restart5", {}, "unknown_name", "option"),
        ("autoattack-bf8", {}, "unknown_name", "option"),
        ("pgd10-restarts", {}, "wrong_type", "restarts"),
        ("pgd10-restarts1.5", {}, "wrong_type", "restarts"),
        ("pgd10-momentum1.2.3", {}, "wrong_type", "momentum"),
        ("pgd10-step1.2.3", {}, "wrong_type", "step_size"),
        ("pgd10-clean5", {}, "wrong_type", "start"),
        ("pgd10-step2", {"threat": ThreatModel(norm="L2", eps=1)}, "conflict", "step_size"),
        ("pgd10-step2", {"step_size": 0.1}, "conflict", "step_size"),
        ("pgd10-targeted-leastlikely", {}, "conflict", "target"),
        ("autoattack-bf16-tf32", {}, "conflict", "precision"),
        ("pgd10", {"steps": 3}, "conflict", "steps"),
        ("cw20", {"loss": "ce"}, "conflict", "loss"),
        ("cw20-dlr", {}, "unknown_name", "option"),
        ("fgsm3", {}, "not_supported", "steps"),
        ("pgd10", {"stepsize": 3}, "unknown_name", "stepsize"),
    ],
)
def test_a_bad_name_raises(name, settings, code, field):
    with raises_problem(code, field):
        attacks.get(name, **{"threat": LINF, **settings})


def test_an_error_suggests_the_nearest_name():
    for name, nearest in (("pdg10", "pgd10"), ("pgdd", "pgd10"), ("pgd10-restart5", "restarts")):
        with raises_problem("unknown_name") as caught:
            attacks.get(name, threat=LINF)
        assert f"did you mean '{nearest}'?" in str(caught.value)


def test_all_problems_of_a_name_are_reported_at_once():
    with raises_problem("wrong_type", "restarts") as caught:
        attacks.get("pgd10-restarts1.5-momentum1.2.3", threat=LINF)
    assert [problem.field for problem in caught.value.problems] == ["restarts", "momentum"]


def test_a_threat_is_required():
    with raises_problem("missing", "threat"):
        attacks.get("pgd10")


def test_an_attack_from_outside_gets_a_name_and_keeps_the_contract(monkeypatch):
    monkeypatch.setattr(ATTACKS, "_entries", dict(ATTACKS._entries))

    @register_attack(
        "grey", steps=4, options={"level": NameOption(setting="level", parse=float)}, summary="towards grey"
    )
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Grey(Attack):
        steps: int = 1
        level: float = 0.5

        def perturb(self, predict, x, y, noise):
            return torch.full_like(x, self.level)

    attack = attacks.get("grey7-level0.25", threat=LINF)
    assert attack == Grey(threat=LINF, steps=7, level=0.25) and "grey4" in attacks.list_attacks()
    assert attacks.list_attacks("grey*") == attacks.list_attacks("grey4") == attacks.list_attacks("grey") == ["grey4"]
    assert parse_name("grey")[1] == {"steps": 4}
    x, y = pictures()
    assert_inside(LINF, attack(SMALL, x, y), x)  # whatever a subclass returns
    with pytest.raises(ConfigError):
        register_attack("grey", summary="")(Grey)
