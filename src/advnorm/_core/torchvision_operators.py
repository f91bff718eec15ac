"""Make ``import torchvision`` work beside a CPU build of torch."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


@cache
def prepare_torchvision() -> torch.library.Library | None:
    """Declare the two operators without which ``import torchvision`` fails if its compiled library does not load.

    The torchvision of PyPI is compiled for CUDA and does not load beside a CPU build of torch. timm and transformers
    import torchvision. The operators have no kernels: non-maximum suppression still raises when it is called. Nothing
    happens if the library loads or if torchvision is not installed. The operators exist as long as the result does.
    """
    spec = find_spec("torchvision")
    folders = spec.submodule_search_locations if spec is not None else None
    compiled = [path for folder in folders or () for path in Path(folder).glob("_C*.so")]
    if not compiled:
        return None
    try:
        torch.ops.load_library(str(compiled[0]))
    except (ImportError, OSError):
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(name + _SCHEMA)
        return library
    return None
