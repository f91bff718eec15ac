"""CIFAR-10-C in its published layout, written small, and damaged files."""

import os

import numpy as np
import pytest

from advnorm.data import cifar10c, load
from support.problems import raises_problem


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.fixture
def corrupted(tmp_path, monkeypatch):
    monkeypatch.setattr(cifar10c, "IMAGES_PER_SEVERITY", 4)
    folder = tmp_path / "CIFAR-10-C"
    folder.mkdir()
    images = np.random.default_rng(0).integers(0, 256, (20, 32, 32, 3), dtype=np.uint8)
    np.save(folder / "fog.npy", images)
    np.save(folder / "labels.npy", (np.arange(20) % 4).astype(np.uint8))
    return folder, images


def test_a_severity_of_cifar10c_is_its_fifth_of_the_array(corrupted):
    folder, images = corrupted
    for severity in range(1, 6):
        data = load("cifar10c", "test", folder.parent, corruption="fog", severity=severity)
        assert np.array_equal(data.images.numpy(), images[4 * severity - 4 : 4 * severity].transpose(0, 3, 1, 2))
        assert data.labels.tolist() == [0, 1, 2, 3]


def test_a_damaged_array_of_cifar10c_is_named_and_never_unpickled(corrupted):
    folder, images = corrupted
    with raises_problem("unknown_name", "corruption") as caught:
        load("cifar10c", "test", folder, corruption="frosty", severity=6)
    assert caught.value.problems[1].field == "severity"
    path = folder / "fog.npy"
    path.write_bytes(path.read_bytes()[:-1])
    with raises_problem("damaged_file", "root"):
        load("cifar10c", "test", folder, corruption="fog", severity=5)
    np.save(path, np.array([Evil(f"touch {folder / 'trace'}")], dtype=object), allow_pickle=True)
    with raises_problem("damaged_file", "root"):
        load("cifar10c", "test", folder, corruption="fog", severity=1)
    assert not (folder / "trace").exists()
    np.save(path, images[:16])
    with raises_problem("damaged_file", "root") as caught:
        load("cifar10c", "test", folder, corruption="fog", severity=1)
    assert "fog.npy: it holds uint8 (16, 32, 32, 3)" in str(caught.value)
