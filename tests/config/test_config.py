"""Configurations: conversion, exact round trips, the attack, digests and names, and random input."""

import math
from dataclasses import FrozenInstanceError, fields, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from advnorm._core.errors import ConfigError
from advnorm.attacks import PGD
from advnorm.config import AttackConfig, Config, Named, load_config
from advnorm.config.validation import ELSEWHERE
from advnorm.norms import list_norms
from advnorm.objectives import OBJECTIVES, list_objectives
from support.configs import GOOD, SETTINGS, WITH, check_round_trips


def test_milestones_times_a_budget_are_what_a_user_would_write():
    """A decay came a step late at 3 * 0.1 = 0.30000000000000004."""
    assert Config(epochs=1, milestones=(0.1, 0.7), budget=3).scaled().milestones == (0.3, 2.1)


def test_milestones_move_with_epochs_that_alone_are_changed(tmp_path):
    config = Config(schedule="step", epochs=110, milestones=(100, 105), snapshots=(1, 2, 55, 110))
    assert config.with_overrides(["epochs=10"]).snapshots == (1, 5, 10)
    assert config.with_overrides(["epochs=3", "snapshots=[3]"]).snapshots == (3,)
    assert config.with_overrides(["epochs=30"]).milestones == (27.2727, 28.6364)
    assert config.with_overrides(["epochs=220"]).milestones == (200.0, 210.0)
    assert config.with_overrides(["epochs=30", "milestones=[5, 9]"]).milestones == (5.0, 9.0)
    assert config.with_overrides(["lr=0.3"]).milestones == (100.0, 105.0)
    (tmp_path / "c.yaml").write_text(config.to_yaml())
    assert load_config(tmp_path / "c.yaml", ["epochs=11"]).milestones == (10.0, 10.5)
    for wrong in ("epochs=0", "epochs=ten", "epochs=none"):
        with pytest.raises(ConfigError, match="epochs must be"):
            config.with_overrides([wrong])


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in GOOD.items() for value in values])
def test_a_good_value_is_kept_as_it_is_and_survives_every_round_trip(name, value):
    config = Config(**{name: value}, **WITH.get(name, {}))
    assert getattr(config, name) == value and type(getattr(config, name)) is type(value)
    check_round_trips(config)


def test_names_mappings_and_numbers_are_brought_into_one_form():
    config = Config(
        model="resnet18",
        objective={"name": "trades", "beta": 6},
        lr=1,
        milestones=[2, 5],
        attack={"steps": 3},
        ema="none",
    )
    assert config.model == Named("resnet18") and config.objective == Named("trades", beta=6.0)
    assert repr(config.objective) == "Named('trades', beta=6.0)"
    assert repr(config.lr) == "1.0" and config.milestones == (2.0, 5.0) and config.ema is None
    assert config.attack == AttackConfig(steps=3)


def test_none_is_a_name_where_there_is_such_a_name():
    assert Config(norm="none").norm == "none" and Config(augment="none").augment == "none"


def test_a_configuration_is_frozen_and_does_not_share_its_options():
    options = {"momentum": 0.2}
    config = Config(norm_options=options)
    options["momentum"] = 0.3
    assert config.norm_options == {"momentum": 0.2}
    with pytest.raises(FrozenInstanceError):
        config.lr = 1.0  # type: ignore[misc]
    with pytest.raises(TypeError):
        Config("small_cnn")  # type: ignore[misc]


@pytest.mark.parametrize("name", list_objectives())
def test_every_objective_can_be_configured_with_its_own_defaults(name):
    kind = OBJECTIVES.get(name)
    norm = next(norm for norm in ("bn", "dual_bn", "cross_bn", "gmm_bn") if not kind.problems(norm))
    options = {k: p.default for k, p in kind.options().items() if k not in ELSEWHERE["objective"]}
    config = Config(norm=norm, objective=Named(name, **options))
    assert config.objective.options == options
    check_round_trips(config)


@pytest.mark.parametrize("norm", list_norms())
def test_every_norm_can_be_configured(norm):
    check_round_trips(Config(norm=norm))


# -- the attack --------------------------------------------------------------------------------------------------------


def test_the_attack_has_the_settings_and_defaults_of_pgd():
    others = ("threat", "seed", "route", "progress", "precision")  # a training has a precision for all its forwards
    theirs = {f.name: f.default for f in fields(PGD) if f.name not in others}
    assert {f.name: f.default for f in fields(AttackConfig) if f.name not in ("name", "options")} == theirs


def test_the_attack_is_built_with_threat_and_seed():
    config = Config(threat="L2", eps="128/255", attack={"steps": 7, "step_size": 0.1, "momentum": 1}, seed=3)
    attack = config.build_attack()
    assert (attack.threat.norm, attack.threat.eps, attack.steps, attack.step, attack.momentum, attack.seed) == (
        "L2", 128 / 255, 7, 0.1, 1.0, 3,
    )  # fmt: skip


def test_eps_and_steps_warm_up_epoch_by_epoch():
    config = Config(eps="8/255", attack={"steps": 10}, eps_warmup_epochs=3, steps_warmup_epochs=4)
    attacks = [config.build_attack(epoch) for epoch in range(6)]
    assert [attack.threat.eps * 255 for attack in attacks] == pytest.approx([2, 4, 6, 8, 8, 8])
    assert [attack.steps for attack in attacks] == [2, 4, 6, 8, 10, 10]
    assert attacks[3].threat == attacks[5].threat == config.build_attack().threat
    assert attacks[5] == config.build_attack()


@settings(deadline=None, max_examples=25, derandomize=True)
@given(steps=st.integers(1, 50), warmup=st.integers(0, 10))
def test_the_steps_of_a_warm_up_are_rounded_up(steps, warmup):
    config = Config(attack={"steps": steps}, steps_warmup_epochs=warmup)
    taken = [config.build_attack(epoch).steps for epoch in range(10)]
    assert taken == [math.ceil(round(min(1, (e + 1) / (warmup + 1)) * steps, 9)) for e in range(10)]
    assert taken == sorted(taken) and taken[0] >= 1


# -- identity ----------------------------------------------------------------------------------------------------------


def test_the_digest_is_of_what_determines_the_result():
    config = Config(eps="8/255", attack={"step_size": "2/255"})
    assert config.digest == replace(config, name="other").digest == replace(config, seed=7).digest
    assert config.digest == replace(config, eps=8 / 255, attack={"step_size": 2 / 255}).digest
    changed = [
        replace(config, **{name: values[0]}, **WITH.get(name, {}))
        for name, values in GOOD.items()
        if name not in ("name", "seed", "train_only")
    ]
    digests = [config.digest, *(each.digest for each in changed if each != config)]
    assert len(set(digests)) == len(digests)


def test_the_digest_is_the_same_in_every_process_and_order():
    one = Config.from_dict({"norm_options": {"momentum": 0.1, "eps": 1e-3}, "seed": 1})
    other = Config.from_dict({"seed": 1, "norm_options": {"eps": 1e-3, "momentum": 0.1}})
    assert one.digest == other.digest and one.run_name == other.run_name


def test_the_name_of_a_run_tells_the_main_settings():
    config = Config(norm="dual_bn")
    assert config.run_name == f"digits-small_cnn-dual_bn-hybrid-eps8_255-{config.digest[:8]}"
    assert replace(config, threat="L2", eps=0.5).run_name.split("-")[4] == "L2_0.5"
    assert replace(config, name="mine").run_name == "mine"
    names = {"./my flowers": "my_flowers", "a/b.npz": "b", "./": "imagefolder", "cifar10:a": "cifar10"}
    for data, name in names.items():
        assert replace(config, data=data).run_name.startswith(f"{name}-small_cnn-")


def test_a_later_setting_leaves_earlier_runs_their_names():
    assert Config().run_name.endswith("-d2642d6d") and not Config(snapshots=(1,)).run_name.endswith("-d2642d6d")


# -- anything at all ---------------------------------------------------------------------------------------------------

OPTION_NAMES = st.text(max_size=4) | st.sampled_from(["name", "beta", "steps", "domains"]) | st.integers()
JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.just(10**400)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["\ud800", "\x00", "8/255", "none", "auto", "bn", "hybrid", "pgd" + "9" * 5000, "small_cnn"])
    | st.binary(max_size=3)
    | st.complex_numbers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(OPTION_NAMES, inner, max_size=3),
    max_leaves=6,
)
PLAUSIBLE = {name: st.sampled_from(values) | JUNK for name, values in GOOD.items()}
MAPPINGS = st.fixed_dictionaries({}, optional=PLAUSIBLE)


def check_outcome(build):
    try:
        config = build()
    except ConfigError as error:
        message = str(error)
        assert message.startswith("bad configuration: ") and len(message) > 25
        return
    check_round_trips(config)


@settings(deadline=None, max_examples=80, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(MAPPINGS)
def test_any_values_end_in_a_configuration_or_in_one_error(mapping):
    check_outcome(lambda: Config.from_dict(mapping))


@settings(deadline=None, max_examples=80, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(SETTINGS), st.data())
def test_any_value_of_one_setting_ends_in_a_configuration_or_in_one_error(name, data):
    value = data.draw(PLAUSIBLE[name])
    check_outcome(lambda: Config.from_dict({name: value}))


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.dictionaries(st.text(max_size=6) | st.sampled_from(SETTINGS) | st.integers(), JUNK, max_size=5))
def test_any_keys_end_in_a_configuration_or_in_one_error(mapping):
    check_outcome(lambda: Config.from_dict(mapping))


@settings(deadline=None, max_examples=100, derandomize=True)
@given(
    st.lists(
        st.builds(
            "{}{}={}".format, st.sampled_from(SETTINGS) | st.text(max_size=5), st.sampled_from(["", ".steps", ".x"]),
            st.text(max_size=8) | st.sampled_from(["1", "0.5", "none", "[1, 2]", "{name: trades}", "8/255", "true"]),
        ),
        max_size=3,
    )
)  # fmt: skip
def test_any_overrides_end_in_a_configuration_or_in_one_error(overrides):
    check_outcome(lambda: Config().with_overrides(overrides))


NAMES = {
    "model": ["small_cnn", "preact_resnet18", "fixup_resnet20"],
    "data": ["digits", "synthetic"],
    "objective": list_objectives(),
}
OPTIONS = {
    "model": ["width", "activation", "mean", "std", "normalize", "final_norm"],
    "data": ["size", "classes", "test_share", "seed"],
    "objective": ["beta", "layout", "clean_share", "clean_weight", "likelihood_weight"],
    "norm_options": ["eps", "momentum", "affine", "domains", "num_groups", "other_gradient", "track_running_stats"],
}


@settings(deadline=None, max_examples=100, derandomize=True)
@given(st.data())
def test_any_options_end_in_a_configuration_or_in_one_error(data):
    mapping = {
        key: data.draw(st.dictionaries(st.sampled_from(options), JUNK, max_size=2), key)
        for key, options in OPTIONS.items()
    }
    for key, names in NAMES.items():
        mapping[key]["name"] = data.draw(st.sampled_from(names), key)
    mapping["norm"] = data.draw(st.sampled_from(list_norms()), "norm")
    check_outcome(lambda: Config.from_dict(mapping))
