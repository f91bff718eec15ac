"""Scopes for modes of a model that restore every flag afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set every module to eval mode; restore each module's own flag afterwards, so that frozen layers stay frozen."""
    flags = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in flags:
            module.training = False
        yield
    finally:
        for module, training in flags:
            module.training = training


def running_eagerly() -> AbstractContextManager[None]:
    """Run compiled models eagerly: a graph that was compiled before a hook was added does not call the hook."""
    return torch.compiler.set_stance("force_eager")
