"""Data sets as objects: what they refuse, how they are divided, and the two that need no files."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from advnorm import ConfigError
from advnorm.data import DATASETS, ImageData, digits, list_datasets, load, split_held_out


def labelled(labels, classes):
    labels = torch.tensor(labels)
    images = torch.arange(len(labels), dtype=torch.float32).view(-1, 1, 1, 1) / 4096  # a number for each
    return ImageData(name="numbered", split="train", images=images, labels=labels, num_classes=classes)


def numbers(data):
    return (data.images.flatten() * 4096).long().tolist()


def test_every_problem_of_wrong_data_is_told_at_once():
    with pytest.raises(ConfigError) as error:
        ImageData(
            name="mine",
            split="train",
            images=torch.full((2, 3, 4), 2.0),
            labels=torch.zeros(3),
            num_classes=10,
        )
    assert all(text in str(error.value) for text in ("mine/train", "(N, C, H, W)", "[0, 1]", "int64"))
    good = load("digits", "test")
    with pytest.raises(ConfigError, match=r"labels lie in \[0, 9\), got 0 to 9"):
        replace(good, num_classes=9)
    with pytest.raises(ConfigError, match="uint8, or float32"):
        replace(good, images=good.images.double())
    with pytest.raises(ConfigError, match=r"float images lie in \[0, 1\]"):
        replace(good, images=torch.full_like(good.images, torch.nan))


def test_pixels_and_rows_are_those_of_the_images(make_data):
    data = make_data(7, (3, 4, 6))
    assert len(data) == 7 and data.image_shape == (3, 4, 6)
    assert np.array_equal(data.pixels().numpy(), data.images.numpy().astype(np.float32) / np.float32(255))
    part = data.take([5, 0])
    assert torch.equal(part.images, data.images[[5, 0]]) and part.labels.tolist() == [2, 0]
    assert torch.equal(data.take(torch.tensor([5, 0])).images, part.images) and len(data.take(slice(2))) == 2
    assert torch.equal(make_data(3, dtype=torch.float32).pixels([1]), make_data(3).pixels([1]))


def test_the_fingerprint_knows_every_pixel_and_label(make_data):
    data = make_data(5)
    assert data.fingerprint == make_data(5).fingerprint
    images, labels = data.images.clone(), data.labels.clone()
    images[4, 2, 7, 7] ^= 1
    labels[0] = 1
    assert (
        len({data.fingerprint, replace(data, images=images).fingerprint, replace(data, labels=labels).fingerprint}) == 3
    )


@given(
    labels=st.lists(st.integers(0, 4), min_size=2, max_size=60),
    share=st.floats(0.01, 0.99),
    seed=st.integers(0, 3),
)
@settings(deadline=None, max_examples=25, derandomize=True)
def test_held_out_images_are_a_fair_share_of_every_class(labels, share, seed):
    data = labelled(labels, 5)
    count = min(max(round(share * len(labels)), 1), len(labels) - 1)
    rest, held_out = split_held_out(data, count, seed)
    assert len(held_out) == count and sorted(numbers(rest) + numbers(held_out)) == list(range(len(labels)))
    assert numbers(rest) == sorted(numbers(rest)), "order is kept"
    for part in (rest, held_out):
        assert part.labels.tolist() == [labels[number] for number in numbers(part)]
    for label in range(5):
        exact = labels.count(label) * count / len(labels)
        assert abs(int((held_out.labels == label).sum()) - exact) < 1
    assert numbers(split_held_out(data, count, seed)[1]) == numbers(held_out)


def test_a_share_and_a_count_hold_out_the_same_images_and_seeds_differ():
    data = load("digits", "train")
    by_share, by_count = split_held_out(data, 0.1, 0)[1], split_held_out(data, 135, 0)[1]
    assert by_share.fingerprint == by_count.fingerprint and by_share.split == "held_out"
    assert split_held_out(data, 0.1, 1)[1].fingerprint != by_share.fingerprint


@pytest.mark.parametrize("held_out", [0, 1.0, 1.5, -1, 5, True, 0.01, "half"])
def test_nothing_and_everything_cannot_be_held_out(held_out):
    with pytest.raises(ConfigError, match="from 1 to 4"):
        split_held_out(labelled([0, 1, 0, 1, 0], 2), held_out, 0)


def test_digits_split_once_for_a_seed():
    train, labels = digits("train")
    test, _ = digits("test")
    assert train.shape == (1348, 1, 8, 8) and test.shape == (449, 1, 8, 8) and labels.dtype == torch.int64
    assert train.min() >= 0 and train.max() == 1
    assert torch.equal(train, digits("train")[0]) and not torch.equal(train, digits("train", seed=1)[0])
    everything = torch.cat([train, test]).flatten(1)
    assert len(everything.unique(dim=0)) == len(
        torch.cat(digits("train", seed=1)[:1] + digits("test", seed=1)[:1]).flatten(1).unique(dim=0)
    )
    with pytest.raises(ConfigError, match="unknown split 'val'"):
        digits("val")
    for share in (-0.2, 0, 0.0001, 0.9999, 1, 1.5, float("nan"), "0.2"):
        with pytest.raises(ConfigError, match=rf"test_share is the share .* in \(0, 1\).* got {share!r}"):
            load("digits", "test", test_share=share)
    assert len(load("digits", "test", test_share=0.5)) == 898
    assert torch.equal(load("digits", "train", seed=1).images, digits("train", seed=1)[0])


def test_synthetic_classes_can_be_told_apart_and_splits_differ():
    options = {"size": 60, "classes": 6, "image_size": 9, "channels": 2}
    train, test = load("synthetic", "train", **options), load("synthetic", "test", **options)
    assert train.image_shape == (2, 9, 9) and train.images.dtype == torch.uint8 and len(train) == 60
    assert train.labels.bincount().tolist() == [10] * 6
    assert not (train.images == test.images).all()
    assert train.fingerprint == load("synthetic", "train", **options).fingerprint
    assert train.fingerprint != load("synthetic", "train", **options, seed=1).fingerprint
    centres = torch.stack([train.pixels(train.labels == label).mean(0) for label in range(6)])
    nearest = torch.cdist(test.pixels().flatten(1), centres.flatten(1)).argmin(1)
    assert torch.equal(nearest, test.labels)


def test_names_splits_options_and_roots_are_checked_at_once():
    assert list_datasets("cifar10*") == ["cifar10", "cifar100", "cifar10c"] and set(list_datasets()) == set(DATASETS)
    with pytest.raises(ConfigError, match="did you mean 'cifar10'"):
        load("cifar-10", "train")
    with pytest.raises(ConfigError) as error:
        load("cifar10c", "train", severty=3)
    expected = ("did you mean 'severity'", "needs the option 'corruption'", "unknown split 'train'", "--data-dir")
    assert all(text in str(error.value) for text in expected), error.value
    with pytest.raises(ConfigError, match="imagefolder cannot be downloaded"):
        load("imagefolder", "train", "here", download=True)


@pytest.mark.parametrize("name", DATASETS)
def test_a_folder_without_the_data_is_refused_with_the_cure(name, tmp_path):
    source = DATASETS.get(name)
    if not source.needs_root:
        assert len(load(name, source.splits[0], tmp_path)) > 0
        return
    options = {"corruption": "fog", "severity": 1} if name == "cifar10c" else {}
    for split in source.splits:
        with pytest.raises(ConfigError, match=r"(missing .*; (unpack|put) https?://.*download=True)|name the folder"):
            load(name, split, tmp_path, **options)
