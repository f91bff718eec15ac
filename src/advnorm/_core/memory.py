"""The memory of the machine, and batch sizes that adapt to the available memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import torch

from advnorm._core.errors import AdvnormError

R = TypeVar("R")


def physical_memory() -> int:
    """Return the bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class AdaptiveBatchSize:
    """A batch size that halves when memory runs out; only the failed batch is computed again.

    >>> logits = torch.cat(AdaptiveBatchSize(512).map(len(x), lambda part: model(x[part])))

    ``minimum``: the smallest batch, unless there are fewer images. A smaller remainder joins the batch before it.
    """

    def __init__(self, size: int | None = None, *, minimum: int = 1) -> None:
        self.size, self.minimum = size, minimum
        self.halved: list[int] = []  # the sizes that were too large

    def map(self, count: int, function: Callable[[slice], R]) -> list[R]:
        """Return the results of ``function`` for consecutive slices of ``range(count)``."""
        results: list[R] = []
        start = 0
        while start < count:
            stop = count if self.size is None else min(count, start + self.size)
            stop = count if count - stop < self.minimum else stop
            try:
                results.append(function(slice(start, stop)))
                start = stop
                continue
            except torch.OutOfMemoryError as error:
                size = stop - start
                if size < 2 * self.minimum:
                    words, hint = f"out of memory for a batch of {size}", "free memory, or use a smaller model or image"
                    raise AdvnormError("out_of_memory", words, field="batch_size", hint=hint) from error
                self.halved.append(size)
                self.size = size // 2
            # Outside of the except clause, whose traceback keeps the activations of the failed batch alive.
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        return results
