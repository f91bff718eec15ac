"""Published files: find, verify by checksum, download. Nothing in them is executed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from advnorm._core.errors import ConfigError, Problem
from advnorm._core.progress import show_progress
from advnorm._core.records import require_regular

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class RemoteFile:
    """A file at its official address, with the md5 sum that its authors publish."""

    address: str
    md5: str
    split: str | None = None  # None: the file serves every split


def find_folder(root: Path, folder: str) -> Path:
    """Return the folder of a data set; the user names that folder or its parent."""
    return root / folder if (root / folder).is_dir() else root


def missing_file_problems(title: str, root: Path, folder: str, files: Sequence[str], address: str) -> list[Problem]:
    """Return one problem that lists the files that do not exist in the folder of a data set, or nothing."""
    missing = [name for name in files if not (find_folder(root, folder) / name).exists()]
    if not missing:
        return []
    unpack = "unpack" if _is_archive(address) else "put"
    hint = (
        f"{unpack} {address} there, name the folder that holds {folder}, or use advnorm.data.load(..., download=True) "
        "in Python or advnorm train --download in the shell"
    )
    return [Problem("missing_file", f"{title} is not at {root}: missing {', '.join(missing)}", "root", hint=hint)]


def read_verified(path: Path, md5: str | None) -> bytes:
    """Return the content of a file; raise if its md5 sum is known and differs."""
    with reading(path):
        content = path.read_bytes()
    if md5 is not None and hashlib.md5(content, usedforsecurity=False).hexdigest() != md5:
        raise damaged_file(f"{path} is not the published file (the md5 sum differs)")
    return content


def damaged_file(message: str) -> ConfigError:
    """Return the error for a file that is not the published one."""
    return ConfigError("damaged_file", message, field="root", hint="download it again")


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Scope: an error while a file is parsed becomes an error that names the file."""
    require_regular(path, "root")
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # parsers of foreign formats raise many types
        raise damaged_file(f"cannot read {path}: {error or type(error).__name__}") from None


def download_files(files: Sequence[RemoteFile], root: Path) -> None:
    """Download files into ``root`` and unpack archives; an interrupted download leaves the folder unchanged."""
    root.mkdir(parents=True, exist_ok=True)
    for remote in files:
        with tempfile.TemporaryDirectory(dir=root, prefix=".download-") as scratch:
            name = remote.address.rsplit("/", 1)[-1]
            file, content = Path(scratch) / name, Path(scratch) / "content"
            _download(remote, file)
            content.mkdir()
            if _is_archive(name):
                with reading(file):
                    if name.endswith(".zip"):
                        shutil.unpack_archive(file, content)  # skips names that lead outside the folder
                    else:
                        shutil.unpack_archive(file, content, filter="data")
            else:
                os.replace(file, content / name)
            shutil.copytree(content, root, dirs_exist_ok=True, copy_function=os.replace)


def _is_archive(name: str) -> bool:
    return name.endswith((".tar.gz", ".tgz", ".tar", ".zip"))


def _download(remote: RemoteFile, target: Path) -> None:
    md5 = hashlib.md5(usedforsecurity=False)
    try:
        with (
            urllib.request.urlopen(remote.address, timeout=60) as response,
            target.open("wb") as file,
            show_progress() as display,
        ):
            length = response.headers.get("Content-Length")
            task = display.task(f"{target.name}, MB", int(length) // 10**6 if length else None)
            while chunk := response.read(_CHUNK_BYTES):
                file.write(chunk)
                md5.update(chunk)
                task.advance(len(chunk) / 10**6)
    except OSError as error:
        message, hint = f"cannot download {remote.address}: {error}", "get it by other means into the data folder"
        raise ConfigError("download_failed", message, field="download", hint=hint) from None
    if md5.hexdigest() != remote.md5:
        message = f"{remote.address} is not the published file (the md5 sum differs); nothing was kept"
        raise ConfigError("damaged_file", message, field="download", hint="try again")
