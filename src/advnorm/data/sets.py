"""A split of a data set, in memory or on disk, and how to hold a part of it out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from advnorm._core.errors import ConfigError, raise_all
from advnorm._core.records import digest
from advnorm._core.seeding import ImageNoise

if TYPE_CHECKING:
    from PIL.Image import Image

Rows = Tensor | slice | Sequence[int]


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageData:
    """A whole split in memory: images ``(N, C, H, W)`` as bytes or as float32 in [0, 1], and labels ``(N,)``."""

    name: str
    split: str
    images: Tensor
    labels: Tensor
    num_classes: int

    def __post_init__(self) -> None:
        images, labels = self.images, self.labels
        problems = []
        if images.dim() != 4 or not images.numel():
            problems.append(f"images have the shape (N, C, H, W) and are not empty, got {tuple(images.shape)}")
        if images.dtype not in (torch.uint8, torch.float32):
            problems.append(f"images are uint8, or float32 in [0, 1], got {images.dtype}")
        elif images.dtype == torch.float32 and not bool(((images >= 0) & (images <= 1)).all()):
            problems.append("float images lie in [0, 1]; divide them by their largest possible value")
        if labels.dtype != torch.int64 or labels.shape != images.shape[:1]:
            problems.append(
                f"labels are int64, one per image, got {labels.dtype} {tuple(labels.shape)} for {len(images)} images"
            )
        elif len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < self.num_classes:
            problems.append(
                f"labels lie in [0, {self.num_classes}), got {int(labels.min())} to {int(labels.max())}; "
                "check the file and num_classes"
            )
        if images.device.type != "cpu" or labels.device.type != "cpu":
            problems.append("images and labels stay on the CPU; a loader moves them to its device")
        raise_all(problems, f"bad data {self.name}/{self.split}")

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width."""
        channels, height, width = self.images.shape[1:]
        return channels, height, width

    @cached_property
    def fingerprint(self) -> str:
        """A hash of every pixel and label."""
        return digest(self.images, self.labels)

    def pixels(self, rows: Rows = slice(None)) -> Tensor:
        """Images as float32 in [0, 1]."""
        images = self.images[rows]
        return images.float() / 255 if images.dtype == torch.uint8 else images

    def take(self, rows: Rows) -> ImageData:
        """Some of the images, in the given order."""
        return replace(self, images=self.images[rows], labels=self.labels[rows])


@dataclass(frozen=True, kw_only=True, eq=False)
class FolderData:
    """Images on disk, decoded on demand: ``files`` relative to ``root``, and a label for each.

    An image is resized so that its shorter side is ``resize``, then its centre of ``image_size`` squared is cut out.
    """

    name: str
    split: str
    root: Path
    files: tuple[str, ...]
    labels: Tensor
    classes: tuple[str, ...]
    image_size: int
    resize: int

    def __post_init__(self) -> None:
        problems = []
        if not self.files or len(self.files) != len(self.labels):
            problems.append(f"needs one label per file, got {len(self.files)} files and {len(self.labels)} labels")
        if not 1 <= self.image_size <= self.resize:
            problems.append(f"needs 1 <= image_size <= resize, got {self.image_size} and {self.resize}")
        raise_all(problems, f"bad data {self.name}/{self.split}")

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, position: int) -> tuple[Tensor, int]:
        return self.bytes_of(position).float() / 255, int(self.labels[position])

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.classes)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width after resizing."""
        return 3, self.image_size, self.image_size

    @property
    def paths(self) -> list[Path]:
        """Where each image is."""
        return [self.root / file for file in self.files]

    @cached_property
    def fingerprint(self) -> str:
        """A hash of file names, labels and sizes; what is inside the files is not read."""
        return digest(self.files, self.labels, self.classes, self.image_size, self.resize)

    def decoded(self, position: int) -> Image:
        """The image as it is on disk, with three channels; a damaged file is refused by name."""
        from PIL import Image

        path = self.root / self.files[position]
        try:
            with Image.open(path) as image:
                return _eight_bits(image, path).convert("RGB")
        except ConfigError:
            raise
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise ConfigError(f"cannot decode {path}: {error}; replace the file or remove it") from None

    def bytes_of(self, position: int) -> Tensor:
        """The resized centre of an image, ``(3, H, W)`` as bytes."""
        image = self.decoded(position)
        side = min(image.size) * self.image_size / self.resize  # of the centre, in the pixels of the file
        left, top = (image.width - side) / 2, (image.height - side) / 2
        return resized(image, self.image_size, (left, top, left + side, top + side))

    def take(self, rows: Rows) -> FolderData:
        """Some of the images, in the given order."""
        positions = torch.arange(len(self))[rows]
        return replace(self, files=tuple(self.files[p] for p in positions.tolist()), labels=self.labels[positions])

    def in_memory(self) -> ImageData:
        """Every image decoded and resized, for sets that fit."""
        images = torch.stack([self.bytes_of(position) for position in range(len(self))])
        return ImageData(
            name=self.name, split=self.split, images=images, labels=self.labels, num_classes=self.num_classes
        )


def _eight_bits(image: Image, path: Path) -> Image:
    """An image with values of 0 to 255: PIL would clip wider ones. Of 32 bits nobody knows which value is white."""
    import numpy as np
    from PIL import Image as images

    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):  # of 16 bits at most
        return images.fromarray(np.rint(np.asarray(image) / 257).astype(np.uint8))
    if image.mode in ("I", "F"):
        kind = "floating-point" if image.mode == "F" else "32-bit"
        raise ConfigError(f"{path} holds {kind} values without a known white; save it with 8 or 16 bits per channel")
    return image


def resized(image: Image, size: int, box: tuple[float, float, float, float] | None = None) -> Tensor:
    """An image, or a box (left, top, right, bottom) of it, as ``(3, size, size)`` bytes, antialiased.

    Pixels around a box have a part in its border, as if the image were resized first and cut then.
    """
    import numpy as np
    from PIL.Image import Resampling

    pixels = np.array(image.resize((size, size), Resampling.BILINEAR, box=box))
    return torch.from_numpy(pixels).permute(2, 0, 1)


Data = TypeVar("Data", ImageData, FolderData)


def split_held_out(data: Data, held_out: float, seed: int) -> tuple[Data, Data]:
    """Two disjoint parts: what is left, and a share in (0, 1) or a number of images held out.

    Which images are held out depends on ``seed`` only. Each class gives its share, rounded by largest remainders, so
    that no class is off by one image or more.
    """
    total = len(data)
    is_share = isinstance(held_out, float) and 0 < held_out < 1
    count = round(held_out * total) if is_share else held_out
    if isinstance(count, bool) or not isinstance(count, int) or not 0 < count < total:
        raise ConfigError(
            f"held_out is a share in (0, 1) or a number of images from 1 to {total - 1}, got {held_out!r} of {total}"
        )
    sizes = torch.bincount(data.labels, minlength=data.num_classes)
    quotas = sizes * count // total
    remainders = sizes * count % total
    quotas[remainders.argsort(descending=True, stable=True)[: count - int(quotas.sum())]] += 1

    # Every image's place in a random order of its class: sort by class, randomly within it.
    shuffled = ImageNoise(seed, torch.arange(total)).fold("held_out").bits(()).argsort(stable=True)
    by_class = shuffled[data.labels[shuffled].argsort(stable=True)]
    starts = sizes.cumsum(0) - sizes
    place = torch.arange(total) - starts[data.labels[by_class]]
    chosen = torch.zeros(total, dtype=torch.bool)
    chosen[by_class[place < quotas[data.labels[by_class]]]] = True
    positions = torch.arange(total)
    return data.take(positions[~chosen]), replace(data.take(positions[chosen]), split="held_out")
