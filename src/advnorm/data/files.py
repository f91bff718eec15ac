"""Published files: found, compared with their checksum, fetched whole or not at all. Nothing in them is executed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tarfile
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from advnorm._core.errors import ConfigError

_PIECE = 1 << 20


class MissingFiles(ConfigError):
    """Data that is not where the user said it is; may be cured by a download."""

    def __init__(self, what: str, root: Path, missing: Sequence[str], address: str, folder: str) -> None:
        unpack = "unpack" if _is_archive(address) else "put"
        super().__init__(
            f"{what} is not at {root}: missing {', '.join(missing)}; {unpack} {address} there, name the folder that "
            f"holds {folder}, or use load(..., download=True)"
        )


@dataclass(frozen=True, kw_only=True)
class Remote:
    """A file at its official address, with the published md5 sum; ``split`` where it serves one split only."""

    address: str
    md5: str
    split: str | None = None


def locate(root: Path, folder: str) -> Path:
    """The folder of a data set, for a user who names it or the one above."""
    return root / folder if (root / folder).is_dir() else root


def read_published(path: Path, md5: str | None, *, size: int | None = None) -> bytes:
    """The content of a file; refused by name where its size or md5 sum is known and differs."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    if size is not None and len(content) != size:
        raise ConfigError(f"{path} has {len(content):,} bytes instead of {size:,}; get it again")
    if md5 is not None and hashlib.md5(content, usedforsecurity=False).hexdigest() != md5:
        raise ConfigError(f"{path} is not the published file (md5 differs); get it again")
    return content


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Scope: whatever goes wrong while a file is parsed becomes an error that names it."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # parsers of foreign formats fail in many ways
        raise ConfigError(f"cannot read {path}: {error or type(error).__name__}; get it again") from None


def download_all(remotes: Sequence[Remote], root: Path) -> None:
    """Fetch files into ``root`` and unpack archives; an interrupted download leaves the folder as it was."""
    root.mkdir(parents=True, exist_ok=True)
    for remote in remotes:
        with tempfile.TemporaryDirectory(dir=root, prefix=".download-") as scratch:
            name = remote.address.rsplit("/", 1)[-1]
            file, content = Path(scratch) / name, Path(scratch) / "content"
            _fetch(remote, file)
            content.mkdir()
            if _is_archive(name):
                with reading(file):
                    _unpack(file, content)
            else:
                os.replace(file, content / name)
            shutil.copytree(content, root, dirs_exist_ok=True, copy_function=os.replace)


def _is_archive(name: str) -> bool:
    return name.endswith((".tar.gz", ".tgz", ".tar", ".zip"))


def _unpack(archive: Path, target: Path) -> None:
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as file:  # leaves out drives, leading slashes and ".." by itself
            file.extractall(target)
    else:
        with tarfile.open(archive) as file:
            file.extractall(target, filter="data")


def _fetch(remote: Remote, target: Path) -> None:
    from rich.progress import DownloadColumn, Progress

    md5 = hashlib.md5(usedforsecurity=False)
    try:
        with (
            urllib.request.urlopen(remote.address, timeout=60) as response,
            target.open("wb") as file,
            Progress(*Progress.get_default_columns(), DownloadColumn(), transient=True) as progress,
        ):
            length = response.headers.get("Content-Length")
            task = progress.add_task(target.name, total=int(length) if length else None)
            while piece := response.read(_PIECE):
                file.write(piece)
                md5.update(piece)
                progress.advance(task, len(piece))
    except (OSError, urllib.error.URLError) as error:
        raise ConfigError(
            f"cannot fetch {remote.address}: {error}; get it by other means and unpack it in the data folder"
        ) from None
    if md5.hexdigest() != remote.md5:
        raise ConfigError(
            f"{remote.address} did not give the published file (md5 differs), nothing was kept; try again"
        )
