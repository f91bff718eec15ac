"""Networks of timm, torchvision and transformers by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from advnorm import (
    Config,
    ConfigError,
    SurgeryError,
    ThreatModel,
    convert_norm,
    create_model,
    load_config,
    route,
    strip,
    train,
)
from advnorm.attacks import AutoAttack
from advnorm.attacks.folded_copy import make_folded_copy
from advnorm.models.libraries import import_library
from advnorm.models.registry import MODELS
from advnorm.training.cost import forward_flops
from support.problems import raises_problem

timm = pytest.importorskip("timm", reason="timm is not installed")
X = torch.rand(4, 3, 32, 32)
TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "patch_size": 8}


NETWORKS = pytest.mark.parametrize(
    ("name", "norm", "options"),
    [
        ("timm:test_efficientnet", "dual_bn", {}),
        ("timm:test_vit", "dual_affine_ln", {"img_size": 32}),
        ("timm:convnext_atto", "dual_affine_ln", {"arguments": {"depths": [1, 1, 1, 1], "dims": [8, 8, 8, 8]}}),
        ("torchvision:mobilenet_v3_small", "dual_bn", {}),
        ("transformers:vit", "dual_affine_ln", {"img_size": 32, "arguments": TINY}),
    ],
)


@NETWORKS
def test_a_network_of_a_library_takes_images_and_routes(name, norm, options):
    model = create_model(name, 7, norm, **options)
    with route(model, {"clean": 2, "adv": 2}):
        assert model(X).shape == (4, 7)
    again = create_model(**model.recipe)
    again.load_state_dict(model.state_dict())
    model.eval(), again.eval()
    with route(model, "adv"), route(again, "adv"):
        assert torch.equal(model(X), again(X))


@NETWORKS
def test_a_network_of_a_library_is_attacked_through_a_folded_copy(name, norm, options):
    model = strip(create_model(name, 7, norm, **options), route="adv").eval()
    attack = AutoAttack(threat=ThreatModel(eps="0.01/255"), precision="bf16", attacks=("apgd-ce",), steps=2)
    messages = []
    copy = make_folded_copy(model, dtype=torch.bfloat16, on_failure=messages.append)
    assert (copy is None) == bool(messages)  # a network that cannot be traced is attacked itself
    if copy is not None:
        torch.testing.assert_close(copy(X), model(X), rtol=0.1, atol=0.1)
    assert attack(model, X, model(X).argmax(1)).shape == X.shape


def test_images_are_normalized_as_the_weights_expect():
    plain = timm.create_model("test_efficientnet", num_classes=10).eval()
    model = create_model("timm:test_efficientnet").eval()
    model.network.load_state_dict(plain.state_dict())
    mean, std = (torch.tensor(plain.pretrained_cfg[key]).view(3, 1, 1) for key in ("mean", "std"))
    assert torch.equal(model(X), plain((X - mean) / std))
    bare = create_model("timm:test_efficientnet", normalize=False, norm="bn").eval()
    bare.network.load_state_dict(plain.state_dict())
    assert torch.equal(bare(X), plain(X)) and bare.input_norm is None


def test_channels_and_classes_are_those_of_the_data():
    model = create_model("timm:test_resnet", 5, in_channels=1, normalize=False)
    assert model(X[:, :1]).shape == (4, 5)
    with raises_problem("not_supported", "in_channels", ConfigError):
        create_model("torchvision:resnet18", in_channels=1, normalize=False)


def test_a_file_of_weights_starts_a_network_of_other_classes(tmp_path):
    torch.manual_seed(1)
    for name, network in (
        ("timm:test_resnet", timm.create_model("test_resnet")),
        ("torchvision:mobilenet_v3_small", import_library("torchvision").models.mobilenet_v3_small()),
    ):
        torch.save(network.state_dict(), tmp_path / "weights.pt")
        model = create_model(name, 4, pretrained=str(tmp_path / "weights.pt"))
        assert model(X).shape == (4, 4)
        first = next(iter(network.parameters()))
        assert torch.equal(next(iter(model.network.parameters())), first)


def test_a_folder_of_transformers_is_read_with_its_weights(tmp_path):
    transformers = import_library("transformers")
    config = transformers.ViTConfig(**TINY, image_size=32, num_labels=6)
    saved = transformers.ViTForImageClassification(config).eval()
    saved.save_pretrained(tmp_path)
    model = create_model(f"transformers:{tmp_path}", 6, "dual_affine_ln", normalize=False).eval()
    with route(model, "clean"):
        assert torch.equal(model(X), saved(X).logits)
    assert create_model(f"transformers:{tmp_path}", 3)(X).shape == (4, 3)
    (tmp_path / "model.safetensors").unlink()
    assert create_model(f"transformers:{tmp_path / 'config.json'}", 6)(X).shape == (4, 6)


@pytest.mark.parametrize(
    ("arguments", "options", "code", "field"),
    [
        (("timm:efficientnet_b00",), {}, "unknown_name", "model"),
        (("torchvision:resnet19",), {}, "unknown_name", "model"),
        (("torchvison:resnet18",), {}, "unknown_name", "model"),
        (("transformers:vitt",), {}, "unknown_name", "model"),
        (("transformers:nowhere/config.json",), {}, "not_readable", "model"),
        (("timm:test_resnet",), {"img_size": 32}, "not_supported", "model"),
        (("torchvision:resnet18",), {"img_size": 32}, "not_supported", "model"),
        (("transformers:resnet",), {"img_size": 32}, "not_supported", "model"),
        (("timm:test_resnet",), {"arguments": {"pretrained": True}}, "conflict", "arguments"),
        (("timm:test_resnet",), {"arguments": {"checkpoint_path": "x.pth"}}, "conflict", "arguments"),
        (("timm:test_resnet",), {"width": 0.5}, "not_supported", "width"),
        (("timm:test_resnet",), {"depth": 3}, "unknown_name", "depth"),
        (("timm:test_vit", 10, "dual_bn"), {}, "no_norm_of_kind", "norm"),
        (("timm:test_nfnet", 10, "dual_bn"), {}, "no_norm", "model"),
        (("timm:test_vit", 10, {"nowhere": "ln"}), {}, "no_norm", "norm"),
        (("timm:test_resnet", 10, "dual"), {}, "unknown_name", "norm"),
    ],
)
def test_wrong_names_and_options_are_rejected(arguments, options, code, field):
    with raises_problem(code, field):
        create_model(*arguments, **options)


def test_the_options_of_a_library_model_are_those_that_it_takes():
    options = MODELS.get("timm:test_resnet").parameters
    assert {"img_size", "arguments", "mean"} <= set(options) and not {"width", "activation"} & set(options)


def test_a_norm_free_network_of_a_library_is_built_with_the_norm_none():
    model = create_model("timm:test_nfnet", 5, "none")
    assert model(X).shape == (4, 5) and model.recipe["norm"] == "none"
    with raises_problem("no_norm_of_kind", "norm", SurgeryError):
        create_model("timm:test_vit", 5, "none")


def test_the_error_of_a_transformer_names_the_norm_that_fits():
    with pytest.raises(SurgeryError) as caught:
        create_model("timm:test_vit", norm="dual_bn")
    assert "dual_affine_ln" in caught.value.problems[0].hint


def test_a_missing_library_is_reported(monkeypatch):
    monkeypatch.setattr("advnorm.models.libraries.find_spec", lambda name: None)
    with raises_problem("missing_package", "model", ConfigError):
        create_model("timm:test_resnet")


def test_norms_by_pattern_are_settings_of_a_model_and_of_a_configuration(tmp_path):
    norms = {"layer4.*": "gmm_bn", "*": "bn"}
    model = create_model("resnet18", norm=norms, width=0.1)
    found = {name: module.plan.name for name, module in model.named_modules() if hasattr(module, "plan")}
    assert {name for name, norm in found.items() if norm == "gmm_bn"} == {n for n in found if n.startswith("layer4.")}
    config = Config(model={"name": "resnet18", "width": 0.1}, norm=norms)
    assert config.norm == (("layer4.*", "gmm_bn"), ("*", "bn")) and hash(config)
    assert Config.from_dict(config.to_dict()) == config
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    assert load_config(tmp_path / "config.yaml") == config
    assert Config.from_dict({"norm": "bn"}, ["norm={layer4.*: gmm_bn, '*': bn}"]).norm == config.norm
    assert "gmm_bn+bn" in config.run_name
    turned = Config(model={"name": "resnet18", "width": 0.1}, norm=dict(reversed(norms.items())))
    assert turned.digest != config.digest


@pytest.mark.parametrize(
    ("norms", "code"),
    [
        ({"*": "dualbn"}, "unknown_name"),
        ({}, "wrong_type"),
        ({"*": 3}, "wrong_type"),
        ([["*", "bn", "dual_bn"]], "wrong_type"),
        ([["*", "bn"], ["*", "dual_bn"]], "wrong_type"),
        ({"a": "dual_bn", "*": "triple_bn"}, "conflict"),
    ],
)
def test_wrong_norms_of_a_configuration_are_rejected(norms, code):
    with raises_problem(code, "norm", ConfigError):
        Config(norm=norms)


def test_a_configuration_names_a_network_of_a_library():
    config = Config(model={"name": "timm:test_vit", "img_size": 32}, norm="dual_affine_ln")
    assert config.model.name == "timm:test_vit" and ":" not in config.run_name
    with raises_problem("unknown_name", "model.image_size", ConfigError):
        Config(model={"name": "timm:test_vit", "image_size": 32}, norm="dual_affine_ln")
    with raises_problem("unknown_name", "model", ConfigError):
        Config(model="timm:test_vitt")


def test_the_operations_of_a_network_of_a_library_are_counted():
    assert forward_flops("timm:test_vit", (3, 160, 160), 10) > 1e6


def test_a_network_of_a_library_strips_to_the_classes_of_the_library():
    model = create_model("timm:test_efficientnet", norm="dual_bn")
    plain = strip(model, "adv").network
    fresh = timm.create_model("test_efficientnet", num_classes=10)
    fresh.load_state_dict(plain.state_dict())
    assert [*map(type, plain.modules())] == [*map(type, fresh.modules())]
    assert isinstance(plain, nn.Module) and convert_norm(plain, "dual_bn").replaced


def test_an_unknown_model_is_suggested_with_its_library():
    for build in (lambda name: create_model(name), lambda name: Config(model=name)):
        with raises_problem("unknown_name", "model") as caught:
            build("test_efficientnet")
        assert "did you mean 'timm:test_efficientnet'" in str(caught.value)


def test_an_image_of_another_size_than_the_network_fixes_names_the_option(tmp_path):
    config = Config(model="timm:test_vit", norm="dual_affine_ln", batch_size=16)
    with raises_problem("wrong_shape", "model") as caught:
        train(config, out=tmp_path, device="cpu")
    assert "model.img_size=8" in str(caught.value)
