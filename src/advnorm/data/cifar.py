"""CIFAR-10 from the official binary files that a user has on disk (Krizhevsky 2009)."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import Tensor

from advnorm._core.errors import ConfigError, did_you_mean

FOLDER = "cifar-10-batches-bin"
FILES = {
    "train": tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
    "test": ("test_batch.bin",),
}
MD5 = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
}
RECORD = 1 + 3 * 32 * 32  # a label, then the red, green and blue plane
ADDRESS = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"


def cifar10(root: Path | str, split: str = "train", *, check: bool = True) -> tuple[Tensor, Tensor]:
    """Images ``(N, 3, 32, 32)`` as bytes and labels of one split; ``root`` is the folder of the files or the one above.

    Divide by 255 where the images are used: bytes take a quarter of the memory. ``check`` compares the files with their
    published md5 sums; a short or changed file is refused by name.
    """
    if split not in FILES:
        raise ConfigError(f"unknown split {split!r}{did_you_mean(split, FILES)}")
    root = Path(root)
    folder = root / FOLDER if (root / FOLDER).is_dir() else root
    missing = [name for name in FILES[split] if not (folder / name).is_file()]
    if missing:
        raise ConfigError(
            f"CIFAR-10 is not at {root}: missing {', '.join(missing)}; unpack {ADDRESS} there, or name the folder that "
            f"holds {FOLDER}"
        )
    records = []
    for name in FILES[split]:
        data = (folder / name).read_bytes()
        if len(data) != 10_000 * RECORD:
            raise ConfigError(f"{folder / name} has {len(data):,} bytes instead of {10_000 * RECORD:,}; get it again")
        if check and hashlib.md5(data, usedforsecurity=False).hexdigest() != MD5[name]:
            raise ConfigError(f"{folder / name} is not the published file (md5 differs); get it again")
        records.append(torch.frombuffer(bytearray(data), dtype=torch.uint8).view(-1, RECORD))
    whole = torch.cat(records)
    return whole[:, 1:].reshape(-1, 3, 32, 32), whole[:, 0].long()
