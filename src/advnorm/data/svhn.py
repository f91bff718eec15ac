"""SVHN, house numbers of 32×32 pixels (Netzer et al. 2011), from its .mat files, which SciPy parses."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from advnorm._core.errors import Problem, raise_problems
from advnorm.data.published_files import RemoteFile, find_folder, missing_file_problems, read_verified, reading
from advnorm.data.registry import register_dataset

FOLDER = "svhn"
ADDRESS = "http://ufldl.stanford.edu/housenumbers"
MD5 = {
    "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
    "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
    "extra_32x32.mat": "a93ce644f1a588dc4d68dda5feec44a7",
}
SPLITS = ("train", "test", "extra")


def missing_svhn(root: Path, split: str, **_options: Any) -> list[Problem]:
    """Return a problem if the file of a split is missing."""
    return missing_file_problems("SVHN", root, FOLDER, [f"{split}_32x32.mat"], f"{ADDRESS}/{split}_32x32.mat")


@register_dataset(
    "svhn",
    summary="99,289 house numbers, 3×32×32, and 531,131 extra",
    num_classes=10,
    splits=SPLITS,
    size=(73_257, 32, 10),
    missing=missing_svhn,
    remote_files=tuple(
        RemoteFile(address=f"{ADDRESS}/{split}_32x32.mat", md5=MD5[f"{split}_32x32.mat"], split=split)
        for split in SPLITS
    ),
)
def read_svhn(root: Path | str, split: str = "train", *, check: bool = True) -> tuple[Tensor, Tensor]:
    """Return images ``(N, 3, 32, 32)`` as bytes and labels; the digit 0, label 10 in the files, is class 0."""
    import numpy as np
    from scipy.io import loadmat

    raise_problems(missing_svhn(Path(root), split))
    name = f"{split}_32x32.mat"
    path = find_folder(Path(root), FOLDER) / name
    content = read_verified(path, MD5[name] if check else None)
    with reading(path):
        arrays = loadmat(io.BytesIO(content))
        images, digits = arrays["X"], arrays["y"].reshape(-1)
        if images.dtype != np.uint8 or images.shape != (32, 32, 3, len(digits)):
            raise ValueError(f"it holds {images.dtype} {images.shape} for {len(digits)} labels")
    pixels = torch.from_numpy(np.ascontiguousarray(images.transpose(3, 2, 0, 1)))
    return pixels, torch.from_numpy(digits.astype(np.int64)) % 10
