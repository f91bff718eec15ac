"""Images and labels from every kind of data that an evaluation accepts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, default_collate

from advnorm._core.errors import ConfigError, Description, raise_problems
from advnorm._core.tensors import dense_problems
from advnorm.data.image_data import FolderData, ImageData
from advnorm.data.loader import Loader


def gather(data: Any, limit: int | None = None, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return images and labels as two tensors on the CPU.

    ``data`` is a pair of tensors, a data set, or an iterable of samples or batches. ``limit`` takes the first images
    and reads no others. ``rows`` takes these images of a data set and reads no others.
    """
    if isinstance(data, Sequence) and len(data) == 2 and all(hasattr(part, "shape") for part in data):
        images, labels = (torch.as_tensor(part) for part in data)
        raise_problems(dense_problems(images=images, labels=labels), "bad data")
        return images[:limit].cpu(), labels[:limit].cpu()
    if isinstance(data, ImageData | FolderData):
        data = data.take(slice(limit) if rows is None else rows).in_memory()
        return data.pixels(), data.labels
    parts: list[tuple[Tensor, Tensor]] = []
    count = 0
    for item in _items(data) if rows is None else (data[row] for row in rows.tolist()):
        x, y = _as_batch(item)
        parts.append((x.cpu(), y.cpu()))
        count += len(x)
        if limit is not None and count >= limit:
            break
    if not count:
        raise ConfigError("empty", "the data set is empty", field="data", hint="check its path and its split")
    images, labels = zip(*parts)
    shapes = {tuple(part.shape[1:]) for part in images}
    if len(shapes) > 1:
        hint = "resize or crop them in the data set"
        raise ConfigError("wrong_shape", "images must share one shape", field="data", got=sorted(shapes), hint=hint)
    return torch.cat(images)[:limit], torch.cat(labels)[:limit]


def gather_spread(data: Any, limit: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``limit`` images spread evenly over the data, their labels and their rows; read no others if possible.

    The images of a folder are sorted by class, so the first ones would show one class.
    """
    if isinstance(data, DataLoader) and _yields_its_data_set(data):
        data = data.dataset
    if _is_indexable(data):
        rows = spread_rows(len(data), limit)
        images, labels = gather(data, rows=rows)
        if len(images) == len(rows):  # otherwise the items are batches
            return images, labels, rows
    images, labels = gather(data)
    if images.shape[:1] != labels.shape[:1]:
        got = Description(f"labels of shape {tuple(labels.shape)} for images of shape {tuple(images.shape)}")
        raise ConfigError("wrong_shape", "{field} must have one label for each image", field="data", got=got)
    rows = spread_rows(len(images), limit)
    return images[rows], labels[rows], rows


def spread_rows(count: int, limit: int | None) -> Tensor:
    """Return ``limit`` of ``count`` row numbers at even distances."""
    rows = torch.arange(count)
    return rows if limit is None or limit >= count else rows[:limit] * count // limit


def _yields_its_data_set(loader: DataLoader) -> bool:
    """Return whether the batches of a loader are all items of its data set, in order and unchanged."""
    sampler, batches = loader.sampler, loader.batch_sampler
    return (
        type(sampler) is SequentialSampler
        and sampler.data_source is loader.dataset
        and type(batches) is BatchSampler
        and batches.sampler is sampler  # with a batch_sampler of the caller, torch makes a sampler that nothing uses
        and not batches.drop_last
        and loader.collate_fn is default_collate
    )


def _is_indexable(data: Any) -> bool:
    """Return whether any image can be read without those before it."""
    return isinstance(data, ImageData | FolderData) or (
        not isinstance(data, Sequence | Tensor | Loader)
        and not hasattr(data, "__iter__")
        and all(hasattr(data, name) for name in ("__len__", "__getitem__"))
    )


def _items(data: Any) -> Iterator[Any]:
    readable = hasattr(data, "__iter__") or hasattr(data, "__getitem__")
    if isinstance(data, str | Tensor | Loader) or not readable:  # our Loader shuffles and augments for training
        raise _wrong_type(data)
    if not hasattr(data, "__iter__") and hasattr(data, "__len__"):
        return (data[row] for row in range(len(data)))  # a map-style data set ends at its length
    return iter(data)


def _as_batch(item: Any) -> tuple[Tensor, Tensor]:
    if not isinstance(item, Sequence):
        raise _wrong_type(item)
    try:
        x, y = (torch.as_tensor(part) for part in item)
    except (RuntimeError, TypeError, ValueError):
        raise _wrong_type(item) from None
    raise_problems(dense_problems(images=x, labels=y), "bad data")
    return (x[None], y[None]) if y.dim() == 0 else (x, y)


def _wrong_type(value: object) -> ConfigError:
    message = "{field} must be images and labels: two tensors, a data set such as advnorm.data.load('digits', 'test')"
    message += ", or a torch DataLoader; its images must be tensors in [0, 1]"
    parts = value if isinstance(value, tuple) else [value]
    got = Description(" and ".join(type(part).__name__ for part in parts))
    return ConfigError("wrong_type", message, field="data", got=got)
