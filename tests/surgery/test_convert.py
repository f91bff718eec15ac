"""Surgery: any model in, a routed one out, and a branch of it back as a plain module."""

import copy
import gc
import io
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import advnorm
from advnorm import ConfigError, SurgeryError, convert_head, convert_norm, create_model, route, strip
from advnorm.norms import NORMS, RoutedNorm, domains, list_norms, routed_modules, statistics

OPTIONS = {"multi_bn": {"domains": ("a", "b", "c")}}
BATCH_FED = [n for n in list_norms() if n.endswith("bn")]
PER_SAMPLE = [n for n in list_norms() if not n.endswith("bn")]
SAME_FUNCTION = [n for n in BATCH_FED if n != "gmm_bn"]  # the mixture of equal Gaussians is equal up to rounding


def trained(model, *shape):
    """A model whose statistics and affine parameters are not those of a fresh one."""
    generator = torch.Generator().manual_seed(1)
    model.train()
    for _ in range(3):
        model(torch.rand(shape, generator=generator) * 2)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) and module.affine:
                module.weight.uniform_(0.5, 1.5, generator=generator)
                module.bias.uniform_(-0.5, 0.5, generator=generator)
    return model.eval()


def disturb(model):
    """Make every bank of a routed model different from the others."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for module in routed_modules(model).values():
            for name, value in [*module.named_parameters(), *module.named_buffers()]:
                if value.is_floating_point():
                    noise = torch.rand(value.shape, generator=generator)
                    value.copy_(0.5 + noise if "var" in name else value + 0.3 * noise)
    return model


def tiny(dim=2, classes=4):
    conv, norm = getattr(nn, f"Conv{dim}d"), getattr(nn, f"BatchNorm{dim}d")
    return nn.Sequential(
        conv(3, 8, 3, padding=1), norm(8), nn.ReLU(), conv(8, 8, 3), norm(8), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4)
    )


@pytest.fixture(scope="module")
def resnet():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type="basic", num_labels=5
    )
    return trained(transformers.ResNetForImageClassification(config), 4, 3, 32, 32)


def logits(model, x):
    out = model(x)
    return out if isinstance(out, torch.Tensor) else out.logits


X = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(3))


# -- convert -------------------------------------------------------------------------------------------------------


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
    if NORMS.get(name).plan(domains(model)).routed and name != "gmm_bn":
        assert not torch.equal(outputs[0], outputs[1])


@pytest.mark.parametrize("name", list_norms())
@pytest.mark.parametrize("architecture", ["small_cnn", "preact_resnet18", "wrn_40_2", "resnet50", "vgg11"])
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
    assert set(report.kept.values()) <= {"routed already", "none has nothing to convert"}
    assert [id(m) for m in model.modules()] == [id(m) for m in modules]
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("name", BATCH_FED)
def test_all_dimensions_convert(dim, name):
    model = tiny(dim)
    x = torch.rand(4, 3, *(8,) * dim)
    trained(model, *x.shape)
    expected = model(x)
    convert_norm(model, name, **OPTIONS.get(name, {}))
    with route(model, domains(model)[0]):
        torch.testing.assert_close(model(x), expected)
        with pytest.raises(ConfigError, match="dimensions"):
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


def test_a_subclass_is_refused_by_name_and_nothing_changes():
    class BatchNormAct(nn.BatchNorm2d):
        def forward(self, x):
            return super().forward(x).relu()

    model = nn.Sequential(nn.BatchNorm2d(3), nn.Sequential(BatchNormAct(3)))
    with pytest.raises(SurgeryError, match=r"1\.0 \(BatchNormAct is a subclass of BatchNorm2d.*keep=\["):
        convert_norm(model, "dual_bn")
    assert type(model[0]) is nn.BatchNorm2d
    report = convert_norm(model, "dual_bn", keep=["1.0"])
    assert report.kept == {"1.0": "as asked"} and list(report.replaced) == ["0"]
    assert type(model[1][0]) is BatchNormAct


def test_parametrized_and_lazy_norms_are_refused():
    model = nn.Sequential(nn.BatchNorm2d(3), nn.LazyBatchNorm2d())
    nn.utils.parametrizations.weight_norm(model[0], "weight", dim=None)
    with pytest.raises(SurgeryError, match=r"0 \(.*subclass of BatchNorm2d.*1 \(LazyBatchNorm2d has no size yet"):
        convert_norm(model, "bn")


class Gate(nn.Module):
    def forward(self, x):
        return x


def _own_forward(module):
    module.forward = lambda x: 2 * x


def _gated(module):
    module.gate = Gate()


@pytest.mark.parametrize("change", [_own_forward, _gated, lambda module: prune.l1_unstructured(module, "weight", 1)])
def test_a_module_that_has_more_than_its_class_is_refused_by_name_and_nothing_changes(change):
    model = nn.Sequential(nn.BatchNorm2d(4), nn.BatchNorm2d(4), nn.Linear(4, 2))
    change(model[1])
    change(model[2])
    with pytest.raises(SurgeryError, match=r"1 \(BatchNorm2d .*may do more.*keep="):
        convert_norm(model, "dual_bn")
    assert type(model[0]) is nn.BatchNorm2d
    with pytest.raises(SurgeryError, match=r"2 .*may do more"):
        convert_head(model)


def test_statistics_that_a_norm_evaluates_with_and_does_not_feed_are_refused():
    model = nn.Sequential(nn.BatchNorm2d(3))
    model[0].track_running_stats = False
    with pytest.raises(
        SurgeryError, match=r"0 \(BatchNorm2d has statistics that .* does not feed; set track_running_s"
    ):
        convert_norm(model, "dual_bn")
    model[0].track_running_stats = True
    model[0].running_mean = None
    with pytest.raises(SurgeryError, match="does not feed"):
        convert_norm(model, "dual_bn")


def test_a_norm_that_lost_its_statistics_evaluates_by_the_batch_as_before():
    model, x = nn.Sequential(nn.BatchNorm2d(3)), torch.rand(4, 3, 5, 5)
    model[0].running_mean = model[0].running_var = None
    expected = model.eval()(x)
    convert_norm(model, "dual_bn")
    with route(model, "adv"):
        assert torch.equal(model(x), expected)


def test_a_subclass_that_the_name_does_not_replace_stays():
    class Mine(nn.LayerNorm):
        pass

    model = nn.Sequential(nn.BatchNorm1d(4), Mine(4))
    assert convert_norm(model, "dual_bn").kept == {
        "1": "Mine, a subclass of LayerNorm, is not the norm that dual_bn replaces"
    }
    model = nn.Sequential(nn.BatchNorm1d(4), Mine(4))
    with pytest.raises(SurgeryError, match="Mine is a subclass of LayerNorm"):
        convert_norm(model, "ln")


def test_settings_of_a_norm_that_stays_are_checked_and_none_is_ignored():
    model = nn.Sequential(nn.BatchNorm2d(4))
    convert_norm(model, "dual_bn")
    with pytest.raises(ConfigError, match="eps must be.*momentum must"):
        convert_norm(model, "dual_bn", momentum=5, eps=-1.0)
    assert model[0].momentum == 0.1
    for norm in (nn.GroupNorm(4, 8), advnorm.make_norm("gn", 8)):
        model = nn.Sequential(norm)
        assert convert_norm(model, "gn", num_groups=norm.num_groups)
        with pytest.raises(SurgeryError, match=r"has \d groups.*leave num_groups out"):
            convert_norm(model, "gn", num_groups=2)
    model = nn.Sequential(nn.BatchNorm2d(8), nn.BatchNorm2d(12), nn.BatchNorm2d(20))
    with pytest.raises(SurgeryError, match=r"1 \(12 channels.*8 groups\); 2 \(20 channels"):
        convert_norm(model, "gn", num_groups=8)


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
    with pytest.raises(SurgeryError, match=r"batch in the second dimension.*batch_first=True"):
        convert_norm(layer(**settings), "dual_affine_ln")
    assert convert_norm(layer(**settings), "ln").replaced


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


def test_a_routed_norm_does_not_become_another():
    model = nn.Sequential(nn.BatchNorm2d(3))
    convert_norm(model, "dual_bn")
    with pytest.raises(SurgeryError, match="routed already as dual_bn.*strip"):
        convert_norm(model, "cross_bn")
    model = nn.Sequential(nn.BatchNorm2d(3))
    convert_norm(model, "cross_bn")
    with pytest.raises(SurgeryError, match="routed already as cross_bn over clean, adv with other_gradient=True"):
        convert_norm(model, "cross_bn", other_gradient=False)


def test_a_model_that_is_itself_a_norm_is_refused():
    with pytest.raises(SurgeryError, match=r"wrap it in nn\.Sequential"):
        convert_norm(nn.BatchNorm2d(3), "dual_bn")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("dualbn",), "did you mean 'dual_bn'"),
        (("dual_bn", {"domains": ("a", "b", "c")}), "multi_bn"),
        (("dual_bn", {"momentums": 0.2}), "did you mean 'momentum'"),
        (("bn", {"other_gradient": True}), "unknown option 'other_gradient'"),
        (("dual_bn", {"keep": ["9"]}), "keep names no module: '9'"),
    ],
)
def test_wrong_arguments_are_explained(arguments, message):
    model = nn.Sequential(nn.BatchNorm2d(3))
    name, options = (*arguments, {})[:2]
    with pytest.raises(ConfigError, match=message):
        convert_norm(model, name, **options)
    assert type(model[0]) is nn.BatchNorm2d


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


def test_sync_batch_norm_converts_to_synchronized_statistics():
    model = nn.Sequential(nn.SyncBatchNorm(3))
    convert_norm(model, "dual_bn")
    assert model[0].sync
    model = nn.Sequential(nn.BatchNorm2d(3))
    convert_norm(model, "dual_bn", sync=True)
    assert model[0].sync


def test_per_sample_norms_keep_their_kind():
    layers = nn.Sequential(
        nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True), nn.LayerNorm((6, 6)), nn.InstanceNorm2d(4)
    )
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.uniform_(0.5, 1.5)
    x = torch.rand(3, 4, 6, 6)
    expected = {"gn": [0], "in": [1], "ln": [2]}
    for family, indices in expected.items():
        for name in (family, f"dual_affine_{family}"):
            model = copy.deepcopy(layers)
            report = convert_norm(model, name)
            assert list(report.replaced) == [str(i) for i in indices]
            assert set(report.kept) == {str(i) for i in range(4)} - set(report.replaced)
            with route(model, "adv"):
                torch.testing.assert_close(model(x), layers(x))
            torch.testing.assert_close(strip(model, "adv")(x), layers(x))
    model = copy.deepcopy(layers)
    assert not convert_norm(model, "dual_bn").replaced


def test_an_unrouted_norm_of_ours_can_become_a_routed_one():
    for family in ("ln", "gn", "in"):
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


# -- strip ---------------------------------------------------------------------------------------------------------


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


def test_strip_asks_which_branch():
    model = create_model("small_cnn", norm="dual_bn")
    with pytest.raises(ConfigError, match="several branches.*route='adv'"):
        strip(model)
    with pytest.raises(ConfigError, match="did you mean 'clean'"):
        strip(model, "clear")
    assert torch.equal(strip(create_model("small_cnn", norm="bn").eval())(X).isnan(), torch.zeros(4, 10, dtype=bool))


def test_strip_works_inside_a_scope_and_on_a_plain_model():
    model = disturb(create_model("small_cnn", norm="dual_bn")).eval()
    with route(model, "clean"), statistics(model, mode="batch_frozen"):
        plain = strip(model, "adv")
    with route(model, "adv"):
        assert torch.equal(plain(X), model(X))
    assert torch.equal(strip(plain)(X), plain(X))
    with pytest.raises(ConfigError, match="the model has no routed modules, so no route 'adv'"):
        strip(plain, "adv")


@pytest.mark.parametrize("name", ["bn", "dual_bn", "cross_bn", "gmm_bn", "dual_affine_gn"])
def test_a_stripped_branch_exports(name):
    model = disturb(create_model("small_cnn", norm=name)).eval()
    plain = strip(model, "adv")
    with route(model, "adv"):
        expected = model(X)
    exported = torch.export.export(plain, (X,))
    torch.testing.assert_close(exported.module()(X), expected)
    buffer = io.BytesIO()
    torch.export.save(exported, buffer)


@pytest.mark.parametrize("name", ["dual_bn", "gmm_bn"])
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


# -- heads ---------------------------------------------------------------------------------------------------------


def test_a_dual_head_routes_and_comes_back():
    model = trained(strip(create_model("small_cnn")), 4, 3, 32, 32)
    original = copy.deepcopy(model)
    report = convert_head(model)
    assert report.replaced == {"fc": "Linear -> dual_linear"}
    for domain in ("clean", "adv"):
        with route(model, domain):
            assert torch.equal(model(X), original(X))
    with torch.no_grad():
        model.fc.weight_adv.add_(1.0)
        model.fc.bias_adv.sub_(1.0)
    with route(model, {"clean": 1, "adv": 3}):
        both = model(X)
    with route(model, "clean"):
        torch.testing.assert_close(both[:1], model(X)[:1])
    with route(model, "adv"):
        torch.testing.assert_close(both[1:], model(X)[1:])
        adversarial = model(X)
    plain = strip(model, "adv")
    assert torch.equal(plain(X), adversarial) and type(plain.fc) is nn.Linear
    original.load_state_dict(plain.state_dict())
    with pytest.raises(advnorm.RouteError, match="no route is set"):
        model(X)
    assert convert_head(model).kept == {"fc": "routed already"}


def test_a_head_is_found_in_a_transformers_model(resnet):
    model = copy.deepcopy(resnet)
    report = convert_head(model)
    assert list(report.replaced) == ["classifier.1"]
    with route(model, "adv"):
        assert torch.equal(logits(model, X), logits(resnet, X))


def test_head_errors_are_explained():
    with pytest.raises(SurgeryError, match=r"no nn\.Linear"):
        convert_head(nn.Sequential(nn.Conv2d(3, 4, 1)))
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Linear(4, 2))
    with pytest.raises(SurgeryError, match=r"0 is a Conv2d.*there are: 1"):
        convert_head(model, name="0")
    with pytest.raises(ConfigError, match="no module '3'"):
        convert_head(model, name="3")
    with pytest.raises(ConfigError, match="name of its own"):
        convert_head(model, domains=("adv", "adv"))
    with pytest.raises(ConfigError, match="domains is a list of names, got the string 'adv'"):
        convert_head(model, domains="adv")


def test_norms_of_domains_that_a_routed_head_does_not_know_are_refused():
    model = create_model("small_cnn", norm="bn")
    plain = strip(model)
    convert_head(plain)
    before = {name: type(module) for name, module in plain.named_modules()}
    with pytest.raises(
        SurgeryError, match=r"routed over clean, adv and the norms would be over a, b.*domains=\['clean'"
    ):
        convert_norm(plain, "dual_bn", domains=("a", "b"))
    assert before == {name: type(module) for name, module in plain.named_modules()}
    convert_norm(plain, "triple_bn")
    with route(plain, "adv"):
        plain.eval()(X)
