"""Images and labels in a .npz or .safetensors file, or in any data set of torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from advnorm._core.errors import ConfigError, Problem, raise_problems
from advnorm._core.records import require_regular
from advnorm.data.gather import gather
from advnorm.data.image_data import FolderData, ImageData, has_channels_last
from advnorm.data.registry import register_dataset

#: Names of the images and of the labels in a file; ``x_train`` and ``x_test`` come before ``x``.
FILE_KEYS = ("x", "images"), ("y", "labels")


def read_arrays(path: Path | str, split: str) -> tuple[Tensor, Tensor]:
    """Read images and labels of a split as float32 and int64. A pickle is never opened: it can run any code.

    Bytes are divided by 255. Images may have the channels last, ``(N, H, W, C)`` with one or three channels, or be
    grey, ``(N, H, W)``.
    """
    path = require_regular(path, "data")
    try:
        entries = np.load(path, allow_pickle=False) if path.suffix == ".npz" else load_file(path)
        used = [
            next((name for key in (f"{{}}_{split}", "{}") for name in map(key.format, names) if name in entries), "")
            for names in FILE_KEYS
        ]
        tensors = [torch.as_tensor(entries[name]) for name in used if name]  # other entries may be pickled
    except Exception as error:
        raise ConfigError("damaged_file", f"cannot read {path}: {error}", field="data") from None
    if len(tensors) < 2:
        message, hint = f"{path} holds {', '.join(entries) or 'nothing'}", "name the images 'x' and the labels 'y'"
        raise ConfigError("missing_entry", message, field="data", hint=f"{hint}, or 'x_{split}' and 'y_{split}'")
    images, labels = tensors
    if images.dim() == 3:
        images = images[:, None]
    elif has_channels_last(images.shape):
        images = images.movedim(-1, 1).contiguous()
    if images.dtype == torch.uint8:
        images = images.float() / 255
    elif images.is_floating_point():
        images = images.float()  # NumPy computes in float64
    return images, labels if labels.is_floating_point() else labels.long()


def missing_arrays(root: Path, split: str) -> list[Problem]:
    """Return a problem if the file does not exist."""
    if root.is_file():
        return []
    return [Problem("missing_file", f"no file {root}", "root", hint="name a .npz or .safetensors file: data=FILE")]


@register_dataset("arrays", summary="your own .npz or .safetensors file with x and y", missing=missing_arrays)
def arrays(root: Path | str, split: str = "train") -> ImageData | FolderData:
    """Read images in [0, 1] or bytes, and labels from 0; ``x_train`` and ``x_test`` come before ``x``."""
    raise_problems(missing_arrays(Path(root), split))
    return as_image_data(read_arrays(root, split), name=Path(root).name, split=split)


def as_image_data(data: Any, *, name: str | None = None, split: str = "train") -> ImageData | FolderData:
    """Return data in memory: two tensors, a ``torch.utils.data.Dataset`` of images in [0, 1] and labels, a loader."""
    if isinstance(data, ImageData | FolderData):
        return data
    images, labels = gather(data)
    labels = labels if labels.is_floating_point() else labels.long()
    classes = int(labels.max()) + 1 if labels.numel() and not labels.is_floating_point() else 0
    kind = "tensors" if isinstance(data, Sequence) else type(data).__name__
    return ImageData(name=name or kind, split=split, images=images, labels=labels, num_classes=max(classes, 1))


@register_dataset("given", summary="the data that `advnorm.train(config, data=...)` got", needs_root=False)
def given(split: str = "train") -> ImageData:
    """Raise: data that were given in Python cannot be read again."""
    message, hint = "the run was trained on data that were given in Python", "name the test images: --data, or data="
    raise ConfigError("missing_data", message, field="data", hint=hint)
