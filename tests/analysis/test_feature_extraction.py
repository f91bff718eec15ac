"""Feature data sets: eq. 2 and 3 of paper D on linear models whose optimum is known, and files that survive a kill."""

from __future__ import annotations

import dataclasses
import os
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import advnorm
from advnorm import data as data_sets
from advnorm._core.errors import AdvnormError, ConfigError
from advnorm._core.seeding import ImageNoise
from advnorm.analysis import reporting_progress
from advnorm.analysis.feature_extraction import (
    RECIPES,
    Recipe,
    apply_recipe,
    extract_features,
    match_features,
    penultimate,
    start_rows,
    towards_class,
)
from advnorm.data import FeatureFolder, ImageData, add_split, load
from support.problems import raises_problem


def linear_net(weights: torch.Tensor, classes: int = 3) -> nn.Sequential:
    """g(x) = weights · x, then a classifier."""
    first = nn.Linear(weights.shape[1], weights.shape[0], bias=False)
    first.weight.data = weights.clone()
    return nn.Sequential(nn.Flatten(), first, nn.Linear(weights.shape[0], classes))


def images(count: int, side: int = 4, classes: int = 3, seed: int = 0, low: float = 0.3) -> ImageData:
    pixels = low + (1 - 2 * low) * torch.rand(count, 1, side, side, generator=torch.Generator().manual_seed(seed))
    return ImageData(
        name="mine", split="train", images=pixels, labels=torch.arange(count) % classes, num_classes=classes
    )


# -- eq. 3 -------------------------------------------------------------------------------------------------------------


def test_one_feature_is_matched_at_the_foot_of_the_perpendicular():
    """The nearest image with ``w · x' = w · x``; n steps of an n-th of the distance arrive there."""
    w = torch.randn(1, 16)
    data = images(2)
    x, start = data.images[:1], data.images[1:]
    gap = (w @ (x - start).flatten()) / w.norm() ** 2
    expected = start + (gap * w).view_as(start)
    assert expected.min() > 0 and expected.max() < 1, "the box plays no part"
    length = float((expected - start).norm())
    found = match_features(linear_net(w), x, start, steps=4, step_size=length / 4)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@settings(deadline=None, max_examples=4, derandomize=True)
@given(seed=st.integers(0, 1000), count=st.integers(1, 6))
def test_features_of_a_linear_model_are_matched_as_well_as_the_step_allows(seed, count):
    """The minimum is 0, at x itself, and the problem is convex: what is left is less than one step."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(count, 16, generator=generator)
    model = linear_net(w)
    x, start = torch.rand(2, 3, 1, 4, 4, generator=generator)
    found = match_features(model, x, start, steps=600, step_size=0.02)
    before, after = ((penultimate(model, z) - penultimate(model, x)).norm(dim=1) for z in (start, found))
    assert (after <= 0.02 * torch.linalg.matrix_norm(w, 2) + 1e-4).all()
    assert (after <= before).all()
    assert found.min() >= 0 and found.max() <= 1


def test_features_of_the_model_keep_their_correlation_with_the_label_and_others_lose_it():
    """Eq. 2: E[y · f] is that of the data for the model's features and 0 for others, if starts are drawn from all."""
    side, count = 4, 400
    labels = torch.arange(count) % 2
    signs = 2.0 * labels - 1
    pixels = 0.5 + 0.1 * torch.randn(count, 1, side, side)
    pixels[:, 0, 0, 0] += 0.15 * signs  # the model uses this one
    pixels[:, 0, 3, 3] += 0.15 * signs  # equally useful, but not used
    data = ImageData(name="two", split="train", images=pixels.clamp(0, 1), labels=labels, num_classes=2)
    w = torch.zeros(1, side * side)
    w[0, 0] = 1
    recipe = Recipe(towards="features", steps=60, step_size=0.02, start="any")
    made = apply_recipe(linear_net(w, 2), data, torch.arange(count), recipe)

    def correlation(x, row, column):
        return float((signs * (x[:, 0, row, column] - x[:, 0, row, column].mean())).mean())

    assert correlation(made.images, 0, 0) == pytest.approx(correlation(data.images, 0, 0), abs=0.01)
    assert correlation(data.images, 3, 3) > 0.1
    assert abs(correlation(made.images, 3, 3)) < 0.02
    other = apply_recipe(linear_net(w, 2), data, torch.arange(count), dataclasses.replace(recipe, start="other_class"))
    assert correlation(other.images, 3, 3) < -0.1, "with starts of the other class the sign changes"


def test_the_nearest_iterate_is_kept():
    w = torch.randn(1, 16)
    data = images(2)
    model = linear_net(w)
    rough = [match_features(model, data.images[:1], data.images[1:], steps=n, step_size=0.5) for n in range(1, 8)]
    wanted = penultimate(model, data.images[:1])
    distances = [float((penultimate(model, found) - wanted).norm()) for found in rough]
    assert distances == sorted(distances, reverse=True)


def test_a_start_that_already_matches_stays_unchanged():
    x = torch.rand(2, 1, 4, 4)
    assert torch.equal(match_features(linear_net(torch.randn(2, 16)), x, x, steps=3), x)


@settings(deadline=None, max_examples=25, derandomize=True)
@given(seed=st.integers(0, 10_000), classes=st.integers(2, 5), count=st.integers(5, 40))
def test_starts_have_another_class_and_depend_on_the_row_alone(seed, classes, count):
    labels = torch.randint(classes, (count,), generator=torch.Generator().manual_seed(seed))
    labels[0], labels[1] = 0, 1
    rows = torch.arange(count)
    chosen = start_rows(labels, rows, ImageNoise(seed, rows), "other_class")
    assert (labels[chosen] != labels).all()
    few = torch.tensor([count - 1, 2])
    assert torch.equal(start_rows(labels, few, ImageNoise(seed, few), "other_class"), chosen[few])


def test_starts_are_drawn_evenly_from_all_images_of_other_classes():
    labels = torch.tensor([0, 1, 2, 1, 0, 2])
    rows = torch.zeros(6000, dtype=torch.int64)
    noise = ImageNoise(0, torch.arange(6000))
    counts = torch.bincount(start_rows(labels, rows, noise, "other_class"), minlength=6)
    assert counts[[0, 4]].tolist() == [0, 0]
    assert counts[[1, 2, 3, 5]].min() > 1300


# -- classes -----------------------------------------------------------------------------------------------------------


def test_on_a_linear_model_the_target_is_reached_along_the_difference_of_the_weights():
    """Two classes: the loss falls fastest along ``w_t - w_y``, everywhere the same; the optimum is eps along it."""
    head = nn.Linear(16, 2)
    model = nn.Sequential(nn.Flatten(), head)
    x = torch.full((2, 1, 4, 4), 0.5)
    y = torch.tensor([0, 1])
    found = towards_class(model, x, y, 1 - y, eps=0.5, steps=10, step_size=0.1)
    direction = (head.weight[1] - head.weight[0]).detach()
    direction = direction / direction.norm()
    expected = x + 0.5 * torch.stack([direction, -direction]).view_as(x)
    assert expected.min() > 0 and expected.max() < 1
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", ["D_rand", "D_det"])
def test_targets_are_random_or_the_next_class_and_the_images_stay_near(name, digits):
    model = digits.networks["bn"]
    data = ImageData(name="digits", split="test", images=digits.x, labels=digits.y, num_classes=10)
    rows = torch.arange(200)
    made = apply_recipe(model, data, rows, dataclasses.replace(RECIPES[name], steps=5))
    assert torch.equal(made.starts, digits.y[:200])
    if name == "D_det":
        assert torch.equal(made.labels, (digits.y[:200] + 1) % 10)
    else:
        assert 5 <= int((made.labels == digits.y[:200]).sum()) <= 40, "any class, the image's own too"
        assert len(made.labels.unique()) == 10
    assert ((made.images - digits.x[:200]).flatten(1).norm(dim=1) <= 0.5).all()
    with torch.no_grad():
        before, after = (
            torch.nn.functional.cross_entropy(model(z), made.labels) for z in (digits.x[:200], made.images)
        )
    assert after < before - 1


# -- the contract ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("norm", "route"), [("bn", None), ("dual_bn", "adv"), ("none", None)])
def test_the_model_stays_unchanged(norm, route, digits, untouched):
    model = digits.networks[norm]
    model.train()
    with untouched(model):
        match_features(model, digits.x[:4], digits.x[4:8], steps=2, route=route)
        towards_class(model, digits.x[:4], digits.y[:4], digits.y[4:8], eps=0.5, steps=2, route=route)
        with raises_problem("unknown_name", "layer"):
            penultimate(model, digits.x[:4], layer="fd", route=route)
    model.eval()


def test_the_penultimate_activations_are_the_input_of_the_classifier(digits):
    model = digits.networks["bn"]
    head = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    with torch.no_grad():
        torch.testing.assert_close(head(penultimate(model, digits.x[:5])), model(digits.x[:5]))


def test_a_model_without_linear_layers_needs_a_named_layer():
    conv = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    x = torch.rand(2, 1, 4, 4)
    with raises_problem("missing_option", "layer"):
        penultimate(conv, x)
    assert torch.equal(penultimate(conv, x, layer="1"), conv[0](x).flatten(1))


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def net():
    torch.manual_seed(4)
    return linear_net(torch.randn(3, 16)).eval()


def extracted(net, root, data=None, **options):
    return extract_features(net, data or images(23), "D_R", root, steps=4, shard_size=5, **options)


def test_a_set_is_written_with_its_recipe_and_loaded_like_any_other(net, tmp_path):
    folder = extracted(net, tmp_path)
    loaded = load("features", "train", tmp_path)
    data = images(23)
    assert (loaded.name, loaded.split, len(loaded), loaded.num_classes) == ("D_R", "train", 23, 3)
    assert torch.equal(loaded.labels, data.labels)
    starts = load("features", "train", tmp_path, labels="start").labels
    assert (starts != data.labels).all()
    recipe = folder.recipe
    assert recipe["recipe"] == dataclasses.asdict(dataclasses.replace(RECIPES["D_R"], steps=4))
    assert recipe["source"]["fingerprint"] == data.fingerprint
    assert recipe["made_with"]["torch"] == torch.__version__
    by_hand = apply_recipe(net, data, torch.arange(5, 10), dataclasses.replace(RECIPES["D_R"], steps=4))
    assert torch.equal(loaded.images[5:10], by_hand.images)
    loader = data_sets.make_loader(loaded, batch_size=8, seed=0, device="cpu")
    assert next(iter(loader.epoch(0))).x.shape == (8, 1, 4, 4)


def test_killed_and_continued_gives_the_same_bits(net, tmp_path, monkeypatch):
    whole = extracted(net, tmp_path / "whole").load()
    replace, written = os.replace, []

    def dies_at_the_third(source, target):
        if str(target).endswith(".safetensors"):
            written.append(target)
            if len(written) == 3:
                raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", dies_at_the_third)
        with pytest.raises(KeyboardInterrupt):
            extracted(net, tmp_path / "killed")
    folder = FeatureFolder(tmp_path / "killed" / "train")
    assert folder.missing_shards() == [2, 3, 4]
    assert not list(folder.path.glob(".*.part")), "no partial file is left"
    with raises_problem("missing_file", "root"):
        folder.load()
    kept = os.stat(folder.path / "00000.safetensors").st_mtime_ns
    seen = []
    with reporting_progress(lambda done, total: seen.append((done, total))):
        extracted(net, tmp_path / "killed")
    assert seen[-1] == (5, 5)
    assert os.stat(folder.path / "00000.safetensors").st_mtime_ns == kept
    assert torch.equal(folder.load().images, whole.images)


@pytest.mark.parametrize(
    ("wrong", "recipe"),
    [({}, "D_R"), ({}, "D_det"), ({"route": "adv", "layer": "foo"}, "D_R"), ({"layer": "f"}, "D_det")],
)
def test_a_call_that_fails_before_any_work_writes_nothing(digits, tmp_path, wrong, recipe):
    model, data = digits.networks["dual_bn"], load("digits", "train").take(slice(0, 20))
    with pytest.raises(AdvnormError):
        extract_features(model, data, recipe, tmp_path, steps=1, **wrong)
    assert not list(tmp_path.iterdir())
    extract_features(model, data, recipe, tmp_path, steps=1, route="adv")
    assert len(load("features", "train", tmp_path)) == 20


def test_shards_without_a_recipe_are_made_again(net, tmp_path):
    folder = extracted(net, tmp_path, seed=1)
    (folder.path / "recipe.json").unlink()
    whole = extracted(net, tmp_path / "whole").load()
    assert torch.equal(extracted(net, tmp_path).load().images, whole.images)


def test_parts_that_are_made_separately_equal_the_whole(net, tmp_path):
    whole = extracted(net, tmp_path / "whole").load()
    for number in (2, 0, 1):
        extracted(net, tmp_path / "parts", part=(number, 3))
    assert torch.equal(FeatureFolder(tmp_path / "parts" / "train").load().images, whole.images)


def test_noise_depends_on_the_seed(net, tmp_path):
    first, second = (extracted(net, tmp_path / str(seed), seed=seed).load() for seed in (0, 1))
    assert not torch.equal(first.images, second.images)


def test_a_folder_with_another_set_raises_and_names_the_difference(net, tmp_path):
    extracted(net, tmp_path)
    with raises_problem("already_exists", "root") as caught:
        extracted(net, tmp_path, seed=1)
    assert "seed (0, now 1)" in str(caught.value)
    with raises_problem("already_exists", "root"):
        extracted(net, tmp_path, images(23, seed=1))
    net[2].weight.data += 1
    with raises_problem("already_exists", "root"):
        extracted(net, tmp_path)


def test_damaged_files_raise_with_their_name(net, tmp_path):
    folder = extracted(net, tmp_path)
    shard = folder.path / "00001.safetensors"
    content = bytearray(shard.read_bytes())
    content[-200] ^= 1
    shard.write_bytes(bytes(content))
    with raises_problem("damaged_file", "root") as caught:
        folder.load()
    assert shard.name in str(caught.value)
    shutil.copy(folder.path / "00004.safetensors", shard)  # three images instead of five
    with raises_problem("damaged_file", "root"):
        folder.load()
    shard.write_bytes(b"no tensors")
    with raises_problem("damaged_file", "root"):
        folder.load()
    with raises_problem("missing_file", "root") as caught:
        load("features", "test", tmp_path)
    assert f"advnorm.data.add_split({str(tmp_path)!r}, " in caught.value.problems[0].hint
    with raises_problem("missing_file", "root") as caught:
        load("features", "test", tmp_path / "elsewhere")
    assert "extract_features" in caught.value.problems[0].hint


def test_a_run_trains_on_features_with_real_test_images(digits, tmp_path):
    few = load("digits", "train").take(slice(0, 120))
    extract_features(digits.networks["dual_bn"], few, "D_R", tmp_path / "D_R", route="adv", steps=2)
    test = load("digits", "test").take(slice(0, 50))
    add_split(tmp_path / "D_R", test)
    add_split(tmp_path / "D_R", test)  # twice changes nothing
    loaded = load("features", "test", tmp_path / "D_R")
    assert torch.equal(loaded.images, test.images) and loaded.name == "digits"
    config = advnorm.Config(data="features", objective="standard", epochs=1, batch_size=32)
    run = advnorm.train(config, out=tmp_path / "runs", data_dir=tmp_path / "D_R")
    assert run.finished


def test_conflict_starts_from_robust_features_and_nothing_else(net, tmp_path):
    extracted(net, tmp_path / "D_R")
    robust = load("features", "train", tmp_path / "D_R")
    with raises_problem("conflict", "data"):
        extract_features(net, images(23), "D_conflict", tmp_path / "no")
    extract_features(net, robust, "D_conflict", tmp_path / "D_conflict", steps=3)
    conflict = load("features", "train", tmp_path / "D_conflict")
    assert torch.equal(conflict.labels, (robust.labels + 1) % 3)
    assert torch.equal(load("features", "train", tmp_path / "D_conflict", labels="start").labels, robust.labels)
    assert ((conflict.images - robust.images).flatten(1).norm(dim=1) <= 0.5).all()


def test_all_problems_are_reported_at_once(net, tmp_path):
    with raises_problem("unknown_name", "recipe"):
        extract_features(net, images(6), "D_rnd", tmp_path)
    with raises_problem("unknown_name", "step"):
        extract_features(net, images(6), "D_R", tmp_path, step=3)
    with pytest.raises(ConfigError) as error:
        extract_features(net, images(6), "D_R", tmp_path, shard_size=0, part=(3, 3))
    fields = [("out_of_range", "shard_size"), ("out_of_range", "part")]
    assert [(problem.code, problem.field) for problem in error.value.problems] == fields
    for part in ((0,), 3, [1, 1]):
        with raises_problem("out_of_range", "part"):
            extract_features(net, images(6), "D_R", tmp_path, part=part)
    with raises_problem("wrong_type", "part"):
        extract_features(net, images(6), "D_R", tmp_path, part="ab")
    with raises_problem("not_supported", "data"):
        apply_recipe(net, images(6).take([0, 3]), torch.arange(2), RECIPES["D_R"])
    with pytest.raises(ConfigError) as error:
        Recipe(towards="next", steps=0, step_size=-1)
    fields = [("out_of_range", "steps"), ("out_of_range", "step_size"), ("missing_option", "eps")]
    assert [(problem.code, problem.field) for problem in error.value.problems] == fields
    assert not list(tmp_path.iterdir()), "nothing was written"
