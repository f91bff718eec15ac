"""SVHN, house numbers as 32×32 pixels (Netzer et al. 2011), from its .mat files."""

from __future__ import annotations

import io
from pathlib import Path

import torch
from torch import Tensor

from advnorm._core.errors import ConfigError, did_you_mean
from advnorm.data.files import MissingFiles, locate, read_published, reading

FOLDER = "svhn"
ADDRESS = "http://ufldl.stanford.edu/housenumbers"
MD5 = {
    "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
    "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
    "extra_32x32.mat": "a93ce644f1a588dc4d68dda5feec44a7",
}
SPLITS = ("train", "test", "extra")


def svhn(root: Path | str, split: str = "train", *, check: bool = True) -> tuple[Tensor, Tensor]:
    """Images ``(N, 3, 32, 32)`` as bytes and labels; the digit 0, which the files call 10, is class 0."""
    import numpy as np
    from scipy.io import loadmat

    if split not in SPLITS:
        raise ConfigError(f"unknown split {split!r}{did_you_mean(split, SPLITS)}")
    name = f"{split}_32x32.mat"
    path = locate(Path(root), FOLDER) / name
    if not path.is_file():
        raise MissingFiles("SVHN", Path(root), [name], f"{ADDRESS}/{name}", FOLDER)
    content = read_published(path, MD5[name] if check else None)
    with reading(path):
        arrays = loadmat(io.BytesIO(content))
        images, digits = arrays["X"], arrays["y"].reshape(-1)
        if images.dtype != np.uint8 or images.shape != (32, 32, 3, len(digits)):
            raise ValueError(f"it holds {images.dtype} {images.shape} for {len(digits)} labels")
    pixels = torch.from_numpy(np.ascontiguousarray(images.transpose(3, 2, 0, 1)))
    return pixels, torch.from_numpy(digits.astype(np.int64)) % 10
