"""Downloads, from a server on this machine: whole, checked, unpacked inside the folder, or not at all."""

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

from advnorm import ConfigError
from advnorm.data import catalogue, cifar, load
from advnorm.data.files import Remote, download_all


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """Puts a file on a local server and gives its address and md5 sum."""
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
        return Remote(address=address, md5=hashlib.md5(content).hexdigest())

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


@pytest.fixture
def archive(monkeypatch):
    """CIFAR-100 in the binary form, small."""
    monkeypatch.setattr(cifar, "IMAGES", {"train": 5, "test": 2})
    records = np.random.default_rng(0).integers(0, 100, (5, 3074), dtype=np.uint8)
    files = {"train.bin": records.tobytes(), "test.bin": records[:2].tobytes()}
    return tar_of({f"cifar-100-binary/{name}": content for name, content in files.items()})


def test_what_is_missing_is_fetched_once(serve, archive, tmp_path, monkeypatch):
    monkeypatch.setitem(catalogue.REMOTES, "cifar100", (serve("cifar-100-binary.tar.gz", archive),))
    root = tmp_path / "new" / "data"
    with pytest.raises(ConfigError, match=r"missing train\.bin.*download=True"):
        load("cifar100", "train", root)
    assert not root.exists()
    assert len(load("cifar100", "train", root, download=True)) == 5
    assert sorted(path.name for path in root.iterdir()) == ["cifar-100-binary"]
    monkeypatch.setitem(catalogue.REMOTES, "cifar100", (Remote(address="http://127.0.0.1:1/gone", md5=""),))
    assert len(load("cifar100", "test", root, download=True)) == 2, "what is there is not fetched again"
    (root / "cifar-100-binary" / "test.bin").unlink()
    with pytest.raises(ConfigError, match=r"cannot fetch http://127\.0\.0\.1:1/gone"):
        load("cifar100", "test", root, download=True)
    monkeypatch.setitem(catalogue.REMOTES, "cifar100", (serve("cifar-100-binary.tar.gz", archive),))
    assert len(load("cifar100", "test", root, download=True)) == 2, "an incomplete folder is completed"


def test_a_changed_or_missing_file_leaves_nothing(serve, archive, tmp_path):
    remote = serve("cifar-100-binary.tar.gz", archive)
    root = tmp_path / "data"
    with pytest.raises(ConfigError, match=r"cifar-100-binary\.tar\.gz did not give the published file"):
        download_all([replace(remote, md5="0" * 32)], root)
    with pytest.raises(ConfigError, match=r"cannot fetch .*nothing\.tar\.gz.*404"):
        download_all([replace(remote, address=remote.address.replace("cifar-100-binary", "nothing"))], root)
    broken = serve("broken.tar.gz", archive[:-50])
    with pytest.raises(ConfigError, match=r"cannot read .*broken\.tar\.gz"):
        download_all([broken], root)
    assert list(root.iterdir()) == []


def test_an_archive_cannot_write_outside_its_folder(serve, tmp_path):
    root, names = tmp_path / "deep" / "data", ("../../../outside", str(tmp_path / "outside"))
    with pytest.raises(ConfigError, match=r"cannot read .*bad\.tar\.gz.*outside"):
        download_all([serve("bad.tar.gz", tar_of({names[0]: b"x"}))], root)
    download_all([serve("absolute.tar.gz", tar_of({names[1]: b"x"}))], root)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in names:
            archive.writestr(name, b"x")
    download_all([serve("bad.zip", buffer.getvalue())], root)
    written = list(tmp_path.rglob("outside"))
    assert written and all(path.is_relative_to(root) for path in written)


def test_files_of_another_split_and_plain_files_are_told_apart(serve, tmp_path, monkeypatch):
    remote = replace(serve("test_32x32.mat", b"no matrix"), split="test")
    other = Remote(address="http://127.0.0.1:1/train_32x32.mat", md5="", split="train")
    monkeypatch.setitem(catalogue.REMOTES, "svhn", (other, remote))
    with pytest.raises(ConfigError, match=r"cannot read .*test_32x32\.mat"):
        load("svhn", "test", tmp_path / "data", download=True, check=False)
    assert (tmp_path / "data" / "test_32x32.mat").read_bytes() == b"no matrix"


def test_every_address_has_a_sum():
    for remotes in catalogue.REMOTES.values():
        for remote in remotes:
            assert remote.address.startswith("http") and len(bytes.fromhex(remote.md5)) == 16
