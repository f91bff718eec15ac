"""Convert the norms of any model: what the new norms compute, and what survives."""

import copy
import gc
from itertools import product
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from advnorm import ConfigError, SurgeryError, convert_norm, create_model, domains, make_norm, route, strip
from advnorm.norms import RoutedNorm, list_norms, make_plan, routed_modules
from support.crossing import fast_first
from support.problems import raises_problem
from support.surgery_models import OPTIONS, X, disturb, logits, tiny, trained

ARCHITECTURES = ("preact_resnet18", "wrn_40_2", "resnet50", "vgg11")
BATCH_NORMS = [n for n in list_norms() if n.endswith("bn")]

SAME_FUNCTION = [n for n in BATCH_NORMS if n != "gmm_bn"]  # the mixture of equal Gaussians is equal up to rounding


@pytest.mark.parametrize("name", list_norms())
def test_a_transformers_resnet_converts_and_comes_back(resnet, name):
    model = copy.deepcopy(resnet)
    report = convert_norm(model, name, **OPTIONS.get(name, {}))
    assert len(report.replaced) == sum(isinstance(m, nn.BatchNorm2d) for m in resnet.modules()) > 0
    assert not any(isinstance(m, nn.BatchNorm2d) for m in model.modules())
    for domain in domains(model):
        with route(model, domain):
            routed = logits(model, X)
        if name in SAME_FUNCTION:
            assert torch.equal(routed, logits(resnet, X)), "statistics and weights went into every bank"
        elif name == "gmm_bn":
            torch.testing.assert_close(routed, logits(resnet, X))
    disturb(model)
    outputs = []
    for domain in domains(model):
        plain = strip(model, domain)
        assert not routed_modules(plain)
        with route(model, domain):
            outputs.append(logits(model, X))
        assert torch.equal(logits(plain, X), outputs[-1])
        if name in SAME_FUNCTION:
            original = copy.deepcopy(resnet)
            original.load_state_dict(plain.state_dict())
            assert torch.equal(logits(original, X), outputs[-1])
    if make_plan(name, domains=domains(model)).routed and name != "gmm_bn":
        assert not torch.equal(outputs[0], outputs[1])


@pytest.mark.parametrize(
    ("architecture", "name"),
    fast_first(
        [*(("small_cnn", name) for name in list_norms()), *zip(ARCHITECTURES, ("dual_bn", "gmm_bn", "cross_bn", "gn"))],
        list(product(("small_cnn", *ARCHITECTURES), list_norms())),
    ),
)
def test_our_models_convert_and_come_back(architecture, name):
    width = 1.0 if architecture == "small_cnn" else 0.125
    built_in = strip(create_model(architecture, norm="bn", width=width))
    trained(built_in, 4, 3, 32, 32)
    model = copy.deepcopy(built_in)
    report = convert_norm(model, name, **OPTIONS.get(name, {}))
    assert len(report.replaced) == sum(isinstance(m, nn.BatchNorm2d) for m in built_in.modules()) > 0
    disturb(model)
    for domain in domains(model):
        with route(model, domain):
            expected = model(X)
        assert torch.equal(strip(model, domain)(X), expected)


@pytest.mark.parametrize("name", list_norms())
def test_a_created_model_equals_a_converted_one(name):
    options = OPTIONS.get(name, {})
    created = create_model("small_cnn", norm=name, norm_options=options)
    converted = create_model("small_cnn", norm="none" if name == "none" else "bn")
    convert_norm(converted, name, **options)
    assert list(converted.state_dict()) == list(created.state_dict())
    converted.load_state_dict(created.state_dict())
    created.eval(), converted.eval()
    for domain in domains(created):
        with route(created, domain), route(converted, domain):
            assert torch.equal(created(X), converted(X))


@pytest.mark.parametrize("name", list_norms())
def test_converting_twice_changes_nothing(name):
    model = trained(nn.Sequential(*list(tiny().children())[:3]), 4, 3, 8, 8)
    options = OPTIONS.get(name, {})
    convert_norm(model, name, **options)
    before, modules = copy.deepcopy(model.state_dict()), list(model.modules())
    report = convert_norm(model, name, **options)
    assert not report.replaced
    assert set(report.kept.values()) <= {"already routed", "none has nothing to convert"}
    assert [id(m) for m in model.modules()] == [id(m) for m in modules]
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("name", BATCH_NORMS)
def test_all_dimensions_convert(dim, name):
    model = tiny(dim)
    x = torch.rand(4, 3, *(8,) * dim)
    trained(model, *x.shape)
    expected = model(x)
    convert_norm(model, name, **OPTIONS.get(name, {}))
    with route(model, domains(model)[0]):
        torch.testing.assert_close(model(x), expected)
        with raises_problem("wrong_shape", "x", ConfigError):
            model[1](torch.rand(4, 8, *(8,) * (dim % 3 + 2)))


def test_mode_dtype_hooks_and_flags_survive():
    model = trained(tiny(), 4, 3, 8, 8).double()
    model.train()
    model[1].eval()
    model[4].weight.requires_grad_(False)
    calls = []
    handle = model[1].register_forward_hook(lambda module, args, out: calls.append(type(module).__name__))
    model[4].register_full_backward_hook(lambda *_: calls.append("backward"))
    model[4].register_forward_pre_hook(lambda module, args: calls.append("pre"))
    convert_norm(model, "dual_bn")
    assert [m.training for m in model] == [True, False] + [True] * 6
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert not model[4].weight_clean.requires_grad and not model[4].weight_adv.requires_grad
    assert model[4].bias_adv.requires_grad
    with route(model, "adv"):
        model(torch.rand(4, 3, 8, 8, dtype=torch.float64)).sum().backward()
    assert calls == ["RoutedNorm", "pre", "backward"]
    handle.remove()
    with route(model, "adv"):
        model(torch.rand(4, 3, 8, 8, dtype=torch.float64))
    assert calls == ["RoutedNorm", "pre", "backward", "pre"], "the handle that the user holds still removes the hook"
    stripped = strip(model, "adv")
    assert [m.training for m in stripped] == [True, False] + [True] * 6


def test_channels_last_stays_channels_last():
    model = trained(tiny(), 4, 3, 8, 8).to(memory_format=torch.channels_last)
    convert_norm(model, "dual_bn")
    model.train()
    x = torch.rand(6, 3, 8, 8).to(memory_format=torch.channels_last)
    for name in ("single", "concatenated"):
        with route(model, "adv" if name == "single" else {"clean": 2, "adv": 4}):
            assert model[:2](x).is_contiguous(memory_format=torch.channels_last)


def test_meta_models_convert_and_new_banks_are_where_the_old_one_was():
    with torch.device("meta"):
        model = create_model("imagenet_resnet50", num_classes=1000)
    convert_norm(model, "dual_bn")
    assert all(value.is_meta for value in (*model.parameters(), *model.buffers()))
    assert sum(p.numel() for p in model.parameters()) == 25_557_032 + 53_120


def test_shared_modules_are_converted_once_and_stay_shared():
    norm = nn.BatchNorm2d(3)
    model = nn.ModuleDict({"a": nn.Sequential(norm, nn.ReLU()), "b": nn.Sequential(nn.ReLU(), norm)})
    report = convert_norm(model, "dual_bn")
    assert list(report.replaced) == ["a.0"]
    assert isinstance(model["a"][0], RoutedNorm) and model["a"][0] is model["b"][1]


class Referring(nn.Module):
    """Uses its norms through attributes that are no children."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.steps = [self.norm, nn.ReLU()]
        self.by_name = {"last": (nn.Identity(), self.norm)}
        self.__dict__["plain"] = self.norm

    def forward(self, x):
        for step in self.steps:
            x = step(x)
        return self.by_name["last"][1](self.plain(x))


def test_a_norm_that_a_forward_finds_in_a_list_or_dict_is_replaced_there():
    model, x = Referring(), torch.rand(4, 3, 5, 5)
    plain = copy.deepcopy(model)
    convert_norm(model, "dual_bn")
    with route(model, "adv"):
        assert torch.equal(model(x), plain(x))
    stripped = strip(model, "adv")
    assert type(stripped.by_name["last"][1]) is nn.BatchNorm2d
    assert torch.equal(stripped.eval()(x), plain.eval()(x))


class Pair(NamedTuple):
    name: str
    norm: nn.Module


def test_references_in_named_tuples_and_in_cycles_are_replaced():
    model = Referring()
    model.steps = [Pair("norm", model.norm), model]
    model.steps.append(model.steps)
    assert convert_norm(model, "dual_bn").kept == {}
    assert model.steps[0].norm is model.norm and isinstance(model.norm, RoutedNorm)
    copied = copy.deepcopy(model)
    assert copied.steps[0].norm is copied.norm is copied.plain is not model.norm


def test_the_report_names_norms_that_only_a_list_or_a_dict_holds():
    model = Referring()
    model.steps = [nn.Sequential(nn.ReLU(), nn.BatchNorm2d(3))]
    model.by_name = {"last": (nn.ReLU(), nn.LayerNorm(3))}
    report = convert_norm(nn.Sequential(model), "dual_bn")
    assert list(report.replaced) == ["0.norm"] and set(report.kept) == {"0.steps.0.1", "0.by_name.last.1"}
    assert all("nn.ModuleList" in reason for reason in report.kept.values())


def test_tied_parameters_stay_tied():
    model = nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(3))
    model[1].weight = model[0].weight
    convert_norm(model, "dual_bn")
    assert model[0].weight_clean is model[1].weight_clean
    assert model[0].weight_adv is model[1].weight_adv
    assert model[0].weight_clean is not model[0].weight_adv
    assert model[0].bias_adv is not model[1].bias_adv


def test_the_single_bank_keeps_its_parameters_so_an_optimizer_stays_valid():
    model = tiny()
    model(torch.rand(2, 3, 8, 8))
    before = list(model.parameters())
    convert_norm(model, "bn")
    assert [id(p) for p in model.parameters()] == [id(p) for p in before]


def test_a_norm_that_lost_its_statistics_evaluates_by_the_batch_as_before():
    model, x = nn.Sequential(nn.BatchNorm2d(3)), torch.rand(4, 3, 5, 5)
    model[0].running_mean = model[0].running_var = None
    expected = model.eval()(x)
    convert_norm(model, "dual_bn")
    with route(model, "adv"):
        assert torch.equal(model(x), expected)


def test_hooks_before_loading_are_given_the_new_module():
    model, seen = nn.Sequential(nn.BatchNorm2d(4)), []
    model[0].register_load_state_dict_pre_hook(lambda module, *_: seen.append(module))
    convert_norm(model, "dual_bn")
    gc.collect()
    model.load_state_dict(model.state_dict())
    stripped = strip(model, "adv")
    stripped.load_state_dict(stripped.state_dict())
    assert seen == [model[0], stripped[0]]


@pytest.mark.parametrize("layer", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
def test_transformer_layers_evaluate_as_they_train_and_must_have_the_batch_first(layer):
    settings = {"d_model": 8, "nhead": 2, "dim_feedforward": 16, "dropout": 0.0}
    model = layer(batch_first=True, **settings)
    encoder, x = layer is nn.TransformerEncoderLayer, torch.rand(4, 5, 8)
    more = () if encoder else (x,)
    expected = model(x, *more)
    notes = convert_norm(model, "dual_affine_ln").notes
    assert [note for note in notes if "fast path" in note] == [*notes][: int(encoder)]
    with torch.no_grad(), route(model, {"clean": 2, "adv": 2}):
        torch.testing.assert_close(model.eval()(x, *more), expected.detach())  # attention rounds otherwise
        model.norm2.weight_adv.fill_(3)
        changed = model(x, *more)
    torch.testing.assert_close(changed[:2], expected[:2].detach())
    assert not torch.allclose(changed[2:], expected[2:])
    with torch.no_grad():
        torch.testing.assert_close(strip(model, "clean")(x, *more), expected.detach())
    with raises_problem("not_supported", "model", SurgeryError):
        convert_norm(layer(**settings), "dual_affine_ln")
    assert convert_norm(layer(**settings), "ln").replaced


def test_norms_without_affine_or_tracking_convert():
    model = nn.Sequential(nn.BatchNorm2d(3, affine=False), nn.BatchNorm2d(3, track_running_stats=False, momentum=None))
    reference = copy.deepcopy(model)
    convert_norm(model, "dual_bn")
    x = torch.rand(4, 3, 5, 5)
    for train in (True, False):
        model.train(train), reference.train(train)
        with route(model, "clean"):
            assert torch.equal(model(x), reference(x))
    assert torch.equal(strip(model, "clean")(x), reference(x))


def test_per_sample_norms_keep_their_kind():
    layers = nn.Sequential(
        nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True), nn.LayerNorm((6, 6)), nn.RMSNorm((4, 6, 6))
    )
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.uniform_(0.5, 1.5)
    x = torch.rand(3, 4, 6, 6)
    expected = {"gn": [0], "in": [1], "ln": [2], "rms": [3]}
    for family, indices in expected.items():
        for name in (family, f"dual_affine_{family}"):
            model = copy.deepcopy(layers)
            report = convert_norm(model, name)
            assert list(report.replaced) == [str(i) for i in indices]
            assert set(report.kept) == {str(i) for i in range(4)} - set(report.replaced)
            with route(model, "adv"):
                assert torch.equal(model(x), layers(x))
            plain = strip(model, "adv")
            assert torch.equal(plain(x), layers(x)) and [*map(type, plain)] == [*map(type, layers)]


def test_an_unrouted_norm_of_ours_can_become_a_routed_one():
    for family in ("ln", "gn", "in", "rms"):
        model = create_model("small_cnn", norm=family).eval()
        expected = model(X)
        convert_norm(model, f"dual_affine_{family}")
        with route(model, "adv"):
            assert torch.equal(model(X), expected)


def test_the_report_prints_what_was_done_and_left():
    model = nn.Sequential(nn.BatchNorm2d(3), nn.GroupNorm(1, 3), nn.Sequential(nn.BatchNorm2d(3)))
    text = str(convert_norm(model, "dual_affine_gn"))
    assert "dual_affine_gn: 3 replaced, 0 kept" in text
    assert "outputs change" in text and "domains: clean, adv" in text and "+18 parameters" in text
    report = convert_norm(nn.Sequential(nn.BatchNorm2d(3), nn.GroupNorm(1, 3)), "dual_bn")
    assert "1  kept: GroupNorm" in str(report) and "+6 parameters" in str(report)


def test_convert_sync_batchnorm_leaves_routed_norms_alone():
    model = trained(tiny(), 4, 3, 8, 8)
    convert_norm(model, "dual_bn")
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert sum(isinstance(m, RoutedNorm) for m in converted.modules()) == 2
    with route(converted, "adv"):
        converted(torch.rand(4, 3, 8, 8))


def test_a_replaced_group_norm_keeps_its_answers_on_single_positions():
    model = nn.Sequential(nn.GroupNorm(4, 4)).eval()
    x = torch.rand(2, 4, 1, 1)
    expected = model(x)
    convert_norm(model, "dual_affine_gn")
    with route(model, "adv"):
        assert torch.equal(model(x), expected)


def test_a_report_names_our_own_norms_by_their_names():
    model = create_model("small_cnn", norm="ln")
    assert set(convert_norm(model, "dual_affine_ln").replaced.values()) == {"ln -> dual_affine_ln"}


@pytest.mark.parametrize("name", ["bn", "dual_bn", "gmm_bn", "cross_bn"])
def test_an_average_of_weights_has_a_rule_for_the_banks(name):
    """Average the buffers with the weights, or re-estimate them; the built-in ``update_bn`` sees no routed norm."""

    torch.manual_seed(0)
    model = create_model("small_cnn", norm=name)
    average = AveragedModel(model, use_buffers=True)
    snapshots = []
    for step in range(3):
        forwarded = {"clean": 3, "adv": 3} if name == "cross_bn" else None
        with route(model, {"clean": 3, "adv": 3}, forwarded=forwarded):
            model(torch.rand(12 if forwarded else 6, 3, 16, 16) + step)
        average.update_parameters(model)
        snapshots.append({key: value.double() for key, value in model.state_dict().items()})
    for key, value in average.module.state_dict().items():
        if "num_batches" in key:  # an integer, whose average torch rounds down
            continue
        expected = sum(snapshot[key] for snapshot in snapshots) / 3
        torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-6)
    with route(average, "adv"):
        average.eval()(torch.rand(2, 3, 16, 16))
    assert all(isinstance(m, RoutedNorm) for n, m in average.module.named_modules() if n.startswith("bn"))


@pytest.mark.parametrize("old", [nn.BatchNorm2d(4), make_norm("bn", 4)], ids=["built_in", "ours"])
def test_every_bank_of_three_has_tensors_of_its_own_with_the_old_values(old):
    with torch.no_grad():
        for tensor in old.state_dict().values():
            tensor.add_(2)
    model = nn.Sequential(copy.deepcopy(old))
    convert_norm(model, "triple_bn")
    state = model[0].state_dict()
    assert len({value.data_ptr() for value in state.values()}) == len(state) == 3 * 5
    for key, value in old.state_dict().items():
        assert all(torch.equal(state[f"{key}_{domain}"], value) for domain in ("clean", "adv", "adv2"))


@pytest.mark.parametrize("family", ["gn", "ln", "in", "rms"])
def test_a_per_sample_norm_of_ours_still_validates_its_input_when_it_is_routed(family):
    model = nn.Sequential(make_norm(family, 4))
    assert list(convert_norm(model, f"dual_affine_{family}").replaced) == ["0"]
    with route(model, "adv"), raises_problem("wrong_shape", "x", ConfigError):
        model(torch.rand(2, 4, 5))


def test_an_instance_norm_with_running_statistics_is_rejected():
    model = nn.Sequential(nn.InstanceNorm2d(4, affine=True, track_running_stats=True))
    with raises_problem("not_supported", "0", SurgeryError):
        convert_norm(model, "in")
    assert type(model[0]) is nn.InstanceNorm2d


@pytest.mark.parametrize("norm", [nn.InstanceNorm2d(4), nn.LayerNorm(4, elementwise_affine=False)])
def test_a_per_sample_norm_without_parameters_has_nothing_to_route(norm):
    family = "in" if isinstance(norm, nn.InstanceNorm2d) else "ln"
    model = nn.Sequential(copy.deepcopy(norm), nn.BatchNorm2d(4))
    with raises_problem("no_norm_of_kind", "norm", SurgeryError):
        convert_norm(nn.Sequential(norm), f"dual_affine_{family}")
    assert list(convert_norm(model, {"0": family, "1": "dual_bn"}).replaced) == ["0", "1"]
    x = torch.rand(2, 4, 4, 4)
    with route(model, "adv"):
        assert torch.equal(model[0](x), norm(x))
    assert type(strip(model, "adv")[0]) is type(norm)


@pytest.mark.parametrize("name", ["ln", "dual_affine_ln"])
def test_layer_norms_of_the_last_dimensions_are_converted_once(name):
    model = nn.Sequential(nn.LayerNorm((6, 6), bias=False))
    convert_norm(model, name)
    norm = model[0]
    assert convert_norm(model, name).kept == {"0": "already routed"}
    assert model[0] is norm
