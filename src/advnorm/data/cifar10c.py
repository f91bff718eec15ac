"""CIFAR-10-C: the CIFAR-10 test images under 19 corruptions at five severities (Hendrycks & Dietterich 2019)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from advnorm._core.errors import Problem, raise_problems, unknown_name
from advnorm.data.corruptions import NOT_GENERATED, SEVERITIES, list_corruptions, severity_problems
from advnorm.data.published_files import RemoteFile, find_folder, missing_file_problems, reading
from advnorm.data.registry import register_dataset

FOLDER = "CIFAR-10-C"
ADDRESS = "https://zenodo.org/records/2535967/files/CIFAR-10-C.tar"
CORRUPTIONS = tuple(sorted((*list_corruptions(), *NOT_GENERATED)))
IMAGES_PER_SEVERITY = 10_000


def missing_cifar10c(root: Path, split: str = "test", *, corruption: str, **_options: Any) -> list[Problem]:
    """Return a problem if the array of a corruption or the labels are missing."""
    return missing_file_problems("CIFAR-10-C", root, FOLDER, (f"{corruption}.npy", "labels.npy"), ADDRESS)


@register_dataset(
    "cifar10c",
    summary="the test images of CIFAR-10 under 19 corruptions, 5 severities",
    num_classes=10,
    splits=("test",),
    missing=missing_cifar10c,
    remote_files=(RemoteFile(address=ADDRESS, md5="56bf5dcef84df0e2308c6dcbcbbd8499"),),
)
def read_cifar10c(root: Path | str, split: str = "test", *, corruption: str, severity: int) -> tuple[Tensor, Tensor]:
    """Return images ``(10000, 3, 32, 32)`` as bytes and labels for a corruption at a severity from 1 to 5."""
    import numpy as np

    problems = [] if corruption in CORRUPTIONS else [unknown_name("corruption", corruption, CORRUPTIONS)]
    raise_problems(problems + severity_problems(severity), "bad data cifar10c")
    raise_problems(missing_cifar10c(Path(root), corruption=corruption))
    folder, total = find_folder(Path(root), FOLDER), len(SEVERITIES) * IMAGES_PER_SEVERITY
    rows = slice((severity - 1) * IMAGES_PER_SEVERITY, severity * IMAGES_PER_SEVERITY)
    tensors = []
    for name, shape in {f"{corruption}.npy": (total, 32, 32, 3), "labels.npy": (total,)}.items():
        with reading(folder / name):
            array = np.load(folder / name, mmap_mode="r", allow_pickle=False)  # reads the chosen rows only
            if array.shape != shape or array.dtype != np.uint8:
                raise ValueError(f"it holds {array.dtype} {array.shape} instead of uint8 {shape}")
            tensors.append(torch.from_numpy(np.array(array[rows])))
    images, labels = tensors
    return images.permute(0, 3, 1, 2).contiguous(), labels.long()
