"""Benchmarks: accuracies, routes, statistics, random models and curves."""

import copy
import json

import pytest
import torch
from torch import nn

import advnorm
from advnorm._core.errors import ConfigError
from advnorm.attacks import PGD
from advnorm.attacks.autoattack import AutoAttack
from advnorm.evaluation import accuracy_against_eps, accuracy_against_steps, benchmark
from support.classifiers import CountingLinear, first, perceptron
from support.problems import raises_problem

THREAT = advnorm.ThreatModel(eps=0.2)
ATTACKS = ["fgsm", "pgd10", "apgd-ce-steps10"]


def test_accuracies_equal_those_of_attacks_by_hand(sound, data):
    x, y = first(data)
    result = benchmark(sound, (x, y), THREAT, ATTACKS)
    sound.eval()
    with torch.no_grad():
        clean = sound(x).argmax(1) == y
        assert torch.equal(result.clean["default"], clean)
        for name in ATTACKS:
            # Only correct images are attacked; each keeps the noise of its row.
            x_adv = advnorm.attacks.get(name, threat=THREAT)(sound, x, y)
            assert torch.equal(result.robust["default"][name], clean & (sound(x_adv).argmax(1) == y)), name
    union = torch.stack(list(result.robust["default"].values())).all(0)
    assert torch.equal(result.union(), union)
    assert result.robust_accuracy() == union.sum().item() / len(union)
    assert result.robust_accuracy("pgd10") == result.accuracy("pgd10") == result.accuracies["default"]["pgd10"]
    assert 0.4 < result.robust_accuracy() <= result.robust_accuracy("fgsm") < result.accuracy()


def test_the_batch_size_has_no_effect(sound, data):
    results = [benchmark(sound, first(data), THREAT, ATTACKS, batch_size=size) for size in (7, 64)]
    one, other = ({**r.record(), "batch_size": 0, "seconds": 0} for r in results)
    assert one == other


def test_several_routes_in_one_call_give_the_results_of_single_calls(dual, data):
    both = benchmark(dual, first(data), THREAT, "pgd10", ["clean", "adv"])
    assert both.routes == ("clean", "adv")
    for route in both.routes:
        single = benchmark(dual, first(data), THREAT, "pgd10", route)
        assert torch.equal(both.robust[route]["pgd10"], single.robust[route]["pgd10"])
    with raises_problem("missing_route", "route"):
        both.robust_accuracy("pgd10")
    with raises_problem("unknown_name", "route"):
        both.accuracy(route="avd")
    with raises_problem("unknown_name", "attack"):
        both.accuracy("pgd20", "adv")


def test_an_attack_with_a_route_of_its_own_is_transferred(dual, data):
    x, y = first(data)
    attack = PGD(threat=THREAT, steps=5, route="clean")
    result = benchmark(dual, (x, y), THREAT, {"from clean": attack}, "adv")
    x_adv = attack(dual, x, y)
    dual.eval()
    with torch.no_grad(), advnorm.route(dual, "adv"):
        expected = (dual(x).argmax(1) == y) & (dual(x_adv).argmax(1) == y)
    assert torch.equal(result.robust["adv"]["from clean"], expected)


def test_a_model_in_train_mode_is_evaluated_in_eval_mode_and_restored(sound, data):
    model = nn.Sequential(nn.Dropout(), nn.BatchNorm2d(1), sound).eval()
    expected = benchmark(model, first(data), THREAT, "pgd10").record()["outcomes"]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.train()
    sound.bn2.eval()
    assert benchmark(model, first(data), THREAT, "pgd10").record()["outcomes"] == expected
    assert [module for module in model.modules() if not module.training] == [sound.bn2]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_autocast_of_the_caller_has_no_effect(data):
    model, (x, _) = CountingLinear(lambda z: z + 1000), first(data)  # bf16 cannot distinguish these logits
    y, weak = model(x).argmax(1), advnorm.ThreatModel(eps=0.01)
    expected = benchmark(model, (x, y), weak, "pgd3")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(benchmark(model, (x, y), weak, "pgd3").union(), expected.union())
    assert 0 < expected.robust_accuracy() < expected.accuracy() == 1


# -- statistics of the batch -------------------------------------------------------------------------------------------


def test_attacks_use_the_statistics_mode_of_the_evaluation_and_update_nothing(sound, data):
    x, y = first(data)
    before = {name: value.clone() for name, value in sound.state_dict().items()}
    for mode in ("batch", "batch_frozen"):
        attacks = ["pgd10", PGD(threat=THREAT, steps=5, statistics="batch")]
        result = benchmark(sound, (x, y), THREAT, attacks, statistics=mode, batch_size=40)
        clean = result.clean["default"]
        x_adv = PGD(threat=THREAT, statistics="batch_frozen")(sound, x[clean], y[clean], index=torch.arange(40)[clean])
        with advnorm.attacks.predicting(sound, statistics="batch_frozen") as predict:
            expected = torch.zeros_like(clean).masked_scatter(clean, predict(x_adv).argmax(1) == y[clean])
        assert torch.equal(result.robust["default"]["pgd10"], expected)
        assert all("statistics='batch_frozen'" in attack for attack in result.attacks.values())
        assert any(warning.startswith("batch-dependent") for warning in result.warnings)
        steps = accuracy_against_steps(sound, (x, y), THREAT, (10,), statistics=mode, batch_size=40)
        eps = accuracy_against_eps(sound, (x, y), THREAT, (0.2,), "pgd10", statistics=mode, batch_size=40)
        assert steps.robust_accuracies() == eps.robust_accuracies() == [result.robust_accuracy("pgd10")]
    assert all(torch.equal(before[name], value) for name, value in sound.state_dict().items())
    assert benchmark(sound, (x, y), THREAT, "fgsm").warnings == ()


@pytest.mark.parametrize("norm", [None, "bn"])
def test_with_batch_statistics_no_image_is_left_alone(norm, data):
    model, (x, _) = perceptron(norm), first(data, 21)
    model.train()
    with torch.no_grad(), advnorm.attacks.predicting(model, statistics="batch_frozen") as predict:
        y = torch.cat([predict(part) for part in (x[:10], x[10:])]).argmax(1)  # the last image joins its neighbours
    y[:19] += 1  # wrong: two images remain to attack, each alone in its batch
    y %= 10
    attacks = ["pgd2", "pgd2-restarts2", "apgd-ce-steps5", "fab-t-steps5", "square-queries10"]
    attacks = [*attacks, AutoAttack(threat=THREAT, steps=3, targets=2, queries=5)]
    for left in (2, 1):
        result = benchmark(model, (x, y), THREAT, attacks, batch_size=10, statistics="batch_frozen")
        assert result.clean["default"].nonzero()[:, 0].tolist() == list(range(21 - left, 21))
        assert any("batch-dependent" in warning for warning in result.warnings)
        y[19] = (y[19] + 1) % 10


def test_autoattack_uses_the_batches_of_the_evaluation_for_batch_statistics(data, monkeypatch):
    sizes, evaluate = [], AutoAttack.evaluate
    monkeypatch.setattr(
        AutoAttack, "evaluate", lambda self, *a, **k: (sizes.append(self.batch_size), evaluate(self, *a, **k))[1]
    )
    for statistics in ("running", "batch_frozen"):
        attack = AutoAttack(threat=THREAT, attacks=("apgd-ce",), steps=2, statistics=statistics)
        benchmark(perceptron(), first(data), THREAT, attack, batch_size=8, statistics=statistics)
    assert sizes == [None, 8]


# -- outputs that limit what attacks can show --------------------------------------------------------------------------


def test_a_random_model_is_attacked_and_evaluated_with_different_draws(data):
    class Noisy(CountingLinear):
        def forward(self, x):
            draws.append(torch.rand(len(x), 10))
            return super().forward(x) + draws[-1]

    torch.manual_seed(0)
    model, records = Noisy(), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        draws, before = [], torch.get_rng_state()
        result = benchmark(model, first(data), THREAT, ["fgsm", "pgd2", "autoattack-rand-steps2"])
        records.append({**result.record(), "seconds": 0, "commit": ""})
        assert torch.equal(before, torch.get_rng_state())
        seen = [tuple(draw.flatten().tolist()) for draw in draws[1:]]
        assert len(set(seen)) == len(seen)  # no two forwards share draws
    other = benchmark(model, first(data), THREAT, ["fgsm"], seed=1).record()["outcomes"]["default"]
    assert records[0] == records[1] and records[0]["outcomes"]["default"]["clean"] != other["clean"]
    assert result.warnings[0].startswith("the outputs are random")
    assert sum("random" in warning for warning in result.warnings) == 1


def test_probabilities_are_reported_once_for_all_attacks(data):
    model = CountingLinear(lambda z: z.softmax(1))
    result = benchmark(model, first(data), THREAT, ["fgsm", "autoattack-steps2-queries5"])
    assert sum("probabilities" in warning for warning in result.warnings) == 1


def test_a_mixture_norm_is_reported_and_its_components_are_evaluated_in_a_scope(data, tmp_path):
    torch.manual_seed(0)
    model = advnorm.create_model("small_cnn", in_channels=1, norm="gmm_bn")
    with advnorm.route(model, {"clean": 64, "adv": 64}), torch.no_grad():
        model(torch.cat([data[0][:64], 1 - data[0][:64]]))
    assert benchmark(model, first(data), THREAT, "fgsm").warnings[0].startswith("input-dependent: gmm_bn")
    for domain in ("clean", "adv"):
        with advnorm.mixture_component(model, domain):
            found = benchmark(model, first(data), THREAT, "pgd2", record=tmp_path / f"{domain}.json")
        expected = benchmark(advnorm.strip(model, component=domain), first(data), THREAT, "pgd2")
        assert torch.equal(found.union(), expected.union()) and found.warnings == ()
        assert f"component {domain}" in str(found)
    with advnorm.mixture_component(model, "adv"), raises_problem("other_evaluation", "record"):
        benchmark(model, first(data), THREAT, "pgd2", record=tmp_path / "clean.json")


class Brittle(nn.Module):
    """A linear classifier that returns NaN unless pixels are multiples of 1/16, so for every perturbed image."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(64, 10)

    def forward(self, x):
        exact = ((16 * x).round() == 16 * x).flatten(1).all(1, keepdim=True)
        return torch.where(exact, self.fc(x.flatten(1)), torch.nan)


@pytest.mark.parametrize(
    "attack",
    [
        "noise-uniform",
        "pgd3",
        "pgd2-restarts2-worst",
        "pgd3-momentum1",
        "apgd-ce-steps5",
        "square-queries20",
        "autoattack-steps5-queries20",
    ],
)
def test_a_nan_output_counts_as_a_successful_attack(data, attack):
    model = Brittle().eval()
    x = data[0][:24]
    y = model(x).argmax(1)
    result = benchmark(model, (x, y), advnorm.ThreatModel(eps=0.03), attack)
    assert result.accuracy() == 1 and result.robust_accuracy(attack) == 0


def test_an_attack_itself_rejects_nan_for_a_clean_image(data):
    model = Brittle().eval()
    x, y = data[0][:4] + 0.001, data[1][:4]
    with pytest.raises(ConfigError):
        PGD(threat=THREAT, steps=1)(model, x.clamp(0, 1), y)


def test_nan_for_one_image_is_reported_before_the_attacks(data):
    def answer(z):
        return torch.where(torch.arange(len(z))[:, None] == 30, torch.nan, z) if len(z) > 30 else z

    model = CountingLinear(answer)
    with raises_problem("not_finite", "model") as error:
        benchmark(model, first(data), THREAT, "pgd10")
    assert "image 30" in str(error.value)
    assert model.forwards == 4  # the probe, two forwards of the first images, and one of all


# -- curves ------------------------------------------------------------------------------------------------------------


def test_accuracy_against_steps_and_eps(sound, data):
    steps = accuracy_against_steps(sound, first(data), THREAT, (1, 5, 20))
    assert steps.values == (1, 5, 20) and steps.robust_accuracies() == sorted(steps.robust_accuracies(), reverse=True)
    eps = accuracy_against_eps(sound, first(data), THREAT, (0.05, "51/255", 0.5))
    assert eps.values == (0.05, 0.2, 0.5)
    small, middle, large = eps.robust_accuracies()
    assert eps.result.accuracy() > small > middle > large == 0
    assert middle == benchmark(sound, first(data), THREAT, "pgd20").robust_accuracy()
    for curve in (steps, eps):
        assert json.loads(json.dumps(curve.record()))["values"] == list(curve.values)
        assert "default route" in str(curve)
    assert "│ 51/255 " in str(eps)
    near = accuracy_against_eps(sound, first(data), THREAT, (0.2, 0.2 + 1e-9, "2/255", "2/255"), "pgd2")
    assert len(near.values) == len(near.robust_accuracies()) == 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_the_results_of_the_cpu_and_keeps_the_tf32_setting(sound, data):
    attacks = ["pgd10", "autoattack-steps10-queries50"]
    expected = benchmark(sound, first(data), THREAT, attacks)
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    try:
        result = benchmark(copy.deepcopy(sound).cuda(), first(data), THREAT, attacks, device="cuda")
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before
    for name in attacks:
        same = result.robust["default"][name] == expected.robust["default"][name]
        assert same.double().mean() >= 0.95
    with raises_problem("conflict", "device"):
        benchmark(sound, first(data), THREAT, "fgsm", device="cuda")
