"""Overrides and YAML scalars."""

from dataclasses import replace

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from advnorm._core.errors import ConfigError
from advnorm.config import AttackConfig, Config, Named, load_config
from advnorm.config.text import Dumper, apply_overrides, parse_yaml
from support.problems import raises_problem


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("epochs=30", "epochs", 30),
        (" epochs = 30 ", "epochs", 30),
        ("lr=1e-3", "lr", 0.001),
        ("lr=1", "lr", 1.0),
        ("eps=16/255", "eps", "16/255"),
        ("eps=1e-2", "eps", 0.01),
        ("milestones=[5,7.5]", "milestones", (5.0, 7.5)),
        ("ema=none", "ema", None),
        ("ema=null", "ema", None),
        ("ema=0.999", "ema", 0.999),
        ("weights=none", "weights", None),
        ("norm=none", "norm", "none"),
        ("norm=in", "norm", "in"),
        ("nesterov=true", "nesterov", True),
        ("compile=false", "compile", False),
        ("compile=auto", "compile", "auto"),
        ("held_out=10", "held_out", 10),
        ("held_out=0.5", "held_out", 0.5),
        ("name='010'", "name", "010"),
        ("objective=trades", "objective", Named("trades")),
        ("objective.clean_weight=1", "objective", Named("hybrid", clean_weight=1.0)),
        ("objective={name: trades, beta: 3}", "objective", Named("trades", beta=3.0)),
        ("objective.name=trades", "objective", Named("trades")),
        ("attack.steps=20", "attack", AttackConfig(steps=20)),
        ("attack.step_size=none", "attack", AttackConfig()),
        ("attack.start=2e-1", "attack", AttackConfig(start=0.2)),
        ("attack={steps: 2}", "attack", AttackConfig(steps=2)),
        ("norm_options.momentum=0.3", "norm_options", {"momentum": 0.3}),
        ("model.width=0.5", "model", Named("small_cnn", width=0.5)),
    ],
)
def test_an_override_is_read_by_the_type_of_its_setting(override, key, value, tmp_path):
    changed = Config().with_overrides([override])
    assert changed == Config().with_overrides(override)
    assert getattr(changed, key) == value and type(getattr(changed, key)) is type(value)
    assert changed == replace(Config(), **{key: value})
    (tmp_path / "empty.yaml").write_text("")
    assert load_config(tmp_path / "empty.yaml", [override]) == changed


def test_a_part_of_a_mapping_inside_a_setting_keeps_the_other_parts():
    settings = {"attack": {"name": "own", "options": {"decay": 0.1, "shape": {"rows": 2}}}}
    overrides = ["attack.options.decay=0.5", "attack.options.shape.columns=3"]
    changed, problems = apply_overrides(settings, overrides, {"attack": {}})
    options = {"decay": 0.5, "shape": {"rows": 2, "columns": 3}}
    assert changed == {"attack": {"name": "own", "options": options}} and not problems
    assert settings["attack"]["options"]["decay"] == 0.1
    config = Config().with_overrides(["attack.name=apgd-ce", "attack.options.rho=0.5"])
    assert config.attack == AttackConfig(name="apgd-ce", options={"rho": 0.5})
    for wrong in ("attack.option.rho=1", "attack.steps.rho=1"):
        with raises_problem("unknown_name"):
            Config().with_overrides([wrong])


def test_the_order_of_overrides_does_not_matter():
    overrides = ["objective.beta=3", "objective=trades", "attack.steps=4", "attack={loss: cw}"]
    expected = Config(objective=Named("trades", beta=3.0), attack=AttackConfig(steps=4, loss="cw"))
    assert Config().with_overrides(overrides) == Config().with_overrides(overrides[::-1]) == expected


def test_another_objective_drops_the_options_of_the_old_one():
    config = Config(objective=Named("hybrid", clean_weight=0.3))
    assert config.with_overrides(["objective=trades"]).objective == Named("trades")
    assert config.with_overrides(["objective.layout=sequential"]).objective.options["clean_weight"] == 0.3


@pytest.mark.parametrize(
    ("overrides", "code", "field"),
    [
        (["epochs"], "wrong_type", "overrides"),
        (["=3"], "wrong_type", "overrides"),
        (["epoch=3"], "unknown_name", "epoch"),
        (["atack.steps=3"], "unknown_name", "atack.steps"),
        (["attack.stepz=3"], "unknown_name", "attack.stepz"),
        (["epochs.x=3"], "unknown_name", "epochs.x"),
        (["epochs=3", "epochs=4"], "conflict", "epochs"),
        (["milestones=[5"], "damaged_file", "milestones"),
        (["nesterov=yes"], "wrong_type", "nesterov"),
        (["lr=.nan"], "wrong_type", "lr"),
        (["lr=1e999"], "wrong_type", "lr"),
        (["attack.steps.x=1"], "unknown_name", "attack.steps.x"),
    ],
)
def test_a_bad_override_is_rejected(overrides, code, field):
    with pytest.raises(ConfigError, match="^bad configuration: ") as caught:
        Config().with_overrides(overrides)
    assert [(problem.code, problem.field) for problem in caught.value.problems] == [(code, field)]


def test_all_bad_overrides_and_their_consequences_come_in_one_error():
    with pytest.raises(ConfigError) as caught:
        Config().with_overrides(["epochs", "norm=dualbn", "atack.steps=3", "lr=0"])
    assert [problem.field for problem in caught.value.problems] == ["overrides", "atack.steps", "lr", "norm"]


@settings(deadline=None, max_examples=100, derandomize=True)
@given(st.text(alphabet="0123456789+-.eE_:xoyesnoOfNullTtrue~/ '\"#&*!|>[]{},", max_size=8))
def test_any_string_survives_yaml(text):
    """As a string it must not come back as a number, and a standard reader must agree that it is a string."""
    dumped = yaml.dump({"key": text}, Dumper=Dumper)
    assert parse_yaml(dumped) == {"key": text}
    assert yaml.safe_load(dumped) == {"key": text}


@settings(deadline=None, max_examples=100, derandomize=True)
@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**63), 2**63))
def test_any_number_survives_yaml_bit_for_bit(number):
    back = parse_yaml(yaml.dump({"key": number}, Dumper=Dumper))["key"]
    assert repr(back) == repr(number)
