"""Batches whose content depends on seed and epoch only: not on device, world size, batch size or worker processes.

Our own because torch's samplers and transforms draw from global random state, and a device-resident set needs no
host; torch's DataLoader runs the worker processes.
"""

from __future__ import annotations

import math
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from advnorm._core.errors import ConfigError, Problem, raise_problems, unknown_name
from advnorm._core.seeding import ImageNoise
from advnorm.data.image_data import FolderData, ImageData, resize_crop

AUGMENTS = ("none", "flip", "crop_flip", "crop_flip_edge")


class Batch(NamedTuple):
    """Images in [0, 1], labels, and each image's identity in this epoch: position + epoch · len(data)."""

    x: Tensor
    y: Tensor
    index: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]


class Loader(ABC):
    """The batches of an epoch on one rank.

    batch_size: of all ranks together; rank r of w gets the r-th of w equal parts of each batch. A last, shorter batch
        is divided as evenly as possible; a part may be empty, but every rank takes the same number of steps.
    augment: one of ``AUGMENTS``; drawn for each image from ``ImageNoise(seed, index).fold("augment")``.
    """

    def __init__(
        self,
        data: ImageData | FolderData,
        *,
        batch_size: int,
        seed: int = 0,
        augment: str = "none",
        device: torch.device | str = "cpu",
        rank: int = 0,
        world: int = 1,
        shuffle: bool = True,
        drop_last: bool = True,
        channels_last: bool = False,
    ) -> None:
        problems = [] if augment in AUGMENTS else [unknown_name("augment", augment, AUGMENTS)]
        if world < 1 or not 0 <= rank < world:
            message = f"{{field}} must be in [0, world) for world {world}"
            problems.append(Problem(code="out_of_range", message=message, field="rank", got=rank))
        elif batch_size < 1 or batch_size % world:
            message = f"{{field}} of all ranks together must be a multiple of world {world}"
            problems.append(Problem(code="out_of_range", message=message, field="batch_size", got=batch_size))
        if drop_last and batch_size > len(data):
            message = f"{{field}} {batch_size} is larger than the {len(data)} images, and smaller batches are skipped"
            hint = "use a smaller batch_size (in Python: or drop_last=False)"
            problems.append(Problem(code="conflict", message=message, field="batch_size", hint=hint))
        raise_problems(problems, "bad loader")
        self.data, self.batch_size, self.seed, self.augment = data, batch_size, seed, augment
        self.device = torch.device(device)
        self.rank, self.world = rank, world
        self.shuffle, self.drop_last, self.channels_last = shuffle, drop_last, channels_last
        # A tensor, because CUDA multiplies by 1/255 if the divisor is a Python number, which rounds differently.
        self._white = torch.tensor(255.0, device=self.device)

    @property
    def steps(self) -> int:
        """Batches per epoch."""
        whole, rest = divmod(len(self.data), self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """Return the batches of epoch ``number`` from step ``start`` on; skipped batches cost nothing."""
        if not 0 <= start <= self.steps:
            message = f"{{field}} must be in [0, {self.steps}], the steps of an epoch"
            raise ConfigError("out_of_range", message, field="start", got=start)
        return self._batches(number, start)

    @abstractmethod
    def _batches(self, epoch: int, start: int) -> Iterator[Batch]: ...

    def order(self, epoch: int) -> Tensor:
        """Return the positions in the order of an epoch: a function of (seed, epoch), computed on the CPU."""
        positions = torch.arange(len(self.data))
        if not self.shuffle:
            return positions
        return ImageNoise(self.seed, positions).fold("order").fold(epoch).bits(()).argsort(stable=True)

    def _rank_positions(self, order: Tensor, start: int) -> Iterator[Tensor]:
        """Yield this rank's positions in each batch from step ``start`` on."""
        for first in range(start * self.batch_size, self.steps * self.batch_size, self.batch_size):
            rows = min(self.batch_size, len(order) - first)
            yield order[first + self.rank * rows // self.world : first + (self.rank + 1) * rows // self.world]

    def _to_float(self, images: Tensor) -> Tensor:
        """Convert to float32 in [0, 1] in the requested memory format."""
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        x = images.to(torch.float32, memory_format=layout)
        return x / self._white if images.dtype == torch.uint8 else x


class ResidentLoader(Loader):
    """Batches from a data set that is stored on the device: gather, crop and flip by index, without the host.

    ``crop_flip`` pads with zeros by an eighth of each side (4 pixels for 32), crops to the old size and mirrors half of
    the images. ``crop_flip_edge`` repeats the border pixels instead of zeros.
    """

    data: ImageData

    def __init__(self, data: ImageData, **settings: Any) -> None:
        super().__init__(data, **settings)
        _, self._height, self._width = data.image_shape
        crops = self.augment in ("crop_flip", "crop_flip_edge")
        self._pad = (self._height // 8, self._width // 8) if crops else (0, 0)
        down, right = self._pad
        if self.augment == "crop_flip_edge":  # torch replicates borders of floats only
            rows, columns = (
                torch.arange(-pad, side + pad).clamp(0, side - 1).to(self.device)
                for pad, side in ((down, self._height), (right, self._width))
            )
            padded = data.images.to(self.device)[:, :, rows][:, :, :, columns]
        else:
            padded = torch.nn.functional.pad(data.images.to(self.device), (right, right, down, down))
        self._images = padded.permute(0, 2, 3, 1).contiguous()  # channels last, so that one read gathers a pixel
        self._labels = data.labels.to(self.device)
        self._rows = torch.arange(self._height, device=self.device)
        self._columns = torch.arange(self._width, device=self.device)

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        order = self.order(epoch).to(self.device)
        offset = epoch * len(self.data)
        draws = self._draw_augmentations(offset)
        for positions in self._rank_positions(order, start):
            images = self._gather(positions, *(draw[positions] for draw in draws))
            yield Batch(self._to_float(images), self._labels[positions], positions + offset)

    def _draw_augmentations(self, offset: int) -> tuple[Tensor, ...]:
        """Return for every image of an epoch, ``(N, 1)``: mirrored or not, shift down, shift right.

        Drawn for the whole epoch at once, because a draw is a hundred small kernels and slower than a batch.
        """
        if self.augment == "none":
            return ()
        noise = ImageNoise(self.seed, offset + torch.arange(len(self.data), device=self.device)).fold("augment")
        down, right = (noise.integers(2 * pad + 1, (1,), draw=draw) for pad, draw in zip(self._pad, ("down", "right")))
        return noise.integers(2, (1,), draw="flip").bool(), down, right

    def _gather(self, positions: Tensor, *draws: Tensor) -> Tensor:
        if not draws:
            return self._images[positions].permute(0, 3, 1, 2)
        flip, down, right = draws
        rows = self._rows + down
        columns = torch.where(flip, self._columns.flip(0), self._columns) + right
        return self._images[positions[:, None, None], rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


class WorkerLoader(Loader):
    """Batches of images on disk, decoded by worker processes while the device computes.

    ``crop_flip`` crops 8 to 100 % of the area at a ratio from 3:4 to 4:3, resizes it and mirrors half of the images
    (Szegedy et al. 2015); otherwise the resized center is used. A file that cannot be decoded raises with its batch.
    """

    data: FolderData

    def __init__(self, data: FolderData, *, workers: int | None = None, **settings: Any) -> None:
        super().__init__(data, **settings)
        self.workers = min(4, os.cpu_count() or 1) if workers is None else workers  # more would only wait

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        offset = epoch * len(self.data)
        loader = DataLoader(
            _BatchDecoder(self.data, self.seed, self.augment, offset),
            sampler=self._rank_positions(self.order(epoch), start),  # pyright: ignore[reportArgumentType]
            batch_size=None,  # a worker returns a whole batch
            num_workers=self.workers,
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator(),  # the default draws a seed from torch's global generator
            worker_init_fn=_leave_process_group,
        )
        for batch in _start_workers(loader):  # no variable, because a traceback would keep the workers alive
            if isinstance(batch, ConfigError):
                raise batch
            images, labels, index = (value.to(self.device, non_blocking=True) for value in batch)
            yield Batch(self._to_float(images), labels, index)


#: Signals that schedulers and terminals send to the whole process group.
_GROUP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def _leave_process_group(_worker: int) -> None:
    """Make a worker ignore signals to the group: its parent may need batches until it has written a checkpoint."""
    if not hasattr(os, "setpgid"):
        return
    os.setpgid(0, 0)
    for number in _GROUP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # discards pending signals
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _GROUP_SIGNALS)


def _start_workers(loader: DataLoader) -> Iterator[Any]:
    """Return the iterator of a loader; block signals until the workers are forked and have left the group."""
    if not hasattr(signal, "pthread_sigmask"):
        return iter(loader)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _GROUP_SIGNALS)
    try:
        return iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _BatchDecoder(Dataset):
    """Decode and augment the images of a batch, given their positions.

    An error for a damaged file is returned, not raised: a worker would add its traceback to the message.
    """

    def __init__(self, data: FolderData, seed: int, augment: str, offset: int) -> None:
        self.data, self.seed, self.augment, self.offset = data, seed, augment, offset

    def __getitem__(self, positions: Tensor) -> tuple[Tensor, Tensor, Tensor] | ConfigError:
        try:
            return self._decode(positions)
        except ConfigError as error:
            return error

    def _decode(self, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        data, index = self.data, positions + self.offset
        noise = ImageNoise(self.seed, index).fold("augment")
        flips = noise.integers(2, draw="flip").tolist()
        draws = noise.uniform((_CROP_TRIES, 4), draw="crop").tolist()
        images = torch.empty((len(positions), *data.image_shape), dtype=torch.uint8)
        for row, position in enumerate(positions.tolist()):
            if self.augment in ("crop_flip", "crop_flip_edge"):  # a crop of an image on disk has no border
                image = data.decode(position)
                pixels = resize_crop(image.crop(random_crop_box(*image.size, draws[row])), data.image_shape[1:])
            else:
                pixels = data.center_crop(position)
            images[row] = pixels.flip(2) if self.augment != "none" and flips[row] else pixels
        return images, data.labels[positions], index


_CROP_TRIES = 10


def random_crop_box(width: int, height: int, draws: list[list[float]]) -> tuple[int, int, int, int]:
    """Return the first random box (left, top, right, bottom) that fits, else the largest central one.

    A draw has four numbers in [0, 1): area, logarithm of the ratio, horizontal and vertical position.
    """
    for area, ratio, horizontal, vertical in draws:
        pixels = width * height * (0.08 + 0.92 * area)
        aspect = math.exp(math.log(4 / 3) * (2 * ratio - 1))
        box_width, box_height = round(math.sqrt(pixels * aspect)), round(math.sqrt(pixels / aspect))
        if 0 < box_width <= width and 0 < box_height <= height:
            left = int(horizontal * (width - box_width + 1))
            top = int(vertical * (height - box_height + 1))
            return left, top, left + box_width, top + box_height
    box_width, box_height = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
    left, top = (width - box_width) // 2, (height - box_height) // 2
    return left, top, left + box_width, top + box_height


def make_loader(data: ImageData | FolderData, *, workers: int | None = None, **settings: Any) -> Loader:
    """Return the loader for the kind of data; ``workers`` decode images on disk (default: one per core, at most 4)."""
    if isinstance(data, FolderData):
        return WorkerLoader(data, workers=workers, **settings)
    return ResidentLoader(data, **settings)
