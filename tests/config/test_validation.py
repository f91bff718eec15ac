"""Wrong settings: each is rejected by code and field, and all problems come in one error."""

import math
from typing import get_type_hints

import pytest
import torch

from advnorm._core.errors import ConfigError
from advnorm._core.settings import convert, describe
from advnorm.config import Config, Named
from support.configs import GOOD, SETTINGS
from support.problems import raises_problem

RANGES = {row.name: row.range for row in describe(Config) if row.range}


def rejected(**settings) -> list[tuple[str, str]]:
    """Code and field of every problem."""
    with pytest.raises(ConfigError) as caught:
        Config(**settings)
    assert str(caught.value).startswith("bad configuration: ") and "\n" not in str(caught.value)
    return [(problem.code, problem.field) for problem in caught.value.problems]


def test_the_cases_cover_every_setting():
    assert set(GOOD) == set(SETTINGS) and set(RANGES) < set(SETTINGS)


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("model", "resnet_18", "unknown_name"),
        ("model", {"width": 2}, "wrong_type"),
        ("model", None, "wrong_type"),
        ("norm", "dualbn", "unknown_name"),
        ("data", "digit", "unknown_name"),
        ("data", "cifar10c", "not_supported"),
        ("held_out", -1, "out_of_range"),
        ("held_out", 1.5, "out_of_range"),
        ("held_out", 0, "conflict"),
        ("mix", "mixu", "unknown_name"),
        ("objective", "trade", "unknown_name"),
        ("regularizer", "lig", "unknown_name"),
        ("second_pass", "smm", "unknown_name"),
        ("second_pass", {"radius": 1}, "wrong_type"),
        ("attack", 3, "wrong_type"),
        ("eps_warmup_epochs", 11, "out_of_range"),
        ("steps_warmup_epochs", 11, "out_of_range"),
        ("warmup_epochs", 10.5, "out_of_range"),
        ("running_epochs", 11, "out_of_range"),
        ("running_epochs", 10, "conflict"),
        ("milestones", [5, 5], "out_of_range"),
        ("milestones", [10], "out_of_range"),
        ("milestones", [0], "out_of_range"),
        ("milestones", 5, "wrong_type"),
        ("validation_images", 0, "out_of_range"),
        ("snapshots", [5, 5], "out_of_range"),
        ("snapshots", [11], "out_of_range"),
        ("snapshots", [0], "out_of_range"),
        ("snapshots", [2.5], "wrong_type"),
        ("train_only", "norms", "conflict"),
        ("name", "a/b", "out_of_range"),
        ("name", "", "wrong_type"),
        ("name", "..", "out_of_range"),
        ("name", "-x", "out_of_range"),
        ("seed", 2**31, "out_of_range"),
    ],
)
def test_a_bad_value_is_rejected_by_code_and_field(name, value, code):
    assert rejected(**{name: value}) == [(code, name)]


@pytest.mark.parametrize(
    ("settings", "code", "field"),
    [
        ({"norm_options": {"sync": True}}, "conflict", "norm_options.sync"),
        ({"norm_options": {"track_running_stats": False}}, "conflict", "norm_options.track_running_stats"),
        ({"norm_options": {"a-b": 1}}, "unknown_name", "norm_options"),
        ({"norm_options": {"momentum": math.nan}}, "wrong_type", "norm_options.momentum"),
        ({"norm_options": {"affine": "no"}}, "wrong_type", "norm_options.affine"),
        ({"norm_options": {"domains": object()}}, "wrong_type", "norm_options.domains"),
        ({"model": {"name": "small_cnn", "norm": "bn"}}, "conflict", "model.norm"),
        ({"attack": {"name": "pgd3-bf16"}}, "conflict", "attack.precision"),
        ({"model": {"name": "small_cnn", "num_classes": 3}}, "conflict", "model.num_classes"),
        ({"model": {"name": "small_cnn", "widht": 3}}, "unknown_name", "model.widht"),
        ({"model": {"name": "small_cnn", "width": "wide"}}, "wrong_type", "model.width"),
        ({"model": "fixup_resnet20", "norm": "bn"}, "conflict", "norm"),
        ({"data": {"name": "synthetic", "sise": 6}}, "unknown_name", "data.sise"),
        ({"data": {"name": "cifar10", "root": "x"}}, "conflict", "data.root"),
        ({"objective": {"name": "hybrid", "label_smoothing": 0.1}}, "conflict", "objective.label_smoothing"),
        ({"objective": {"name": "trades", "beta": "6"}}, "wrong_type", "objective.beta"),
        ({"objective": {"name": "trades", "betta": 6}}, "unknown_name", "objective.betta"),
        ({"attack": {"step": 1}}, "unknown_name", "attack.step"),
        ({"schedule": "cosine", "milestones": [5]}, "conflict", "milestones"),
        ({"schedule": "cosine", "gamma": 0.5}, "conflict", "gamma"),
        ({"gamma": 0.3}, "conflict", "gamma"),
        ({"second_pass_warmup_epochs": 1}, "conflict", "second_pass_warmup_epochs"),
        ({"second_pass": "awp", "second_pass_warmup_epochs": 11}, "out_of_range", "second_pass_warmup_epochs"),
        ({"schedule": "cosine", "peak_share": 0.9}, "conflict", "peak_share"),
        ({"parallel": "fsdp", "second_pass": "sam"}, "conflict", "second_pass"),
        ({"parallel": "fsdp", "regularizer": "ligs"}, "conflict", "regularizer"),
        ({"parallel": "fsdp", "compile": True}, "conflict", "compile"),
        ({"parallel": "fsdp", "channels_last": True}, "conflict", "channels_last"),
        ({"recompute": True, "compile": True}, "conflict", "compile"),
        ({"attack": {"name": "square"}, "steps_warmup_epochs": 2}, "conflict", "steps_warmup_epochs"),
        ({"mix_alpha": 0.4}, "conflict", "mix_alpha"),
        ({"schedule": "one_cycle", "warmup_epochs": 1}, "conflict", "warmup_epochs"),
        ({"nesterov": True, "momentum": 0}, "conflict", "nesterov"),
        ({"nesterov": True, "optimizer": "adam"}, "conflict", "nesterov"),
        ({"norm": "none", "train_only": "norms", "weights": "w"}, "conflict", "train_only"),
        ({"norm_options": {"affine": False}, "train_only": "norms", "weights": "w"}, "conflict", "train_only"),
        ({"norm": "ln", "sync_statistics": True}, "conflict", "sync_statistics"),
        ({"norm": "gn", "second_pass": "apart"}, "conflict", "second_pass"),
        ({"norm": "gn", "running_epochs": 2}, "conflict", "running_epochs"),
        ({"held_out": 50, "validation_images": 51}, "conflict", "validation_images"),
        ({"second_pass": {"name": "apart", "samples": 129}}, "conflict", "second_pass.samples"),
        ({"second_pass": {"name": "apart", "groups": 16}, "batch_size": 8}, "conflict", "second_pass.groups"),
        (
            {
                "objective": {"name": "hybrid", "clean_share": 0.001},
                "second_pass": {"name": "apart", "groups": 2},
                "batch_size": 64,
                "norm": "dual_bn",
            },
            "conflict",
            "second_pass.groups",
        ),
        (
            {
                "objective": {"name": "hybrid", "clean_share": 0.3},
                "second_pass": {"name": "apart", "groups": 4},
                "batch_size": 20,
                "norm": "dual_bn",
            },
            "conflict",
            "second_pass.groups",
        ),
        (
            {"second_pass": {"name": "apart", "groups": 4, "samples": 2}, "batch_size": 8},
            "conflict",
            "second_pass.groups",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_rejected(settings, code, field):
    assert (code, field) in rejected(**settings)


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"eps": 8}, "eps"),
        ({"eps": "x"}, "eps"),
        ({"eps": -0.1}, "eps"),
        ({"attack": {"steps": 0}}, "attack"),
        ({"attack": {"step_size": 2}}, "attack"),
        ({"attack": {"loss": "kl", "start": "clean"}}, "attack"),
        ({"objective": "trades", "attack": {"start": "clean"}}, "attack"),
        ({"objective": "trades", "attack": {"start": 0.2}}, "attack"),
        ({"objective": "trades", "attack": {"target": "random"}}, "attack"),
        ({"validation_attack": "pgdd"}, "validation_attack"),
        ({"validation_attack": "pgd10-momentum1.2.3"}, "validation_attack"),
        ({"regularizer": {"name": "ligs", "shift": "pgdd"}}, "regularizer"),
        ({"second_pass": {"name": "apart", "samples": 0.0, "groups": 0, "radius": -1}}, "second_pass"),
        ({"norm_options": {"momentun": 1}}, "norm_options"),
        ({"norm_options": {"domains": ["clean", "x"]}}, "objective"),
        ({"objective": {"name": "hybrid", "layout": "sequential"}, "norm": "cross_bn"}, "objective"),
    ],
)
def test_problems_that_other_layers_find_carry_the_setting(settings, part):
    assert {field.partition(".")[0] for _, field in rejected(**settings)} == {part}


def unfit(hint):
    """Values that no setting of this type accepts."""
    odd = (None, True, 1.5, "?", math.nan, math.inf, -math.inf, 10**400, 10**5000, 2**63, [1], {"a": 1}, object(), b"x")
    for value in odd:
        try:
            convert("x", hint, value)
        except ConfigError:
            yield value


@pytest.mark.parametrize("name", SETTINGS)
def test_a_value_of_another_type_is_rejected_by_the_name_of_the_setting(name):
    values = list(unfit(get_type_hints(Config)[name]))
    assert len(values) >= 8
    for value in values:
        assert {field.partition(".")[0] for _, field in rejected(**{name: value})} == {name}


@pytest.mark.parametrize("name", RANGES)
def test_the_ends_of_every_range_are_exact(name):
    limit = RANGES[name]
    low, high = map(float, limit[1:-1].split(","))
    whole = int in (hint := get_type_hints(Config)[name], *getattr(hint, "__args__", ()))
    number = int if whole else float
    wrong = [low - 1, *([low] if limit[0] == "(" else [])]
    if high < math.inf:
        wrong += [high + 1, *([high] if limit[-1] == ")" else [])]
    for value in wrong:
        assert ("out_of_range", name) in rejected(**{name: number(value)})


def test_all_problems_come_in_one_error():
    found = rejected(
        norm="dualbn", epochs=0, optimizer="sdg", lr=math.nan, attack={"steps": 0, "loss": "hinge"}, eps=8, ema=1
    )
    assert {field.partition(".")[0] for _, field in found} == {
        "norm", "epochs", "optimizer", "lr", "attack", "eps", "ema",
    }  # fmt: skip


def test_the_message_reads_as_documented():
    with raises_problem("unknown_name", "norm") as caught:
        Config(norm="dualbn", epochs=0)
    assert str(caught.value) == (
        "bad configuration: epochs must be at least 1, got 0; unknown norm 'dualbn', did you mean 'dual_bn'?"
    )


def test_a_problem_of_one_setting_hides_no_problem_of_another():
    found = rejected(
        epochs="ten", milestones=[5, 3], running_epochs=-1, model="resnet_18", objective={"name": "hybrid", "x": 1}
    )
    assert found == [
        ("wrong_type", "epochs"),
        ("out_of_range", "running_epochs"),
        ("unknown_name", "objective.x"),
        ("unknown_name", "model"),
    ]


def test_validation_builds_no_network(monkeypatch):
    monkeypatch.setattr(torch.nn.Module, "__init__", lambda *_: pytest.fail("built a module"))
    Config(model=Named("resnet18", width=0.25), norm="dual_bn", norm_options={"momentum": 0.3})


def test_the_number_of_means_is_checked_against_the_data_when_the_network_is_built():
    four = {"name": "small_cnn", "mean": [0.3] * 4, "std": [0.4] * 4}
    config = Config.from_dict({"model": four, "data": {"name": "synthetic", "channels": 4}, "eps": 0.1})
    assert config.model.options["mean"] == (0.3,) * 4
