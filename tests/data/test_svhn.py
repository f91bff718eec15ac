"""SVHN in its published layout, written small, and damaged files."""

import hashlib
import io

import numpy as np
import pytest

from advnorm.data import load, svhn
from support.problems import raises_problem


@pytest.fixture
def house_numbers(tmp_path, monkeypatch):
    from scipy.io import savemat

    images = np.random.default_rng(0).integers(0, 256, (32, 32, 3, 12), dtype=np.uint8)
    digits = np.array([10, *range(1, 11), 10], dtype=np.uint8).reshape(-1, 1)
    buffer = io.BytesIO()
    savemat(buffer, {"X": images, "y": digits})
    (tmp_path / "extra_32x32.mat").write_bytes(buffer.getvalue())
    monkeypatch.setitem(svhn.MD5, "extra_32x32.mat", hashlib.md5(buffer.getvalue()).hexdigest())
    return tmp_path, images


def test_label_ten_of_svhn_is_class_zero(house_numbers):
    root, images = house_numbers
    data = load("svhn", "extra", root)
    assert data.labels.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 0]
    assert data.images.shape == (12, 3, 32, 32) and data.images[3, 2, 5, 7] == images[5, 7, 2, 3]


def test_damaged_and_missing_files_of_svhn_are_named(house_numbers):
    root, *_ = house_numbers
    path = root / "extra_32x32.mat"
    path.write_bytes(path.read_bytes()[:-100])
    for check in (True, False):
        with raises_problem("damaged_file", "root") as caught:
            load("svhn", "extra", root, check=check)
        assert path.name in str(caught.value)
    with raises_problem("missing_file", "root") as caught:
        load("svhn", "test", root)
    assert "test_32x32.mat" in str(caught.value) and "put http://ufldl" in caught.value.problems[0].hint
