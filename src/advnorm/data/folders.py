"""Images on disk, a folder per class: ImageNet, Imagenette and the like, and Tiny ImageNet with its own layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from advnorm._core.errors import ConfigError
from advnorm.data.files import MissingFiles, locate
from advnorm.data.sets import FolderData

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff")
TINY_FOLDER = "tiny-imagenet-200"
TINY_ADDRESS = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"


def imagefolder(
    root: Path | str, split: str = "train", *, image_size: int = 224, resize: int | None = None
) -> FolderData:
    """``root/train/<class>/*`` and ``root/val`` or ``root/test``; classes in the alphabetical order of ``root/train``.

    ``resize`` is the shorter side before the centre is cut out: 8/7 of ``image_size`` unless told (256 for 224).
    """
    root = Path(root)
    folder = root / split
    if split == "test" and not _classes(folder):  # ImageNet's own test images have no labels
        folder = root / "val"
    present = _classes(folder)
    if not present:
        raise ConfigError(
            f"no images at {folder}: it needs a folder per class with images in it; name the folder that holds train "
            "and val (or test), as ImageNet and Imagenette lay them out"
        )
    classes = _classes(root / "train") or present
    unknown = [name for name in present if name not in set(classes)]
    if unknown:
        raise ConfigError(f"{folder} has classes that {root / 'train'} has not: {', '.join(unknown[:5])}; remove them")
    files = _per_class(root, {name: folder / name for name in present})
    labels = {name: label for label, name in enumerate(classes)}
    found = [(file, labels[name]) for name in present for file in files[name]]
    return _data("imagefolder", split, root, found, classes, image_size, resize or round(image_size * 8 / 7))


def imagenet(root: Path | str, split: str = "train", *, image_size: int = 224, resize: int | None = None) -> FolderData:
    """ImageNet-1k as an :func:`imagefolder`, in ``root/imagenet`` or ``root`` itself."""
    return _known("imagenet", ("imagenet", "ILSVRC2012"), 1000, Path(root), split, image_size, resize)


def imagenette(
    root: Path | str, split: str = "train", *, image_size: int = 224, resize: int | None = None
) -> FolderData:
    """Ten classes of ImageNet as an :func:`imagefolder`, in ``root/imagenette2`` or ``root`` itself."""
    return _known("imagenette", ("imagenette2", "imagenette"), 10, Path(root), split, image_size, resize)


def _known(
    name: str, folders: Sequence[str], classes: int, root: Path, split: str, image_size: int, resize: int | None
) -> FolderData:
    """A set that is known by name: another one in its place, with other classes, is refused."""
    place = next((root / folder for folder in folders if (root / folder).is_dir()), root)
    if not _classes(place / "train"):
        raise ConfigError(
            f"{name} is not at {root}: {place / 'train'} has no folders of classes; name the folder that holds train "
            f"and val, or the one above {folders[0]}"
        )
    data = imagefolder(place, split, image_size=image_size, resize=resize)
    if data.num_classes != classes:
        raise ConfigError(
            f"{place} has {data.num_classes} classes and {name} has {classes}; name the folder that holds {name}, or "
            f"the one above {folders[0]}"
        )
    return replace(data, name=name)


def tiny_imagenet(
    root: Path | str, split: str = "train", *, image_size: int = 64, resize: int | None = None
) -> FolderData:
    """``train/<class>/images/*`` and, for test, ``val/images/*`` with ``val/val_annotations.txt``.

    Classes have the order of ``wnids.txt``. Images are 64×64 and stay so unless another ``image_size`` is asked for.
    """
    folder = locate(Path(root), TINY_FOLDER)
    annotations = folder / "val" / "val_annotations.txt"
    needed = [folder / "wnids.txt", folder / "train" if split == "train" else annotations]
    missing = [str(path.relative_to(folder)) for path in needed if not path.exists()]
    if missing:
        raise MissingFiles("Tiny ImageNet", Path(root), missing, TINY_ADDRESS, TINY_FOLDER)
    classes = tuple((folder / "wnids.txt").read_text(encoding="utf-8").split())
    if split == "train":
        files = _per_class(folder, {name: folder / "train" / name / "images" for name in classes})
        found = [(file, label) for label, name in enumerate(classes) for file in files[name]]
    else:
        found = _annotated(annotations, classes)
    return _data("tiny_imagenet", split, folder, found, classes, image_size, resize or image_size)


def _annotated(annotations: Path, classes: tuple[str, ...]) -> list[tuple[str, int]]:
    """Files and labels of a list of file name, class and box, separated by tabs; it must cover the folder exactly."""
    labels = {name: label for label, name in enumerate(classes)}
    present = set(_images(annotations.parent / "images"))
    found = []
    for number, line in enumerate(annotations.read_text(encoding="utf-8").splitlines(), 1):
        file, name, *_ = [*line.split("\t"), "", ""]
        if file not in present or name not in labels:
            what = f"there is no image {file!r}" if file not in present else f"unknown class {name!r}"
            raise ConfigError(f"{annotations}, line {number}: {what}; unpack the archive again")
        found.append((f"val/images/{file}", labels[name]))
    if len(found) != len(present):
        raise ConfigError(f"{annotations} lists {len(found)} of {len(present)} images; unpack the archive again")
    return found


def _classes(folder: Path) -> tuple[str, ...]:
    """Names of the folders in a folder, in alphabetical order."""
    if not folder.is_dir():
        return ()
    return tuple(sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")))


def _images(folder: Path) -> list[str]:
    """Names of the images in a folder, in alphabetical order."""
    names = (path.name for path in folder.iterdir()) if folder.is_dir() else ()
    return sorted(name for name in names if name.lower().endswith(SUFFIXES) and not name.startswith("."))


def _per_class(root: Path, folders: Mapping[str, Path]) -> dict[str, list[str]]:
    """The images of each class, relative to ``root``; a class without any is a sign of an incomplete copy."""
    files = {
        name: [(folder / image).relative_to(root).as_posix() for image in _images(folder)]
        for name, folder in folders.items()
    }
    empty = [str(folders[name]) for name, images in files.items() if not images]
    if empty:
        more = f" and {len(empty) - 3} more" if len(empty) > 3 else ""
        raise ConfigError(f"no images in {', '.join(empty[:3])}{more}; copy them again, or remove the class everywhere")
    return files


def _data(
    name: str,
    split: str,
    root: Path,
    found: Sequence[tuple[str, int]],
    classes: tuple[str, ...],
    image_size: int,
    resize: int,
) -> FolderData:
    return FolderData(
        name=name,
        split=split,
        root=root,
        files=tuple(file for file, _ in found),
        labels=torch.tensor([label for _, label in found], dtype=torch.int64),
        classes=classes,
        image_size=image_size,
        resize=resize,
    )
