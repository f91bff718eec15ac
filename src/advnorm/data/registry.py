"""The registry of data sets: what each one is called, what it needs, and ``load``."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from torch import Tensor

from advnorm._core.errors import ConfigError, Problem, raise_problems, unknown_name
from advnorm._core.registry import Registry, keywords
from advnorm._core.settings import Setting, convert, convert_options
from advnorm.data.image_data import FolderData, ImageData, balanced_subset
from advnorm.data.published_files import RemoteFile, download_files

#: The environment variable that names the data folder if the caller names none.
ENVIRONMENT = "ADVNORM_DATA"


@dataclass(frozen=True)
class DataSource:
    """A registered data set: ``read(root, split, **options)``, or ``read(split, **options)`` if it needs no files.

    The reader returns ``ImageData`` or ``FolderData``, or images and labels of ``num_classes`` classes.
    """

    read: Callable[..., ImageData | FolderData | tuple[Tensor, Tensor]]
    summary: str
    num_classes: int = 0
    splits: tuple[str, ...] = ("train", "test")
    needs_root: bool = True
    #: Number of training images, side in pixels and number of classes, if they are the same for every user.
    size: tuple[int, int, int] | None = None
    #: ``missing(root, split, **options)`` returns a problem for missing files; it reads no images.
    missing: Callable[..., list[Problem]] | None = None
    #: What ``load(..., download=True)`` fetches.
    remote_files: tuple[RemoteFile, ...] = ()

    @property
    def options(self) -> Mapping[str, inspect.Parameter]:
        """The keyword-only parameters of the reader, and ``limit``."""
        return {**keywords(self.read), **({"limit": _LIMIT} if "train" in self.splits else {})}


_LIMIT = inspect.Parameter(
    "limit",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[int | None, Setting("Number of training images, the same of each class.", "[1, inf)")],
)


DATASETS: Registry[DataSource] = Registry("data set", DataSource)
register_dataset = DATASETS.register
"""Decorator that registers a reader: ``@register_dataset(name, summary="…", needs_root=False)``.

The reader is ``read(root, split, *, options)``, or ``read(split, *, options)`` with ``needs_root=False``. It returns
:class:`ImageData` or :class:`FolderData`, or images and labels if ``num_classes`` is given. ``summary`` is required.
``splits`` (default: train, test), ``size``, ``missing`` and ``remote_files`` are optional.
"""


def list_datasets(pattern: str = "*") -> list[str]:
    """Return the names of the registered data sets that match a shell pattern."""
    return DATASETS.names(pattern)


def resolve_source(name: Path | str, root: Path | str | None = None) -> tuple[str, Path | str | None]:
    """Return the registered name and the folder or file that a text stands for.

    The text is a registered name, ``NAME:FOLDER``, a folder of images, or a .npz or .safetensors file. A folder without
    a slash in its name must exist.
    """
    text: str = str(name) if isinstance(name, Path) else convert("data", str, name)
    known, colon, folder = text.partition(":")
    if text in DATASETS:
        return text, root
    if colon and known in DATASETS:
        return known, folder or root
    if Path(text).suffix in (".npz", ".safetensors"):
        return "arrays", text
    if "/" in text or Path(text).is_dir():
        return "imagefolder", text
    problem = unknown_name("data set", text, DATASETS, field="data")
    hint = "or give NAME:FOLDER, a folder of images (./FOLDER), or a .npz or .safetensors file"
    raise ConfigError.listing([replace(problem, hint=hint)])


def data_problems(name: Path | str, split: str, root: Path | str | None = None, **options: Any) -> list[Problem]:
    """Return why ``load`` with the same arguments would fail: wrong arguments, missing files. Reads no images."""
    name, root = resolve_source(name, root)
    source = DATASETS.get(name)
    problems = _argument_problems(name, source, split, root, options)
    folder = _data_folder(root)
    if not problems and source.missing is not None and folder is not None:
        problems = source.missing(folder, split, **_reader_options(options))
    return problems


def load(
    name: Path | str, split: str, root: Path | str | None = None, *, download: bool = False, **options: Any
) -> ImageData | FolderData:
    """Read one split of a registered data set; ``root`` is the folder of its files or the parent of that folder.

    ``name`` may also be ``NAME:FOLDER``, a folder of images, or a .npz or .safetensors file; see
    :func:`resolve_source`. ``limit`` takes some training images of every data set, the same number of each class.
    Without ``root`` the environment variable ``ADVNORM_DATA`` names the folder. ``download=True`` fetches missing files
    from the official address into ``root``. docs/reference/data_sets.md lists the options of each data set, for example
    ``load("cifar10c", "test", root, corruption="fog", severity=3)``.
    """
    name, root = resolve_source(name, root)
    source = DATASETS.get(name)
    problems = _argument_problems(name, source, split, root, options)
    remote_files = [file for file in source.remote_files if file.split in (None, split)]
    if download and source.needs_root and not remote_files:
        message, hint = f"{name} cannot be downloaded", "get it from its authors and name its folder with --data-dir"
        problems.append(Problem(code="not_supported", message=message, field="download", hint=hint))
    raise_problems(problems, "bad data")
    folder, limit, options = _data_folder(root), options.get("limit"), _reader_options(options)
    if download and folder is not None and source.missing is not None and source.missing(folder, split, **options):
        download_files(remote_files, folder)
    data = source.read(*((folder, split) if source.needs_root else (split,)), **options)
    if isinstance(data, tuple):
        data = ImageData(name=name, split=split, images=data[0], labels=data[1], num_classes=source.num_classes)
    return data if limit is None or split != "train" else balanced_subset(data, limit)  # pyright: ignore[reportArgumentType]


def _reader_options(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "limit"}


def _data_folder(root: Path | str | None) -> Path | None:
    root = root if root is not None else os.environ.get(ENVIRONMENT) or None
    return None if root is None else Path(root).expanduser()


def _argument_problems(
    name: str, source: DataSource, split: str, root: Path | str | None, options: Mapping[str, Any]
) -> list[Problem]:
    problems = convert_options("", source.options, options)[1]
    problems += [
        Problem(code="missing_option", message=f"{name} needs the option {option!r}", field=option)
        for option, parameter in source.options.items()
        if parameter.default is parameter.empty and option not in options
    ]
    if split not in source.splits:
        problems.append(unknown_name(f"split of {name}", split, source.splits, field="split"))
    if source.needs_root and _data_folder(root) is None:
        message = f"{name} is read from a folder"
        hint = f"name it with --data-dir (in Python: data_dir, or root of load), or in the environment: {ENVIRONMENT}"
        problems.append(Problem(code="missing_folder", message=message, field="root", hint=hint))
    return problems
