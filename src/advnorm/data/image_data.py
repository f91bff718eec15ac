"""One split of a data set, in memory or on disk, and the split into training and held-out images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from advnorm._core.errors import ConfigError, Description, Problem, raise_problems
from advnorm._core.records import digest, require_regular
from advnorm._core.seeding import ImageNoise
from advnorm._core.tensors import dense_problems, pixel_conversion

if TYPE_CHECKING:
    from PIL.Image import Image

Rows = Tensor | slice | Sequence[int]
#: Formats that are decoded, whatever a file is called. Pillow would run Ghostscript for PostScript in a .png file.
FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "PPM", "TIFF")


def has_channels_last(shape: Sequence[int]) -> bool:
    """Return whether a shape is ``(N, H, W, C)``, with one or three channels."""
    return len(shape) == 4 and shape[-1] in (1, 3) and shape[1] not in (1, 3)


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
        raise_problems(dense_problems(images=images, labels=labels), f"bad data {self.name}/{self.split}")
        problems: list[Problem] = []

        def report(code: str, field: str, message: str, got: object, hint: str = "") -> None:
            problems.append(Problem(code=code, message=f"{{field}} must {message}", field=field, got=got, hint=hint))

        if images.dim() != 4 or not images.numel() or has_channels_last(images.shape):
            hint = "move the channels: images.movedim(-1, 1)" if has_channels_last(images.shape) else ""
            report("wrong_shape", "images", "have shape (N, C, H, W) and not be empty", tuple(images.shape), hint)
        if images.dtype not in (torch.uint8, torch.float32):
            fix = f"convert them with {pixel_conversion(images)}"
            report("wrong_dtype", "images", "be uint8, or float32 in [0, 1]", Description(images.dtype), fix)
        elif images.dtype == torch.float32 and not bool(((images >= 0) & (images <= 1)).all()):
            got = Description(f"values from {float(images.min()):g} to {float(images.max()):g}")
            hint = "divide by the largest possible value"
            if not bool(images.isfinite().all()):
                hint = "remove images with NaN or infinite values"
            elif bool((images < 0).any()):
                hint = "give the pixels; input normalization belongs inside the model (its mean and std)"
            report("out_of_range", "images", "lie in [0, 1]", got, hint)
        if labels.dtype != torch.int64 or labels.shape != images.shape[:1]:
            got = Description(f"{labels.dtype} of shape {tuple(labels.shape)} for {len(images)} images")
            fix = "give classes as integers: y.astype('int64') or y.long()"
            if labels.shape[:1] != images.shape[:1]:
                fix = "give each image a label"
            elif labels.dim() == 2:  # the largest value of a single column is always the first
                fix = "use " + ("y.argmax(1) for one-hot labels" if labels.shape[1] > 1 else "y[:, 0]")
            report("wrong_shape", "labels", "be int64, one for each image", got, fix)
        elif len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < self.num_classes:
            got = Description(f"{int(labels.min())} to {int(labels.max())}")
            report("out_of_range", "labels", f"lie in [0, {self.num_classes})", got, "check the file and num_classes")
        if images.is_cuda or labels.is_cuda:
            report("wrong_device", "images", "be on the CPU, and so must labels", images.device, "a loader moves them")
        raise_problems(problems, f"bad data {self.name}/{self.split}")

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
        """Return images as float32 in [0, 1]."""
        images = self.images[rows]
        return images.float() / 255 if images.dtype == torch.uint8 else images

    def in_memory(self) -> ImageData:
        """Return the data itself, as :meth:`FolderData.in_memory` does for images on disk."""
        return self

    def take(self, rows: Rows) -> ImageData:
        """Return some of the images, in the given order."""
        return replace(self, images=self.images[rows], labels=self.labels[rows])


@dataclass(frozen=True, kw_only=True, eq=False)
class FolderData:
    """Images on disk, decoded on demand: ``files`` relative to ``root``, and a label for each.

    An image is resized so that its shorter side is ``resize``; then the center of ``image_size`` squared is cropped.
    Without ``resize`` the images have the ``image_size`` (height, width) and are not changed.
    """

    name: str
    split: str
    root: Path
    files: tuple[str, ...]
    labels: Tensor
    classes: tuple[str, ...]
    image_size: int | tuple[int, int]
    resize: int | None

    def __post_init__(self) -> None:
        if self.resize is not None and not (isinstance(self.image_size, int) and 1 <= self.image_size <= self.resize):
            message = f"{{field}} must be from 1 to resize ({self.resize})"
            raise ConfigError("out_of_range", message, field="image_size", got=self.image_size)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, position: int) -> tuple[Tensor, int]:
        return self.center_crop(position).float() / 255, int(self.labels[position])

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.classes)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width after resizing."""
        size = self.image_size
        return (3, size, size) if isinstance(size, int) else (3, *size)

    @property
    def preparation(self) -> str:
        """What happens to the images, for a log."""
        size = self.image_size
        return "native size" if self.resize is None else f"shorter side resized to {self.resize}, center of {size}"

    @cached_property
    def fingerprint(self) -> str:
        """A hash of file names, labels and sizes; it does not cover the content of the files."""
        return digest(self.files, self.labels, self.classes, self.image_size, self.resize)

    def decode(self, position: int) -> Image:
        """Return the image on disk, with three channels; raise if the file is damaged."""
        from PIL import Image

        path = self.root / self.files[position]
        try:
            require_regular(path, "files", "remove it")
            with Image.open(path, formats=FORMATS) as image:
                if image.width * image.height > (Image.MAX_IMAGE_PIXELS or math.inf):
                    raise ValueError(f"{image.width} x {image.height} pixels are more than {Image.MAX_IMAGE_PIXELS}")
                return _to_eight_bits(image, path).convert("RGB")
        except ConfigError:
            raise
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            message, hint = f"cannot decode {path}: {error}", "replace the file or remove it"
            raise ConfigError("damaged_file", message, field="files", hint=hint) from None

    def center_crop(self, position: int) -> Tensor:
        """Return the resized center of an image, ``(3, H, W)`` as bytes."""
        image, (_, height, width) = self.decode(position), self.image_shape
        if self.resize is None:
            if image.size != (width, height):
                raise size_error(self.root / self.files[position], image.size, (width, height))
            return resize_crop(image, (height, width))
        side = min(image.size) * height / self.resize  # of the center, in pixels of the file
        left, top = (image.width - side) / 2, (image.height - side) / 2
        return resize_crop(image, (height, width), (left, top, left + side, top + side))

    def take(self, rows: Rows) -> FolderData:
        """Return some of the images, in the given order."""
        positions = torch.arange(len(self))[rows]
        return replace(self, files=tuple(self.files[p] for p in positions.tolist()), labels=self.labels[positions])

    def in_memory(self) -> ImageData:
        """Decode and resize every image, for sets that fit into memory."""
        images = torch.stack([self.center_crop(position) for position in range(len(self))])
        return ImageData(
            name=self.name, split=self.split, images=images, labels=self.labels, num_classes=self.num_classes
        )


def _to_eight_bits(image: Image, path: Path) -> Image:
    """Scale a 16-bit image to values from 0 to 255, where Pillow would clip. The white of 32-bit images is unknown."""
    import numpy as np
    from PIL import Image as images

    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):  # at most 16 bits
        return images.fromarray(np.rint(np.asarray(image) / 257).astype(np.uint8))
    if image.mode in ("I", "F"):
        message, hint = f"{path} holds 32-bit values without a known white", "save it with 8 or 16 bits per channel"
        raise ConfigError("not_supported", message, field="files", hint=hint)
    return image


def size_error(path: Path, size: tuple[int, int], others: tuple[int, int]) -> ConfigError:
    """The error for an image of another size (width, height) than the others."""
    message = f"the images have different sizes: {path} has {size[0]}×{size[1]} pixels, others have"
    message += f" {others[0]}×{others[1]}"
    hint = "set image_size to the side of the squares that they are resized to (data.image_size=64, --image-size 64)"
    return ConfigError("conflict", message, field="image_size", hint=hint)


def resize_crop(image: Image, size: tuple[int, int], box: tuple[float, float, float, float] | None = None) -> Tensor:
    """Return an image, or a box (left, top, right, bottom) of it, as ``(3, *size)`` bytes, antialiased.

    Pixels around a box contribute to its border, as if the image were resized before the crop.
    """
    import numpy as np
    from PIL.Image import Resampling

    pixels = np.array(image.resize((size[1], size[0]), Resampling.BILINEAR, box=box))
    return torch.from_numpy(pixels).permute(2, 0, 1)


Data = TypeVar("Data", ImageData, FolderData)


def balanced_subset(data: Data, limit: int) -> Data:
    """Return ``limit`` images in their order, the same number of each class as far as the classes have them.

    Always the same images, so that runs with other seeds train on the same data.
    """
    if limit >= len(data):
        return data
    by_class, rank = _shuffle_classes(data, ImageNoise(0, torch.arange(len(data))).fold("limit"))
    return data.take(by_class[rank.argsort(stable=True)[:limit]].sort().values)


def split_held_out(data: Data, held_out: float, seed: int) -> tuple[Data, Data]:
    """Return two disjoint parts: the remaining images, and the held-out ones, a share in (0, 1) or a number of images.

    The choice depends on ``seed`` only. Each class contributes its share, rounded by largest remainders, so that every
    class is less than one image away from its exact share.
    """
    total = len(data)
    is_share = isinstance(held_out, float) and 0 < held_out < 1
    count = round(held_out * total) if is_share else held_out
    if isinstance(count, bool) or not isinstance(count, int) or not 0 < count < total:
        message = f"{{field}} must be a share in (0, 1) or a number of images from 1 to {total - 1}"
        got = Description(f"{held_out}, {count} of {total} images") if is_share else held_out
        raise ConfigError("out_of_range", message, field="held_out", got=got)
    sizes = torch.bincount(data.labels, minlength=data.num_classes)
    quotas = sizes * count // total
    remainders = sizes * count % total
    quotas[remainders.argsort(descending=True, stable=True)[: count - int(quotas.sum())]] += 1
    by_class, rank = _shuffle_classes(data, ImageNoise(seed, torch.arange(total)).fold("held_out"))
    chosen = torch.zeros(total, dtype=torch.bool)
    chosen[by_class[rank < quotas[data.labels[by_class]]]] = True
    positions = torch.arange(total)
    return data.take(positions[~chosen]), replace(data.take(positions[chosen]), split="held_out")


def _shuffle_classes(data: ImageData | FolderData, noise: ImageNoise) -> tuple[Tensor, Tensor]:
    """Return the positions sorted by class, in random order within a class, and the rank of each within its class."""
    shuffled = noise.bits(()).argsort(stable=True)
    by_class = shuffled[data.labels[shuffled].argsort(stable=True)]
    sizes = torch.bincount(data.labels, minlength=data.num_classes)
    return by_class, torch.arange(len(data)) - (sizes.cumsum(0) - sizes)[data.labels[by_class]]
