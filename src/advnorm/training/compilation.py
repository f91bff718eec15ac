"""Compiled functions that fall back to eager execution."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from advnorm._core.errors import first_line

#: Variants of one network: a route, a statistics mode and a batch size each. PyTorch's own limit is 8 per process.
VARIANTS = 64
#: Writes a line to the log.
Log = Callable[[str], None]


def allow_variants() -> AbstractContextManager[Any]:
    """Scope: raise torch's limit on recompilations to the number of variants that a training has."""
    limit = max(torch._dynamo.config.recompile_limit, VARIANTS)  # pyright: ignore
    return torch._dynamo.config.patch(recompile_limit=limit)  # pyright: ignore


class CompiledFunction:
    """A compiled function. If it cannot be compiled, it runs eagerly and logs the reason."""

    def __init__(self, eager: Callable[[Tensor], Any], label: str, log: Log) -> None:
        self._eager, self._label, self._log = eager, label, log
        self._compiled: Callable[[Tensor], Any] = torch.compile(eager, dynamic=False)
        self.works = True

    def __call__(self, x: Tensor) -> Any:
        if self.works:
            try:
                return self._compiled(x)
            except torch._dynamo.exc.TorchDynamoException as error:  # pyright: ignore
                self._log(f"{self._label} cannot be compiled and runs eagerly: {first_line(error)}")
                self.works = False
        return self._eager(x)
