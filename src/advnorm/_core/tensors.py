"""Problems of the kind of a tensor, and the conversion that fixes them."""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor, nn

from advnorm._core.errors import Description, Problem

#: Fixes for tensors without dense values, by kind; any other kind is sparse.
_FIXES = {
    "meta": "a tensor on the meta device has no values; make it on another device",
    "nested": "stack values of one shape with torch.stack",
    "quantized": "use .dequantize()",
}


def special_kind(value: Tensor) -> str:
    """Return ``meta``, ``nested``, ``quantized``, ``sparse_coo`` or another layout; for a dense tensor, nothing."""
    if value.device.type == "meta":
        return "meta"
    if value.is_nested or value.is_quantized:
        return "nested" if value.is_nested else "quantized"
    return "" if value.layout == torch.strided else str(value.layout).removeprefix("torch.")


def dense_problems(**tensors: Tensor) -> list[Problem]:
    """Return a problem for each tensor, by field, whose values cannot be read like those of an array."""
    kinds = {field: special_kind(value) for field, value in tensors.items()}
    return [
        Problem(
            code="wrong_layout",
            message="{field} must be a dense tensor",
            field=field,
            got=Description(f"a {kind} tensor"),
            hint=_FIXES.get(kind, "use .to_dense()"),
        )
        for field, kind in kinds.items()
        if kind
    ]


def meta_problems(model: nn.Module, field: str = "model") -> list[Problem]:
    """Return a problem if a parameter or buffer of a model is on the meta device."""
    names = [name for name, value in chain(model.named_parameters(), model.named_buffers()) if value.is_meta]
    message, hint = "{field} has tensors without values, on the meta device", "build it without torch.device('meta')"
    return [Problem("wrong_device", message, field, got=Description(names[0]), hint=hint)] if names else []


def pixel_conversion(x: Tensor) -> str:
    """Return the code that makes float32 pixels in [0, 1] of a tensor of another type."""
    if x.is_complex():
        return "x.real.float()"
    if x.is_floating_point() or x.dtype == torch.bool:
        return "x.float()"
    wide = x.dtype == torch.uint16 or (x.numel() > 0 and x.float().amax().item() > 255)
    return f"x.float() / {65535 if wide else 255}"
