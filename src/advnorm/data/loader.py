"""Batches whose content depends on seed and epoch only: not on device, world size, batch size or worker processes."""

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

from advnorm._core.errors import ConfigError, did_you_mean, raise_all
from advnorm._core.seeding import ImageNoise
from advnorm.data.sets import FolderData, ImageData, resized

AUGMENTS = ("none", "flip", "crop_flip")


class Batch(NamedTuple):
    """Images in [0, 1], labels, and each image's identity in this epoch: position + epoch · len(data)."""

    x: Tensor
    y: Tensor
    index: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]


class Loader(ABC):
    """The batches of an epoch, as this rank sees them.

    batch_size: of all ranks together; rank r of w gets the r-th of w equal parts of each batch. A last, shorter batch
        is divided as evenly as it goes; a part may be empty, but every rank takes the same number of steps.
    augment: one of ``AUGMENTS``; drawn per image from ``ImageNoise(seed, index).fold("augment")``.
    """

    def __init__(
        self,
        data: ImageData | FolderData,
        *,
        batch_size: int,
        seed: int = 0,
        augment: str = "crop_flip",
        device: torch.device | str = "cpu",
        rank: int = 0,
        world: int = 1,
        shuffle: bool = True,
        drop_last: bool = True,
        channels_last: bool = False,
    ) -> None:
        problems = []
        if augment not in AUGMENTS:
            problems.append(f"unknown augment {augment!r}{did_you_mean(augment, AUGMENTS)}")
        if world < 1 or not 0 <= rank < world:
            problems.append(f"rank lies in [0, world), got rank {rank} of {world}")
        elif batch_size < 1 or batch_size % world:
            problems.append(f"batch_size is for all ranks together, a multiple of world {world}, got {batch_size}")
        if drop_last and batch_size > len(data):
            problems.append(
                f"batch_size {batch_size} is larger than the {len(data)} images, so drop_last leaves no batch; "
                "take a smaller batch_size or drop_last=False"
            )
        raise_all(problems, "bad loader")
        self.data, self.batch_size, self.seed, self.augment = data, batch_size, seed, augment
        self.device = torch.device(device)
        self.rank, self.world = rank, world
        self.shuffle, self.drop_last, self.channels_last = shuffle, drop_last, channels_last
        # Bytes are divided by this tensor: CUDA multiplies by 1/255 when the divisor is a Python number, which rounds
        # differently from the CPU.
        self._white = torch.tensor(255.0, device=self.device)

    @property
    def steps(self) -> int:
        """Batches per epoch."""
        whole, rest = divmod(len(self.data), self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """The batches of epoch ``number`` from step ``start`` on; those before cost nothing."""
        problems = []
        if number < 0:
            problems.append(f"epochs count from 0, got {number}")
        if not 0 <= start <= self.steps:
            problems.append(f"start lies in [0, {self.steps}], the steps of an epoch, got {start}")
        raise_all(problems, "bad epoch")
        return self._batches(number, start)

    @abstractmethod
    def _batches(self, epoch: int, start: int) -> Iterator[Batch]: ...

    def order(self, epoch: int) -> Tensor:
        """Positions in the order of an epoch: a function of (seed, epoch), made on the CPU."""
        positions = torch.arange(len(self.data))
        if not self.shuffle:
            return positions
        return ImageNoise(self.seed, positions).fold("order").fold(epoch).bits(()).argsort(stable=True)

    def _parts(self, order: Tensor, start: int) -> Iterator[Tensor]:
        """This rank's positions in each batch from step ``start`` on."""
        for first in range(start * self.batch_size, self.steps * self.batch_size, self.batch_size):
            rows = min(self.batch_size, len(order) - first)
            yield order[first + self.rank * rows // self.world : first + (self.rank + 1) * rows // self.world]

    def _finished(self, images: Tensor) -> Tensor:
        """Float32 in [0, 1] in the memory format that was asked for."""
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        x = images.to(torch.float32, memory_format=layout)
        return x / self._white if images.dtype == torch.uint8 else x


class ResidentLoader(Loader):
    """Batches from a set that lies on the device as a whole: gather, crop and flip by index, no wait for the host.

    ``crop_flip`` pads with zeros by an eighth of each side (4 pixels of 32), cuts the old size out and mirrors half of
    the images.
    """

    data: ImageData

    def __init__(self, data: ImageData, **settings: Any) -> None:
        super().__init__(data, **settings)
        _, self._height, self._width = data.image_shape
        crops = self.augment == "crop_flip"
        self._pad = (self._height // 8, self._width // 8) if crops else (0, 0)
        down, right = self._pad
        padded = torch.nn.functional.pad(data.images.to(self.device), (right, right, down, down))
        self._images = padded.permute(0, 2, 3, 1).contiguous()  # channels last: a pixel is gathered in one piece
        self._labels = data.labels.to(self.device)
        self._rows = torch.arange(self._height, device=self.device)
        self._columns = torch.arange(self._width, device=self.device)

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        order = self.order(epoch).to(self.device)
        offset = epoch * len(self.data)
        draws = self._draws(offset)
        for positions in self._parts(order, start):
            images = self._gathered(positions, *(draw[positions] for draw in draws))
            yield Batch(self._finished(images), self._labels[positions], positions + offset)

    def _draws(self, offset: int) -> tuple[Tensor, ...]:
        """Of every image in an epoch, ``(N, 1)``: mirrored or not, rows down, columns to the right.

        For the whole epoch at once: a draw is a hundred small kernels, which would take longer than a batch.
        """
        if self.augment == "none":
            return ()
        noise = ImageNoise(self.seed, offset + torch.arange(len(self.data), device=self.device)).fold("augment")
        down, right = (noise.integers(2 * pad + 1, (1,), draw=draw) for pad, draw in zip(self._pad, ("down", "right")))
        return noise.integers(2, (1,), draw="flip").bool(), down, right

    def _gathered(self, positions: Tensor, *draws: Tensor) -> Tensor:
        if not draws:
            return self._images[positions].permute(0, 3, 1, 2)
        flip, down, right = draws
        rows = self._rows + down
        columns = torch.where(flip, self._columns.flip(0), self._columns) + right
        return self._images[positions[:, None, None], rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


class WorkerLoader(Loader):
    """Batches of images on disk, decoded by worker processes while the device computes.

    ``crop_flip`` cuts out 8 to 100 % of the area in a ratio from 3:4 to 4:3, resizes it and mirrors half of the images
    (Szegedy et al. 2015); otherwise the resized centre of an image is taken. A file that cannot be decoded is refused
    by name when its batch comes.
    """

    data: FolderData

    def __init__(self, data: FolderData, *, workers: int | None = None, **settings: Any) -> None:
        super().__init__(data, **settings)
        if workers is not None and workers < 0:
            raise ConfigError(f"workers is the number of processes, 0 for none, got {workers}")
        self.workers = default_workers() if workers is None else workers

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        offset = epoch * len(self.data)
        loader = DataLoader(
            _Decoder(self.data, self.seed, self.augment, offset),
            sampler=self._parts(self.order(epoch), start),  # pyright: ignore[reportArgumentType]
            batch_size=None,  # a worker makes a whole batch
            num_workers=self.workers,
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator(),  # else it draws a seed from torch's global generator
            worker_init_fn=_leave_group,
        )
        for batch in _started(loader):  # in no variable: an error's traceback would keep the workers
            if isinstance(batch, ConfigError):
                raise batch
            images, labels, index = (value.to(self.device, non_blocking=True) for value in batch)
            yield Batch(self._finished(images), labels, index)


def default_workers() -> int:
    """Processes that decode files: a process more than there are cores only waits."""
    return min(4, os.cpu_count() or 1)


#: Schedulers and terminals send these to the whole process group.
_TO_GROUPS = (signal.SIGTERM, signal.SIGINT)


def _leave_group(_worker: int) -> None:
    """A worker ends when the process it works for says so, which may still need batches until its checkpoint."""
    if not hasattr(os, "setpgid"):
        return
    os.setpgid(0, 0)
    for number in _TO_GROUPS:
        signal.signal(number, signal.SIG_IGN)  # drops what came before
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _TO_GROUPS)


def _started(loader: DataLoader) -> Iterator[Any]:
    """The batches of a loader; signals wait until its workers are forked, which have not left the group yet."""
    if not hasattr(signal, "pthread_sigmask"):
        return iter(loader)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _TO_GROUPS)
    try:
        return iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Decoder(Dataset):
    """Decoded and augmented images, by the positions of a batch.

    A damaged file is returned as its error: what a worker process raises arrives with the worker's traceback in it.
    """

    def __init__(self, data: FolderData, seed: int, augment: str, offset: int) -> None:
        self.data, self.seed, self.augment, self.offset = data, seed, augment, offset

    def __getitem__(self, positions: Tensor) -> tuple[Tensor, Tensor, Tensor] | ConfigError:
        try:
            return self._batch(positions)
        except ConfigError as error:
            return error

    def _batch(self, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        data, index = self.data, positions + self.offset
        noise = ImageNoise(self.seed, index).fold("augment")
        flips = noise.integers(2, draw="flip").tolist()
        draws = noise.uniform((_CROP_TRIES, 4), draw="crop").tolist()
        images = torch.empty((len(positions), *data.image_shape), dtype=torch.uint8)
        for row, position in enumerate(positions.tolist()):
            if self.augment == "crop_flip":
                image = data.decoded(position)
                pixels = resized(image.crop(random_box(*image.size, draws[row])), data.image_size)
            else:
                pixels = data.bytes_of(position)
            images[row] = pixels.flip(2) if self.augment != "none" and flips[row] else pixels
        return images, data.labels[positions], index


_CROP_TRIES = 10


def random_box(width: int, height: int, draws: list[list[float]]) -> tuple[int, int, int, int]:
    """The first box that fits among random ones (left, top, right, bottom); else the largest central one.

    A draw has four numbers in [0, 1): area, logarithm of the ratio, horizontal and vertical place.
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
    """The loader for this kind of data; ``workers`` serve images on disk only, by default one per core, 4 at most."""
    if isinstance(data, FolderData):
        return WorkerLoader(data, workers=workers, **settings)
    return ResidentLoader(data, **settings)
