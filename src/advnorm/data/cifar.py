"""CIFAR-10 and CIFAR-100 from the official files (Krizhevsky 2009)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from advnorm._core.errors import ConfigError, did_you_mean
from advnorm.data.array_pickle import read_array_pickle
from advnorm.data.files import MissingFiles, locate, read_published, reading

PIXELS = 3 * 32 * 32  # the red, green and blue plane
IMAGES = {"train": 50_000, "test": 10_000}
MD5 = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
    "train": "16019d7e3df5f24257cddd939b257f8d",
    "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
    # For CIFAR-100's train.bin and test.bin no sum is published, only the archive's: their sizes are checked.
}
ADDRESS10 = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
ADDRESS100 = "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One of the published forms: its folder, the files of each split, and how a file's content becomes tensors."""

    folder: str
    files: Mapping[str, tuple[str, ...]]
    read: Callable[[bytes], tuple[Tensor, Tensor]]
    record: int | None = None  # bytes per image, where that is fixed

    def missing(self, root: Path, *splits: str) -> list[str]:
        """Files of the splits that are not there."""
        names = [name for split in splits for name in self.files[split]]
        return [name for name in names if not (locate(root, self.folder) / name).is_file()]

    def size(self, split: str) -> int | None:
        """Bytes of each file of a split."""
        return self.record and IMAGES[split] // len(self.files[split]) * self.record


def _read_records(content: bytes, *, label_bytes: int) -> tuple[Tensor, Tensor]:
    """Records of one or two label bytes, the last of which is the fine label, and the pixels."""
    records = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, label_bytes + PIXELS)
    return records[:, label_bytes:], records[:, label_bytes - 1].long()


def _read_pickle(content: bytes, *, labels: bytes) -> tuple[Tensor, Tensor]:
    """The python form: a pickled dictionary of an array and lists, read without running what a pickle can run."""
    batch = read_array_pickle(content)
    return torch.from_numpy(batch[b"data"]).reshape(-1, PIXELS), torch.tensor(batch[labels], dtype=torch.int64)


_BATCHES = {"train": tuple(f"data_batch_{number}" for number in range(1, 6)), "test": ("test_batch",)}
CIFAR10_LAYOUTS = (
    Layout(
        folder="cifar-10-batches-bin",
        files={split: tuple(f"{name}.bin" for name in names) for split, names in _BATCHES.items()},
        read=partial(_read_records, label_bytes=1),
        record=1 + PIXELS,
    ),
    Layout(folder="cifar-10-batches-py", files=_BATCHES, read=partial(_read_pickle, labels=b"labels")),
)
CIFAR100_LAYOUTS = (
    Layout(
        folder="cifar-100-binary",
        files={"train": ("train.bin",), "test": ("test.bin",)},
        read=partial(_read_records, label_bytes=2),
        record=2 + PIXELS,
    ),
    Layout(
        folder="cifar-100-python",
        files={"train": ("train",), "test": ("test",)},
        read=partial(_read_pickle, labels=b"fine_labels"),
    ),
)


def cifar10(root: Path | str, split: str = "train", *, check: bool = True) -> tuple[Tensor, Tensor]:
    """Images ``(N, 3, 32, 32)`` as bytes and labels of one split; ``root`` is the folder of the files or the one above.

    Divide by 255 where the images are used: bytes take a quarter of the memory. ``check`` compares the files with their
    published md5 sums; a short or changed file is refused by name. The binary and the python form are read.
    """
    return _read("CIFAR-10", ADDRESS10, CIFAR10_LAYOUTS, Path(root), split, check)


def cifar100(root: Path | str, split: str = "train", *, check: bool = True) -> tuple[Tensor, Tensor]:
    """As ``cifar10``, with the 100 fine labels."""
    return _read("CIFAR-100", ADDRESS100, CIFAR100_LAYOUTS, Path(root), split, check)


def _read(
    what: str, address: str, layouts: tuple[Layout, ...], root: Path, split: str, check: bool
) -> tuple[Tensor, Tensor]:
    if split not in IMAGES:
        raise ConfigError(f"unknown split {split!r}{did_you_mean(split, IMAGES)}")
    # The layout that is there, or the one of which something is; the binary one when nothing is.
    layout = min(layouts, key=lambda layout: (bool(layout.missing(root, split)), len(layout.missing(root, *IMAGES))))
    if missing := layout.missing(root, split):
        raise MissingFiles(what, root, missing, address, layout.folder)
    parts = []
    for name in layout.files[split]:
        path = locate(root, layout.folder) / name
        content = read_published(path, MD5.get(name) if check else None, size=layout.size(split))
        with reading(path):
            images, labels = layout.read(content)
            if len(images) != len(labels):
                raise ValueError(f"{len(images)} images but {len(labels)} labels")
        parts.append((images, labels))
    images, labels = (torch.cat(tensors) for tensors in zip(*parts))
    return images.reshape(-1, 3, 32, 32), labels
