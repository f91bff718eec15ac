"""Images batch by batch: slices, progress, attacks and predictions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from advnorm._core.precision import float32_as
from advnorm._core.wrappers import device_of
from advnorm.analysis.settings import StatisticsMode
from advnorm.attacks import Attack, predicting
from advnorm.attacks.base import Progress

T = TypeVar("T")
#: Images as one tensor, or batch by batch: tensors, or tuples whose first entry is the images.
Images = Tensor | Iterable[Any]


def even_slices(count: int, size: int) -> Iterator[slice]:
    """Yield slices of at most ``size`` images whose lengths differ by at most one.

    A short last batch would have unusual statistics.
    """
    parts = -(-count // size)
    for part in range(parts):
        yield slice(part * count // parts, (part + 1) * count // parts)


def track(items: Iterable[T], progress: Progress | None) -> Iterator[T]:
    """Yield the items and report after each one how many are done."""
    items = list(items)
    for done, item in enumerate(items, 1):
        yield item
        if progress is not None:
            progress(done, len(items))


def iterate_batches(x: Images, batch_size: int) -> Iterator[Tensor]:
    """Yield images batch by batch: slices of a tensor, or the batches of an iterable."""
    for batch in (x[rows] for rows in even_slices(len(x), batch_size)) if isinstance(x, Tensor) else x:
        yield batch[0] if isinstance(batch, tuple | list) else batch


def attack_images(
    attack: Attack, model: nn.Module, x: Tensor, y: Tensor, *, batch_size: int, progress: Progress | None = None
) -> Tensor:
    """Return adversarial images, on the CPU; the position of an image determines its random numbers."""
    device, parts = device_of(model), []
    for rows in even_slices(len(x), batch_size):
        index = torch.arange(rows.start, rows.stop)
        parts.append(attack(model, x[rows].to(device), y[rows].to(device), index=index).cpu())
        if progress is not None:
            progress(rows.stop, len(x))
    return torch.cat(parts)


def predict_classes(
    model: nn.Module,
    images: Tensor,
    *,
    route: str | None = None,
    statistics: StatisticsMode = "running",
    batch_size: int = 256,
) -> Tensor:
    """Return the predicted class of each image, in eval mode and strict float32; on the CPU."""
    device, classes = device_of(model), []
    with predicting(model, route=route, statistics=statistics) as predict, torch.no_grad(), float32_as("ieee", device):
        for rows in even_slices(len(images), batch_size):
            classes.append(predict(images[rows].to(device)).argmax(1).cpu())
    return torch.cat(classes)


def measure_accuracy(model: nn.Module, images: Tensor, labels: Tensor, **settings: Any) -> float:
    """Return the share of the images whose predicted class is their label."""
    return float((predict_classes(model, images, **settings) == labels.cpu()).double().mean())
