"""Configurations: every setting good and bad, all problems at once, exact round trips, overrides and files."""

import json
import math
import pickle
import re
from collections.abc import Sequence
from dataclasses import FrozenInstanceError, fields, replace
from typing import get_type_hints

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from advnorm._core.errors import ConfigError
from advnorm._core.settings import convert
from advnorm.attacks import PGD
from advnorm.config import config as module
from advnorm.config.config import LIMITS, AttackConfig, Config, Named, explain, load_config
from advnorm.config.text import Dumper, parse_yaml
from advnorm.norms import list_norms
from advnorm.objectives import OBJECTIVES, list_objectives

SETTINGS = [f.name for f in fields(Config)]


def problem(**wrong):
    with pytest.raises(ConfigError) as caught:
        Config(**wrong)
    message = str(caught.value)
    assert message.startswith("bad configuration: ") and "\n" not in message
    return message


# -- values ------------------------------------------------------------------------------------------------------------

GOOD = {
    "model": [Named("resnet18"), Named("preact_resnet18", width=0.5)],
    "norm": list_norms("*bn")[:2],
    "norm_options": [{"momentum": 0.2}],
    "dual_head": [True],
    "weights": ["runs/a", "w.safetensors"],
    "data": [Named("synthetic", size=64)],
    "augment": ["flip", "crop_flip"],
    "held_out": [0.2, 100, 1],
    "mix": ["none"],
    "mix_alpha": [0.2],
    "objective": [Named("trades", beta=3.0), Named("standard")],
    "regularizer": [None, Named("ligs", weight=0.5)],
    "second_pass": [None, Named("apart", samples=64, groups=2), Named("awp")],
    "threat": ["L2", "L1"],
    "eps": [0.0, 0.1, "16/255"],
    "attack": [AttackConfig(steps=3, step_size="2/255", start=0.2)],
    "eps_warmup_epochs": [3],
    "steps_warmup_epochs": [3],
    "epochs": [1, 105],
    "budget": [4],
    "batch_size": [1, 1024],
    "optimizer": ["adam", "adagrad"],
    "lr": [1e-12, 3.0],
    "momentum": [0.0],
    "nesterov": [True],
    "weight_decay": [0.0],
    "norm_weight_decay": [False],
    "grad_clip": [None, 0.5],
    "schedule": ["cosine", "one_cycle", "constant"],
    "milestones": [(5.0,), (2.5, 7.0)],
    "gamma": [1.0],
    "warmup_epochs": [0.5, 10.0],
    "peak_share": [0.2],
    "ema": [0.999],
    "ema_buffers": ["average"],
    "label_smoothing": [0.1],
    "running_epochs": [2],
    "train_only": ["all"],
    "sync_statistics": [True],
    "precision": ["float32", "tf32", "bf16"],
    "channels_last": [True, False],
    "compile": [True, False],
    "deterministic": [True],
    "validate_every": [0, 5],
    "validation_attack": ["fgsm", "pgd20-restarts2", "training"],
    "validation_images": [500],
    "snapshots": [(1,), (2, 10)],
    "seed": [7],
    "name": ["my_run-1.0"],
}

BAD = {
    "model": [("resnet_18", "did you mean 'resnet18'"), ({"width": 2}, "a mapping with a name"), (None, "a name")],
    "norm": [("dualbn", "unknown norm 'dualbn', did you mean 'dual_bn'?")],
    "norm_options": [
        ({"momentun": 1}, "did you mean 'momentum'"),
        ({"sync": True}, "use sync_statistics"),
        ({"track_running_stats": False}, "use running statistics; leave it out"),
        ({"domains": ["clean", "x"]}, "name adv among its domains"),
    ],
    "weights": [("w.pth", "pickles are never opened"), ("", "is empty")],
    "data": [("digit", "did you mean 'digits'"), ("cifar10c", "for evaluation only")],
    "held_out": [(-1, "at least 0"), (1.5, "a share below 1 or a whole number"), (0, "validate_every=0")],
    "mix": [("mixup", "needs hard ones"), ("mixu", "did you mean 'mixup'")],
    "objective": [("trade", "did you mean 'trades'")],
    "regularizer": [("lig", "did you mean 'ligs'"), ({"name": "ligs", "shift": "pgdd"}, "did you mean 'pgd'")],
    "second_pass": [
        ("smm", "did you mean 'sam'"),
        ({"name": "apart", "samples": 129}, "more than batch_size (128)"),
        ({"name": "apart", "samples": 0.0, "groups": 0, "radius": -1}, "radius must be"),
        ({"radius": 1}, "a mapping with a name"),
    ],
    "eps": [(8, "did you mean '8/255'"), ("x", "cannot read 'x'"), (-0.1, "at least 0")],
    "attack": [({"steps": 0}, "attack: steps"), ({"step": 1}, "did you mean 'steps'"), (3, "a mapping of settings")],
    "eps_warmup_epochs": [(11, "at most epochs (10)")],
    "steps_warmup_epochs": [(11, "at most epochs (10)")],
    "warmup_epochs": [(10.5, "at most epochs (10)")],
    "running_epochs": [(11, "at most epochs (10)"), (10, "estimates the statistics")],
    "milestones": [([5, 5], "must increase"), ([10], "between 0 and epochs (10)"), ([0], "between 0"), (5, "a list")],
    "validation_attack": [("pgdd", "validation_attack: "), ("pgd10-momentum1.2.3", "validation_attack: ")],
    "validation_images": [(0, "at least 1")],
    "snapshots": [
        ([5, 5], "must increase"),
        ([11], "between 1 and epochs (10)"),
        ([0], "between 1"),
        ([2.5], "integer"),
    ],
    "train_only": [("norms", "give its weights")],
    "name": [("a/b", "folder"), ("", "folder"), ("..", "folder"), ("-x", "folder")],
    "seed": [(2**31, "lie in [0, 2147483647]")],
}


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


#: Without these a setting has no effect and is refused.
WITH = {
    "gamma": {"milestones": (5.0,)},
    "peak_share": {"schedule": "one_cycle"},
    "mix_alpha": {"mix": "mixup", "objective": Named("standard")},
}


def test_the_cases_cover_every_setting():
    assert set(GOOD) == set(SETTINGS)
    assert set(LIMITS) < set(SETTINGS)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in GOOD.items() for value in values])
def test_a_good_value_is_kept_as_it_is_and_survives_every_round_trip(name, value):
    config = Config(**{name: value}, **WITH.get(name, {}))
    assert getattr(config, name) == value and type(getattr(config, name)) is type(value)
    check_round_trips(config)


def check_round_trips(config):
    assert Config.from_dict(config.to_dict()) == config
    assert Config.from_dict(json.loads(json.dumps(config.to_dict(), allow_nan=False))) == config
    assert Config.from_dict(parse_yaml(config.to_yaml())) == config
    assert eval(repr(config), {"Config": Config, "AttackConfig": AttackConfig, "Named": Named}) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert replace(config) == config and hash(replace(config)) == hash(config)
    again = Config.from_dict(config.to_dict())
    assert repr(again) == repr(config) and again.digest == config.digest  # 1 == 1.0, so that equality is not enough


@pytest.mark.parametrize(("name", "value", "part"), [(n, *case) for n, cases in BAD.items() for case in cases])
def test_a_bad_value_is_refused_with_the_cure(name, value, part):
    assert part in problem(**{name: value})


def unfit(hint):
    """Values that no setting of this type takes."""
    for value in (
        None,
        True,
        1.5,
        "?",
        math.nan,
        math.inf,
        -math.inf,
        10**400,
        10**5000,
        2**63,
        [1],
        {"a": 1},
        object(),
        b"x",
    ):
        try:
            convert("x", hint, value)
        except ConfigError:
            yield value


@pytest.mark.parametrize("name", SETTINGS)
def test_a_value_of_another_type_is_refused_by_the_name_of_the_setting(name):
    values = list(unfit(get_type_hints(Config)[name]))
    assert len(values) >= 8
    for value in values:
        assert name in problem(**{name: value})


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        (int, True),
        (float, True),
        (int, 1.0),
        (float, math.nan),
        (float, math.inf),
        (float, 10**400),
        (bool, 1),
        (str, 1),
    ],
)
def test_nothing_is_taken_for_another_type(hint, value):
    with pytest.raises(ConfigError):
        convert("x", hint, value)


@pytest.mark.parametrize("name", LIMITS)
def test_the_ends_of_every_range_are_told_apart(name):
    limit = LIMITS[name]
    low, high = map(float, limit[1:-1].split(","))
    whole = int in (hint := get_type_hints(Config)[name], *getattr(hint, "__args__", ()))
    number = int if whole else float
    assert f"{name} must" in problem(**{name: number(low - 1)})
    if limit[0] == "(":
        assert f"{name} must" in problem(**{name: number(low)})
    if high < math.inf:
        assert f"{name} must" in problem(**{name: number(high + 1)})
        if limit[-1] == ")":
            assert f"{name} must" in problem(**{name: number(high)})


def test_all_problems_come_in_one_error():
    message = problem(
        norm="dualbn", epochs=0, optimizer="sdg", lr=math.nan, attack={"steps": 0, "loss": "hinge"}, eps=8, ema=1
    )
    for part in (
        "'dual_bn'",
        "epochs must be at least 1, got 0",
        "'sgd'",
        "lr must",
        "steps",
        "'hinge'",
        "8/255",
        "ema",
    ):
        assert part in message


def test_the_message_reads_as_documented():
    assert problem(norm="dualbn", epochs=0) == (
        "bad configuration: unknown norm 'dualbn', did you mean 'dual_bn'?; epochs must be at least 1, got 0"
    )


@pytest.mark.parametrize(
    ("wrong", "part"),
    [
        ({"schedule": "cosine", "milestones": [5]}, "milestones belong to schedule='step'"),
        (
            {"schedule": "cosine", "gamma": 0.5},
            "gamma belongs to milestones, and so to schedule='step', and has no eff",
        ),
        ({"gamma": 0.3}, "gamma belongs to milestones"),
        ({"schedule": "cosine", "peak_share": 0.9}, "peak_share belongs to schedule='one_cycle'"),
        ({"mix_alpha": 0.4}, "mix_alpha belongs to mix='mixup' or 'cutmix'"),
        ({"schedule": "one_cycle", "warmup_epochs": 1}, "peak_share"),
        ({"nesterov": True, "momentum": 0}, "nesterov needs a momentum"),
        ({"nesterov": True, "optimizer": "adam"}, "nesterov belongs to optimizer='sgd'"),
        ({"norm": "none", "train_only": "norms", "weights": "w"}, "has no parameters"),
        ({"norm": "ln", "sync_statistics": True}, "no batch statistics"),
        ({"norm": "gn", "running_epochs": 2}, "no running statistics"),
        ({"held_out": 50, "validation_images": 51}, "is more than held_out"),
        ({"attack": {"loss": "kl", "start": "clean"}}, "no gradient at the clean image"),
        ({"attack": {"step_size": 2}}, "did you mean '2/255'"),
        ({"model": {"name": "small_cnn", "norm": "bn"}}, "norm is a setting of its own"),
        ({"model": {"name": "small_cnn", "num_classes": 3}}, "the data set says"),
        ({"model": {"name": "small_cnn", "widht": 3}}, "did you mean 'width'"),
        ({"model": {"name": "small_cnn", "width": 1e200}}, "cannot build"),
        ({"objective": {"name": "hybrid", "label_smoothing": 0.1}}, "label_smoothing is a setting of its own"),
        ({"objective": "trades", "attack": {"start": "clean"}}, "the kl loss has no gradient"),
        ({"objective": "trades", "attack": {"start": 0.2}}, "where start=0.2 begins"),
        ({"objective": "trades", "attack": {"target": "random"}}, "TRADES ascends the KL divergence"),
        (
            {
                "objective": {"name": "hybrid", "clean_share": 0.001},
                "second_pass": {"name": "apart", "groups": 2},
                "batch_size": 64,
                "norm": "dual_bn",
            },
            "does not divide the 1 clean images",
        ),
        ({"objective": {"name": "trades", "beta": "6"}}, "objective.beta must be a finite number"),
        ({"objective": {"name": "trades", "betta": 6}}, "did you mean 'beta'"),
        ({"objective": {"name": "hybrid", "layout": "sequential"}, "norm": "cross_bn"}, "use layout='concatenated'"),
        ({"data": {"name": "synthetic", "sise": 6}}, "did you mean 'size'"),
        ({"data": {"name": "cifar10", "root": "x"}}, "where the training is started"),
        ({"norm_options": {"a-b": 1}}, "letters, digits and '_'"),
        ({"norm_options": {"momentum": math.nan}}, "norm_options.momentum must be a finite number"),
        ({"norm_options": {"domains": object()}}, "consist of numbers, strings"),
    ],
)
def test_contradictions_are_refused_with_the_cure(wrong, part):
    assert part in problem(**wrong)


def test_an_error_in_one_setting_hides_no_problem_of_another():
    message = problem(
        epochs="ten", milestones=[5, 3], running_epochs=-1, model="resnet_18", objective={"name": "hybrid", "x": 1}
    )
    for part in (
        "epochs must be an integer",
        "running_epochs must be at least 0",
        "'resnet18'",
        "unknown option objective.x",
    ):
        assert part in message


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


def test_checking_a_configuration_leaves_the_random_state_alone():
    before = torch.get_rng_state()
    Config(model=Named("resnet18", width=0.25), norm="dual_bn", norm_options={"momentum": 0.3})
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", list_objectives())
def test_every_objective_can_be_configured_with_its_own_defaults(name):
    kind = OBJECTIVES.get(name)
    norm = next(norm for norm in ("bn", "dual_bn", "cross_bn", "gmm_bn") if not kind.problems(norm))
    options = {k: p.default for k, p in kind.options().items() if k not in module._NOT_OBJECTIVE_OPTIONS}
    config = Config(norm=norm, objective=Named(name, **options))
    assert config.objective.options == options
    check_round_trips(config)


@pytest.mark.parametrize("norm", list_norms())
def test_every_norm_can_be_configured(norm):
    check_round_trips(Config(norm=norm))


# -- the attack --------------------------------------------------------------------------------------------------------


def test_the_attack_has_the_settings_and_defaults_of_pgd():
    theirs = {f.name: f.default for f in fields(PGD) if f.name not in ("threat", "seed", "route", "progress")}
    assert {f.name: f.default for f in fields(AttackConfig)} == theirs


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


def test_explain_lists_every_setting_and_marks_the_changed_ones():
    rows = explain(
        Config(objective=Named("trades", beta=3.0), attack={"steps": 3}, norm="gn", norm_options={"num_groups": 4})
    )
    table = {key: (value, default) for key, value, default in rows}
    assert {key.partition(".")[0] for key in table} == set(SETTINGS) | {"norm_options"}
    assert table["attack.steps"] == (3, False) and table["attack.loss"] == ("ce", True)
    assert table["objective"] == ("trades", False) and table["objective.beta"] == (3.0, False)
    assert table["objective.layout"] == ("concatenated", True)
    assert table["norm_options.num_groups"] == (4, False) and table["model"] == ("small_cnn", True)
    keys = [key for key, _, _ in rows]
    assert keys.index("objective") + 1 == keys.index("objective.beta") or keys[keys.index("objective") + 1].startswith(
        "objective."
    )
    assert all(default for _, _, default in explain(Config()))
    around = Config(objective="standard", second_pass=Named("apart", groups=2), regularizer="ligs")
    table = {key: (value, default) for key, value, default in explain(around)}
    assert table["second_pass.groups"] == (2, False) and table["second_pass.radius"] == (0.1, True)
    assert table["regularizer"] == ("ligs", False) and table["regularizer.shift"] == ("gaussian", True)


# -- overrides ---------------------------------------------------------------------------------------------------------


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
    assert getattr(changed, key) == value and type(getattr(changed, key)) is type(value)
    assert changed == replace(Config(), **{key: value})
    (tmp_path / "empty.yaml").write_text("")
    assert load_config(tmp_path / "empty.yaml", [override]) == changed


def test_the_order_of_overrides_does_not_matter():
    overrides = ["objective.beta=3", "objective=trades", "attack.steps=4", "attack={loss: cw}"]
    expected = Config(objective=Named("trades", beta=3.0), attack=AttackConfig(steps=4, loss="cw"))
    assert Config().with_overrides(overrides) == Config().with_overrides(overrides[::-1]) == expected


def test_another_objective_drops_the_options_of_the_old_one():
    config = Config(objective=Named("hybrid", clean_weight=0.3))
    assert config.with_overrides(["objective=trades"]).objective == Named("trades")
    assert config.with_overrides(["objective.layout=sequential"]).objective.options["clean_weight"] == 0.3


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["epochs"], "write key=value"),
        (["=3"], "write key=value"),
        (["epoch=3"], "unknown setting 'epoch', did you mean 'epochs'?"),
        (["atack.steps=3"], "did you mean 'attack'"),
        (["attack.stepz=3"], "did you mean 'steps'"),
        (["epochs.x=3"], "unknown setting 'epochs.x'"),
        (["epochs=3", "epochs=4"], "epochs is set twice"),
        (["milestones=[5"], "cannot be read as YAML"),
        (["nesterov=yes"], "nesterov must be true or false, got 'yes'"),
        (["lr=.nan"], "lr must be a finite number"),
        (["lr=1e999"], "lr must be a finite number"),
        (["attack.steps.x=1"], "unknown setting 'steps.x'"),
        ("epochs=3", "put it into a list"),
    ],
)
def test_a_bad_override_is_refused_with_the_cure(overrides, part):
    with pytest.raises(ConfigError, match="^bad configuration: ") as caught:
        Config().with_overrides(overrides)
    assert part in str(caught.value)


def test_all_bad_overrides_and_what_they_lead_to_come_in_one_error():
    with pytest.raises(ConfigError) as caught:
        Config().with_overrides(["epochs", "norm=dualbn", "atack.steps=3", "lr=0"])
    for part in ("write key=value", "'dual_bn'", "'attack'", "lr must be above 0"):
        assert part in str(caught.value)


# -- files -------------------------------------------------------------------------------------------------------------


def written(folder, name, text):
    (folder / name).write_text(text)
    return folder / name


EXPECTED = Config(norm="dual_bn", objective=Named("trades", beta=6.0), lr=1e-3, attack=AttackConfig(steps=5), ema=0.99)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "norm: dual_bn\nobjective: {name: trades, beta: 6}\nlr: 1e-3\nema: 0.99\nattack:\n  steps: 5\n"),
        ("a.yml", EXPECTED.to_yaml()),
        ("a.json", json.dumps(EXPECTED.to_dict())),
        ("a.py", f"from advnorm.config.config import *\nconfig = {EXPECTED!r}\n"),
        ("b.py", f"from advnorm.config.config import *\ndef config():\n    return {EXPECTED!r}\n"),
    ],
)
def test_a_configuration_is_read_from_any_kind_of_file(tmp_path, name, text):
    path = written(tmp_path, name, text)
    assert load_config(path) == load_config(str(path)) == EXPECTED
    assert load_config(path, ["attack.loss=cw"]) == replace(EXPECTED, attack=AttackConfig(steps=5, loss="cw"))


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("a.toml", "", "ends in .yaml"),
        ("a.yaml", "epochs: 1\nepochs: 2\n", "'epochs' stands there twice"),
        ("a.yaml", "attack: {steps: 1, steps: 2}", "'steps' stands there twice"),
        ("a.yaml", "a: [1", "line 1"),
        ("a.yaml", "- 1\n", "a mapping of settings"),
        ("a.yaml", "epochs: !!python/object/apply:os.system ['exit 1']", "tags such as"),
        ("a.yaml", "attack: &a {steps: 1}\nobjective: *a", "aliases"),
        ("a.yaml", "model: &a [*a]", "aliases"),
        ("a.yaml", "[1, 2]: 3", "unknown setting"),
        ("a.yaml", "a: 1\n---\nb: 2", "cannot be read as YAML"),
        ("a.yaml", "epochs: " + "[" * 1000, "nested too deeply"),
        ("a.yaml", "epohcs: 3\nattack: {stepz: 3}\nlr: 0\n", "did you mean 'epochs'"),
        ("a.json", '{"epochs": 1, "epochs": 2}', "'epochs' stands there twice"),
        ("a.json", '{"epochs": ', "cannot be read as JSON"),
        ("a.json", "[" * 100_000, "cannot be read as JSON"),
        ("a.json", '{"lr": NaN}', "lr must be a finite number"),
        ("a.json", '{"seed": ' + "9" * 5000 + "}", "cannot be read as JSON"),
        ("a.py", "x = 1", "must define config"),
        ("a.py", "config = 3", "found 3"),
        ("a.py", "config = lambda: None", "found None"),
        ("a.py", "1 / 0", "running it raised ZeroDivisionError"),
        ("a.py", "def config(): return {}['x']", "running it raised KeyError"),
        ("a.py", "import sys\nsys.exit(3)", "running it raised SystemExit"),
        ("a.py", "def config(:", "running it raised SyntaxError"),
        ("a.py", "from advnorm.config.config import Config\nconfig = Config(norm='dualbn')", "did you mean 'dual_bn'"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path, name, text, part):
    path = written(tmp_path, name, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value).startswith(str(path)) and part in str(caught.value)


def test_all_problems_of_a_file_and_of_its_overrides_come_in_one_error(tmp_path):
    path = written(tmp_path, "a.yaml", "epohcs: 3\nattack: {stepz: 3}\nlr: 0\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["norm=dualbn", "nonsense"])
    for part in ("'epochs'", "'steps'", "lr must be above 0", "'dual_bn'", "write key=value"):
        assert part in str(caught.value)


@pytest.mark.parametrize("name", ["gone.yaml", "gone.json", "gone.py"])
def test_a_missing_file_is_told_by_name(tmp_path, name):
    with pytest.raises(ConfigError, match="gone.*cannot be read"):
        load_config(tmp_path / name)


def test_a_file_that_is_no_text_is_told_by_name(tmp_path):
    (tmp_path / "a.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="a.yaml: is no text"):
        load_config(tmp_path / "a.yaml")


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


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"batch_size": 8, "second_pass": {"name": "apart", "groups": 16}}, "groups (16) is more than batch_size (8)"),
        (
            {
                "batch_size": 20,
                "second_pass": {"name": "apart", "groups": 4},
                "objective": {"name": "hybrid", "clean_share": 0.3},
            },
            "does not divide the 6 clean images",
        ),
    ],
)
def test_groups_of_a_second_pass_that_cannot_be_made_are_refused_before_training(settings, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        Config.from_dict({"norm": "dual_bn", "eps": 0.1, **settings})


def test_a_setting_that_came_later_leaves_the_runs_before_it_their_names():
    assert Config().run_name.endswith("-d2642d6d") and not Config(snapshots=(1,)).run_name.endswith("-d2642d6d")


def test_one_value_stands_for_a_list_of_it_where_any_sequence_serves():
    assert convert("inputs", Sequence[str], "adv") == ("adv",) == convert("inputs", Sequence[str], ["adv"])
    assert convert("channels", int | Sequence[int], 5) == 5 and convert("channels", int | Sequence[int], [5]) == (5,)
    with pytest.raises(ConfigError, match="inputs must be a list whose items are each a printable string, got 5"):
        convert("inputs", Sequence[str], 5)
    with pytest.raises(ConfigError, match="must be a list"):
        convert("snapshots", tuple[int, ...], 5)


def test_means_are_of_as_many_channels_as_the_data_have():
    four = {"name": "small_cnn", "mean": [0.3] * 4, "std": [0.4] * 4}
    config = Config.from_dict({"model": four, "data": {"name": "synthetic", "channels": 4}, "eps": 0.1})
    assert config.model.options["mean"] == (0.3,) * 4
    with pytest.raises(ConfigError, match="std"):
        Config.from_dict({"model": {**four, "std": [0.4] * 3}, "eps": 0.1})
