"""The contract of every registered attack, on a routed model and on any other model."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from advnorm import attacks
from advnorm._core.errors import ConfigError
from advnorm.attacks.base import Attack
from advnorm.attacks.model_access import predicting
from advnorm.threat import THREAT_NORMS, ThreatModel
from support.attack_contract import (
    COMBINED,
    LINF,
    MODELS,
    NAMES,
    SMALL,
    WITHOUT_MODEL,
    Returns,
    assert_inside,
    assert_same,
    pictures,
    plain_model,
    quick,
    routed_model,
    snapshot,
)


@pytest.fixture(params=MODELS)
def victim(request) -> tuple[nn.Module, str | None]:
    build, route = MODELS[request.param]
    return build(), route


@pytest.mark.parametrize("norm", THREAT_NORMS)
@pytest.mark.parametrize("name", [*NAMES, *COMBINED])
def test_an_attack_keeps_the_contract(name, norm, victim):
    model, route = victim
    threat = ThreatModel(norm=norm, eps={"Linf": "8/255", "L2": 0.5, "L1": 4.0}[norm])
    attack = quick(name, threat, route=route)
    x, y = pictures()
    untouched = x.clone()
    before = snapshot(model)
    x_adv = attack(model, x, y)
    assert_same(before, snapshot(model))
    assert torch.equal(x, untouched)
    assert_inside(threat, x_adv, x)
    assert torch.equal(x_adv, attack(model, x, y)), "two calls differ"
    assert x_adv.data_ptr() != x.data_ptr()


class Failed(Exception):
    pass


class Failing(nn.Module):
    """Raises at a given forward."""

    def __init__(self, model: nn.Module, at: int) -> None:
        super().__init__()
        self.model, self.at = model, at
        self.training = model.training

    def forward(self, x: Tensor) -> Tensor:
        self.at -= 1
        if self.at < 0:
            raise Failed
        return self.model(x)


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in WITHOUT_MODEL])
def test_an_attack_that_raises_leaves_the_model_unchanged(name, at, victim):
    model, route = victim
    attack, failing = quick(name, route=route), Failing(model, at)
    before = snapshot(model)
    x, y = pictures()
    if name == "fgsm" and at == 1:
        attack(failing, x, y)
    else:
        with pytest.raises(Failed if at else ConfigError):  # the first forward checks the model
            attack(failing, x, y)
    assert_same(before, snapshot(model))


#: Every name with one norm; all other pairs run with the slow tests.
NAME_AND_NORM = [
    pytest.param(name, norm, torch.float64, marks=[] if i % len(THREAT_NORMS) == j else pytest.mark.slow)
    for i, name in enumerate([*NAMES, *COMBINED])
    for j, norm in enumerate(THREAT_NORMS)
]


@pytest.mark.parametrize(
    ("name", "norm", "dtype"),
    [*NAME_AND_NORM, *((name, "Linf", torch.float32) for name in NAMES if name in ("fgsm", "pgd10", "cw20"))],
)
def test_the_result_does_not_depend_on_the_batch(name, norm, dtype):
    """Batches of 1, 7 and 64, and shuffled. In float64, since the model's float32 logits differ in the last bit between
    batch sizes, which changes normalized gradients."""
    threat = ThreatModel(norm=norm, eps={"Linf": "8/255", "L2": 0.5, "L1": 4.0}[norm])
    model = routed_model().to(dtype)
    attack = quick(name, threat, route="adv")
    x, y = pictures(64)
    index = torch.arange(1000, 1064)
    whole = attack(model, x, y, index=index)
    sevens = zip(x.split(7), y.split(7), index.split(7))
    assert torch.equal(torch.cat([attack(model, *part[:2], index=part[2]) for part in sevens]), whole)
    for i in (0, 17, 63):
        one = slice(i, i + 1)
        assert torch.equal(attack(model, x[one], y[one], index=index[one]), whole[one])
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(attack(model, x[order], y[order], index=index[order]), whole[order])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("norm", THREAT_NORMS)
@pytest.mark.parametrize("name", NAMES)
def test_an_attack_keeps_the_contract_on_a_gpu(name, norm):
    threat = ThreatModel(norm=norm, eps={"Linf": "8/255", "L2": 0.5, "L1": 4.0}[norm])
    model = routed_model().cuda()
    x, y = (v.cuda() for v in pictures())
    before = snapshot(model), torch.cuda.get_rng_state()
    x_adv = quick(name, threat, route="adv")(model, x, y)
    assert_same(before, (snapshot(model), torch.cuda.get_rng_state()))
    assert_inside(threat, x_adv, x)
    if name in WITHOUT_MODEL:
        on_cpu = quick(name, threat, route="adv")(model.cpu(), x.cpu(), y.cpu())
        torch.testing.assert_close(x_adv.cpu(), on_cpu, rtol=0, atol=1e-7)


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    name=st.sampled_from(NAMES),
    norm=st.sampled_from(THREAT_NORMS),
    eps=st.sampled_from(["8/255", 1e-4, 0.3, 0.0, "16/255"]),
    edge=st.sampled_from([None, 0.0, 1.0]),
    seed=st.integers(0, 50),
)
def test_ball_and_box_hold_for_any_images(name, norm, eps, edge, seed):
    threat = ThreatModel(norm=norm, eps=eps)
    x, y = pictures(3, seed)
    x = x if edge is None else torch.full_like(x, edge)
    assert_inside(threat, quick(name, threat, seed=seed)(SMALL, x, y), x)


@pytest.mark.parametrize("name", NAMES)
def test_repr_rebuilds_the_attack(name):
    attack = quick(name)
    scope = {**vars(attacks), "ThreatModel": ThreatModel}
    assert eval(repr(attack), scope) == attack
    with pytest.raises(dataclasses.FrozenInstanceError):
        attack.seed = 1  # type: ignore[misc]


@pytest.mark.parametrize("name", NAMES)
def test_the_result_keeps_the_memory_format_and_the_images_their_gradient_flag(name):
    x, y = pictures(4)
    x = x.to(memory_format=torch.channels_last).requires_grad_()
    x_adv = quick(name)(plain_model(), x, y)
    assert x_adv.is_contiguous(memory_format=torch.channels_last) and not x_adv.requires_grad
    assert x.requires_grad and x.grad is None


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", NAMES)
def test_an_attack_works_where_gradients_are_off(name, context):
    model = plain_model()
    expected = quick(name)(model, *pictures(4))
    with context():
        x, y = (v.clone() for v in pictures(4))
        assert torch.equal(quick(name)(model, x, y), expected)
        assert not torch.is_grad_enabled()


def test_pixels_that_are_not_finite_keep_their_clean_value():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Broken(Attack):
        def perturb(self, predict, x, y, noise):
            return torch.where(x > 0.5, x * torch.nan, x + 1)

    x, y = pictures()
    x_adv = Broken(threat=LINF)(SMALL, x, y)
    assert_inside(LINF, x_adv, x)
    assert torch.equal(x_adv[x > 0.5], x[x > 0.5])


# -- success flags -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_run_returns_the_images_of_a_call_and_whether_each_is_misclassified(name, victim):
    model, route = victim
    x, y = pictures(12)
    attack = quick(name, ThreatModel(eps=0.1), route=route)
    with torch.no_grad(), predicting(model, route=route) as predict:
        y[:9] = predict(x).argmax(1)[:9]
    before = snapshot(model)
    result = attack.run(model, x, y)
    assert_same(before, snapshot(model))
    assert torch.equal(result.images, attack(model, x, y))
    with torch.no_grad(), predicting(model, route=route) as predict:
        assert torch.equal(result.success, predict(result.images).argmax(1) != y)
    assert result.success.dtype == torch.bool and result.success.any()


@pytest.mark.parametrize("name", NAMES)
def test_a_run_with_batch_statistics_handles_a_single_image_and_updates_nothing(name):
    model = routed_model()
    before = snapshot(model)
    images, success = quick(name, route="adv", statistics="batch_frozen").run(model, *pictures(1))
    assert_same(before, snapshot(model))
    assert images.shape == (1, 3, 8, 8) and success.shape == (1,)


def test_a_run_adds_no_update_to_the_statistics_regime_that_updates():
    x, y = pictures()
    called, run = routed_model(), routed_model()
    attack = attacks.PGD(threat=LINF, steps=2, route="adv", statistics="batch")
    images = attack(called, x, y)
    assert torch.equal(attack.run(run, x, y).images, images)
    assert all(torch.equal(a, b) for a, b in zip(called.state_dict().values(), run.state_dict().values()))


def test_a_nan_logit_is_a_success_and_a_run_takes_targets():
    def nan_when_perturbed(z):
        return z if nan_when_perturbed.calm else z * torch.nan

    nan_when_perturbed.calm = True
    x, y = pictures()
    with torch.no_grad():
        y = SMALL(x).argmax(1)
    model, attack = Returns(nan_when_perturbed), attacks.PGD(threat=ThreatModel(eps=0.0), steps=1)
    assert not attack.run(model, x, y).success.any()

    class Nan(attacks.PGD):
        def __call__(self, *args, **kwargs):
            images = super().__call__(*args, **kwargs)
            nan_when_perturbed.calm = False
            return images

    assert Nan(threat=LINF, steps=1).run(model, x, y).success.all()
    target = (y + 1) % 10
    attack = attacks.PGD(threat=ThreatModel(eps=0.3), steps=5)
    images, success = attack.run(SMALL, x, y, target=target)
    assert torch.equal(images, attack(SMALL, x, y, target=target)) and success.all()
