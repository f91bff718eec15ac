"""Norm classes of timm, torchvision and transformers: exact, routed by an independent oracle, and given back."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import advnorm
from advnorm import SurgeryError, convert_norm, make_norm, route, statistics, strip
from advnorm.surgery.adapters import find_adapter
from support.problems import raises_problem

timm_layers = pytest.importorskip("timm.layers", reason="timm is not installed")
torchvision_convnext = pytest.importorskip("torchvision.models.convnext")

C = 8


def layer_norm_2d(x: Tensor, w: Tensor, b: Tensor | None, eps: float) -> Tensor:
    mean = x.mean(1, keepdim=True)
    var = ((x - mean) ** 2).mean(1, keepdim=True)
    return (x - mean) / (var + eps).sqrt() * w.view(-1, 1, 1) + b.view(-1, 1, 1)


def group_norm_act(x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
    values = x.reshape(len(x), 4, -1)
    mean = values.mean(2, keepdim=True)
    var = ((values - mean) ** 2).mean(2, keepdim=True)
    z = ((values - mean) / (var + eps).sqrt()).reshape(x.shape)
    return (z * w.view(-1, 1, 1) + b.view(-1, 1, 1)).clamp(min=0)


def rms_norm_2d(x: Tensor, w: Tensor, b: Tensor | None, eps: float) -> Tensor:
    return x / ((x**2).mean(1, keepdim=True) + eps).sqrt() * w.view(-1, 1, 1)


def batch_norm_silu(x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
    mean = x.mean((0, 2, 3), keepdim=True)
    var = ((x - mean) ** 2).mean((0, 2, 3), keepdim=True)
    z = (x - mean) / (var + eps).sqrt() * w.view(-1, 1, 1) + b.view(-1, 1, 1)
    return z / (1 + torch.exp(-z))


#: Class, the dual norm that it becomes, and its formula for the samples of one domain in float64.
ORACLES = {
    "BatchNormAct2d": (lambda: timm_layers.BatchNormAct2d(C, act_layer=nn.SiLU), "dual_bn", batch_norm_silu),
    "LayerNorm2d": (lambda: timm_layers.LayerNorm2d(C), "dual_affine_ln", layer_norm_2d),
    "GroupNormAct": (lambda: timm_layers.GroupNormAct(C, num_groups=4), "dual_affine_gn", group_norm_act),
    "RmsNorm2d": (lambda: timm_layers.RmsNorm2d(C), "dual_affine_rms", rms_norm_2d),
    "torchvision": (lambda: torchvision_convnext.LayerNorm2d(C, eps=1e-6), "dual_affine_ln", layer_norm_2d),
}


def randomized(model: nn.Module, seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()):
            if value.is_floating_point():
                value.copy_(torch.rand(value.shape, generator=generator) + 0.5)
    return model


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(list(ORACLES)),
    counts=st.lists(
        st.tuples(st.sampled_from(["clean", "adv"]), st.integers(2, 5)),
        min_size=1,
        max_size=2,
        unique_by=lambda c: c[0],
    ),
    side=st.integers(2, 5),
    seed=st.integers(0, 99),
)
def test_each_domain_of_a_converted_norm_follows_its_formula(name, counts, side, seed):
    make, norm, formula = ORACLES[name]
    model = nn.Sequential(make())
    convert_norm(model, norm)
    randomized(model, seed)
    counts = dict(counts)
    x = torch.randn(sum(counts.values()), C, side, side, generator=torch.Generator().manual_seed(seed))
    own, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    with route(model, counts):
        out = model(own)
    state = {key: value.detach().double().requires_grad_() for key, value in model[0].named_parameters()}
    parts = [
        formula(part, state[f"weight_{domain}"], state.get(f"bias_{domain}"), model[0].eps)
        for part, domain in zip(exact.split(list(counts.values())), counts)
    ]
    expected = torch.cat(parts)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    (out * weights).sum().backward()
    (expected * weights.double()).sum().backward()
    torch.testing.assert_close(own.grad.double(), exact.grad, rtol=1e-3, atol=1e-3)
    for key, value in model[0].named_parameters():
        used = key.rpartition("_")[2] in counts
        assert (value.grad is not None) == used
        if used:
            torch.testing.assert_close(value.grad.double(), state[key].grad, rtol=1e-3, atol=1e-3)


def images(shape=(4, C, 5, 5)) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def last(*shape: int) -> Tensor:
    return images((4, *shape, C))


CLASSES = {
    "BatchNormAct2d": (lambda: timm_layers.BatchNormAct2d(C, drop_layer=nn.Identity), "bn", images()),
    "GroupNorm": (lambda: timm_layers.GroupNorm(C, num_groups=2), "gn", images()),
    "GroupNorm1": (lambda: timm_layers.GroupNorm1(C), "ln", images()),
    "GroupNormAct": (lambda: timm_layers.GroupNormAct(C, num_groups=2), "gn", images()),
    "LayerNorm": (lambda: timm_layers.LayerNorm(C), "ln", last(5)),
    "LayerNorm2d": (lambda: timm_layers.LayerNorm2d(C), "ln", images()),
    "LayerNormFp32": (lambda: timm_layers.LayerNormFp32(C), "ln", last(5)),
    "LayerNormAct": (lambda: timm_layers.LayerNormAct(C), "ln", last(5)),
    "LayerNormAct2d": (lambda: timm_layers.LayerNormAct2d(C), "ln", images()),
    "RmsNorm": (lambda: timm_layers.RmsNorm(C), "rms", last(5)),
    "RmsNorm2d": (lambda: timm_layers.RmsNorm2d(C), "rms", images()),
    "RmsNormAct2d": (lambda: timm_layers.RmsNormAct2d(C), "rms", images()),
    "SimpleNorm": (lambda: timm_layers.SimpleNorm(C), "rms", last(5)),
    "SimpleNorm2d": (lambda: timm_layers.SimpleNorm2d(C), "rms", images()),
    "EvoNorm2dS0": (lambda: timm_layers.EvoNorm2dS0(C, groups=4), "rms", images()),
    "FilterResponseNormTlu2d": (lambda: timm_layers.FilterResponseNormTlu2d(C), "rms", images()),
    "nn.RMSNorm": (lambda: nn.RMSNorm(C), "rms", last(5)),
    "nn.InstanceNorm2d": (lambda: nn.InstanceNorm2d(C, affine=True), "in", images()),
}


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", CLASSES)
def test_outputs_gradients_and_class_stay_the_same_to_the_bit(name, train):
    make, family, x = CLASSES[name]
    original = randomized(nn.Sequential(make())).train(train)
    model, dual = copy.deepcopy(original), "dual_bn" if family == "bn" else f"dual_affine_{family}"
    report = convert_norm(model, dual)
    assert list(report.replaced) == ["0"] and not report.notes
    twin = copy.deepcopy(model)
    pickled = io.BytesIO()
    torch.save(model, pickled)
    pickled.seek(0)
    reference, inputs = copy.deepcopy(original), x.clone().requires_grad_()
    expected = reference(inputs)
    expected.sum().backward()
    for routed in (model, twin, torch.load(pickled, weights_only=False)):
        own = x.clone().requires_grad_()
        with route(routed, "adv"):
            out = routed(own)
        out.sum().backward()
        assert torch.equal(out, expected) and torch.equal(own.grad, inputs.grad)
        for key, value in reference[0].named_parameters():
            banked = key in ("weight", "bias")
            assert torch.equal(routed[0].get_parameter(f"{key}_adv" if banked else key).grad, value.grad)
    plain = strip(model, "adv")
    assert type(plain[0]) is type(original[0]) and str(plain) == str(original)
    # The statistics of the branch that ran are those that the original class has after the same forward.
    assert plain.state_dict().keys() == original.state_dict().keys()
    for key, value in plain.state_dict().items():
        assert torch.equal(value, reference.state_dict()[key])
    reference.load_state_dict(plain.state_dict())


@pytest.mark.parametrize("name", [name for name in CLASSES if CLASSES[name][1] != "bn"])
def test_a_converted_norm_with_one_branch_becomes_a_dual_one_and_keeps_its_class(name):
    make, family, x = CLASSES[name]
    original = randomized(nn.Sequential(make()))
    model = copy.deepcopy(original)
    convert_norm(model, family)
    assert torch.equal(model(x), original(x))
    assert convert_norm(model, family).kept == {"0": "already routed"}
    convert_norm(model, f"dual_affine_{family}", eps=0.5)
    with route(model, "adv"):
        assert not torch.equal(model(x), original(x))  # the requested eps is used
    plain = strip(model, "adv")
    assert type(plain[0]) is type(original[0]) and plain[0].eps == 0.5


@pytest.mark.parametrize("name", ["LayerNormAct2d", "RmsNorm", "GroupNormAct"])
def test_moved_replaced_and_parametrized_parameters_are_used(name):
    make, family, x = CLASSES[name]
    model = nn.Sequential(make())
    convert_norm(model, f"dual_affine_{family}")
    model = copy.deepcopy(model).double()
    with route(model, "adv"):
        assert model(x.double()).dtype == torch.float64
        values = {key: torch.zeros_like(value) for key, value in model.named_parameters()}
        assert not torch.func.functional_call(model, values, x.double()).any()
        assert model(x.double()).any()
        nn.utils.parametrize.register_parametrization(model[0], "weight_adv", _Zero())
        zero = model(x.double())
    assert not zero.any()


class _Zero(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        return value * 0


def test_dropout_follows_the_mode_of_the_model():
    model = nn.Sequential(
        timm_layers.BatchNormAct2d(C, drop_layer=nn.Dropout), timm_layers.GroupNormAct(C, 4, drop_layer=nn.Dropout)
    )
    convert_norm(model, {"0": "dual_bn", "1": "dual_affine_gn"})
    assert isinstance(model[1].drop, nn.Dropout)
    with route(model, "adv"), statistics(model, mode="running"):
        assert not torch.equal(model.train()(images()), model(images()))
        assert torch.equal(model.eval()(images()), model(images()))


def test_a_synchronized_batch_norm_with_activation_converts():
    model = timm_layers.convert_sync_batchnorm(nn.Sequential(timm_layers.BatchNormAct2d(C)))
    x = images()
    reference = F.batch_norm(x, torch.zeros(C), torch.ones(C)).relu()
    convert_norm(model, "dual_bn")
    assert model[0].sync
    with route(model.eval(), "clean"):
        assert torch.equal(model(x), reference)
    assert type(strip(model, "clean")[0]).__name__ == "SyncBatchNormAct"


def test_a_frozen_batch_norm_stays_and_the_error_names_it():
    model = timm_layers.freeze_batch_norm_2d(nn.Sequential(nn.BatchNorm2d(C)))
    with raises_problem("no_norm_of_kind", "norm", SurgeryError) as caught:
        convert_norm(model, "dual_bn")
    assert "unfreeze" in caught.value.problems[0].hint
    assert list(convert_norm(nn.Sequential(model, nn.BatchNorm2d(C)), "dual_bn").kept) == ["0.0"]


def test_statistics_modes_work_on_a_batch_norm_with_activation():
    model = nn.Sequential(timm_layers.BatchNormAct2d(C))
    plain = nn.Sequential(make_norm("dual_bn", C), nn.ReLU())
    convert_norm(model, "dual_bn")
    x = images()
    for mode in ("batch", "batch_frozen", "running"):
        outputs = []
        for network in (model, plain):
            with route(network, {"clean": 1, "adv": 3}), statistics(network, mode=mode, groups=1):
                outputs.append(network(x))
        assert torch.equal(*outputs)
    assert torch.equal(model[0].running_var_adv, plain[0].running_var_adv)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["BatchNormAct2d", "LayerNormAct2d"])
def test_a_converted_norm_compiles_without_a_graph_break(name):
    make, family, x = CLASSES[name]
    model = nn.Sequential(nn.Conv2d(C, C, 1), make())
    convert_norm(model, "dual_bn" if family == "bn" else f"dual_affine_{family}")
    randomized(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for train in (True, False):
        model.train(train)
        with route(model, {"clean": 1, "adv": 3}):
            torch.testing.assert_close(compiled(x), model(x))


def test_an_attack_leaves_a_converted_network_unchanged():
    model = advnorm.create_model("timm:test_efficientnet", 10, "dual_bn").train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    x, y = torch.rand(2, 3, 32, 32), torch.tensor([1, 2])
    threat = advnorm.ThreatModel(norm="Linf", eps="8/255")
    found = advnorm.attacks.PGD(threat=threat, steps=2, step_size="4/255", route="adv")(model, x, y)
    assert (found - x).abs().max() <= 8 / 255 and found.min() >= 0 and found.max() <= 1 and not torch.equal(found, x)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(module.training for module in model.modules()) and all(p.grad is None for p in model.parameters())


def test_classes_of_other_libraries_are_known_by_name_only():
    assert find_adapter(nn.BatchNorm2d).kind.family == "bn"
    unlisted = type("LayerNorm2d", (nn.LayerNorm,), {"__module__": "mylib.layers.norm"})
    assert find_adapter(unlisted) is None
    with raises_problem("not_supported", "0", SurgeryError):
        convert_norm(nn.Sequential(unlisted(4)), "dual_affine_ln")
