"""Images in memory: validation, rows, fingerprints and held-out images."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from advnorm import ConfigError
from advnorm.data import ImageData, load, split_held_out
from support.problems import raises_problem


def labelled(labels, classes):
    labels = torch.tensor(labels)
    images = torch.arange(len(labels), dtype=torch.float32).view(-1, 1, 1, 1) / 4096  # a different number for each
    return ImageData(name="numbered", split="train", images=images, labels=labels, num_classes=classes)


def numbers(data):
    return (data.images.flatten() * 4096).long().tolist()


def test_every_problem_of_wrong_data_is_reported_at_once():
    with pytest.raises(ConfigError) as error:
        ImageData(name="mine", split="train", images=torch.full((2, 3, 4), 2.0), labels=torch.zeros(3), num_classes=10)
    found = [(problem.code, problem.field) for problem in error.value.problems]
    assert found == [("wrong_shape", "images"), ("out_of_range", "images"), ("wrong_shape", "labels")]
    assert "mine/train" in error.value.heading
    good = load("digits", "test")
    with raises_problem("out_of_range", "labels"):
        replace(good, num_classes=9)
    with raises_problem("wrong_dtype", "images"):
        replace(good, images=good.images.double())
    with raises_problem("out_of_range", "images"):
        replace(good, images=torch.full_like(good.images, torch.nan))


@pytest.mark.parametrize(
    ("wrong", "fix"),
    [
        (lambda data: {"labels": torch.nn.functional.one_hot(data.labels).float()}, "argmax"),
        (lambda data: {"labels": data.labels.float()}, "long"),
        (lambda data: {"labels": data.labels[:, None]}, "y[:, 0]"),
        (lambda data: {"labels": data.labels[1:]}, "each image"),
        (lambda data: {"images": data.images.double()}, "float()"),
        (lambda data: {"images": data.images.long()}, "x.float() / 255"),
        (lambda data: {"images": (data.images * 65535).int()}, "x.float() / 65535"),
        (lambda data: {"images": data.images > 128}, "with x.float()"),
        (lambda data: {"images": data.images * 1j}, "x.real.float()"),
        (lambda data: {"images": data.images.to_sparse()}, "to_dense"),
        (lambda data: {"images": data.images.to("meta")}, "no values"),
        (lambda data: {"images": data.images.float() * torch.inf}, "infinite"),
        (lambda data: {"images": torch.full_like(data.images, torch.nan, dtype=torch.float32)}, "NaN"),
        (lambda data: {"images": (data.images.float() - 0.5) / 0.25}, "normalization"),
        (lambda data: {"images": data.images.float() * 255 + 2}, "divide"),
    ],
)
def test_the_fix_is_that_of_the_usual_mistakes(wrong, fix):
    data = load("digits", "test")
    with pytest.raises(ConfigError) as caught:
        replace(data, **wrong(data))
    assert fix in caught.value.problems[0].hint
    assert not fix.endswith("float()") or caught.value.problems[0].hint.endswith(fix)


def test_pixels_and_rows_are_those_of_the_images(make_data):
    data = make_data(7, (3, 4, 6))
    assert len(data) == 7 and data.image_shape == (3, 4, 6)
    assert np.array_equal(data.pixels().numpy(), data.images.numpy().astype(np.float32) / np.float32(255))
    part = data.take([5, 0])
    assert torch.equal(part.images, data.images[[5, 0]]) and part.labels.tolist() == [2, 0]
    assert torch.equal(data.take(torch.tensor([5, 0])).images, part.images) and len(data.take(slice(2))) == 2
    assert torch.equal(make_data(3, dtype=torch.float32).pixels([1]), make_data(3).pixels([1]))


def test_the_fingerprint_covers_every_pixel_and_label(make_data):
    data = make_data(5)
    assert data.fingerprint == make_data(5).fingerprint
    images, labels = data.images.clone(), data.labels.clone()
    images[4, 2, 7, 7] ^= 1
    labels[0] = 1
    assert (
        len({data.fingerprint, replace(data, images=images).fingerprint, replace(data, labels=labels).fingerprint}) == 3
    )


@given(labels=st.lists(st.integers(0, 4), min_size=2, max_size=60), share=st.floats(0.01, 0.99), seed=st.integers(0, 3))
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


def test_a_share_of_no_image_is_reported_in_images():
    with raises_problem("out_of_range", "held_out") as caught:
        split_held_out(labelled([0, 1, 2], 3), 0.1, 0)
    assert "0 of 3 images" in str(caught.value)


def test_a_share_and_a_count_hold_out_the_same_images_and_seeds_differ():
    data = load("digits", "train")
    by_share, by_count = split_held_out(data, 0.1, 0)[1], split_held_out(data, 135, 0)[1]
    assert by_share.fingerprint == by_count.fingerprint and by_share.split == "held_out"
    assert split_held_out(data, 0.1, 1)[1].fingerprint != by_share.fingerprint


@pytest.mark.parametrize("held_out", [0, 1.0, 1.5, -1, 5, True, 0.01, "half"])
def test_nothing_and_everything_cannot_be_held_out(held_out):
    with raises_problem("out_of_range", "held_out"):
        split_held_out(labelled([0, 1, 0, 1, 0], 2), held_out, 0)
