"""CIFAR-10 and CIFAR-100 from the official files (Krizhevsky 2009).

Our own reader because torchvision executes the pickles, decodes image by image and ignores the binary version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from advnorm._core.errors import Problem, raise_problems, unknown_name
from advnorm.data.published_files import RemoteFile, find_folder, missing_file_problems, read_verified, reading
from advnorm.data.registry import register_dataset
from advnorm.data.restricted_pickle import unpickle_byte_arrays

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
    # CIFAR-100's train.bin and test.bin have no published sum, only their archive has; their images are counted.
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A published version of a data set: its folder, the files of each split, and the parser of a file."""

    folder: str
    files: Mapping[str, tuple[str, ...]]
    parse: Callable[[bytes], tuple[Tensor, Tensor]]

    def missing(self, root: Path, *splits: str) -> list[str]:
        """Return the files of the splits that do not exist."""
        names = [name for split in splits for name in self.files[split]]
        return [name for name in names if not (find_folder(root, self.folder) / name).is_file()]


@dataclass(frozen=True, kw_only=True)
class CIFAR:
    """CIFAR-10 or CIFAR-100."""

    title: str
    address: str
    layouts: tuple[Layout, ...]

    def layout(self, root: Path, split: str) -> Layout:
        """Return the complete layout, else the most complete one; the binary one if no file exists."""
        return min(self.layouts, key=lambda one: (bool(one.missing(root, split)), len(one.missing(root, *IMAGES))))

    def missing(self, root: Path, split: str, **_options: Any) -> list[Problem]:
        """Return a problem if files of a split are missing."""
        layout = self.layout(root, split)
        return missing_file_problems(self.title, root, layout.folder, layout.files[split], self.address)

    def read(self, root: Path, split: str, check: bool) -> tuple[Tensor, Tensor]:
        """Return images and labels of a split."""
        if split not in IMAGES:
            raise_problems([unknown_name("split", split, IMAGES)])
        raise_problems(self.missing(root, split))
        layout, parts = self.layout(root, split), []
        count = IMAGES[split] // len(layout.files[split])
        for name in layout.files[split]:
            path = find_folder(root, layout.folder) / name
            content = read_verified(path, MD5.get(name) if check else None)
            with reading(path):
                images, labels = layout.parse(content)
                if not len(images) == len(labels) == count:
                    raise ValueError(f"it holds {len(images)} images but {len(labels)} labels, instead of {count}")
            parts.append((images, labels))
        images, labels = (torch.cat(tensors) for tensors in zip(*parts))
        return images.reshape(-1, 3, 32, 32), labels


def _parse_binary(content: bytes, *, label_bytes: int) -> tuple[Tensor, Tensor]:
    """Parse records of one or two label bytes, of which the last is the fine label, followed by the pixels."""
    records = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, label_bytes + PIXELS)
    return records[:, label_bytes:], records[:, label_bytes - 1].long()


def _parse_pickle(content: bytes, *, labels: bytes) -> tuple[Tensor, Tensor]:
    batch = unpickle_byte_arrays(content)
    return torch.from_numpy(batch[b"data"]).reshape(-1, PIXELS), torch.tensor(batch[labels], dtype=torch.int64)


_BATCHES = {"train": tuple(f"data_batch_{number}" for number in range(1, 6)), "test": ("test_batch",)}
CIFAR10 = CIFAR(
    title="CIFAR-10",
    address="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    layouts=(
        Layout(
            folder="cifar-10-batches-bin",
            files={split: tuple(f"{name}.bin" for name in names) for split, names in _BATCHES.items()},
            parse=partial(_parse_binary, label_bytes=1),
        ),
        Layout(folder="cifar-10-batches-py", files=_BATCHES, parse=partial(_parse_pickle, labels=b"labels")),
    ),
)
CIFAR100 = CIFAR(
    title="CIFAR-100",
    address="https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
    layouts=(
        Layout(
            folder="cifar-100-binary",
            files={"train": ("train.bin",), "test": ("test.bin",)},
            parse=partial(_parse_binary, label_bytes=2),
        ),
        Layout(
            folder="cifar-100-python",
            files={"train": ("train",), "test": ("test",)},
            parse=partial(_parse_pickle, labels=b"fine_labels"),
        ),
    ),
)


@register_dataset(
    "cifar10",
    summary="60,000 images, 3×32×32, 10 classes; binary or Python files",
    num_classes=10,
    size=(50_000, 32, 10),
    missing=CIFAR10.missing,
    remote_files=(RemoteFile(address=CIFAR10.address, md5="c32a1d4ab5d03f1284b67883e8d87530"),),
)
def cifar10(root: Path | str, split: str = "train", *, check: bool = True) -> tuple[Tensor, Tensor]:
    """Return images ``(N, 3, 32, 32)`` as bytes and labels; ``root`` is the folder of the files or its parent.

    Divide by 255 where the images are used: bytes take a quarter of the memory. ``check`` compares the files with their
    published md5 sums. The binary and the Python version are read.
    """
    return CIFAR10.read(Path(root), split, check)


@register_dataset(
    "cifar100",
    summary="60,000 images, 3×32×32, 100 classes; binary or Python files",
    num_classes=100,
    size=(50_000, 32, 100),
    missing=CIFAR100.missing,
    remote_files=(RemoteFile(address=CIFAR100.address, md5="03b5dce01913d631647c71ecec9e9cb8"),),
)
def cifar100(root: Path | str, split: str = "train", *, check: bool = True) -> tuple[Tensor, Tensor]:
    """Return the same as ``cifar10``, with the 100 fine labels."""
    return CIFAR100.read(Path(root), split, check)
