"""Data sets by name."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from advnorm._core.errors import did_you_mean, raise_all
from advnorm._core.registry import Registry
from advnorm.data.cifar import ADDRESS10, ADDRESS100, cifar10, cifar100
from advnorm.data.corruptions import ADDRESS as CIFAR10C_ADDRESS
from advnorm.data.corruptions import cifar10c
from advnorm.data.digits import digits
from advnorm.data.features import features
from advnorm.data.files import MissingFiles, Remote, download_all
from advnorm.data.folders import TINY_ADDRESS, imagefolder, imagenet, imagenette, tiny_imagenet
from advnorm.data.sets import FolderData, ImageData
from advnorm.data.svhn import ADDRESS as SVHN_ADDRESS
from advnorm.data.svhn import MD5 as SVHN_MD5
from advnorm.data.svhn import SPLITS as SVHN_SPLITS
from advnorm.data.svhn import svhn
from advnorm.data.synthetic import synthetic

#: Where ``download=True`` gets a data set from; md5 sums as its authors publish them.
REMOTES: dict[str, tuple[Remote, ...]] = {
    "cifar10": (Remote(address=ADDRESS10, md5="c32a1d4ab5d03f1284b67883e8d87530"),),
    "cifar100": (Remote(address=ADDRESS100, md5="03b5dce01913d631647c71ecec9e9cb8"),),
    "svhn": tuple(
        Remote(address=f"{SVHN_ADDRESS}/{split}_32x32.mat", md5=SVHN_MD5[f"{split}_32x32.mat"], split=split)
        for split in SVHN_SPLITS
    ),
    "tiny_imagenet": (Remote(address=TINY_ADDRESS, md5="90528d7ca1a48142e341f4ef8d21d0de"),),
    "cifar10c": (Remote(address=CIFAR10C_ADDRESS, md5="56bf5dcef84df0e2308c6dcbcbbd8499"),),
}


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """A registered data set: ``read(root, split, **options)``, or ``read(split, **options)`` if it needs no files."""

    read: Callable[..., ImageData | FolderData]
    summary: str
    splits: tuple[str, ...] = ("train", "test")
    needs_root: bool = True
    #: Of the images to train on, where it is the same for everybody: how many, their side, and their classes.
    size: tuple[int, int, int] | None = None

    @property
    def options(self) -> dict[str, inspect.Parameter]:
        """What the reader takes by keyword."""
        parameters = inspect.signature(self.read).parameters.items()
        return {name: parameter for name, parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}


DATASETS: Registry[DataSource] = Registry("data set")
#: The environment variable with the folder of data sets for which none is named.
ENVIRONMENT = "ADVNORM_DATA"


def list_datasets(pattern: str = "*") -> list[str]:
    """Names of the registered data sets that match a shell pattern."""
    return DATASETS.names(pattern)


def load(
    name: str, split: str, root: Path | str | None = None, *, download: bool = False, **options: Any
) -> ImageData | FolderData:
    """One split of a registered data set; ``root`` is the folder of its files, or the one above.

    Without ``root`` the environment variable ``ADVNORM_DATA`` names it.
    ``download=True`` fetches what is missing from the official address into ``root``. The options of each data set
    are in docs/data.md, for example ``load("cifar10c", "test", root, corruption="fog", severity=3)``.
    """
    source = DATASETS.get(name)
    root = root if root is not None else os.environ.get(ENVIRONMENT) or None
    problems = [
        f"unknown option {option!r} of {name}{did_you_mean(option, source.options)}"
        for option in options
        if option not in source.options
    ]
    problems += [
        f"{name} needs the option {option!r}"
        for option, parameter in source.options.items()
        if parameter.default is parameter.empty and option not in options
    ]
    if split not in source.splits:
        problems.append(f"unknown split {split!r} of {name}{did_you_mean(split, source.splits)}")
    if root is None and source.needs_root:
        problems.append(
            f"{name} is read from a folder; name it with --data-dir (in Python: data_dir, or root of load), or in "
            f"the environment variable {ENVIRONMENT}"
        )
    remotes = [remote for remote in REMOTES.get(name, ()) if remote.split in (None, split)]
    if download and source.needs_root and not remotes:
        problems.append(
            f"{name} cannot be downloaded; get it from its authors and name its folder: --data-dir (in Python: root)"
        )
    raise_all(problems, "bad data")

    if root is None or not source.needs_root:
        return source.read(split, **options)
    root = Path(root).expanduser()
    try:
        return source.read(root, split, **options)
    except MissingFiles:
        if not download:
            raise
    download_all(remotes, root)
    return source.read(root, split, **options)


def _whole(name: str, read: Callable[..., tuple[Tensor, Tensor]], num_classes: int) -> Callable[..., ImageData]:
    """A reader of images and labels as a reader of ``ImageData``."""

    @functools.wraps(read)
    def read_whole(*place: Any, **options: Any) -> ImageData:
        images, labels = read(*place, **options)
        return ImageData(name=name, split=place[-1], images=images, labels=labels, num_classes=num_classes)

    return read_whole


for _name, _source in {
    "digits": DataSource(
        read=_whole("digits", digits, 10),
        summary="1,797 handwritten digits, 1×8×8, embedded (scikit-learn)",
        needs_root=False,
    ),
    "synthetic": DataSource(
        read=synthetic, summary="a random pattern per class and noise, made on the spot", needs_root=False
    ),
    "cifar10": DataSource(
        read=_whole("cifar10", cifar10, 10),
        summary="60,000 images, 3×32×32, 10 classes; binary or python files",
        size=(50_000, 32, 10),
    ),
    "cifar100": DataSource(
        read=_whole("cifar100", cifar100, 100),
        summary="60,000 images, 3×32×32, 100 classes; binary or python files",
        size=(50_000, 32, 100),
    ),
    "svhn": DataSource(
        read=_whole("svhn", svhn, 10),
        summary="99,289 house numbers, 3×32×32, and 531,131 extra",
        splits=SVHN_SPLITS,
        size=(73_257, 32, 10),
    ),
    "imagefolder": DataSource(
        read=imagefolder,
        summary="your own images on disk, a folder per class",
        splits=("train", "val", "test"),
    ),
    "imagenet": DataSource(
        read=imagenet,
        summary="1,331,167 images on disk, a folder for each of 1,000 classes",
        splits=("train", "val", "test"),
        size=(1_281_167, 224, 1000),
    ),
    "imagenette": DataSource(
        read=imagenette,
        summary="13,394 images on disk, ten classes of ImageNet",
        splits=("train", "val", "test"),
        size=(9_469, 224, 10),
    ),
    "tiny_imagenet": DataSource(
        read=tiny_imagenet, summary="110,000 images on disk, 3×64×64, 200 classes", size=(100_000, 64, 200)
    ),
    "cifar10c": DataSource(
        read=_whole("cifar10c", cifar10c, 10),
        summary="the test images of CIFAR-10 under 19 corruptions, 5 severities",
        splits=("test",),
    ),
    "features": DataSource(
        read=features, summary="features extracted from a model: D_R, D_NR, D_rand, D_det, D_conflict (paper D)"
    ),
}.items():
    DATASETS.add(_name, _source)
