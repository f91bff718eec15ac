"""Data that several tests of evaluations share."""

from pathlib import Path

import pytest


@pytest.fixture
def mostly_damaged_folder(tmp_path) -> tuple[Path, list[int]]:
    """A folder of 40 images of which every fourth can be decoded, and the rows of these."""
    from PIL import Image

    for name in "ab":
        folder = tmp_path / "images" / "test" / name
        folder.mkdir(parents=True)
        for number in range(20):
            if number % 4 == 0:
                Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / f"{number:02}.png")
            else:
                (folder / f"{number:02}.png").write_bytes(b"no image")
    return tmp_path / "images", list(range(0, 40, 4))
