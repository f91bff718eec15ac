"""Images on disk with a folder for each class: your own, ImageNet, Imagenette, and Tiny ImageNet with its own layout.

Our own listing because torchvision is not a dependency and our fingerprints and labels need relative, sorted paths;
Pillow decodes the files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from advnorm._core.errors import ConfigError, Problem, raise_problems
from advnorm._core.records import require_regular
from advnorm.data.image_data import FORMATS, FolderData, size_error
from advnorm.data.published_files import RemoteFile, damaged_file, find_folder, missing_file_problems
from advnorm.data.registry import register_dataset

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff")
TINY_FOLDER = "tiny-imagenet-200"
TINY_ADDRESS = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
SPLITS = ("train", "val", "test")


def missing_images(root: Path, split: str, **_options: Any) -> list[Problem]:
    """Return a problem if the folder of a split has no folders of classes."""
    folder = _split_folder(root, split)
    if _class_names(folder):
        return []
    hint = "name the folder that holds train and val (or test), each with one folder for each class"
    return [Problem(code="missing_file", message=f"no images at {folder.absolute()}", field="root", hint=hint)]


@register_dataset(
    "imagefolder", summary="your own images on disk, one folder for each class", splits=SPLITS, missing=missing_images
)
def read_imagefolder(
    root: Path | str, split: str = "train", *, image_size: int | None = None, resize: int | None = None
) -> FolderData:
    """Read ``root/train/<class>/*`` and ``root/val`` or ``root/test``; classes in alphabetical order of ``root/train``.

    Without ``image_size`` the images keep their size, which must be the same for all. ``resize`` is the shorter side
    before the center crop; the default is 8/7 of ``image_size`` (256 for 224). If the root has no folder of a split but
    folders of classes, these are the test images.
    """
    root = Path(root)
    raise_problems(missing_images(root, split))
    folder = _split_folder(root, split)
    present = _class_names(folder)
    classes = _class_names(root / "train") or present
    if unknown := [name for name in present if name not in set(classes)]:
        message = f"{folder} has classes that {root / 'train'} does not have: {', '.join(unknown[:5])}"
        raise ConfigError("conflict", message, field="root", hint="remove them")
    files = _files_of_classes(root, {name: folder / name for name in present})
    labels = {name: label for label, name in enumerate(classes)}
    labelled = [(file, labels[name]) for name in present for file in files[name]]
    sizes: dict[str, Any] = {"image_size": image_size, "resize": resize}
    if image_size is not None:
        sizes["resize"] = resize or round(image_size * 8 / 7)
    elif resize is not None:
        raise ConfigError("missing_option", "resize needs an image_size", field="image_size", hint="set both")
    else:
        sizes["image_size"] = _native_size([root / file for file, _ in labelled])
    return _folder_data(labelled, name="imagefolder", split=split, root=root, classes=classes, **sizes)


def _native_size(paths: Sequence[Path]) -> tuple[int, int]:
    """Height and width of all images; only the headers of the files are read."""
    from PIL import Image

    first: tuple[int, int] | None = None
    for path in paths:
        require_regular(path, "files", "remove it")
        try:
            with Image.open(path, formats=FORMATS) as image:
                first = first or image.size
                if image.size != first:
                    raise size_error(path, image.size, first)
        except (OSError, SyntaxError):  # a damaged file is reported when it is decoded
            continue
    if first is None:
        raise ConfigError("damaged_file", f"no image can be read, such as {paths[0]}", field="files")
    return first[1], first[0]


def _register_known(name: str, summary: str, folders: Sequence[str], size: tuple[int, int, int]) -> None:
    """Register an image folder whose number of classes is checked, so that another data set cannot replace it."""

    def find(root: Path) -> Path:
        return next((root / folder for folder in folders if (root / folder).is_dir()), root)

    def missing(root: Path, split: str, **_options: Any) -> list[Problem]:
        if problems := missing_images(find(root), "train"):
            hint = f"name the folder that holds train and val of {name}, or the parent of {folders[0]}"
            return [replace(problem, hint=hint) for problem in problems]
        return missing_images(find(root), split)

    def read(root: Path | str, split: str = "train", *, image_size: int = 224, resize: int | None = None) -> FolderData:
        raise_problems(missing(Path(root), split))
        data = read_imagefolder(find(Path(root)), split, image_size=image_size, resize=resize)
        if data.num_classes != size[2]:
            message = f"{data.root} has {data.num_classes} classes, but {name} has {size[2]}"
            hint = f"name the folder that holds {name}, or the parent of {folders[0]}"
            raise ConfigError("conflict", message, field="root", hint=hint)
        return replace(data, name=name)

    register_dataset(name, summary=summary, splits=SPLITS, size=size, missing=missing)(read)


_register_known("imagenet", "1,331,167 images of 1,000 classes", ("imagenet", "ILSVRC2012"), (1_281_167, 224, 1000))
_register_known("imagenette", "13,394 images of 10 classes", ("imagenette2", "imagenette"), (9_469, 224, 10))


def missing_tiny_imagenet(root: Path, split: str, **_options: Any) -> list[Problem]:
    """Return a problem if the class list, the training folder or the annotations are missing."""
    needed = ("wnids.txt", "train" if split == "train" else "val/val_annotations.txt")
    return missing_file_problems("Tiny ImageNet", root, TINY_FOLDER, needed, TINY_ADDRESS)


@register_dataset(
    "tiny_imagenet",
    summary="110,000 images on disk, 3×64×64, 200 classes",
    size=(100_000, 64, 200),
    missing=missing_tiny_imagenet,
    remote_files=(RemoteFile(address=TINY_ADDRESS, md5="90528d7ca1a48142e341f4ef8d21d0de"),),
)
def tiny_imagenet(
    root: Path | str, split: str = "train", *, image_size: int = 64, resize: int | None = None
) -> FolderData:
    """Read ``train/<class>/images/*``, and for the test split ``val/images/*`` with ``val/val_annotations.txt``.

    Classes are in the order of ``wnids.txt``. Images are 64×64 and keep this size by default.
    """
    raise_problems(missing_tiny_imagenet(Path(root), split))
    folder = find_folder(Path(root), TINY_FOLDER)
    classes = tuple((folder / "wnids.txt").read_text(encoding="utf-8").split())
    if split == "train":
        files = _files_of_classes(folder, {name: folder / "train" / name / "images" for name in classes})
        labelled = [(file, label) for label, name in enumerate(classes) for file in files[name]]
    else:
        labelled = _read_annotations(folder / "val" / "val_annotations.txt", classes)
    sizes = {"image_size": image_size, "resize": resize or image_size}
    return _folder_data(labelled, name="tiny_imagenet", split=split, root=folder, classes=classes, **sizes)


def _read_annotations(path: Path, classes: tuple[str, ...]) -> list[tuple[str, int]]:
    """Return files and labels from lines of file name, class and box; the lines must cover the folder exactly."""
    labels = {name: label for label, name in enumerate(classes)}
    present = set(_image_names(path.parent / "images"))
    labelled = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        file, name, *_ = [*line.split("\t"), "", ""]
        if file not in present or name not in labels:
            reason = f"no image {file!r}" if file not in present else f"unknown class {name!r}"
            raise damaged_file(f"{path}, line {number}: {reason}")
        labelled.append((f"val/images/{file}", labels[name]))
    if len(labelled) != len(present):
        raise damaged_file(f"{path} lists {len(labelled)} of {len(present)} images")
    return labelled


def _split_folder(root: Path, split: str) -> Path:
    """Return the folder of a split; ``val`` for a ``test`` without classes, because ImageNet's has no labels.

    A root without splits has test images only.
    """
    folder = root / split
    if split == "test" and not any((root / name).is_dir() for name in SPLITS):
        return root
    return root / "val" if split == "test" and not _class_names(folder) else folder


def _class_names(folder: Path) -> tuple[str, ...]:
    """Return the names of the folders in a folder, in alphabetical order."""
    if not folder.is_dir():
        return ()
    return tuple(sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")))


def _image_names(folder: Path) -> list[str]:
    """Return the names of the images in a folder, in alphabetical order."""
    names = (path.name for path in folder.iterdir()) if folder.is_dir() else ()
    return sorted(name for name in names if name.lower().endswith(SUFFIXES) and not name.startswith("."))


def _files_of_classes(root: Path, folders: Mapping[str, Path]) -> dict[str, list[str]]:
    """Return the images of each class, relative to ``root``; a class without images shows an incomplete copy."""
    files = {
        name: [(folder / image).relative_to(root).as_posix() for image in _image_names(folder)]
        for name, folder in folders.items()
    }
    if empty := [str(folders[name]) for name, images in files.items() if not images]:
        message = f"{len(empty)} classes have no images: {', '.join(empty[:3])}"
        raise ConfigError("empty", message, field="root", hint="copy them again, or remove the class everywhere")
    return files


def _folder_data(labelled: Sequence[tuple[str, int]], **settings: Any) -> FolderData:
    files, labels = zip(*labelled)
    return FolderData(files=files, labels=torch.tensor(labels), **settings)
