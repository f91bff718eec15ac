"""The scope in which a model is attacked: modes, statistics, routes, gradients and random state."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import advnorm
from advnorm import attacks
from advnorm._core.errors import ConfigError, RouteError
from advnorm.attacks.model_access import pad_rows, padded_size, predicting
from advnorm.norms import routed_modules
from support.attack_contract import (
    LINF,
    MODELS,
    SMALL,
    Returns,
    assert_inside,
    assert_same,
    pictures,
    plain_model,
    routed_model,
    snapshot,
)
from support.problems import raises_problem


def test_no_weight_gradients_are_computed():
    model = plain_model()
    with predicting(model) as predict:
        assert not any(parameter.requires_grad for parameter in model.parameters())
        assert predict(pictures()[0]).grad_fn is None
    assert [p.requires_grad for p in model.conv1.parameters()] == [False, False]
    assert all(p.requires_grad for p in model.fc.parameters())


def test_a_live_autograd_graph_survives_an_attack():
    for build, route in MODELS.values():
        model = build()
        x, y = pictures()
        with advnorm.route(model, route) if route else torch.enable_grad():
            loss = nn.functional.cross_entropy(model(x), y)
        for statistics in ("running", "batch_frozen"):
            attacks.PGD(threat=LINF, steps=2, route=route, statistics=statistics)(model, x, y)
        loss.backward()
        last = list(model.parameters())[-1]
        assert last.grad is not None and last.grad.abs().sum() > 0


@pytest.mark.parametrize("training", [True, False])
def test_running_statistics_make_the_callers_mode_irrelevant(training):
    model = plain_model()
    expected = attacks.PGD(threat=LINF, steps=2)(model, *pictures())
    model.train(training)
    assert torch.equal(attacks.PGD(threat=LINF, steps=2)(model, *pictures()), expected)
    assert all(module.training is training for module in model.modules())


def statistics_of(model: nn.Module) -> dict[str, Tensor]:
    names = ("running", "num_batches")
    return {name: buffer.clone() for name, buffer in model.named_buffers() if any(n in name for n in names)}


@pytest.mark.parametrize("kind", MODELS)
def test_the_three_statistics_regimes_equal_plain_forwards(kind):
    """Running; batch with update; batch without update. Each against a plain forward in that regime."""
    build, route = MODELS[kind]
    x, _ = pictures(16)
    expected: dict[str, Tensor] = {}
    for regime in ("running", "batch", "batch_frozen"):
        model = build()
        reference = copy.deepcopy(model)
        for module in reference.modules():
            is_norm = isinstance(module, nn.BatchNorm2d) or type(module).__name__ == "RoutedNorm"
            module.training = is_norm and regime != "running" and module is not getattr(reference, "frozen", None)
        before = statistics_of(model)
        with predicting(model, route=route, statistics=regime) as predict:  # type: ignore[arg-type]
            got = predict(x)
        with advnorm.route(reference, route) if route else torch.enable_grad():
            expected[regime] = reference(x)
        assert torch.equal(got, expected[regime]), regime
        after = statistics_of(model)
        moved = {name for name in before if not torch.equal(before[name], after[name])}
        if regime == "batch":
            assert moved == {name for name in before if ("adv" in name if route else name.startswith("bn1"))}
            assert_same(statistics_of(reference), after)
        else:
            assert not moved
    assert not torch.equal(expected["running"], expected["batch"])
    assert torch.equal(expected["batch"], expected["batch_frozen"])


@pytest.mark.parametrize("regime", ["running", "batch", "batch_frozen"])
@pytest.mark.parametrize("kind", MODELS)
def test_the_regime_is_an_option_of_the_attack(kind, regime):
    build, route = MODELS[kind]
    model = build()
    before = snapshot(model)
    attack = attacks.PGD(threat=LINF, steps=4, route=route, statistics=regime)
    assert f"statistics={regime!r}" in repr(attack)
    attack(model, *pictures())
    after = snapshot(model)
    if regime == "batch":
        counted = "bn1.num_batches_tracked" + ("_adv" if route else "")
        assert after["bits"][counted] - before["bits"][counted] == 4
        for changing in ("bits", "version"):
            del before[changing], after[changing]
    assert_same(before, after)


@pytest.mark.parametrize("regime", ["running", "batch", "batch_frozen"])
@pytest.mark.parametrize("norm", [None, "bn"])
def test_a_frozen_layer_stays_frozen(norm, regime):
    """No blanket train() afterwards; a frozen norm uses its running statistics in every regime."""
    model = plain_model()
    if norm:
        advnorm.convert_norm(model, norm)
    frozen = model.frozen
    stored = {name: t.clone() for name, t in frozen.state_dict().items()}
    calls: list[tuple[Tensor, Tensor]] = []
    frozen.register_forward_hook(lambda module, args, out: calls.append((args[0], out)))
    with predicting(model, statistics=regime) as predict:
        predict(pictures()[0])
    into, out = calls[-1]
    mean, var = (stored[name].view(-1, 1, 1) for name in ("running_mean", "running_var"))
    torch.testing.assert_close(out, (into - mean) / (var + 1e-5).sqrt(), rtol=1e-4, atol=1e-5)
    assert_same(stored, dict(frozen.state_dict().items()))
    assert not frozen.training and model.bn1.training and model.drop.training and model.training


def test_instance_norm_with_statistics_is_restored_too():
    torch.manual_seed(0)
    model = nn.Sequential(nn.InstanceNorm2d(3, track_running_stats=True), nn.Flatten(), nn.Linear(192, 10))
    before = snapshot(model)
    x, _ = pictures()
    with predicting(model, statistics="batch_frozen") as predict:
        got = predict(x)
    assert_same(before, snapshot(model))
    torch.testing.assert_close(got, model[2](nn.functional.instance_norm(x).flatten(1)))


def test_the_route_comes_from_the_attack_or_the_enclosing_scope():
    model = routed_model()
    x, y = pictures()
    by_option = {r: attacks.PGD(threat=LINF, steps=2, route=r)(model, x, y) for r in ("clean", "adv")}
    assert not torch.equal(by_option["clean"], by_option["adv"])
    with advnorm.route(model, "adv"):
        assert torch.equal(attacks.PGD(threat=LINF, steps=2)(model, x, y), by_option["adv"])
        assert torch.equal(attacks.PGD(threat=LINF, steps=2, route="clean")(model, x, y), by_option["clean"])
    with raises_problem("missing_route", kind=RouteError):
        attacks.PGD(threat=LINF)(model, x, y)
    with pytest.raises(ConfigError):
        attacks.PGD(threat=LINF, route="advv")(model, x, y)
    assert all(module.state == type(module.state)() for module in routed_modules(model).values())


def test_an_attack_adds_nothing_to_the_likelihood_of_the_training_pass():
    torch.manual_seed(0)
    model = advnorm.create_model("small_cnn", norm="gmm_bn")
    x, y = pictures()
    with advnorm.route(model, "adv"), advnorm.mixture_likelihood(model) as nll:
        attacks.PGD(threat=LINF, steps=2)(model, x, y)
        with pytest.raises(RouteError):
            nll.loss()
        with advnorm.statistics(model, mode="running"):
            model(x)
        nll.loss()


def test_an_attack_bypasses_a_ddp_wrapper():
    """An attack reduces nothing over ranks, so it calls the module inside."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = plain_model()
        wrapped = nn.parallel.DistributedDataParallel(model)
        calls: list[Any] = []
        wrapped.register_forward_pre_hook(lambda *_: calls.append(1))
        attack = attacks.PGD(threat=LINF, steps=2)
        before = snapshot(wrapped)
        assert torch.equal(attack(wrapped, *pictures()), attack(model, *pictures()))
        assert not calls
        assert_same(before, snapshot(wrapped))
    finally:
        dist.destroy_process_group()


class Randomized(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x + 0.01 * torch.randn_like(x))


def test_a_randomized_model_leaves_the_global_random_state_unchanged():
    model = Randomized(plain_model())
    torch.manual_seed(3)
    before = torch.get_rng_state()
    attacks.PGD(threat=LINF, steps=2)(model, *pictures())
    assert torch.equal(torch.get_rng_state(), before)


def test_an_attack_on_the_cpu_starts_and_seeds_no_gpu(monkeypatch):
    def touched(*_):
        raise AssertionError("CUDA was touched")

    model, (x, y) = plain_model(), pictures()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    for name in ("_lazy_init", "manual_seed_all"):
        monkeypatch.setattr(torch.cuda, name, touched)
    attacks.PGD(threat=LINF, steps=1)(model, x, y)
    attacks.AutoAttack(threat=LINF, attacks=("square",), queries=1).evaluate(model, x, y)


@dataclasses.dataclass
class Output:
    logits: Tensor


@pytest.mark.parametrize("wrap", [lambda z: Output(z), lambda z: {"logits": z, "hidden": None}])
def test_logits_are_found_in_an_output_object(wrap):
    x, y = pictures()
    attack = attacks.PGD(threat=LINF, steps=2)
    assert torch.equal(attack(Returns(wrap), x, y), attack(SMALL, x, y))


def test_half_precision_models_get_images_in_their_precision_and_return_float32():
    model = plain_model().bfloat16()
    with predicting(model) as predict:
        assert predict(pictures()[0]).dtype == torch.float32
    assert_inside(LINF, attacks.PGD(threat=LINF, steps=2)(model, *pictures()), pictures()[0])


def test_a_route_on_a_model_without_branches_raises(linf):
    x, y = linf.first(2)
    with raises_problem("wrong_route", "route"):
        attacks.PGD(threat=linf.threat, steps=1, route="adv")(linf.model, x, y)


def test_rows_are_filled_up_to_few_sizes():
    assert [padded_size(rows, 16) for rows in (1, 2, 3, 9, 16, 17, 32, 33, 708)] == [1, 2, 4, 16, 16, 32, 32, 48, 720]
    x = torch.rand(3, 2, requires_grad=True)
    assert pad_rows(x, 3) is x
    more = pad_rows(x, 5)
    assert torch.equal(more, x[[0, 1, 2, 0, 0]])
    (gradient,) = torch.autograd.grad(more[:3].sum() + 7 * more[3:].sum(), x)
    assert torch.equal(gradient, torch.ones(3, 2))
