"""Plans of evaluations: everything is validated with one small forward."""

from pathlib import Path

import pytest
import torch

import advnorm
from advnorm._core.errors import ConfigError
from advnorm.attacks import PGD
from advnorm.data import load
from advnorm.evaluation import accuracy_against_eps, accuracy_against_steps, benchmark
from advnorm.evaluation.jobs import name_attacks
from advnorm.evaluation.plan import plan_evaluation
from support.classifiers import CountingLinear, first, perceptron
from support.problems import raises_problem

THREAT = advnorm.ThreatModel(eps=0.2)


def dual() -> torch.nn.Module:
    return advnorm.create_model("small_cnn", in_channels=1, norm="dual_bn")


def nan(z):
    return z * float("nan")


@pytest.mark.parametrize(
    ("change", "code", "field"),
    [
        ({"data": lambda x, y: (x[:0], y[:0])}, "empty", None),
        ({"data": lambda x, y: (x * 255, y)}, "out_of_range", None),
        ({"data": lambda x, y: ((x - 0.5) / 0.5, y)}, "out_of_range", None),
        ({"data": lambda x, y: (x * 65535, y)}, "out_of_range", None),
        ({"data": lambda x, y: (x.double(), y)}, "wrong_dtype", None),
        ({"data": lambda x, y: ((x * 255).byte(), y)}, "wrong_dtype", None),
        ({"data": lambda x, y: ((x * 65535).to(torch.uint16), y)}, "wrong_dtype", None),
        ({"data": lambda x, y: (x, y.float())}, "wrong_dtype", None),
        ({"data": lambda x, y: (x, y - 1)}, "out_of_range", None),
        ({"data": lambda x, y: (x, y + 1)}, "out_of_range", "labels"),
        ({"data": lambda x, y: (x[:, :, :4], y)}, "wrong_shape", "model"),
        ({"data": lambda x, y: x}, "wrong_type", "data"),
        ({"data": lambda x, y: (x.to_sparse(), y)}, "wrong_layout", "images"),
        ({"data": lambda x, y: [(x, y.to("meta"))]}, "wrong_layout", "labels"),
        ({"model": lambda: dual().to("meta")}, "wrong_device", "model"),
        ({"model": lambda: CountingLinear(lambda z: z * 1j)}, "wrong_dtype", "logits"),
        ({"model": lambda: CountingLinear(nan)}, "not_finite", "logits"),
        ({"model": lambda: CountingLinear(lambda z: (z, z))}, "wrong_type", None),
        ({"model": lambda: CountingLinear(lambda z: z[:, 0])}, "wrong_shape", None),
        ({"model": lambda: torch.sin}, "wrong_type", "model"),
        ({"threat": 8 / 255}, "wrong_type", "threat"),
        ({"attacks": 3}, "wrong_type", "attacks"),
        ({"attacks": []}, "empty", "attacks"),
        ({"attacks": ["pgd10", "autoatack"]}, "unknown_name", None),
        ({"attacks": "pgd10-restart5"}, "unknown_name", None),
        ({"attacks": {"clean": PGD(threat=THREAT)}}, "conflict", "attacks"),
        ({"attacks": {"strong": PGD(threat=advnorm.ThreatModel(eps=0.5))}}, "conflict", "attacks"),
        ({"statistics": "frozen"}, "unknown_name", "statistics"),
        ({"route": "adv"}, "wrong_route", "route"),  # a model without routed norms
        ({"batch_size": 0}, "out_of_range", "batch_size"),
        ({"limit": 0}, "out_of_range", "limit"),
        ({"device": "tpu"}, "no_device", "device"),
        ({"about": "run 3"}, "wrong_type", "about"),
        ({"about": {"place": Path("x")}}, "wrong_type", "about"),
        ({"about": {"lr": float("nan")}}, "wrong_type", "about"),
    ],
)
def test_a_wrong_argument_is_reported_before_any_long_computation(change, code, field, data):
    x, y = first(data)
    model = change.get("model", CountingLinear)()
    given = {key: value for key, value in change.items() if key not in ("model", "data", "threat")}
    with pytest.raises(ConfigError) as error:
        benchmark(model, change.get("data", lambda x, y: (x, y))(x, y), change.get("threat", THREAT), **given)
    found = [(problem.code, problem.field) for problem in error.value.problems]
    assert any(c == code and field in (None, f) for c, f in found), found
    assert getattr(model, "forwards", 0) <= 1


def test_one_error_lists_all_problems(data):
    with pytest.raises(ConfigError) as error:
        benchmark(CountingLinear(nan), first(data), THREAT, ["pdg10", "pgd0"], batch_size=-1)
    fields = {problem.field for problem in error.value.problems}
    assert {"batch_size", "logits"} <= fields and len(error.value.problems) == 4


def test_a_missing_route_and_an_unknown_route_are_reported(data):
    model = dual()
    with pytest.raises(ConfigError, match="route"):
        benchmark(model, first(data), THREAT, "pgd10")
    with pytest.raises(ConfigError, match="'adv'"):
        benchmark(model, first(data), THREAT, "pgd10", "avd")
    with advnorm.route(model, "adv"):
        assert benchmark(model, first(data), THREAT, "fgsm").routes == ("default",)


def test_a_problem_of_all_routes_is_reported_once_and_that_of_one_route_with_its_name(data):
    model = dual()
    colour = torch.rand(8, 3, 8, 8), torch.zeros(8, dtype=torch.long)
    with raises_problem("wrong_shape", "model") as error:
        benchmark(model, colour, THREAT, "pgd10", ["clean", "adv"])
    (problem,) = error.value.problems
    assert "route" not in problem.message
    with raises_problem("wrong_shape", "surrogate.model") as error:
        advnorm.audit(advnorm.create_model("small_cnn", norm="dual_bn"), colour, THREAT, surrogate=model)
    assert len(error.value.problems) == 1
    next(buffer for name, buffer in model.named_buffers() if name.endswith("running_mean_adv")).fill_(torch.nan)
    with raises_problem("not_finite", "logits") as error:
        benchmark(model, first(data), THREAT, "pgd10", ["clean", "adv"])
    assert error.value.problems[0].message.endswith("through route 'adv'")


def test_a_route_of_a_mixture_norm_is_rejected(data):
    model = advnorm.create_model("small_cnn", in_channels=1, norm="gmm_bn")
    with raises_problem("not_supported", "route"):
        benchmark(model, first(data), THREAT, "fgsm", ["clean", "adv"])


@pytest.mark.parametrize("options", [{"limit": 1}, {"batch_size": 1}])
def test_batch_statistics_of_a_single_image_are_rejected(options, data):
    with raises_problem("conflict", "statistics"):
        benchmark(perceptron(), first(data), THREAT, "fgsm", statistics="batch_frozen", **options)
    assert benchmark(perceptron(), first(data), THREAT, "fgsm", **options).accuracy() <= 1


@pytest.mark.parametrize(
    ("model", "change", "attacks", "names"),
    [
        (lambda: CountingLinear(classes=2), lambda x: x, ["apgd-ce-steps3", "pgd10-dlr"], "pgd10-dlr"),
        (lambda: CountingLinear(classes=3), lambda x: x, ["fgsm", "pgd3-dlr-targeted"], "pgd3-dlr-targeted"),
        (lambda: CountingLinear(torch.detach), lambda x: x, ["square-queries9", "pgd10", "fgsm"], "pgd10, fgsm"),
        (CountingLinear, lambda x: x.flatten(1), ["pgd3", "autoattack-steps2"], "autoattack-steps2"),
    ],
)
def test_an_attack_that_does_not_fit_the_model_or_the_images_is_rejected(data, model, change, attacks, names):
    model = model()
    with pytest.raises(ConfigError) as error:
        benchmark(model, (change(data[0][:20]), data[1][:20] % 2), THREAT, attacks)
    (problem,) = error.value.problems
    assert problem.field == "attacks" and problem.message.startswith(f"{names}: ") and model.forwards == 1


def test_attacks_without_gradients_run_on_a_model_without_gradients(data):
    attacks = ["square-queries9", "noise-uniform", "autoattack-steps2-queries9"]
    assert len(benchmark(CountingLinear(torch.detach), first(data), THREAT, attacks).attacks) == 3


def test_logits_under_a_name_are_found(data):
    result = benchmark(CountingLinear(lambda z: {"logits": z, "features": z}), first(data), THREAT, "fgsm")
    assert result.images == 40


def test_an_attack_object_never_takes_the_name_of_a_named_attack():
    attacks = [PGD(threat=THREAT, seed=3), "pgd10", PGD(threat=THREAT, steps=2)]
    assert name_attacks(attacks) == {"pgd10 (2)": attacks[0], "pgd10": "pgd10", "pgd2": attacks[2]}


def test_an_attack_object_is_named_by_its_changed_settings():
    attacks = [PGD(threat=THREAT, steps=3), PGD(threat=THREAT, steps=3, momentum=0.5, step_size="1/255")]
    assert [*name_attacks(attacks)] == ["pgd3", "pgd3 step_size=1/255 momentum=0.5"]


def test_data_sets_and_tensors_have_the_same_fingerprint(data):
    digits = load("digits", "test")
    model = CountingLinear()
    plans = [plan_evaluation(model, d, THREAT, "fgsm", limit=10) for d in (digits, digits.take(slice(None)))]
    plans.append(plan_evaluation(model, (digits.pixels(), digits.labels), THREAT, "fgsm", limit=10))
    assert len({plan.fingerprint for plan in plans}) == 1
    other = plan_evaluation(model, data, THREAT, "fgsm", limit=11)
    assert other.fingerprint != plans[0].fingerprint


def test_the_record_names_the_data_set_unless_the_caller_does(sound):
    digits = load("digits", "test")
    assert benchmark(sound, digits, THREAT, "fgsm", limit=8).record()["about"] == {"data": "digits, test"}
    named = benchmark(sound, digits, THREAT, "fgsm", limit=8, about={"data": "mine", "run": "r"})
    assert named.record()["about"] == {"data": "mine", "run": "r"} and "run r, data mine" in str(named)


def test_a_single_value_stands_for_a_list(data):
    model = CountingLinear()
    assert accuracy_against_steps(model, first(data), THREAT, 3).labels == ("3",)
    assert accuracy_against_eps(model, first(data), THREAT, "8/255", "fgsm").labels == ("8/255",)
    assert accuracy_against_eps(model, first(data), THREAT, 0.1, "fgsm").values == (0.1,)
    for wrong in (
        lambda: accuracy_against_steps(model, first(data), THREAT, None),
        lambda: accuracy_against_eps(model, first(data), THREAT, None),
        lambda: accuracy_against_eps(model, first(data), 0.1),
    ):
        with pytest.raises(ConfigError):
            wrong()
