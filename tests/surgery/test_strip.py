"""Take a branch out as a plain model."""

import copy
import gc
import io
import weakref

import pytest
import torch
from torch import nn

from advnorm import ConfigError, SurgeryError, convert_head, convert_norm, create_model, make_norm, route, strip
from advnorm.norms import statistics
from support.crossing import fast_first
from support.problems import raises_problem
from support.surgery_models import X, disturb, net


def test_a_process_group_comes_back(tmp_path):
    if not torch.distributed.is_available():
        pytest.skip("torch was built without distributed")
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    try:
        group = torch.distributed.new_group([0])
        model = nn.Sequential(nn.SyncBatchNorm(3, process_group=group))
        convert_norm(model, "dual_bn")
        assert model[0].process_group is group and strip(model, "adv")[0].process_group is group
    finally:
        torch.distributed.destroy_process_group()


def test_strip_leaves_the_model_as_it_was_and_shares_nothing():
    model = disturb(create_model("small_cnn", norm="dual_bn"))
    before = copy.deepcopy(model.state_dict())
    plain = strip(model, "adv")
    with torch.no_grad():
        for value in plain.state_dict().values():
            value.zero_()
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None, "the plain copy does not hold on to the routed model"


def test_strip_needs_a_route_if_there_are_several_branches():
    model = create_model("small_cnn", norm="dual_bn")
    with raises_problem("missing_route", "route", ConfigError):
        strip(model)
    with raises_problem("unknown_name", "route", ConfigError):
        strip(model, "clear")
    assert torch.equal(strip(create_model("small_cnn", norm="bn").eval())(X).isnan(), torch.zeros(4, 10, dtype=bool))


def test_strip_works_inside_a_scope_and_on_a_plain_model():
    model = disturb(create_model("small_cnn", norm="dual_bn")).eval()
    with route(model, "clean"), statistics(model, mode="batch_frozen"):
        plain = strip(model, "adv")
    with route(model, "adv"):
        assert torch.equal(plain(X), model(X))
    assert torch.equal(strip(plain)(X), plain(X))
    with raises_problem("no_routed_norm", "route", ConfigError):
        strip(plain, "adv")


@pytest.mark.parametrize("name", fast_first(["gmm_bn", "dual_affine_gn"], ["bn", "dual_bn", "cross_bn"]))
def test_a_stripped_branch_exports(name):
    model = disturb(create_model("small_cnn", norm=name)).eval()
    plain = strip(model, "adv")
    with route(model, "adv"):
        expected = model(X)
    exported = torch.export.export(plain, (X,))
    torch.testing.assert_close(exported.module()(X), expected)
    buffer = io.BytesIO()
    torch.export.save(exported, buffer)


@pytest.mark.parametrize("name", fast_first(["gmm_bn"], ["dual_bn"]))
def test_a_stripped_branch_runs_in_onnx(name, tmp_path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    model = disturb(create_model("small_cnn", norm=name)).eval()
    plain = strip(model, "adv")
    path = tmp_path / "model.onnx"
    torch.onnx.export(plain, (X,), path, dynamo=True, verbose=False)
    session = runtime.InferenceSession(path)
    (got,) = session.run(None, {session.get_inputs()[0].name: X.numpy()})
    torch.testing.assert_close(torch.from_numpy(got), plain(X), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["bn", "dual_bn", "cross_bn", "gmm_bn", "sandwich_bn", "dual_affine_gn", "rms"])
def test_a_stripped_branch_has_the_same_outputs_at_any_eps(name):
    model = disturb(create_model("small_cnn", norm=name, norm_options={"eps": 0.3})).eval()
    for branch in ("clean", "adv"):
        with route(model, branch):
            torch.testing.assert_close(strip(model, branch)(X), model(X))


def test_strip_unwraps():
    model = net().eval()
    convert_norm(model, "dual_bn")
    for wrapped in (torch.compile(model, backend="eager"), nn.DataParallel(model)):
        plain = strip(wrapped, "adv")
        assert type(plain) is nn.Sequential and list(plain.state_dict()) == list(net().state_dict())
    model = net()
    convert_norm(model, "gmm_bn")
    model[1] = make_norm("gmm_bn", 4, track_running_stats=False)
    with raises_problem("not_supported", "model", SurgeryError):
        strip(model)


def test_hooks_before_loading_are_given_the_plain_module_of_a_lone_norm_too():
    norm, seen = make_norm("dual_bn", 4), []
    norm.register_load_state_dict_pre_hook(lambda module, *_: seen.append(module))
    plain = strip(norm, "adv")
    plain.load_state_dict(plain.state_dict())
    assert seen == [plain]


def test_a_linked_copy_shares_every_tensor_of_its_branch():
    model = create_model("small_cnn", norm="dual_bn")
    own = {value.data_ptr() for value in model.state_dict().values()}
    assert {value.data_ptr() for value in strip(model, "adv", linked=True).state_dict().values()} <= own
    assert not {value.data_ptr() for value in strip(model, "adv").state_dict().values()} & own


@pytest.mark.parametrize("name", ["none", "gmm_bn", "dual_affine_ln"])
def test_hooks_and_mode_of_every_kind_of_norm_are_those_of_its_plain_module(name):
    norm, calls = make_norm(name, 4).eval(), []
    norm.register_forward_hook(lambda module, args, out: calls.append(type(module)))
    plain = strip(norm, "adv")
    plain(torch.rand(2, 4, 3, 3))
    assert calls == [type(plain)] and not plain.training


@pytest.mark.parametrize(
    ("norm", "family"),
    [
        (nn.BatchNorm2d(4), "bn"),
        (nn.SyncBatchNorm(4), "bn"),
        (nn.GroupNorm(2, 4), "gn"),
        (nn.InstanceNorm2d(4, affine=True), "in"),
        (nn.InstanceNorm2d(4, affine=True, eps=1e-3, momentum=0.3), "in"),
        (nn.BatchNorm2d(4, eps=1e-3, momentum=None), "bn"),
        (nn.LayerNorm((3, 3)), "ln"),
        (nn.RMSNorm(3), "rms"),
    ],
)
def test_strip_gives_the_replaced_class_back_with_the_same_settings(norm, family):
    model = nn.Sequential(copy.deepcopy(norm))
    convert_norm(model, family)
    plain = strip(model)[0]
    assert type(plain) is type(norm) and repr(plain) == repr(norm)
    assert {k: v for k, v in vars(plain).items() if k[0] != "_"} == {k: v for k, v in vars(norm).items() if k[0] != "_"}


def test_strip_gives_the_settings_that_the_conversion_changed():
    model = nn.Sequential(nn.BatchNorm2d(4), nn.BatchNorm1d(4))
    convert_norm(model, "dual_bn", eps=0.5, momentum=0.2)
    for plain in strip(model, "adv"):
        assert (plain.eps, plain.momentum) == (0.5, 0.2)


def test_strip_gives_the_class_of_the_new_norm_if_the_conversion_changed_the_kind():
    model = nn.Sequential(nn.BatchNorm2d(4))
    convert_norm(model, "dual_affine_ln")
    assert type(strip(model, "adv")[0]) is nn.GroupNorm


@pytest.mark.parametrize(
    "norm", ["dual_bn", "dual_affine_bn", "dual_stats_bn", "sandwich_bn", "cross_bn", "dual_affine_ln", "bn"]
)
def test_a_mixture_of_branches_is_the_weighted_mean_of_their_tensors(norm):
    model = disturb(create_model("small_cnn", norm=norm)).eval()
    for number, (name, value) in enumerate(model.named_buffers()):
        if "num_batches" in name:
            value.fill_(number)  # another one in every bank
    x = torch.rand(4, 3, 8, 8)
    for domain, other in (("clean", "adv"), ("adv", "clean")):
        whole, one = strip(model, route={other: 0.0, domain: 1.0}), strip(model, route=domain)
        assert all(
            torch.equal(a, b) for a, b in zip(whole.state_dict().values(), one.state_dict().values(), strict=True)
        )
        assert torch.equal(whole(x), one(x))
    clean, adv, mixed = (
        strip(model, route=route).state_dict() for route in ("clean", "adv", {"clean": 0.3, "adv": 0.7})
    )
    for name, value in mixed.items():
        if value.is_floating_point():
            expected = (0.3 * clean[name].double() + 0.7 * adv[name].double()).to(value.dtype)
            assert torch.allclose(value, expected, rtol=1e-6, atol=1e-7), name


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("norm", ["dual_bn", "sandwich_bn"])
def test_parameters_of_a_branch_are_trained_or_frozen_as_before(norm, trained):
    model = create_model("small_cnn", norm=norm).requires_grad_(trained)
    for branch in ("adv", {"clean": 0.5, "adv": 0.5}):
        with torch.no_grad():
            without_graph = strip(model, branch)
        for plain in (strip(model, branch), without_graph):
            assert all(parameter.is_leaf and parameter.requires_grad is trained for parameter in plain.parameters())


def test_a_mixture_of_branches_interpolates_a_dual_head_and_shares_nothing():
    model = create_model("small_cnn", norm="dual_bn")
    convert_head(model)
    model = disturb(model)
    heads = [strip(model, route=route).fc.weight for route in ("clean", "adv", {"clean": 0.5, "adv": 0.5})]
    assert torch.allclose(heads[2], (heads[0] + heads[1]) / 2, atol=1e-7) and not torch.equal(heads[0], heads[1])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plain = strip(model, route={"clean": 0.5, "adv": 0.5})
    for value in plain.parameters():
        value.data.zero_()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("shares", "options", "code"),
    [
        ({"clean": 0.5, "adv": 0.6}, {}, "out_of_range"),
        ({"clean": -0.5, "adv": 1.5}, {}, "out_of_range"),
        ({"clean": True, "adv": 0.0}, {}, "out_of_range"),
        ({"clean": "a", "adv": 0.0}, {}, "out_of_range"),
        ({}, {}, "out_of_range"),
        ({"clean": 0.5, "avd": 0.5}, {}, "unknown_name"),
        ({"clean": 0.5, "adv": 0.5}, {"linked": True}, "not_supported"),
    ],
)
def test_wrong_shares_are_rejected(shares, options, code):
    with raises_problem(code, "route"):
        strip(create_model("small_cnn", norm="dual_bn"), route=shares, **options)
    with raises_problem("no_routed_norm", "route"):
        strip(nn.Sequential(nn.BatchNorm2d(3)), route={"clean": 1.0})
    with raises_problem("not_supported", "route"):
        strip(create_model("small_cnn", norm="gmm_bn"), route={"clean": 0.5, "adv": 0.5})
