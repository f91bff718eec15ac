"""CIFAR-10-C: the test images of CIFAR-10 under 19 corruptions, five levels each (Hendrycks & Dietterich 2019)."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from advnorm._core.errors import did_you_mean, raise_all
from advnorm.data.files import MissingFiles, locate, reading

FOLDER = "CIFAR-10-C"
ADDRESS = "https://zenodo.org/records/2535967/files/CIFAR-10-C.tar"
CORRUPTIONS = (
    "brightness",
    "contrast",
    "defocus_blur",
    "elastic_transform",
    "fog",
    "frost",
    "gaussian_blur",
    "gaussian_noise",
    "glass_blur",
    "impulse_noise",
    "jpeg_compression",
    "motion_blur",
    "pixelate",
    "saturate",
    "shot_noise",
    "snow",
    "spatter",
    "speckle_noise",
    "zoom_blur",
)
PER_LEVEL = 10_000


def cifar10c(root: Path | str, split: str = "test", *, corruption: str, severity: int) -> tuple[Tensor, Tensor]:
    """Images ``(10000, 3, 32, 32)`` as bytes and labels, for a corruption at severity 1 to 5."""
    import numpy as np

    problems = [] if split == "test" else [f"there is a test split only, got {split!r}"]
    if corruption not in CORRUPTIONS:
        problems.append(f"unknown corruption {corruption!r}{did_you_mean(corruption, CORRUPTIONS)}")
    if severity not in range(1, 6):
        problems.append(f"severity is 1, 2, 3, 4 or 5, got {severity!r}")
    raise_all(problems, "bad data cifar10c")
    folder = locate(Path(root), FOLDER)
    shapes = {f"{corruption}.npy": (5 * PER_LEVEL, 32, 32, 3), "labels.npy": (5 * PER_LEVEL,)}
    missing = [name for name in shapes if not (folder / name).is_file()]
    if missing:
        raise MissingFiles("CIFAR-10-C", Path(root), missing, ADDRESS, FOLDER)
    parts = []
    for name, shape in shapes.items():
        with reading(folder / name):
            whole = np.load(folder / name, mmap_mode="r", allow_pickle=False)  # only the chosen level is read
            if whole.shape != shape or whole.dtype != np.uint8:
                raise ValueError(f"it holds {whole.dtype} {whole.shape} instead of uint8 {shape}")
            parts.append(torch.from_numpy(np.array(whole[(severity - 1) * PER_LEVEL : severity * PER_LEVEL])))
    images, labels = parts
    return images.permute(0, 3, 1, 2).contiguous(), labels.long()
