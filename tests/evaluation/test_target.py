"""Opening a run as an evaluation target: its test images and its attack."""

import numpy as np
import pytest
import torch
from PIL import Image

from advnorm import Config, train
from advnorm.config import Named
from advnorm.evaluation import open_run

CLASSES, EACH = ("ant", "bee", "cat"), 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Images in folders, one class after another; every pixel of test image ``i`` of them all is ``10 i``."""
    folder = tmp_path_factory.mktemp("pictures")
    for split in ("train", "test"):
        for label, name in enumerate(CLASSES):
            (folder / split / name).mkdir(parents=True)
            for number in range(EACH):
                pixels = np.full((8, 8, 3), 10 * (EACH * label + number), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    config = Config(
        data=Named("imagefolder", image_size=8, resize=8),
        objective="standard",
        epochs=1,
        batch_size=4,
        held_out=0,
        validate_every=0,
    )
    return train(config, out=tmp_path_factory.mktemp("runs"), data_dir=folder, device="cpu", workers=0)


@pytest.mark.parametrize(("limit", "chosen"), [(3, [0, 4, 8]), (5, [0, 2, 4, 7, 9]), (12, range(12)), (99, range(12))])
def test_a_limit_takes_images_of_every_class_though_they_lie_one_after_another(run, folder, limit, chosen):
    target = open_run(run, data_dir=folder, device="cpu").sample(limit)
    rows = target.rows.tolist()
    assert sorted(rows) == list(chosen) and target.labels.tolist() == [i // EACH for i in rows]
    expected = torch.tensor([10 * i / 255 for i in rows]).view(-1, 1, 1, 1).expand(-1, 3, 8, 8)
    assert torch.allclose(target.images, expected)
    assert target.conditions["images"] == len(chosen) and target.conditions["checkpoint"] == "last"
    assert target.conditions["trained_on"] == run.description["data"]["name"] == "imagefolder"


def test_a_batch_of_folders_has_several_classes_and_the_order_is_always_the_same(run, folder):
    first, second = (open_run(run, data_dir=folder, device="cpu").sample(None) for _ in range(2))
    assert len(first.labels) == 12 and torch.equal(first.labels, second.labels)
    assert all(len(part.unique()) > 1 for part in first.labels.split(EACH))


def test_images_that_are_not_taken_are_not_decoded(run, folder):
    spoiled = folder / "test" / "ant" / "1.png"
    whole = spoiled.read_bytes()
    spoiled.write_bytes(b"no picture")
    try:
        assert len(open_run(run, data_dir=folder, device="cpu").sample(3).labels) == 3
    finally:
        spoiled.write_bytes(whole)


def test_the_attack_of_a_training_on_batch_statistics_is_looked_at_on_stored_ones(tmp_path):
    """It would move the very statistics that are looked at, batch by batch."""
    config = Config(epochs=1, batch_size=512, attack={"steps": 1, "statistics": "batch"}, norm="dual_bn")
    found = open_run(train(config, out=tmp_path, device="cpu", workers=0), device="cpu").sample(16)
    assert found.attack.statistics == "running" and "statistics='running'" in found.conditions["attack"]
    assert found.attack.steps == 1
