"""The attack on batch-norm statistics (paper B, sec. 4.4 and 4.5) against plain arithmetic."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import advnorm
from advnorm._core.errors import ConfigError
from advnorm._core.seeding import ImageNoise
from advnorm.analysis.perturbed_statistics import StatisticsPerturbation
from advnorm.norms import RoutedNorm
from support.problems import raises_problem

CLASSES = 4


def pictures(count: int = 48, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Classes that differ by the place of a bright row, on noise."""
    noise = ImageNoise(seed, torch.arange(count))
    y = noise.integers(CLASSES, (), "y")
    x = 0.85 * noise.uniform((3, 8, 8), "x")
    return x + 0.15 * nn.functional.one_hot(2 * y, 8).float()[:, None, :, None], y


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    """A small network that gets its training batch right."""
    torch.manual_seed(0)
    model = advnorm.create_model("small_cnn", num_classes=CLASSES, norm="bn")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(40):
        x, y = pictures(seed=step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def state(model: nn.Module) -> dict[str, Any]:
    return {
        "bits": {k: (v.clone(), v._version) for k, v in model.state_dict(keep_vars=True).items()},
        "flags": [m.training for m in model.modules()] + [p.requires_grad for p in model.parameters()],
        "grads": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "random": torch.get_rng_state(),
    }


def assert_untouched(model: nn.Module, before: dict[str, Any]) -> None:
    after = state(model)
    assert after["flags"] == before["flags"] and torch.equal(after["random"], before["random"])
    for name, (value, version) in before["bits"].items():
        assert torch.equal(after["bits"][name][0], value) and after["bits"][name][1] == version, name
    for a, b in zip(before["grads"], after["grads"]):
        assert (a is None) == (b is None) and (a is None or torch.equal(a, b))


@pytest.mark.parametrize("statistics", ["batch_frozen", "running"])
@pytest.mark.parametrize("kind", ["gradient", "uniform", "binary"])
def test_the_model_is_untouched_and_the_radius_holds(trained, kind, statistics):
    before = state(trained)
    result = StatisticsPerturbation(radius=0.2, kind=kind, statistics=statistics)(trained, *pictures())
    assert_untouched(trained, before)
    assert 0 <= result.accuracy <= 1 and result.clean_accuracy > 0.7
    sizes = torch.cat([tensor.abs().flatten() for tensor in result.perturbation.tensors])
    assert sizes.max() <= 0.2 and not any(t.requires_grad for t in result.perturbation.tensors)
    if kind == "binary":
        assert torch.equal(sizes, torch.full_like(sizes, 0.2))
    if kind == "uniform":
        assert float(sizes.mean()) == pytest.approx(0.1, rel=0.2)


def test_it_leaves_no_trace_when_it_fails(trained):
    x, y = pictures()
    before = state(trained)
    with raises_problem("out_of_range", "labels"):
        StatisticsPerturbation(radius=0.1)(trained, x, y + CLASSES)
    with raises_problem("out_of_range", "images"):
        StatisticsPerturbation(radius=0.1).accuracy(trained, [(x * 255, y)])
    assert_untouched(trained, before)


@pytest.mark.parametrize("statistics", ["batch_frozen", "running"])
def test_the_direction_is_the_sign_of_the_gradient_by_finite_differences(statistics):
    torch.manual_seed(0)
    model = advnorm.create_model("small_cnn", num_classes=CLASSES, norm="bn", activation="silu").double()
    x, y = pictures(24)
    with torch.no_grad():
        model(x.double() + 0.1)
    direction = StatisticsPerturbation(radius=0.1, statistics=statistics).direction(model, x, y)

    def loss() -> float:
        with advnorm.statistics(model, mode=statistics, perturbation=probe), torch.no_grad():
            return float(nn.functional.cross_entropy(model(x.double()), y, reduction="sum"))

    probe = advnorm.zero_perturbation(model, requires_grad=False)
    checked = 0
    for signs, tensor in zip(direction.tensors, probe.tensors):
        for channel in range(0, len(tensor), 7):
            values = []
            for step in (1e-5, -1e-5):
                tensor[channel] = step
                values.append(loss())
            tensor[channel] = 0
            slope = (values[0] - values[1]) / 2e-5
            if abs(slope) > 1e-4:
                assert signs[channel] == (1 if slope > 0 else -1)
                checked += 1
    assert checked > 15


def test_the_gradient_hurts_more_than_random_directions(trained):
    """Paper B, fig. 1, in its order: gradient below binary below uniform; one batch attacks other data as well."""
    batch, other = pictures(seed=100), [pictures(seed=s) for s in range(101, 105)]
    accuracy = {}
    for kind in ("gradient", "binary", "uniform"):
        attack = StatisticsPerturbation(radius=0.6, kind=kind)
        accuracy[kind] = attack.accuracy(trained, other, attack.perturbation(trained, *batch))
    assert accuracy["gradient"] < accuracy["binary"] - 0.1 and accuracy["gradient"] < accuracy["uniform"] - 0.1
    direction = StatisticsPerturbation(radius=0.6).direction(trained, *batch)
    curve = [
        (attack := StatisticsPerturbation(radius=radius)).accuracy(trained, other, attack.scaled(direction))
        for radius in (0.0, 0.3, 0.6)
    ]
    assert curve[0] == StatisticsPerturbation(radius=0.1).accuracy(trained, other) and curve[0] > curve[1] > curve[2]


@pytest.mark.parametrize("which", ["mean", "std"])
def test_running_statistics_perturbed_as_in_section_4_5(trained, which):
    """``μ ← (1 + εv) μ`` or ``σ ← (1 + εv) σ``, done by hand to the buffers of a copy."""
    radius = 0.3
    attack = StatisticsPerturbation(
        radius=radius, kind="binary", which=which, scaling="std", statistics="running", seed=5
    )
    direction = attack.direction(trained)
    by_hand = copy.deepcopy(trained).eval()
    for name, module in by_hand.named_modules():
        if isinstance(module, RoutedNorm):
            v_mean, v_std = direction[name]["shared"]
            if which == "mean":
                module.running_mean *= 1 + radius * v_mean
            else:
                module.running_var.copy_((module.running_var + module.eps) * (1 + radius * v_std) ** 2 - module.eps)
    x, y = pictures(200, seed=50)
    with torch.no_grad(), advnorm.statistics(trained, mode="running", perturbation=attack.perturbation(trained)):
        got = trained(x)
    expected = by_hand(x).detach()
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    perturbed = attack.accuracy(trained, [(x, y)], attack.perturbation(trained))
    assert perturbed == pytest.approx(float((expected.argmax(1) == y).float().mean()), abs=0.011)


def test_only_the_chosen_statistics_move(trained):
    for which, moved in (("mean", (True, False)), ("std", (False, True)), ("both", (True, True))):
        perturbation = StatisticsPerturbation(radius=0.1, kind="binary", which=which).perturbation(trained)
        for banks in perturbation.values():
            for delta in banks.values():
                assert tuple(bool(part.any()) for part in delta) == moved


def test_a_gradient_on_sigma_ascends_too(trained):
    """``1/σ`` goes where the gradient points, by ``ε`` of itself or such that ``σ`` moves by ``ε`` of itself."""
    x, y = pictures(seed=100)
    direction = StatisticsPerturbation(radius=0.6, which="std").direction(trained, x, y)
    for scaling in ("invstd", "std"):
        attack = StatisticsPerturbation(radius=0.6, which="std", scaling=scaling)
        result = attack(trained, x, y)
        assert result.accuracy < result.clean_accuracy - 0.05, scaling
        for sign, delta in zip(direction.tensors[1::2], result.perturbation.tensors[1::2]):
            assert torch.equal(delta.sign(), sign)
            moved = delta if scaling == "invstd" else 1 / (1 + delta) - 1
            torch.testing.assert_close(moved.abs(), 0.6 * sign.abs())


def test_random_directions_are_shared_by_models_of_one_architecture(trained):
    torch.manual_seed(7)
    other = advnorm.create_model("small_cnn", num_classes=CLASSES, norm="bn")
    one, same, different = (
        torch.cat(StatisticsPerturbation(radius=0.1, kind="binary", seed=seed).direction(model).tensors)
        for model, seed in ((trained, 0), (other, 0), (trained, 1))
    )
    assert torch.equal(one, same) and not torch.equal(one, different)
    assert abs(float(one.mean())) < 5 / len(one) ** 0.5


def test_groups_have_statistics_of_their_own(trained):
    """Evaluation in n groups is n evaluations of a n-th of the batch; the gradient is that of the whole batch."""
    x, y = pictures(48, seed=60)
    grouped = StatisticsPerturbation(radius=0.2, groups=4)
    whole = StatisticsPerturbation(radius=0.2)
    perturbation = whole.perturbation(trained, x, y)
    for a, b in zip(grouped.perturbation(trained, x, y).tensors, perturbation.tensors):
        assert torch.equal(a, b)
    parts = list(zip(x.split(12), y.split(12)))
    assert grouped.accuracy(trained, [(x, y)], perturbation) == pytest.approx(
        whole.accuracy(trained, parts, perturbation)
    )


def test_only_the_branch_under_attack_is_perturbed():
    torch.manual_seed(0)
    model = advnorm.create_model("small_cnn", num_classes=CLASSES, norm="dual_bn")
    attack = StatisticsPerturbation(radius=0.1, route="adv")
    for banks in attack.perturbation(model, *pictures()).values():
        assert not any(part.any() for part in banks["clean"]) and all(part.any() for part in banks["adv"])


def test_repr_rebuilds_it():
    attack = StatisticsPerturbation(radius=0.1, kind="binary", groups=8, route="adv")
    assert eval(repr(attack)) == attack


@pytest.mark.parametrize(
    ("settings", "code", "field"),
    [
        ({"radius": 1.5}, "out_of_range", "radius"),
        ({"radius": float("nan")}, "wrong_type", "radius"),
        ({"kind": "grad"}, "unknown_name", "kind"),
        ({"which": "var"}, "unknown_name", "which"),
        ({"scaling": "var"}, "unknown_name", "scaling"),
        ({"groups": 0}, "out_of_range", "groups"),
        ({"statistics": "batch"}, "unknown_name", "statistics"),
        ({"statistics": "running", "groups": 2}, "conflict", "groups"),
    ],
)
def test_a_bad_setting_raises(settings, code, field):
    with raises_problem(code, field):
        StatisticsPerturbation(**{"radius": 0.1, **settings})


def test_all_problems_of_the_settings_are_reported_at_once():
    with raises_problem("out_of_range", "radius") as caught:
        StatisticsPerturbation(radius=-1, kind="x")
    assert [problem.field for problem in caught.value.problems] == ["radius", "kind"]


def test_missing_data_and_plain_norms_raise(trained):
    with raises_problem("empty", "images"):
        StatisticsPerturbation(radius=0.1).perturbation(trained)
    with raises_problem("empty", "data"):
        StatisticsPerturbation(radius=0.1).accuracy(trained, [])
    plain = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(192, CLASSES))
    with pytest.raises(ConfigError):
        StatisticsPerturbation(radius=0.1)(plain, *pictures())
