"""Moments against all activations at once in float64, and against the buffers of batch norms."""

import copy
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import advnorm
from advnorm._core.shapes import with_digest
from advnorm.analysis import ANALYSES, collect_moments, norm_statistics, statistics_shift, stored_statistics
from advnorm.surgery import adapters
from support.problems import raises_problem


class Headed(nn.Module):
    """A norm directly on the images, and some of its outputs as logits."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        return self.norm(x).flatten(1)[:, :2]


def all_at_once(model, x, layer, channel_dim=1):
    """Return mean, biased and unbiased variance of the whole input of a layer."""
    kept = []
    handle = model.get_submodule(layer).register_forward_pre_hook(lambda _, args: kept.append(args[0].double()))
    with torch.no_grad():
        model(x)
    handle.remove()
    rows = torch.cat(kept).movedim(channel_dim, -1).flatten(0, -2)
    return rows.mean(0), rows.var(0, correction=0), rows.var(0, correction=1)


@settings(deadline=None, max_examples=25, derandomize=True)
@given(
    images=st.integers(2, 9),
    channels=st.integers(2, 4),
    size=st.integers(1, 3),
    batch_size=st.integers(1, 10),
    offset=st.sampled_from([0.0, 1000.0]),
    seed=st.integers(0, 99),
)
def test_pooled_moments_are_those_of_all_values_for_every_batch_size(images, channels, size, batch_size, offset, seed):
    x = offset + torch.randn(images, channels, size, size, generator=torch.Generator().manual_seed(seed))
    model = Headed(nn.BatchNorm2d(channels)).eval()
    found = collect_moments(model, x, batch_size=batch_size)["norm"]
    rows = x.double().transpose(0, 1).flatten(1)
    assert found.values_per_channel == rows.shape[1]
    torch.testing.assert_close(found.mean, rows.mean(1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.biased_variance, rows.var(1, correction=0), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.unbiased_variance, rows.var(1), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("norm", "shape", "channel_dim"),
    [
        (nn.BatchNorm1d(4), (6, 4), 1),
        (nn.BatchNorm1d(4), (6, 4, 5), 1),
        (nn.BatchNorm3d(4), (6, 4, 2, 2, 2), 1),
        (nn.GroupNorm(2, 4), (6, 4, 3, 3), 1),
        (nn.InstanceNorm2d(4), (6, 4, 3, 3), 1),
        (nn.LayerNorm(4), (6, 5, 4), -1),
        (advnorm.make_norm("none", 4), (6, 4, 3, 3), 1),
        (advnorm.make_norm("gn", 4), (6, 4, 3, 3), 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_moments_are_those_of_the_channels_for_every_kind_of_norm(norm, shape, channel_dim):
    x = torch.randn(shape)
    model = Headed(norm).eval()
    found = collect_moments(model, x, batch_size=4)["norm"]
    mean, var, _ = all_at_once(model, x, "norm", channel_dim)
    torch.testing.assert_close(found.mean, mean)
    torch.testing.assert_close(found.biased_variance, var)


class ChannelsFirst(nn.LayerNorm):
    """A layer norm over dimension 1, as ConvNeXt has it."""

    def forward(self, input):
        return super().forward(input.movedim(1, -1)).movedim(-1, 1)


class EitherOrder(nn.LayerNorm):
    """A norm whose setting decides the order of the dimensions, as in ConvNeXt of transformers."""

    data_format = "channels_first"

    def forward(self, x):
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


@pytest.mark.parametrize("converted", [True, False])
@pytest.mark.parametrize(("norm_class", "kind"), [(ChannelsFirst, "layer_norm_2d"), (EitherOrder, "layer_norm")])
def test_width_equal_to_the_number_of_channels_is_not_mistaken_for_them(norm_class, kind, converted, monkeypatch):
    x = torch.randn(6, 4, 3, 4) * torch.tensor([1.0, 2.0, 3.0, 4.0]).view(4, 1, 1)
    model = Headed(norm_class(4)).eval()
    monkeypatch.setattr(adapters, "ADAPTERS", dict(adapters.ADAPTERS))
    advnorm.surgery.register_adapter(norm_class, kind)
    if converted:
        advnorm.convert_norm(model, "ln")
    rows = x.double().transpose(0, 1).flatten(1)
    torch.testing.assert_close(collect_moments(model, x)["norm"].mean, rows.mean(1))


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_library_norms_over_the_second_dimension_have_their_channels_there(library):
    pytest.importorskip("timm")
    from timm.layers import LayerNorm2d as OfTimm
    from torchvision.models.convnext import LayerNorm2d as OfTorchvision

    x = torch.randn(6, 4, 3, 4)
    model = Headed({"timm": OfTimm, "torchvision": OfTorchvision}[library](4)).eval()
    rows = x.double().transpose(0, 1).flatten(1)
    for convert in (False, True):
        if convert:
            advnorm.convert_norm(model, "dual_affine_ln")
        found = collect_moments(model, x, route="adv" if convert else None)["norm"]
        torch.testing.assert_close(found.mean, rows.mean(1))


@pytest.mark.parametrize("norm", ["bn", "dual_bn", "none"])
@pytest.mark.parametrize("batch_size", [64, 300])
def test_moments_of_a_network_are_those_of_its_activations(digits, untouched, norm, batch_size):
    model = digits.networks[norm]
    route = "adv" if norm == "dual_bn" else None
    with untouched(model):
        found = collect_moments(model, digits.x, route=route, batch_size=batch_size)
    assert list(found) == ["bn1", "bn2", "bn3"]
    with advnorm.route(model, "adv"):
        for layer, one in found.items():
            mean, var, _ = all_at_once(model, digits.x, layer)
            torch.testing.assert_close(one.mean, mean, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(one.biased_variance, var, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("affine", ["clean", "adv"])
def test_statistics_under_an_affine_bank_are_what_a_plain_batch_norm_would_store(digits, untouched, affine):
    model = digits.networks["dual_bn"]
    with untouched(model):
        found = collect_moments(model, digits.x, pair=(affine, affine), statistics="batch_frozen", batch_size=300)
    plain = advnorm.strip(copy.deepcopy(model), route=affine).train()
    for module in plain.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0  # stores exactly the last batch
    with torch.no_grad():
        plain(digits.x)
    for layer, one in found.items():
        stored = plain.get_submodule(layer)
        torch.testing.assert_close(one.mean.float(), stored.running_mean, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(one.unbiased_variance.float(), stored.running_var, rtol=1e-4, atol=1e-5)


def test_statistics_are_those_that_recalibrate_would_store_batch_by_batch(digits):
    model = digits.networks["dual_bn"]
    found = norm_statistics(model, {"clean": digits.x}, batch_size=64).moments["adv"]["clean"]
    fresh = copy.deepcopy(model)
    advnorm.recalibrate(fresh, digits.x, route="adv", batch_size=64)
    for layer, stored in stored_statistics(fresh, "adv").items():
        torch.testing.assert_close(found[layer].mean, stored.mean, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found[layer].unbiased_variance.sqrt(), stored.std, rtol=1e-4, atol=1e-5)


def test_a_swapped_pair_normalizes_by_the_other_bank(digits):
    model = digits.networks["dual_bn"]
    found = collect_moments(model, digits.x, pair=("clean", "adv"), batch_size=300)
    with advnorm.pair_banks(model, statistics="clean", affine="adv"):
        mean, *_ = all_at_once(model, digits.x, "bn3")
    torch.testing.assert_close(found["bn3"].mean, mean, rtol=1e-5, atol=1e-6)
    own = collect_moments(model, digits.x, route="adv", batch_size=300)
    assert not torch.allclose(own["bn3"].mean, mean, rtol=1e-3)


def test_batches_are_streamed_one_at_a_time(digits):
    alive = []

    def stream():
        for part, labels in zip(digits.x.split(64), digits.y.split(64)):
            alive.append(len(alive))
            yield part, labels

    model = digits.networks["bn"]
    seen = []
    handle = model.bn1.register_forward_pre_hook(lambda *_: seen.append(len(alive)))
    streamed = collect_moments(model, stream())
    handle.remove()
    assert seen == [1, 2, 3, 4, 5], "a batch is requested after the forward of the batch before"
    whole = collect_moments(model, digits.x, batch_size=64)
    for name, one in whole.items():
        torch.testing.assert_close(streamed[name].biased_variance, one.biased_variance, rtol=1e-6, atol=0)


def test_a_model_in_training_with_gradients_stays_unchanged(digits, untouched):
    model = copy.deepcopy(digits.networks["dual_bn"]).train()
    model.bn2.eval()
    with advnorm.route(model, "adv"):
        model(digits.x[:8]).sum().backward()
    with untouched(model):
        collect_moments(model, digits.x, route="clean", statistics="batch_frozen")
    with untouched(model), pytest.raises(RuntimeError, match="channels"):
        collect_moments(model, [digits.x[:4], torch.zeros(4, 3, 8, 8)], route="clean")


def test_all_problems_are_reported_at_once(digits):
    with pytest.raises(advnorm.ConfigError) as caught:
        collect_moments(
            digits.networks["dual_bn"], digits.x, route="adv", pair=("adv", "adv"), statistics="batch", batch_size=0
        )
    assert [(problem.code, problem.field) for problem in caught.value.problems] == [
        ("unknown_name", "statistics"),
        ("out_of_range", "batch_size"),
        ("conflict", "route"),
    ]
    with raises_problem("unknown_name", "layer"):
        collect_moments(digits.networks["bn"], digits.x, layers="bn11")
    with raises_problem("empty", "images"):
        collect_moments(digits.networks["bn"], iter(()))
    with raises_problem("not_supported", "model"):
        collect_moments(nn.Linear(2, 2), torch.rand(2, 2))
    with raises_problem("not_finite", "images"):
        collect_moments(digits.networks["bn"], torch.full((2, 1, 8, 8), torch.inf))
    with pytest.raises(advnorm.RouteError):
        collect_moments(digits.networks["dual_bn"], digits.x)


def test_a_mixture_norm_is_measured_with_running_statistics_only(digits):
    model = advnorm.create_model("small_cnn", num_classes=10, norm="gmm_bn", in_channels=1, normalize=False)
    assert set(collect_moments(model, digits.x[:8])) == {"bn1", "bn2", "bn3"}
    for how in ({}, {"route": "adv"}, {"pair": ("adv", "adv")}):
        with raises_problem("conflict", "statistics"):
            collect_moments(model, digits.x[:8], statistics="batch_frozen", **how)


def test_the_figure_and_the_record_hold_every_statistic(digits, tmp_path, untouched):
    target = digits.target("dual_bn")
    with untouched(target.model):
        found = ANALYSES.get("moments").run(target)
    assert {a: list(row) for a, row in found.moments.items()} == {a: ["clean", "adv"] for a in ("clean", "adv")}
    figure = found.figure()
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "Size of the channels' means",
        "Size of the channels' deviations",
    ]
    assert all(len(axes.get_lines()) == 4 for axes in figure.axes)
    assert len(figure.legends[0].get_texts()) == 4
    line = figure.axes[0].get_lines()[2].get_ydata()  # NS^adv_clean
    expected = [one.mean.square().mean().sqrt().item() for one in found.moments["adv"]["clean"].values()]
    assert line.tolist() == pytest.approx(expected)
    paths = found.save(tmp_path / "moments")
    assert [path.suffix for path in paths] == [".json", ".svg", ".png"]
    assert all(path.stat().st_size > 0 for path in paths)
    record = json.loads(paths[0].read_text())
    assert record == with_digest(found.record())
    assert record["moments"]["adv"]["clean"]["bn2"]["mean"] == found.moments["adv"]["clean"]["bn2"].mean.tolist()
    assert record["conditions"]["crafted_through"] == "adv"


def test_one_image_more_than_full_batches_does_not_change_the_statistics(digits):
    """A last batch of one image must not count as much as 64 images."""
    shift = [
        statistics_shift(digits.networks["bn"], {"clean": digits.x[:count]}, batch_size=64).sums["clean"]
        for count in (128, 129)
    ]
    assert shift[1] == pytest.approx(shift[0], rel=0.1)
    flat = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.Linear(12, 10)).eval()
    assert collect_moments(flat, digits.x[:65], statistics="batch_frozen", batch_size=64)["2"].values_per_channel == 65


def test_images_of_a_wrong_type_and_no_images_raise(digits):
    model = digits.networks["bn"]
    with raises_problem("wrong_dtype", "images"):
        collect_moments(model, (255 * digits.x).byte())
    for function in (norm_statistics, statistics_shift):
        with raises_problem("empty", "inputs"):
            function(model, {})
    for name in ("moments", "channels", "statistics_shift"):
        with raises_problem("empty", "inputs"):
            ANALYSES.get(name).run(digits.target("bn"), inputs=[])


def test_recalibration_uses_equal_batches_and_the_precision_of_the_model(digits):
    flat = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.Linear(12, 10)).eval()
    advnorm.convert_norm(flat, "bn")
    model, seen = flat.double(), []
    model[1].register_forward_hook(lambda *args: seen.append(args[-1]))
    advnorm.recalibrate(model, digits.x[:65], batch_size=64)
    assert [len(part) for part in seen] == [33, 32] or [len(part) for part in seen] == [32, 33]
    torch.testing.assert_close(model[2].running_mean, torch.cat(seen).mean(0), rtol=1e-12, atol=1e-12)
