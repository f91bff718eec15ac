"""Data sets: layout, splits, and files that are not what they should be."""

import hashlib
import os

import numpy as np
import pytest
import torch

from advnorm import ConfigError
from advnorm.data import cifar, cifar10, digits


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Files in the official layout with random content, and their md5 sums in place of the published ones."""
    generator = np.random.default_rng(0)
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    data = generator.integers(0, 256, (10_000, 3073), dtype=np.uint8)
    data[:, 0] %= 10
    (tmp_path / "content").write_bytes(data.tobytes())
    for name in cifar.MD5:
        os.link(tmp_path / "content", folder / name)
    monkeypatch.setattr(cifar, "MD5", dict.fromkeys(cifar.MD5, hashlib.md5(data.tobytes()).hexdigest()))
    return folder


def test_the_binary_layout_is_read_plane_by_plane(folder):
    images, labels = cifar10(folder.parent, "test")
    raw = np.frombuffer((folder / "test_batch.bin").read_bytes(), np.uint8).reshape(10_000, 3073)
    assert images.shape == (10_000, 3, 32, 32) and images.dtype == torch.uint8
    assert labels[17] == raw[17, 0]
    assert images[17, 2, 5, 7] == raw[17, 1 + 2 * 1024 + 5 * 32 + 7]
    train, _ = cifar10(folder, "train")
    assert train.shape == (50_000, 3, 32, 32)


def test_a_missing_a_short_and_a_changed_file_are_named(folder):
    path = folder / "test_batch.bin"
    whole = path.read_bytes()
    path.unlink()  # the files share their content
    path.write_bytes(whole[:-1])
    with pytest.raises(ConfigError, match=r"test_batch\.bin has 30,729,999 bytes"):
        cifar10(folder, "test")
    path.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    with pytest.raises(ConfigError, match=r"test_batch\.bin is not the published file"):
        cifar10(folder, "test")
    assert len(cifar10(folder, "test", check=False)[1]) == 10_000
    path.unlink()
    with pytest.raises(ConfigError, match=r"missing test_batch\.bin; unpack"):
        cifar10(folder, "test")
    with pytest.raises(ConfigError, match="did you mean 'train'"):
        cifar10(folder, "training")


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
