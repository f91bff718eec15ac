"""Generated images."""

import pytest
import torch

from advnorm.data import load, synthetic
from support.problems import raises_problem


def test_classes_can_be_learned_and_splits_differ():
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


@pytest.mark.parametrize("options", [{"size": 2_000_000_000}, {"image_size": 2**30}, {"classes": 2_000_000_000}])
def test_images_beyond_the_memory_of_the_machine_are_rejected_before_they_are_generated(options):
    with raises_problem("out_of_range", "size"):
        load("synthetic", "train", **options)


def test_images_do_not_depend_on_how_many_are_generated_at_once(monkeypatch):
    whole = load("synthetic", "train", size=30, image_size=9, channels=2)
    monkeypatch.setattr(synthetic, "CHUNK", 400)
    assert load("synthetic", "train", size=30, image_size=9, channels=2).fingerprint == whole.fingerprint
