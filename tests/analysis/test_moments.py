"""Moments against all activations at once in float64, and against what batch norms themselves store."""

import copy
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import advnorm
from advnorm._core.errors import ConfigError
from advnorm.analysis.base import ANALYSES
from advnorm.analysis.channels import statistics_shift
from advnorm.analysis.landscape import landscape
from advnorm.analysis.ligs import ligs
from advnorm.analysis.moments import (
    affine_parameters,
    collect_moments,
    default_layer,
    formula,
    in_batches,
    input_images,
    norm_layers,
    norm_statistics,
    stored_statistics,
)
from advnorm.analysis.perturbed import perturbed_accuracy
from advnorm.attacks import PGD, StatisticsAttack


class Headed(nn.Module):
    """A norm that sees the images themselves, and something that looks like logits."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        return self.norm(x).flatten(1)[:, :2]


def all_at_once(model, x, layer, channel_dim=1):
    """Mean, biased and unbiased variance of everything that enters a layer, kept and computed in one go."""
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
def test_pooled_moments_are_those_of_all_values_however_they_are_cut(images, channels, size, batch_size, offset, seed):
    x = offset + torch.randn(images, channels, size, size, generator=torch.Generator().manual_seed(seed))
    model = Headed(nn.BatchNorm2d(channels)).eval()
    found = collect_moments(model, x, batch_size=batch_size)["norm"]
    rows = x.double().transpose(0, 1).flatten(1)
    assert found.count == rows.shape[1]
    torch.testing.assert_close(found.mean, rows.mean(1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.var, rows.var(1, correction=0), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.unbiased, rows.var(1), rtol=1e-10, atol=1e-10)


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
def test_every_kind_of_norm_is_seen_by_its_channels(norm, shape, channel_dim):
    x = torch.randn(shape)
    model = Headed(norm).eval()
    found = collect_moments(model, x, batch_size=4)["norm"]
    mean, var, _ = all_at_once(model, x, "norm", channel_dim)
    torch.testing.assert_close(found.mean, mean)
    torch.testing.assert_close(found.var, var)


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
            torch.testing.assert_close(one.var, var, rtol=1e-5, atol=1e-7)


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
        torch.testing.assert_close(one.unbiased.float(), stored.running_var, rtol=1e-4, atol=1e-5)


def test_statistics_are_those_that_recalibrate_would_store_batch_by_batch(digits):
    model = digits.networks["dual_bn"]
    found = norm_statistics(model, {"clean": digits.x}, batch_size=64).moments["adv"]["clean"]
    fresh = copy.deepcopy(model)
    advnorm.recalibrate(fresh, digits.x, route="adv", batch_size=64)
    for layer, stored in stored_statistics(fresh, "adv").items():
        torch.testing.assert_close(found[layer].mean, stored.mean, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found[layer].unbiased.sqrt(), stored.std, rtol=1e-4, atol=1e-5)


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
    assert seen == [1, 2, 3, 4, 5], "a batch is asked for after the one before went through"
    whole = collect_moments(model, digits.x, batch_size=64)
    for name, one in whole.items():
        torch.testing.assert_close(streamed[name].var, one.var, rtol=1e-6, atol=0)


def test_a_model_in_training_and_with_gradients_is_left_as_it_was(digits, untouched):
    model = copy.deepcopy(digits.networks["dual_bn"]).train()
    model.bn2.eval()
    with advnorm.route(model, "adv"):
        model(digits.x[:8]).sum().backward()
    with untouched(model):
        collect_moments(model, digits.x, route="clean", statistics="batch_frozen")
    with untouched(model), pytest.raises(RuntimeError, match="channels"):
        collect_moments(model, [digits.x[:4], torch.zeros(4, 3, 8, 8)], route="clean")


def test_every_mistake_is_told_at_once(digits):
    with pytest.raises(advnorm.ConfigError, match=r"statistics 'batch'.*batch_size.*not both"):
        collect_moments(
            digits.networks["dual_bn"], digits.x, route="adv", pair=("adv", "adv"), statistics="batch", batch_size=0
        )
    with pytest.raises(advnorm.ConfigError, match="did you mean 'bn1'"):
        collect_moments(digits.networks["bn"], digits.x, layers="bn11")
    with pytest.raises(advnorm.ConfigError, match="no images"):
        collect_moments(digits.networks["bn"], iter(()))
    with pytest.raises(advnorm.ConfigError, match="no norm layers"):
        collect_moments(nn.Linear(2, 2), torch.rand(2, 2))
    with pytest.raises(advnorm.ConfigError, match="bn1 is not finite"):
        collect_moments(digits.networks["bn"], torch.full((2, 1, 8, 8), torch.inf))
    with pytest.raises(advnorm.RouteError, match="no route is set"):
        collect_moments(digits.networks["dual_bn"], digits.x)


def test_a_mixture_norm_is_seen_as_it_is_called_and_refused_alone_in_a_batch(digits):
    model = advnorm.create_model("small_cnn", num_classes=10, norm="gmm_bn", in_channels=1, normalize=False)
    assert set(collect_moments(model, digits.x[:8])) == {"bn1", "bn2", "bn3"}
    for how in ({}, {"route": "adv"}, {"pair": ("adv", "adv")}):
        with pytest.raises(advnorm.ConfigError, match="statistics='running'"):
            collect_moments(model, digits.x[:8], statistics="batch_frozen", **how)


def test_what_a_model_stores_is_read_by_domain(digits):
    model = digits.networks["dual_bn"]
    stored, affine = stored_statistics(model, "adv")["bn2"], affine_parameters(model, "adv")["bn2"]
    state = model.state_dict()
    assert torch.equal(stored.mean.float(), state["bn2.running_mean_adv"])
    torch.testing.assert_close(stored.std.square().float(), state["bn2.running_var_adv"])
    assert torch.equal(affine.mean.float(), state["bn2.bias_adv"])
    assert torch.equal(affine.std.float(), state["bn2.weight_adv"])
    plain = Headed(nn.BatchNorm2d(3))
    assert torch.equal(stored_statistics(plain)["norm"].std, torch.ones(3, dtype=torch.float64))
    with pytest.raises(advnorm.ConfigError, match="name a domain: clean, adv"):
        stored_statistics(model)
    with pytest.raises(advnorm.ConfigError, match="did you mean 'adv'"):
        affine_parameters(model, "advv")
    with pytest.raises(advnorm.ConfigError, match="only batch norms do"):
        stored_statistics(digits.networks["none"])
    assert affine_parameters(Headed(nn.RMSNorm(4)))["norm"].mean.tolist() == [0.0] * 4


def test_the_default_layer_is_the_second_norm_of_the_first_block():
    assert default_layer(advnorm.create_model("preact_resnet18", num_classes=10)) == "layer1.0.bn2"
    assert default_layer(advnorm.create_model("small_cnn", num_classes=10)) == "bn2"
    assert list(norm_layers(nn.Sequential(nn.BatchNorm1d(2)))) == ["0"]


def test_inputs_come_by_name_inside_the_ball(digits, untouched):
    subject = digits.subject("dual_bn")
    names = ("clean", "adv", "noise", "pgd3", "autoattack-steps2-queries3")
    with untouched(subject.model):
        found = input_images(subject, names, route="clean")
    assert tuple(found) == names
    assert torch.equal(found["clean"], digits.x)
    for name in names[1:]:
        distance = (found[name] - digits.x).abs().amax()
        assert 0 < distance <= subject.attack.threat.eps
    with advnorm.route(subject.model, "clean"):
        whole = subject.attack(subject.model, digits.x, digits.y)
    assert (found["adv"] - whole).abs().amax() <= 2 * subject.attack.threat.eps
    assert (found["adv"] == whole).double().mean() > 0.99, "noise belongs to an image, not to its batch"
    with pytest.raises(advnorm.ConfigError, match="unknown attack 'pdg'"):
        input_images(subject, ["pdg"])


def test_the_figure_and_the_record_hold_every_statistic(digits, tmp_path, untouched):
    subject = digits.subject("dual_bn")
    with untouched(subject.model):
        found = ANALYSES.get("moments").run(subject)
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
    assert record == found.record()
    assert record["moments"]["adv"]["clean"]["bn2"]["mean"] == found.moments["adv"]["clean"]["bn2"].mean.tolist()
    assert record["conditions"]["crafted_through"] == "adv"


def test_symbols_become_formulas_and_other_text_stays():
    assert formula("NS^adv_clean") == r"$\mathrm{NS}^{\mathrm{adv}}_{\mathrm{clean}}$"
    assert formula("AP_adv") == r"$\mathrm{AP}_{\mathrm{adv}}$"
    assert formula("batch 1") == "batch 1"


@pytest.mark.parametrize("norm", ["gmm_bn", "cross_bn"])
def test_norms_that_need_both_domains_are_refused_alone_in_a_batch_by_every_analysis(digits, norm):
    model = advnorm.create_model("small_cnn", num_classes=10, norm=norm, in_channels=1, normalize=False)
    x, y, route = digits.x[:8], digits.y[:8], "adv" if norm == "cross_bn" else None
    attacks = {"gradient": StatisticsAttack(radius=0.1, route=route)}
    looks = [
        lambda how: ligs(model, x, y, route=route, statistics=how),
        lambda how: landscape(model, x, y, route=route, statistics=how),
    ]
    for look in (*looks, lambda _: perturbed_accuracy(model, x, y, attacks)):
        with pytest.raises(advnorm.ConfigError, match=f"{norm} normalizes by .* both domains.*statistics='running'"):
            look("batch_frozen")
    for look in looks:
        look("running")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("domain_gap", {}),
        ("channels", {}),
        ("moments", {}),
        ("branch_gap", {}),
        ("swap_table", {"attacks": ["pgd1"]}),
        ("statistics_shift", {}),
        ("projection", {"inputs": ["clean", "adv"], "samples": 20}),
        ("batch_channels", {}),
    ],
)
def test_to_craft_images_moves_no_statistics_whatever_the_attack_would(digits, untouched, name, options):
    attack = PGD(threat=advnorm.ThreatModel(eps=0.1), steps=1, statistics="batch")
    subject = digits.subject("dual_bn", attack=attack)
    with untouched(subject.model):
        found = ANALYSES.get(name).run(subject, **options)
    assert json.dumps(found.record(), allow_nan=False)


def test_a_record_says_what_made_each_kind_of_images(digits):
    for name, inputs in (("domain_gap", ["adv", "noise", "fgsm"]), ("moments", ["clean", "noise"])):
        told = ANALYSES.get(name).run(digits.subject("dual_bn"), inputs=inputs).record()["conditions"]
        assert set(told["inputs"]) == {"clean", *inputs} and told["inputs"]["clean"] is None
        assert told["crafted_through"] == "adv"
        assert all("eps=0.1" in made and "route='adv'" in made for made in told["inputs"].values() if made)
    assert told["inputs"]["noise"].startswith("RandomNoise(")


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 129, 300])
def test_batches_of_images_are_equally_large(digits, count):
    sizes = [len(batch) for batch in in_batches(digits.x[:count], 64)]
    assert sum(sizes) == count and max(sizes) <= 64 and max(sizes) - min(sizes) <= 1
    assert len(sizes) == -(-count // 64)


def test_one_image_more_than_fills_the_batches_makes_no_other_statistics(digits):
    """A last batch of one had statistics of its own, which counted as much as those of 64 images."""
    shift = [
        statistics_shift(digits.networks["bn"], {"clean": digits.x[:count]}, batch_size=64).sums["clean"]
        for count in (128, 129)
    ]
    assert shift[1] == pytest.approx(shift[0], rel=0.1)
    flat = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.Linear(12, 10)).eval()
    assert collect_moments(flat, digits.x[:65], statistics="batch_frozen", batch_size=64)["2"].count == 65


def test_what_is_no_image_is_refused(digits):
    model = digits.networks["bn"]
    with pytest.raises(ConfigError, match="got torch.uint8; of bytes take x.float"):
        collect_moments(model, (255 * digits.x).byte())
    for function in (norm_statistics, statistics_shift):
        with pytest.raises(ConfigError, match="no images to look at"):
            function(model, {})
    for name in ("moments", "channels", "statistics_shift"):
        with pytest.raises(ConfigError, match="no images named"):
            ANALYSES.get(name).run(digits.subject("bn"), inputs=[])


def test_recalibration_takes_equal_batches_and_the_precision_of_the_model(digits):
    flat = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.Linear(12, 10)).eval()
    advnorm.convert_norm(flat, "bn")
    model, seen = flat.double(), []
    model[1].register_forward_hook(lambda *args: seen.append(args[-1]))
    advnorm.recalibrate(model, digits.x[:65], batch_size=64)
    assert [len(part) for part in seen] == [33, 32] or [len(part) for part in seen] == [32, 33]
    torch.testing.assert_close(model[2].running_mean, torch.cat(seen).mean(0), rtol=1e-12, atol=1e-12)
