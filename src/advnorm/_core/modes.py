"""Evaluate a model whatever mode its caller left it in, and leave every flag as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Every module in eval mode; afterwards each has its own flag again, so that a frozen layer stays frozen."""
    flags = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in flags:
            module.training = False
        yield
    finally:
        for module, training in flags:
            module.training = training


def hooks_run() -> AbstractContextManager[None]:
    """Scope: compiled models run as they are written; a graph that was made before a hook came does not call it."""
    return torch.compiler.set_stance("force_eager")
