"""Downloads from a local server: verified, unpacked inside the folder, complete or absent."""

import functools
import hashlib
import http.server
import io
import tarfile
import threading
import zipfile
from dataclasses import replace

import numpy as np
import pytest

from advnorm.data import DATASETS, cifar, load
from advnorm.data.published_files import RemoteFile, download_files
from support.problems import raises_problem


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """Put a file on a local server; return its address and md5 sum."""
    monkeypatch.setenv("no_proxy", "*")
    folder = tmp_path / "server"
    folder.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()

    def put(name, content):
        (folder / name).write_bytes(content)
        address = f"http://127.0.0.1:{server.server_address[1]}/{name}"
        return RemoteFile(address=address, md5=hashlib.md5(content).hexdigest())

    yield put
    server.shutdown()
    server.server_close()
    thread.join()


def tar_of(files):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def provide(monkeypatch, name, *files):
    """Make a data set come from other addresses."""
    monkeypatch.setitem(DATASETS._entries, name, replace(DATASETS.get(name), remote_files=files))


@pytest.fixture
def archive(monkeypatch):
    """A small CIFAR-100 in the binary version."""
    monkeypatch.setattr(cifar, "IMAGES", {"train": 5, "test": 2})
    records = np.random.default_rng(0).integers(0, 100, (5, 3074), dtype=np.uint8)
    files = {"train.bin": records.tobytes(), "test.bin": records[:2].tobytes()}
    return tar_of({f"cifar-100-binary/{name}": content for name, content in files.items()})


def test_missing_files_are_downloaded_once(serve, archive, tmp_path, monkeypatch):
    provide(monkeypatch, "cifar100", serve("cifar-100-binary.tar.gz", archive))
    root = tmp_path / "new" / "data"
    with raises_problem("missing_file", "root"):
        load("cifar100", "train", root)
    assert not root.exists()
    assert len(load("cifar100", "train", root, download=True)) == 5
    assert sorted(path.name for path in root.iterdir()) == ["cifar-100-binary"]
    provide(monkeypatch, "cifar100", RemoteFile(address="http://127.0.0.1:1/gone", md5=""))
    assert len(load("cifar100", "test", root, download=True)) == 2, "existing files are not downloaded again"
    (root / "cifar-100-binary" / "test.bin").unlink()
    with raises_problem("download_failed", "download"):
        load("cifar100", "test", root, download=True)
    provide(monkeypatch, "cifar100", serve("cifar-100-binary.tar.gz", archive))
    assert len(load("cifar100", "test", root, download=True)) == 2, "an incomplete folder is completed"


def test_a_changed_or_missing_file_leaves_nothing(serve, archive, tmp_path):
    remote = serve("cifar-100-binary.tar.gz", archive)
    root = tmp_path / "data"
    with raises_problem("damaged_file", "download"):
        download_files([replace(remote, md5="0" * 32)], root)
    with raises_problem("download_failed", "download"):
        download_files([replace(remote, address=remote.address.replace("cifar-100-binary", "nothing"))], root)
    broken = serve("broken.tar.gz", archive[:-50])
    with raises_problem("damaged_file", "root"):
        download_files([broken], root)
    assert list(root.iterdir()) == []


def test_an_archive_cannot_write_outside_its_folder(serve, tmp_path):
    root, names = tmp_path / "deep" / "data", ("../../../outside", str(tmp_path / "outside"))
    with raises_problem("damaged_file", "root"):
        download_files([serve("bad.tar.gz", tar_of({names[0]: b"x"}))], root)
    download_files([serve("absolute.tar.gz", tar_of({names[1]: b"x"}))], root)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in names:
            archive.writestr(name, b"x")
    download_files([serve("bad.zip", buffer.getvalue())], root)
    written = list(tmp_path.rglob("outside"))
    assert written and all(path.is_relative_to(root) for path in written)


def test_only_the_files_of_the_split_are_downloaded(serve, tmp_path, monkeypatch):
    remote = replace(serve("test_32x32.mat", b"no matrix"), split="test")
    other = RemoteFile(address="http://127.0.0.1:1/train_32x32.mat", md5="", split="train")
    provide(monkeypatch, "svhn", other, remote)
    with raises_problem("damaged_file", "root"):
        load("svhn", "test", tmp_path / "data", download=True, check=False)
    assert (tmp_path / "data" / "test_32x32.mat").read_bytes() == b"no matrix"


def test_every_address_has_an_md5_sum():
    for name in DATASETS:
        for remote in DATASETS.get(name).remote_files:
            assert remote.address.startswith("http") and len(bytes.fromhex(remote.md5)) == 16
