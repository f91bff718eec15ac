"""Small data sets for the tests of the data layer."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from advnorm.data import ImageData


@pytest.fixture
def make_data():
    """Make a data set of random images of any shape; labels repeat in order."""

    def make(size, shape=(3, 8, 8), *, classes=3, dtype=torch.uint8, seed=0):
        generator = torch.Generator().manual_seed(seed)
        images = torch.randint(0, 256, (size, *shape), generator=generator, dtype=torch.uint8)
        images = images if dtype == torch.uint8 else images.float() / 255
        labels = torch.arange(size) % classes
        return ImageData(name="random", split="train", images=images, labels=labels, num_classes=classes)

    return make


@pytest.fixture
def picture_folder(tmp_path):
    """``train`` and ``val`` with two classes of PNG files, wider, higher and square."""
    generator = np.random.default_rng(0)
    for split, count in (("train", 6), ("val", 3)):
        for name in ("bird", "ant"):
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(count):
                size = [(24, 16), (16, 24), (20, 20)][number % 3]
                pixels = generator.integers(0, 256, (*size, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / split / name / f"{number}.png")
    return tmp_path


@pytest.fixture
def mostly_damaged_folder(tmp_path) -> tuple[Path, list[int]]:
    """A folder of 40 images of which every fourth can be decoded, and the rows of these."""
    for name in "ab":
        folder = tmp_path / "images" / "test" / name
        folder.mkdir(parents=True)
        for number in range(20):
            if number % 4 == 0:
                Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / f"{number:02}.png")
            else:
                (folder / f"{number:02}.png").write_bytes(b"no image")
    return tmp_path / "images", list(range(0, 40, 4))
