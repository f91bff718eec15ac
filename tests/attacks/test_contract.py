"""What every registered attack promises, on a routed model and on anybody's model."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import advnorm
from advnorm import attacks
from advnorm._core.errors import AdvnormError, ConfigError, RouteError
from advnorm._core.seeding import ImageNoise
from advnorm.attacks.base import ATTACKS, Attack, Option, attacked, parse_name, register
from advnorm.norms import routed_modules
from advnorm.threat import THREAT_NORMS, ThreatModel

ORDER = {"Linf": torch.inf, "L2": 2, "L1": 1}
LINF = ThreatModel(norm="Linf", eps="8/255")
#: At most this much, so that an attack is quick without leaving out any of its parts; and restarts for all.
QUICK = {"steps": 3, "queries": 12, "targets": 2}
NAMES = attacks.list_attacks()
WITHOUT_MODEL = {"noise-uniform", "noise-gaussian", "noise-binary"}


def quick(name: str, threat: ThreatModel = LINF, **settings: Any) -> Attack:
    attack = attacks.get(name, threat=threat, **settings)
    fields = {field.name for field in dataclasses.fields(attack)}
    small = {key: min(getattr(attack, key), most) for key, most in QUICK.items() if key in fields}
    if "restarts" in fields and name not in WITHOUT_MODEL and name != "fgsm":
        small["restarts"] = 2
    return dataclasses.replace(attack, **small)


def pictures(count: int = 6, seed: int = 0, size: int = 8) -> tuple[Tensor, Tensor]:
    """Images with pixels at 0 and 1 among them, and labels."""
    noise = ImageNoise(seed, torch.arange(count)).fold("pictures")
    x = (1.4 * noise.uniform((3, size, size), "x") - 0.2).clamp(0, 1)
    return x, noise.integers(10, (), "y")


def routed_model() -> nn.Module:
    torch.manual_seed(0)
    model = advnorm.create_model("small_cnn", num_classes=10, norm="dual_bn")
    x, _ = pictures(32, seed=9)
    for domain, shift in (("clean", 0.0), ("adv", 0.3)):  # branches that differ
        with advnorm.route(model, domain), torch.no_grad():
            model(x + shift)
    return model


def plain_model() -> nn.Sequential:
    """In train mode, with dropout, one norm frozen by its owner and one convolution without gradients."""
    torch.manual_seed(1)
    model = nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(3, 8, 3, padding=1),
            bn1=nn.BatchNorm2d(8),
            act1=nn.ReLU(),
            drop=nn.Dropout(0.5),
            conv2=nn.Conv2d(8, 8, 3, stride=2, padding=1),
            frozen=nn.BatchNorm2d(8),
            act2=nn.ReLU(),
            flat=nn.Flatten(),
            fc=nn.Linear(128, 10),
        )
    )
    x, y = pictures(32, seed=9)
    nn.functional.cross_entropy(model(x), y).backward()  # moves the statistics and leaves gradients behind
    model.frozen.eval()
    model.conv1.requires_grad_(False)
    return model


MODELS = {"routed": (routed_model, "adv"), "plain": (plain_model, None)}


@pytest.fixture(params=MODELS)
def victim(request) -> tuple[nn.Module, str | None]:
    build, route = MODELS[request.param]
    return build(), route


def snapshot(model: nn.Module) -> dict[str, Any]:
    """All that an attack must not change, with version counters, so that not even an equal value is written."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        "identity": {name: id(t) for name, t in tensors.items()},
        "version": {name: t._version for name, t in tensors.items()},
        "bits": {name: t.detach().clone() for name, t in tensors.items()},
        "requires_grad": {name: p.requires_grad for name, p in model.named_parameters()},
        "grad": {
            name: (id(p.grad), None if p.grad is None else p.grad.clone()) for name, p in model.named_parameters()
        },
        "attributes": {
            name: {k: v for k, v in vars(m).items() if not k.startswith("_") and not isinstance(v, Tensor)}
            for name, m in model.named_modules()
        },
        "random": (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()),  # noqa: NPY002
        "grad_mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
    }


def assert_same(before: Any, after: Any, where: str = "") -> None:
    assert type(before) is type(after), where
    if isinstance(before, dict):
        assert before.keys() == after.keys(), where
        for key in before:
            assert_same(before[key], after[key], f"{where}/{key}")
    elif isinstance(before, tuple):
        assert len(before) == len(after), where
        for position, (a, b) in enumerate(zip(before, after)):
            assert_same(a, b, f"{where}/{position}")
    elif isinstance(before, Tensor):
        assert torch.equal(before, after), where
    elif isinstance(before, np.ndarray):
        assert (before == after).all(), where
    else:
        assert before == after, where


def assert_inside(threat: ThreatModel, x_adv: Tensor, x: Tensor) -> None:
    assert x_adv.dtype == torch.float32 and x_adv.shape == x.shape and x_adv.device == x.device
    assert not x_adv.requires_grad and x_adv.grad_fn is None and not x_adv.is_inference()
    assert x_adv.min() >= 0 and x_adv.max() <= 1
    rows = (x_adv - x).flatten(1)
    assert torch.linalg.vector_norm(rows, ORDER[threat.norm], dim=1).max().item() <= threat.eps
    assert threat.distance(x_adv, x).max().item() <= threat.eps


# -- every registered attack -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", THREAT_NORMS)
@pytest.mark.parametrize("name", NAMES)
def test_an_attack_keeps_its_promises(name, norm, victim):
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


class Fuse(nn.Module):
    """Raises at a given forward."""

    def __init__(self, model: nn.Module, at: int) -> None:
        super().__init__()
        self.model, self.at = model, at
        self.training = model.training

    def forward(self, x: Tensor) -> Tensor:
        self.at -= 1
        if self.at < 0:
            raise RuntimeError("the fuse is blown")
        return self.model(x)


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in WITHOUT_MODEL])
def test_an_attack_that_fails_leaves_no_trace(name, at, victim):
    model, route = victim
    attack, fuse = quick(name, route=route), Fuse(model, at)
    before = snapshot(model)
    x, y = pictures()
    if name == "fgsm" and at == 1:
        attack(fuse, x, y)
    else:
        with pytest.raises(RuntimeError, match="the fuse is blown"):
            attack(fuse, x, y)
    assert_same(before, snapshot(model))


@pytest.mark.parametrize(
    ("name", "norm", "dtype"),
    [(name, norm, torch.float64) for name in NAMES for norm in THREAT_NORMS]
    + [(name, "Linf", torch.float32) for name in NAMES if name in ("fgsm", "pgd10", "cw20")],
)
def test_the_result_does_not_depend_on_the_batch(name, norm, dtype):
    """Batches of 1, 7 and 64, and shuffled. In float64, where the model's own arithmetic is out of the question: its
    float32 logits differ in the last bit between batch sizes, which a sign forgives and a normalized gradient shows."""
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
def test_an_attack_keeps_its_promises_on_a_gpu(name, norm):
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


SMALL = nn.Sequential(nn.Flatten(), nn.Linear(192, 10))
with torch.no_grad():
    SMALL[1].weight.copy_(ImageNoise(0, torch.tensor([0])).normal((10, 192))[0])
    SMALL[1].bias.zero_()


@pytest.mark.parametrize("name", NAMES)
def test_repr_rebuilds_the_attack(name):
    attack = quick(name)
    scope = {**vars(attacks), "ThreatModel": ThreatModel}
    assert eval(repr(attack), scope) == attack
    with pytest.raises(dataclasses.FrozenInstanceError):
        attack.seed = 1  # type: ignore[misc]


@pytest.mark.parametrize("name", NAMES)
def test_memory_format_and_gradient_flag_of_the_images_are_kept(name):
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


# -- the model under attack --------------------------------------------------------------------------------------------


def test_no_weight_gradients_are_computed():
    model = plain_model()
    with attacked(model) as predict:
        assert not any(parameter.requires_grad for parameter in model.parameters())
        assert predict(pictures()[0]).grad_fn is None
    assert [p.requires_grad for p in model.conv1.parameters()] == [False, False]
    assert all(p.requires_grad for p in model.fc.parameters())


def test_a_graph_that_is_alive_survives_an_attack():
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
def test_three_regimes_of_statistics(kind):
    """Trap 1: running; of the batch, feeding; of the batch, frozen. Each against a plain forward in that regime."""
    build, route = MODELS[kind]
    x, _ = pictures(16)
    expected: dict[str, Tensor] = {}
    for regime in ("running", "batch", "batch_frozen"):
        model = build()
        judge = copy.deepcopy(model)
        for module in judge.modules():
            is_norm = isinstance(module, nn.BatchNorm2d) or type(module).__name__ == "RoutedNorm"
            module.training = is_norm and regime != "running" and module is not getattr(judge, "frozen", None)
        before = statistics_of(model)
        with attacked(model, route=route, statistics=regime) as predict:  # type: ignore[arg-type]
            got = predict(x)
        with advnorm.route(judge, route) if route else torch.enable_grad():
            expected[regime] = judge(x)
        assert torch.equal(got, expected[regime]), regime
        after = statistics_of(model)
        moved = {name for name in before if not torch.equal(before[name], after[name])}
        if regime == "batch":
            assert moved == {name for name in before if ("adv" in name if route else name.startswith("bn1"))}
            assert_same(statistics_of(judge), after)
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
    """Trap 3: no blanket train() afterwards; and a frozen norm uses its running statistics in every regime."""
    model = plain_model()
    if norm:
        advnorm.convert_norm(model, norm)
    frozen = model.frozen
    stored = {name: t.clone() for name, t in frozen.state_dict().items()}
    calls: list[tuple[Tensor, Tensor]] = []
    frozen.register_forward_hook(lambda module, args, out: calls.append((args[0], out)))
    with attacked(model, statistics=regime) as predict:
        predict(pictures()[0])
    into, out = calls[-1]
    mean, var = (stored[name].view(-1, 1, 1) for name in ("running_mean", "running_var"))
    torch.testing.assert_close(out, (into - mean) / (var + 1e-5).sqrt(), rtol=1e-4, atol=1e-5)
    assert_same(stored, dict(frozen.state_dict().items()))
    assert not frozen.training and model.bn1.training and model.drop.training and model.training


def test_instance_norm_with_statistics_is_guarded_too():
    torch.manual_seed(0)
    model = nn.Sequential(nn.InstanceNorm2d(3, track_running_stats=True), nn.Flatten(), nn.Linear(192, 10))
    before = snapshot(model)
    x, _ = pictures()
    with attacked(model, statistics="batch_frozen") as predict:
        got = predict(x)
    assert_same(before, snapshot(model))
    torch.testing.assert_close(got, model[2](nn.functional.instance_norm(x).flatten(1)))


def test_the_route_is_that_of_the_attack_or_of_the_enclosing_scope():
    model = routed_model()
    x, y = pictures()
    by_option = {r: attacks.PGD(threat=LINF, steps=2, route=r)(model, x, y) for r in ("clean", "adv")}
    assert not torch.equal(by_option["clean"], by_option["adv"])
    with advnorm.route(model, "adv"):
        assert torch.equal(attacks.PGD(threat=LINF, steps=2)(model, x, y), by_option["adv"])
        assert torch.equal(attacks.PGD(threat=LINF, steps=2, route="clean")(model, x, y), by_option["clean"])
    with pytest.raises(RouteError, match="no route is set"):
        attacks.PGD(threat=LINF)(model, x, y)
    with pytest.raises(ConfigError, match="unknown domain 'advv', did you mean 'adv'"):
        attacks.PGD(threat=LINF, route="advv")(model, x, y)
    assert all(module.state == type(module.state)() for module in routed_modules(model).values())


def test_a_likelihood_of_the_training_pass_does_not_hear_of_the_attack():
    torch.manual_seed(0)
    model = advnorm.create_model("small_cnn", norm="gmm_bn")
    x, y = pictures()
    with advnorm.route(model, "adv"), advnorm.mixture_likelihood(model) as nll:
        attacks.PGD(threat=LINF, steps=2)(model, x, y)
        with pytest.raises(RouteError, match="no mixture norm ran"):
            nll.loss()
        with advnorm.statistics(model, mode="running"):
            model(x)
        nll.loss()


def test_a_ddp_wrapper_is_passed_by():
    """Trap 12: an attack reduces nothing over ranks, so it goes to the module inside."""
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


def test_a_randomized_model_does_not_use_up_the_random_numbers_of_others():
    model = Randomized(plain_model())
    torch.manual_seed(3)
    before = torch.get_rng_state()
    attacks.PGD(threat=LINF, steps=2)(model, *pictures())
    assert torch.equal(torch.get_rng_state(), before)


class Returns(nn.Module):
    def __init__(self, wrap) -> None:
        super().__init__()
        self.model, self.wrap = SMALL, wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.model(x))


@dataclasses.dataclass
class Output:
    logits: Tensor


@pytest.mark.parametrize("wrap", [lambda z: Output(z), lambda z: {"logits": z, "hidden": None}])
def test_logits_are_found_in_an_output_object(wrap):
    x, y = pictures()
    attack = attacks.PGD(threat=LINF, steps=2)
    assert torch.equal(attack(Returns(wrap), x, y), attack(SMALL, x, y))


def test_half_precision_models_are_fed_their_precision_and_judged_in_float32():
    model = plain_model().bfloat16()
    with attacked(model) as predict:
        assert predict(pictures()[0]).dtype == torch.float32
    assert_inside(LINF, attacks.PGD(threat=LINF, steps=2)(model, *pictures()), pictures()[0])


# -- refused with the cure, before any work ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, y: ((x * 255), y), "divide by 255"),
        (lambda x, y: ((x * 255).byte(), y), r"x.float\(\) / 255"),
        (lambda x, y: (x.double(), y), r"float32, got torch.float64; use x.float\(\)"),
        (lambda x, y: (x * 4 - 2, y), "input normalization belongs inside the model"),
        (lambda x, y: (x + 1e-6, y), r"x.clamp\(0, 1\)"),
        (lambda x, y: (x / 0 * 0, y), "check the data for NaN"),
        (lambda x, y: (x, y.int()), r"int64, got torch.int32; use y.long\(\)"),
        (lambda x, y: (x, nn.functional.one_hot(y).float()), r"y.argmax\(1\)"),
        (lambda x, y: (x, y[:3]), r"shape \(6,\), one per image, got \(3,\)"),
        (lambda x, y: (x, y - 20), "at least 0"),
        (lambda x, y: (x, y + 10), "labels go up to .* and the model has 10 classes; labels count from 0"),
        (lambda x, y: (x[:0], y[:0]), "the batch is empty"),
        (lambda x, y: (x.numpy(), y), "must be tensors"),
    ],
)
def test_bad_input_is_refused_with_the_cure(change, message):
    x, y = pictures()
    before = snapshot(SMALL)
    with pytest.raises(ConfigError, match=message):
        attacks.PGD(threat=LINF)(SMALL, *change(x, y))
    assert_same(before, snapshot(SMALL))


def test_all_that_is_wrong_with_a_batch_is_told_at_once():
    with pytest.raises(ConfigError, match=r"float32.*; labels must be int64.*; labels must have shape"):
        attacks.PGD(threat=LINF)(SMALL, torch.zeros(2, 3, 8, 8).byte(), torch.zeros(3))


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (lambda z: (z, z), r"returned tuple.*`return self.model\(x\)\[0\]`"),
        (lambda z: {"out": z}, "returned dict"),
        (lambda z: z[:, 0], r"returned shape \(6,\) for 6 images"),
        (lambda z: z[:, :1], "at least 2 classes"),
        (lambda z: z * torch.nan, "NaN logits"),
        (lambda z: z.detach(), "differentiable"),
    ],
)
def test_a_bad_model_is_refused_with_the_cure(wrap, message):
    with pytest.raises(ConfigError, match=message):
        attacks.PGD(threat=LINF)(Returns(wrap), *pictures())


def test_a_function_is_no_module():
    with pytest.raises(ConfigError, match="needs an nn.Module, got function"):
        attacks.PGD(threat=LINF)(lambda x: x, *pictures())  # type: ignore[arg-type]


def test_an_index_of_another_length_is_refused():
    with pytest.raises(ConfigError, match="index names 3 images and the batch has 6"):
        attacks.PGD(threat=LINF)(SMALL, *pictures(), index=torch.arange(3))


def test_bad_settings_are_told_at_once():
    with pytest.raises(ConfigError, match=r"threat must be.*; seed.*; route.*; unknown statistics mode 'eval'"):
        attacks.PGD(threat="8/255", seed=0.5, route=1, statistics="eval")  # type: ignore[arg-type]


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("pgd10", attacks.PGD(threat=LINF, steps=10)),
        ("pgd", attacks.PGD(threat=LINF, steps=10)),
        ("pgd20-restarts5", attacks.PGD(threat=LINF, steps=20, restarts=5)),
        ("pgd2000-targeted", attacks.PGD(threat=LINF, steps=2000, target="random")),
        ("pgd50-dlr-worst-momentum0.9", attacks.PGD(threat=LINF, steps=50, loss="dlr", keep="worst", momentum=0.9)),
        ("pgd10-step2", attacks.PGD(threat=LINF, steps=10, step_size="2/255")),
        ("cw20-step0.5", attacks.PGD(threat=LINF, steps=20, loss="cw", step_size="0.5/255")),
        ("cw20", attacks.PGD(threat=LINF, steps=20, loss="cw")),
        ("fgsm", attacks.FGSM(threat=LINF)),
        ("noise-binary", attacks.RandomNoise(threat=LINF, kind="binary")),
        ("noise-uniform-restarts10", attacks.RandomNoise(threat=LINF, kind="uniform", restarts=10)),
    ],
)
def test_names_say_what_they_mean(name, expected):
    assert attacks.get(name, threat=LINF) == expected


def test_keywords_complete_a_name():
    attack = attacks.get("pgd10", threat=LINF, step_size="2/255", route="adv", seed=3)
    assert attack == attacks.PGD(threat=LINF, steps=10, step_size="2/255", route="adv", seed=3)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("pdg10", {}, "unknown attack 'pdg10', did you mean 'pgd10'"),
        ("pgdd", {}, "unknown attack 'pgdd', did you mean 'pgd10'"),
        ("pgd10-restart5", {}, "unknown option 'restart', did you mean 'restarts'"),
        ("pgd10-restarts", {}, "option 'restarts' needs a number"),
        ("pgd10-restarts1.5", {}, "option 'restarts' needs a whole number, got '1.5'"),
        ("pgd10-momentum1.2.3", {}, "option 'momentum' needs a number, got '1.2.3'"),
        ("pgd10-restarts1.5-momentum1.2.3", {}, "'restarts' needs .*'momentum' needs"),
        (
            "pgd10-step2",
            {"threat": ThreatModel(norm="L2", eps=1)},
            "'step' is for Linf, and the threat is L2; give an attack .*step_size=",
        ),
        ("pgd10-step1.2.3", {}, "option 'step' needs a number"),
        ("pgd10-step2", {"step_size": 0.1}, "the name sets 'step_size' already"),
        ("pgd10-clean5", {}, "option 'clean' takes no number"),
        ("pgd10-targeted-leastlikely", {}, "target is set twice"),
        ("fgsm3", {}, "fgsm takes no number"),
        ("pgd10", {"steps": 3}, "the name sets 'steps' already"),
        ("cw20", {"loss": "ce"}, "the name sets 'loss' already"),
        ("pgd10", {"stepsize": 3}, "unknown setting 'stepsize', did you mean 'step_size'"),
        ("", {}, "unknown attack ''"),
    ],
)
def test_a_bad_name_is_refused_with_the_nearest(name, settings, message):
    with pytest.raises(ConfigError, match=message):
        attacks.get(name, **{"threat": LINF, **settings})


def test_a_threat_is_needed():
    with pytest.raises(ConfigError, match="threat is missing; give threat=ThreatModel"):
        attacks.get("pgd10")


def test_an_attack_of_ones_own_gets_a_name(monkeypatch):
    monkeypatch.setattr(ATTACKS, "_entries", dict(ATTACKS._entries))

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Grey(Attack):
        steps: int = 1
        level: float = 0.5

        def perturb(self, predict, x, y, noise):
            return torch.full_like(x, self.level)

    register("grey", Grey, steps=4, options={"level": Option(setting="level", parse=float)}, summary="towards grey")
    attack = attacks.get("grey7-level0.25", threat=LINF)
    assert attack == Grey(threat=LINF, steps=7, level=0.25) and "grey4" in attacks.list_attacks()
    assert attacks.list_attacks("grey*") == ["grey4"]
    assert parse_name("grey")[1] == {"steps": 4}
    x, y = pictures()
    assert_inside(LINF, attack(SMALL, x, y), x)  # whatever a subclass returns
    with pytest.raises(AdvnormError, match="registered already"):
        register("grey", Grey, summary="")


def test_pixels_that_are_not_finite_are_left_as_they_were():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Broken(Attack):
        def perturb(self, predict, x, y, noise):
            return torch.where(x > 0.5, x * torch.nan, x + 1)

    x, y = pictures()
    x_adv = Broken(threat=LINF)(SMALL, x, y)
    assert_inside(LINF, x_adv, x)
    assert torch.equal(x_adv[x > 0.5], x[x > 0.5])


def test_a_route_of_a_model_without_branches_is_refused(linf):
    x, y = linf.first(2)
    with pytest.raises(ConfigError, match="Sequential has no routed norms, and so no route 'adv'; leave route out"):
        attacks.PGD(threat=linf.threat, steps=1, route="adv")(linf.model, x, y)
