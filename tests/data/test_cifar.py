"""CIFAR in its published layouts, written small; missing, damaged and malicious files."""

import hashlib
import os
import pickle
import re
import struct

import numpy as np
import pytest
import torch

from advnorm.data import cifar, cifar10, data_problems, load
from support.problems import raises_problem

IMAGES = {"train": 50, "test": 10}


def python2_pickle(value) -> bytes:
    """Pickle as Python 2 and its NumPy did: strings of bytes, arrays by ``numpy.core.multiarray``."""

    def dump(value):
        if isinstance(value, bytes):
            return b"T" + struct.pack("<i", len(value)) + value
        if isinstance(value, bool):
            return b"\x88" if value else b"\x89"
        if isinstance(value, int):
            return b"J" + struct.pack("<i", value)
        if isinstance(value, tuple):
            return b"(" + b"".join(map(dump, value)) + b"t"
        if isinstance(value, list):
            return b"](" + b"".join(map(dump, value)) + b"e"
        if isinstance(value, dict):
            return b"}(" + b"".join(dump(key) + dump(item) for key, item in value.items()) + b"u"
        kind = value.dtype.str[1:].encode()
        state = dump(1) + dump(value.shape)
        state += (
            b"cnumpy\ndtype\n" + dump((kind, 0, 1)) + b"R(" + dump(3) + dump(b"|") + b"NNN" + dump(-1) * 2 + dump(0)
        )
        state += b"tb" + dump(False) + dump(value.tobytes())
        return (
            b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n"
            + dump((0,))
            + dump(b"b")
            + b"tR("
            + state
            + b"tb"
        )

    return b"\x80\x02" + dump(value) + b"."


@pytest.fixture(params=["cifar10-binary", "cifar10-python", "cifar100-binary", "cifar100-python"])
def published(request, tmp_path, monkeypatch):
    """Name, layout, folder and content of a small CIFAR whose md5 sums replace the published ones."""
    name, form = request.param.split("-")
    layout = getattr(cifar, name.upper()).layouts[form == "python"]
    folder = tmp_path / layout.folder
    folder.mkdir()
    generator = np.random.default_rng(0)
    contents, sums = {}, {}
    for split, files in layout.files.items():
        classes = 10 if name == "cifar10" else 100
        images = generator.integers(0, 256, (IMAGES[split], 3, 32, 32), dtype=np.uint8)
        labels = generator.integers(0, classes, IMAGES[split])
        contents[split] = images, labels
        for file, rows in zip(files, np.split(np.arange(IMAGES[split]), len(files))):
            pixels, fine, coarse = images[rows].reshape(len(rows), -1), labels[rows], labels[rows] // 5
            if form == "binary":
                columns = [fine] if name == "cifar10" else [coarse, fine]
                content = np.column_stack([*columns, pixels]).astype(np.uint8).tobytes()
            elif name == "cifar10":
                content = python2_pickle({b"batch_label": b"some", b"labels": fine.tolist(), b"data": pixels})
            else:
                batch = {b"fine_labels": fine.tolist(), b"coarse_labels": coarse.tolist(), b"data": pixels}
                content = python2_pickle({b"filenames": [b"a.png"], **batch})
            (folder / file).write_bytes(content)
            sums[file] = hashlib.md5(content).hexdigest()
    monkeypatch.setattr(cifar, "IMAGES", IMAGES)
    monkeypatch.setattr(cifar, "MD5", {file: sums[file] for file in sums if file in cifar.MD5})
    return name, layout, folder, contents


def test_both_versions_of_cifar_are_read_from_their_folder_or_its_parent(published):
    name, _, folder, contents = published
    for split, (images, labels) in contents.items():
        for root in (folder, folder.parent, str(folder)):
            data = load(name, split, root)
            assert np.array_equal(data.images.numpy(), images) and np.array_equal(data.labels.numpy(), labels)
        assert data.images.dtype == torch.uint8 and (data.name, data.split) == (name, split)
        assert data.num_classes == (10 if name == "cifar10" else 100)


def test_the_environment_variable_names_the_folder_if_the_caller_does_not(published, tmp_path, monkeypatch):
    name, _, folder, contents = published
    with raises_problem("missing_folder", "root"):
        load(name, "test")
    monkeypatch.setenv("ADVNORM_DATA", "")
    with raises_problem("missing_folder", "root"):
        load(name, "test")
    monkeypatch.setenv("ADVNORM_DATA", str(folder.parent))
    assert np.array_equal(load(name, "test").images.numpy(), contents["test"][0])
    assert len(load("digits", "test"))  # needs no folder
    with raises_problem("missing_file", "root"):
        load(name, "test", tmp_path / "elsewhere")


def test_cifar10_gives_images_and_labels(published):
    name, _, folder, contents = published
    if name == "cifar10":
        images, labels = cifar10(folder, "test")
        assert images.shape == (10, 3, 32, 32) and np.array_equal(labels.numpy(), contents["test"][1])
        with raises_problem("unknown_name", "split"):
            cifar10(folder, "training")


def test_a_missing_a_truncated_and_a_changed_file_are_named(published):
    name, layout, folder, _ = published
    path = folder / layout.files["train"][-1]
    whole = path.read_bytes()
    for length in (len(whole) - 1, len(whole) // 2, 0):
        path.write_bytes(whole[:length])
        for check in (True, False):
            with raises_problem("damaged_file", "root") as caught:
                load(name, "train", folder, check=check)
            assert path.name in str(caught.value)
    path.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    if path.name in cifar.MD5:
        with raises_problem("damaged_file", "root") as caught:
            load(name, "train", folder)
        assert path.name in str(caught.value)
    path.unlink()
    with raises_problem("missing_file", "root") as caught:
        load(name, "train", folder)
    assert path.name in str(caught.value) and "https://www.cs.toronto.edu" in caught.value.problems[0].hint
    assert len(load(name, "test", folder)) == 10, "the other split does not need it"


def test_the_check_for_missing_files_reads_none(published, monkeypatch):
    name, layout, folder, _ = published
    monkeypatch.setattr(cifar, "read_verified", lambda *_, **__: pytest.fail("read a file"))
    assert data_problems(name, "train", folder.parent) == data_problems(name, "test", folder, check=False) == []
    (folder / layout.files["train"][0]).unlink()
    assert [problem.code for problem in data_problems(name, "train", folder)] == ["missing_file"]


def test_the_md5_sums_of_all_files_but_two_are_known():
    files = {
        name
        for layout in (*cifar.CIFAR10.layouts, *cifar.CIFAR100.layouts)
        for f in layout.files.values()
        for name in f
    }
    assert files - set(cifar.MD5) == {"train.bin", "test.bin"}
    assert all(len(bytes.fromhex(md5)) == 16 for md5 in cifar.MD5.values())


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_that_runs_a_command_raises_and_runs_nothing(tmp_path, monkeypatch, protocol):
    trace = tmp_path / "trace"
    content = pickle.dumps({"data": Evil(f"touch {trace}"), "labels": []}, protocol=protocol)
    (tmp_path / "test_batch").write_bytes(content)
    with raises_problem("damaged_file", "root"):
        cifar10(tmp_path, "test")
    monkeypatch.setitem(cifar.MD5, "test_batch", hashlib.md5(content).hexdigest())
    with raises_problem("damaged_file", "root") as caught:
        cifar10(tmp_path, "test")
    assert ".system" in str(caught.value)
    assert not trace.exists()
    pickle.loads(content)
    assert trace.exists(), "the pickle does run the command when it is loaded"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (python2_pickle({b"labels": [1], b"data": np.zeros((1, 3072), np.uint16)}), "only unsigned bytes"),
        (python2_pickle({b"labels": [1], b"data": np.zeros((2, 3072), np.uint8)}), "2 images but 1 labels"),
        (python2_pickle({b"labels": [1], b"data": np.zeros((1, 3071), np.uint8)}), "invalid for input of size 3071"),
        (python2_pickle([1, 2]), "holds a list"),
        (python2_pickle({b"labels": [1]}), "b'data'"),
        (b"", "Ran out of input"),
        (b"(S'true'\nios\nsystem\n.", "calls os.system"),
        (b"cbuiltins\neval\n(S'1'\ntR.", "calls builtins.eval"),
        (b"cnumpy\ndtype.__class__\n.", "calls numpy.dtype.__class__"),
        (pickle.dumps(np.zeros(3), protocol=2), "not allowed|unsigned bytes"),
    ],
)
def test_a_pickle_of_anything_else_raises_with_its_name(tmp_path, content, reason):
    (tmp_path / "test_batch").write_bytes(content)
    with raises_problem("damaged_file", "root") as caught:
        cifar10(tmp_path, "test", check=False)
    assert re.search(f"test_batch: .*({reason})", str(caught.value))
