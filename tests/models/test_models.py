"""The models: published sizes and keys, independent oracles, options, errors."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from advnorm._core.errors import ConfigError
from advnorm.models import MODELS, ImageClassifier, InputNorm, create_model, list_models, register_model
from advnorm.models.fixup_resnet import FixupBlock
from advnorm.models.resnet import IMAGENET_DEPTHS
from advnorm.norms import domains, list_norms, route
from support.crossing import fast_first
from support.problems import raises_problem

VERY_DEEP = [f"imagenet_resnet{depth}" for depth in (101, 152, 200, 338, 518, 638)]
ONE_OF_EACH = ["small_cnn", "resnet20", "imagenet_resnet50", "preact_resnet18", "wrn_40_2", "vgg11", "fixup_resnet50"]
TINY: dict[str, Any] = {"width": 0.125}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def on_meta(name: str, **options) -> ImageClassifier:
    with torch.device("meta"):
        return create_model(name, **options)


def randomized(model: ImageClassifier) -> ImageClassifier:
    """The model in float64 and eval mode, nothing in its state at a value that could hide a mistake."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in model.double().eval().state_dict().values():
            noise = torch.rand(tensor.shape, generator=generator, dtype=torch.float64)
            if tensor.is_floating_point():
                tensor.copy_(0.5 + noise if tensor.dim() < 2 else (noise - 0.5) * tensor[0].numel() ** -0.5)
    return model


# Published sizes


@pytest.mark.parametrize(
    ("name", "num_classes", "parameters"),
    [
        ("resnet18", 10, 11_173_962),
        ("resnet20", 10, 269_722),
        ("resnet56", 10, 853_018),
        ("imagenet_resnet18", 1000, 11_689_512),
        ("imagenet_resnet34", 1000, 21_797_672),
        ("imagenet_resnet50", 1000, 25_557_032),
        ("imagenet_resnet101", 1000, 44_549_160),
        ("imagenet_resnet152", 1000, 60_192_808),
        ("preact_resnet18", 10, 11_171_146),
        ("wrn_40_2", 10, 2_243_546),
        ("wrn_34_10", 10, 46_160_474),
        ("wrn_28_10", 10, 36_479_194),
        ("vgg11", 10, 9_231_114),
        ("vgg16", 10, 14_728_266),
        ("vgg19", 10, 20_040_522),
        # ResNet-20 without 2 * 688 affine parameters, with 5 scalars in each of 9 blocks and 2 in the network
        ("fixup_resnet20", 10, 269_722 - 2 * 688 + 5 * 9 + 2),
    ],
)
def test_parameter_count_is_the_published_one(name, num_classes, parameters):
    assert count(on_meta(name, num_classes=num_classes)) == parameters


def test_final_norm_of_preact_resnet_adds_one_norm():
    assert count(on_meta("preact_resnet18", final_norm=True)) == 11_171_146 + 2 * 512


@pytest.mark.parametrize("depth", sorted(IMAGENET_DEPTHS))
def test_blocks_of_imagenet_resnets_add_up_to_the_depth(depth):
    kernels, depths = IMAGENET_DEPTHS[depth]
    assert len(kernels) * sum(depths) + 2 == depth
    model = on_meta(f"imagenet_resnet{depth}")
    convs = [key for key, m in model.named_modules() if isinstance(m, nn.Conv2d) and "downsample" not in key]
    assert len(convs) + 1 == depth


# Every model


@pytest.mark.parametrize("name", list_models())
def test_every_model_gives_logits(name):
    device = "meta" if name in VERY_DEEP else "cpu"
    with torch.device(device), torch.no_grad():
        model = create_model(name, num_classes=7, **TINY).eval()
        x = torch.rand(2, 3, 32, 32)
        logits = model(x)
    assert logits.shape == (2, 7)
    assert device == "meta" or (logits.isfinite().all() and torch.equal(model.fc(model.penultimate(x)), logits))


@pytest.mark.parametrize(
    "name", fast_first(["small_cnn", "resnet20", "preact_resnet18", "vgg11", "fixup_resnet20"], ONE_OF_EACH)
)
def test_every_family_exports_and_compiles_as_one_graph(name):
    torch._dynamo.reset()
    model = create_model(name, **TINY).eval()
    x = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        expected = model(x)
        torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), expected)
        torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="eager")(x), expected)


@pytest.mark.parametrize("name", [n for n in ONE_OF_EACH if not n.startswith("fixup")])
def test_without_norm_the_signal_keeps_its_scale_and_convolutions_have_a_bias(name):
    model = create_model(name, norm="none", width=0.5)
    assert all(m.bias is not None for m in model.modules() if isinstance(m, nn.Conv2d))
    assert not any(".bn" in f".{key}" for key in model.state_dict())
    features = model.penultimate(torch.rand(4, 3, 32, 32))
    assert 1e-2 < features.square().mean().sqrt() < 1e2


def test_convolutions_under_a_norm_have_no_bias_but_those_of_vgg_do():
    for name in ("resnet18", "preact_resnet18", "wrn_40_2", "small_cnn", "fixup_resnet18"):
        assert all(m.bias is None for m in on_meta(name).modules() if isinstance(m, nn.Conv2d))
    assert all(m.bias is not None for m in on_meta("vgg11").modules() if isinstance(m, nn.Conv2d))


@pytest.mark.parametrize("name", ["resnet56", "preact_resnet18", "imagenet_resnet50"])
def test_last_convolution_of_a_branch_starts_small_without_a_norm(name):
    model = create_model(name, norm="none", width=0.5)
    blocks = [m for m in model.modules() if hasattr(m, "downsample")]
    for block in blocks:
        conv = getattr(block, f"conv{block.depth}")
        usual = math.sqrt(2 / (conv.out_channels * conv.kernel_size[0] ** 2))
        assert conv.weight.std().item() == pytest.approx(usual / math.sqrt(len(blocks)), rel=0.1)


# Independent oracles


def batch_norm(state, key, x):
    stats = (state[f"{key}.{part}"] for part in ("running_mean", "running_var", "weight", "bias"))
    return F.batch_norm(x, *stats)


def conv(state, key, x, stride=1):
    weight = state[f"{key}.weight"]
    return F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2)


def blocks_of(state):
    """(prefix, stride) of each block, in the order of execution."""
    prefixes = dict.fromkeys(tuple(map(int, key[5:].split(".")[:2])) for key in state if key.startswith("layer"))
    return [(f"layer{stage}.{i}", 2 if stage > 1 and i == 0 else 1) for stage, i in sorted(prefixes)]


def pad_shortcut(x, stride):
    return x if stride == 1 else torch.cat([F.avg_pool2d(x, 1, 2), torch.zeros_like(x[..., ::2, ::2])], 1)


def resnet_oracle(state, x):
    x = batch_norm(state, "bn1", conv(state, "conv1", x)).relu()
    for block, stride in blocks_of(state):
        out = batch_norm(state, f"{block}.bn1", conv(state, f"{block}.conv1", x, stride)).relu()
        out = batch_norm(state, f"{block}.bn2", conv(state, f"{block}.conv2", out))
        x = (out + pad_shortcut(x, stride)).relu()
    return F.linear(x.mean((2, 3)), state["fc.weight"], state["fc.bias"])


def preact_oracle(state, x):
    x = conv(state, "conv1", x)
    for block, stride in blocks_of(state):
        bottleneck = f"{block}.conv3.weight" in state
        out = batch_norm(state, f"{block}.bn1", x).relu()
        if f"{block}.downsample.0.weight" in state:
            x = conv(state, f"{block}.downsample.0", out, stride)
        out = conv(state, f"{block}.conv1", out, 1 if bottleneck else stride)
        out = conv(state, f"{block}.conv2", batch_norm(state, f"{block}.bn2", out).relu(), stride if bottleneck else 1)
        if bottleneck:
            out = conv(state, f"{block}.conv3", batch_norm(state, f"{block}.bn3", out).relu())
        x = x + out
    if "bn_final.weight" in state:
        x = batch_norm(state, "bn_final", x).relu()
    return F.linear(x.mean((2, 3)), state["fc.weight"], state["fc.bias"])


def fixup_oracle(state, x):
    x = (conv(state, "conv1", x) + state["bias1"]).relu()
    for block, stride in blocks_of(state):
        p = {key.removeprefix(f"{block}."): value for key, value in state.items() if key.startswith(f"{block}.")}
        out = (conv(p, "conv1", x + p["bias1a"], stride) + p["bias1b"]).relu()
        out = conv(p, "conv2", out + p["bias2a"]) * p["scale"] + p["bias2b"]
        if "downsample.0.weight" in p:
            x = conv(p, "downsample.0", x + p["bias1a"], stride)
        elif stride == 2:
            x = pad_shortcut(x + p["bias1a"], stride)
        x = (out + x).relu()
    return F.linear(x.mean((2, 3)) + state["bias2"], state["fc.weight"], state["fc.bias"])


@pytest.mark.parametrize(
    ("name", "options", "oracle"),
    [
        ("resnet20", {}, resnet_oracle),
        ("preact_resnet18", {}, preact_oracle),
        ("preact_resnet18", {"final_norm": True}, preact_oracle),
        ("preact_resnet50", {}, preact_oracle),
        ("wrn_40_2", {}, preact_oracle),
        ("fixup_resnet20", {}, fixup_oracle),
        ("fixup_resnet18", {}, fixup_oracle),
    ],
)
def test_model_equals_its_equations_written_out(name, options, oracle):
    width = 1.0 if name.endswith("20") else 0.125
    model = randomized(create_model(name, width=width, normalize=False, **options))
    x = torch.rand(2, 3, 16, 16, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(model(x), oracle(model.state_dict(), x))


def huggingface_keys(depths, convs):
    """Our names of layers and those of transformers' ResNet."""
    pairs = {"conv1": "resnet.embedder.embedder.convolution", "bn1": "resnet.embedder.embedder.normalization"}
    for stage, depth in enumerate(depths):
        for block in range(depth):
            ours, theirs = f"layer{stage + 1}.{block}", f"resnet.encoder.stages.{stage}.layers.{block}"
            for i in range(convs):
                pairs[f"{ours}.conv{i + 1}"] = f"{theirs}.layer.{i}.convolution"
                pairs[f"{ours}.bn{i + 1}"] = f"{theirs}.layer.{i}.normalization"
            pairs[f"{ours}.downsample.0"] = f"{theirs}.shortcut.convolution"
            pairs[f"{ours}.downsample.1"] = f"{theirs}.shortcut.normalization"
    return pairs | {"fc": "classifier.1"}


@pytest.mark.parametrize(("depth", "kind"), [(18, "basic"), (50, "bottleneck")])
def test_imagenet_resnet_equals_the_one_of_transformers(depth, kind):
    transformers = pytest.importorskip("transformers", reason="the oracle is transformers' ResNet")
    kernels, depths = IMAGENET_DEPTHS[depth]
    model = randomized(create_model(f"imagenet_resnet{depth}", num_classes=5, width=0.125, normalize=False)).float()
    sizes = [c * (4 if kind == "bottleneck" else 1) for c in (8, 16, 32, 64)]
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=sizes, depths=list(depths), layer_type=kind, num_labels=5
    )
    oracle = transformers.ResNetForImageClassification(config).eval()
    keys = huggingface_keys(depths, len(kernels))
    renamed = {f"{keys[key.rpartition('.')[0]]}.{key.rpartition('.')[2]}": v for key, v in model.state_dict().items()}
    oracle.load_state_dict(renamed)
    x = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(model(x), oracle(x).logits)


@pytest.mark.parametrize("depth", [18, 34, 50, 101, 152])
def test_keys_of_imagenet_resnets_are_those_of_torchvision(depth):
    bottleneck = depth >= 50
    parts = ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
    expected = ["conv1.weight", *[f"bn1.{part}" for part in parts]]
    for stage, blocks in enumerate(IMAGENET_DEPTHS[depth][1], 1):
        for block in range(blocks):
            for i in range(1, 4 if bottleneck else 3):
                expected += [f"layer{stage}.{block}.conv{i}.weight"]
                expected += [f"layer{stage}.{block}.bn{i}.{part}" for part in parts]
            if block == 0 and (stage > 1 or bottleneck):
                expected += [f"layer{stage}.0.downsample.0.weight"]
                expected += [f"layer{stage}.0.downsample.1.{part}" for part in parts]
    assert list(on_meta(f"imagenet_resnet{depth}").state_dict()) == [*expected, "fc.weight", "fc.bias"]


@pytest.mark.parametrize("depth", [18, 50])
def test_weights_of_torchvision_load_and_give_the_same_logits(depth):
    models = pytest.importorskip("torchvision.models", reason="torchvision is not installed")
    oracle = getattr(models, f"resnet{depth}")(weights=None).eval()
    model = create_model(f"imagenet_resnet{depth}", num_classes=1000, normalize=False).eval()
    model.load_state_dict(oracle.state_dict())
    x = torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(model(x), oracle(x))


# Shortcuts and Fixup


@pytest.mark.parametrize("name", ["resnet18", "resnet20", "resnet56"])
def test_variant_without_shortcut_is_the_same_network_minus_the_addition(name):
    model, plain = create_model(name, **TINY).eval(), create_model(f"{name}_noshortcut", **TINY).eval()
    keys = {key for key in model.state_dict() if "downsample" not in key}
    assert set(plain.state_dict()) == keys
    plain.load_state_dict({key: model.state_dict()[key] for key in keys})
    x = torch.rand(2, 3, 16, 16)
    assert not torch.allclose(plain(x), model(x))
    block = plain.get_submodule("layer1.0")
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.zero_()
    assert block(torch.rand(1, 8, 4, 4)).eq(0).all()  # no path around the branch


@pytest.mark.parametrize("name", list_models("fixup*"))
def test_fixup_starts_at_zero_in_each_branch_and_at_the_logits(name):
    model = create_model(name, **TINY)
    x = torch.rand(2, 3, 16, 16)
    assert model(x).eq(0).all() and model.penultimate(x).ne(0).any()
    blocks = [module for module in model.modules() if isinstance(module, FixupBlock)]
    for block in blocks:
        channels = block.get_parameter("conv1.weight").shape[1]
        assert block.branch(torch.rand(1, channels, 4, 4)).eq(0).all()


@pytest.mark.parametrize(("name", "blocks", "convs"), [("fixup_resnet56", 27, 2), ("fixup_resnet50", 16, 3)])
def test_fixup_scales_the_other_convolutions_by_the_rule(name, blocks, convs):
    model = create_model(name, width=0.5)
    found = [module for module in model.modules() if isinstance(module, FixupBlock)]
    assert len(found) == blocks
    for block in found:
        for i in range(1, convs):
            weight = block.get_parameter(f"conv{i}.weight")
            he = math.sqrt(2 / (weight.shape[0] * weight.shape[2] * weight.shape[3]))
            assert weight.std().item() == pytest.approx(he * blocks ** (-1 / (2 * convs - 2)), rel=0.1)


def test_fixup_learns_from_its_start():
    model = create_model("fixup_resnet20", width=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x, y = torch.rand(16, 3, 16, 16), torch.arange(16) % 10
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(10)) and losses[-1] < losses[0] - 0.05


# Options


@pytest.mark.parametrize("norm", list_norms())
def test_every_norm_trains_in_the_small_network(norm):
    model = create_model("small_cnn", norm=norm, in_channels=1).train()
    batch = dict.fromkeys(domains(model), 3)
    x = torch.rand(sum(batch.values()), 1, 8, 8)
    forwarded = batch if norm == "cross_bn" else None  # for the statistics that cross
    with route(model, batch, forwarded=forwarded):
        logits = model(torch.cat([x, x]) if forwarded else x)[-len(x) :]
        loss = F.cross_entropy(logits, torch.arange(len(x)))
        loss.backward()
    assert loss.isfinite()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert not name.startswith("conv") or parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("name", [n for n in ONE_OF_EACH if MODELS.get(n).has_norm])
@pytest.mark.parametrize("norm", ["dual_bn", "gn"])
def test_every_family_takes_other_norms(name, norm):
    model = create_model(name, norm=norm, width=0.5).eval()
    with route(model, "adv"):
        assert model(torch.rand(2, 3, 32, 32)).shape == (2, 10)


def test_input_is_normalized_inside_and_outside_the_state_dict():
    model = create_model("resnet20").eval()
    bare = create_model("resnet20", normalize=False).eval()
    bare.load_state_dict(model.state_dict())
    assert bare.input_norm is None and next(iter(model.children())) is model.input_norm
    x = torch.rand(2, 3, 16, 16)
    mean = torch.tensor([0.4914, 0.4822, 0.4465]).reshape(1, 3, 1, 1)
    std = torch.tensor([0.2471, 0.2435, 0.2616]).reshape(1, 3, 1, 1)
    torch.testing.assert_close(model(x), bare((x - mean) / std))
    assert not torch.allclose(model(x), bare(x))


def test_input_norm_defaults_follow_the_data_of_the_model():
    assert on_meta("small_cnn").input_norm is None
    for name, first in (("imagenet_resnet18", 0.485), ("vgg11", 0.4914)):
        norm = create_model(name, **TINY).input_norm
        assert isinstance(norm, InputNorm) and norm.mean.flatten()[0].item() == pytest.approx(first)
    x = torch.rand(2, 1, 8, 8)
    norm = create_model("small_cnn", in_channels=1, mean=0.5, std=[0.25]).input_norm
    assert norm is not None and torch.equal(norm(x), (x - 0.5) / 0.25)


def test_input_norm_follows_copies_and_dtype():
    model = pickle.loads(pickle.dumps(copy.deepcopy(create_model("resnet20")))).double().to("meta")
    assert model.input_norm.mean.dtype == torch.float64 and model.input_norm.std.device.type == "meta"


@pytest.mark.parametrize("name", ONE_OF_EACH)
@pytest.mark.parametrize(
    ("activation", "kind"), [("leaky_relu", nn.LeakyReLU), ("selu", nn.SELU), ("silu", nn.SiLU), ("relu", nn.ReLU)]
)
def test_activation_replaces_all_activations(name, activation, kind):
    kinds = {nn.ReLU, nn.LeakyReLU, nn.SELU, nn.SiLU}
    found = [m for m in on_meta(name, activation=activation).modules() if type(m) in kinds]
    assert found and {type(m) for m in found} == {kind}
    assert not any(getattr(m, "inplace", False) for m in found)


def test_width_multiplies_channels_down_to_eight():
    assert on_meta("resnet18", width=2.0).fc.in_features == 1024
    assert on_meta("resnet18", width=0.3).fc.in_features == round(512 * 0.3)
    narrow = [m for m in on_meta("wrn_40_2", width=0.01).modules() if isinstance(m, nn.Conv2d)]
    assert {m.out_channels for m in narrow} == {8}


def test_norm_options_reach_the_norm():
    model = create_model("small_cnn", norm="multi_bn", norm_options={"domains": ("a", "b", "c")}).eval()
    with route(model, "c"):
        assert model(torch.rand(2, 3, 8, 8)).shape == (2, 10)


def test_same_seed_gives_the_same_model():
    def build():
        torch.manual_seed(3)
        return create_model("small_cnn").state_dict()

    assert all(torch.equal(a, b) for a, b in zip(build().values(), build().values(), strict=True))


def test_a_user_can_register_a_model(monkeypatch):
    monkeypatch.setattr(MODELS, "_entries", dict(MODELS._entries))
    register_model("mine", mean=(0.5,), std=(0.5,))(MODELS.get("small_cnn").build)
    assert "mine" in list_models() and create_model("mine").input_norm is not None


# Names and errors


def test_models_are_listed_by_pattern():
    assert list_models("wrn*") == ["wrn_28_10", "wrn_34_10", "wrn_40_2"]
    assert {"resnet18", "preact_resnet50", "fixup_resnet56", "resnet56_noshortcut", "vgg19"} < set(list_models())


def test_all_problems_are_reported_at_once():
    wrong: dict[str, Any] = {"norm": "dualbn", "width": 0, "activation": "rellu", "in_channels": 1.5, "mean": 0.1}
    with raises_problem("unknown_name", "model", ConfigError) as caught:
        create_model("resnet81", num_classes=0, **wrong)
    assert [(problem.code, problem.field) for problem in caught.value.problems] == [
        ("unknown_name", "model"),
        ("out_of_range", "num_classes"),
        ("wrong_type", "in_channels"),
        ("out_of_range", "width"),
        ("unknown_name", "activation"),
        ("unknown_name", "norm"),
        ("conflict", "mean"),
    ]


@pytest.mark.parametrize(
    ("name", "options", "code", "field"),
    [
        ("resnet18", {"final_norm": True}, "unknown_name", "final_norm"),
        ("resnet18", {"activaton": "relu"}, "unknown_name", "activaton"),
        ("preact_resnet18", {"final_norm": "yes"}, "wrong_type", "final_norm"),
        ("fixup_resnet20", {"norm": "bn"}, "conflict", "norm"),
        ("resnet18", {"in_channels": 1}, "wrong_shape", "mean"),
        ("resnet18", {"mean": 0.5, "std": 0.0}, "out_of_range", "std"),
        ("resnet18", {"mean": "grey", "std": 1.0}, "out_of_range", "mean"),
        ("resnet18", {"width": float("nan")}, "wrong_type", "width"),
        ("resnet18", {"norm_options": {"bananas": 3}}, "unknown_name", "norm_options.bananas"),
        ("small_cnn", {"norm": "gn", "norm_options": {"num_groups": -1}}, "out_of_range", "norm_options.num_groups"),
        ("small_cnn", {"num_classes": True}, "wrong_type", "num_classes"),
        ("resnet20", {"normalize": False, "mean": 0.5, "std": 0.5}, "conflict", "normalize"),
    ],
)
def test_a_wrong_option_is_rejected_by_name(name, options, code, field):
    with raises_problem(code, field, ConfigError):
        create_model(name, **options)
