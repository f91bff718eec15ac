"""``advnorm ls`` and ``advnorm show`` list what is registered, with the options as they are typed."""

import pytest

import advnorm
from advnorm import list_models, list_norms
from advnorm.cli.listing import _EXAMPLES
from support.command import invoke
from support.problems import raises_problem


def test_norms_are_all_listed():
    out = invoke("ls", "norms")
    assert out.exit_code == 0
    assert [name for name in list_norms() if name not in out.output] == []


def test_models_are_listed_with_their_parameters_by_pattern():
    out = invoke("ls", "models", "*resnet18")
    assert "11,173,962" in out.output and "11,171,146" in out.output and "11,689,512" in out.output
    assert [name for name in list_models("*resnet18") if name not in out.output] == []
    assert "vgg11" not in out.output


def test_attacks_are_listed_with_options_as_they_are_typed():
    out = invoke("ls", "attacks").output
    assert all(word in out for word in ("pgd10", "restartsN", "float32, tf32, bf16"))
    threat = advnorm.ThreatModel(eps="8/255")
    for precision in ("float32", "tf32", "bf16"):
        assert advnorm.attacks.get(f"autoattack-{precision}", threat=threat).precision == precision


def test_objectives_are_listed_with_second_passes_and_regularizers():
    out = invoke("ls", "objectives").output
    assert "label_smoothing, running_epochs and mix (mixup, cutmix) are settings" in out and "beta=6.0" in out
    assert all(name in out for name in ("second_pass=apart_sam", "regularizer=ligs", "rho=0.05"))


@pytest.mark.parametrize(("kind", "example"), [(f"{k.replace(' ', '')}s", e) for k, e in _EXAMPLES.items()])
def test_a_pattern_without_matches_is_an_error_with_an_example_that_matches(kind, example):
    kind = {"analysiss": "analyses", "studys": "studies"}.get(kind, kind)
    with raises_problem("unknown_name", "pattern") as caught:
        invoke("ls", kind, "zzz*")
    assert example in caught.value.problems[0].hint
    assert invoke("ls", kind, example).exit_code == 0


def test_show_rejects_overrides_of_a_whole_study():
    with raises_problem("conflict", "--set"):
        invoke("show", "A/table3", "--set", "epochs=1")
    assert invoke("show", "A/table3").exit_code == 0
    assert "epochs" in invoke("show", "A/table3/dual_bn/eps16", "--set", "epochs=1").output


def test_show_prints_values_as_set_takes_them():
    settings = {}
    for line in invoke("show", width=200).output.splitlines():
        if line.startswith("│"):
            key, value = (cell.strip() for cell in line.strip("│").split("│"))
            settings[key] = value
    assert settings["ema"] == "none" and settings["recompute"] == "false" and settings["milestones"] == "[]"
    given = [f"{key}={value}" for key, value in settings.items() if not key.startswith("objective")]
    assert advnorm.Config().with_overrides(given) == advnorm.Config()
    with raises_problem("unknown_name", "A"):
        invoke("show", "A")
