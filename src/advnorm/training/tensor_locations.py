"""The memory that a model's tensors occupy, which folded copies and CUDA graphs read."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class TensorLocations:
    """The parameters and buffers of a model and their addresses.

    A module that assigns a new tensor to its buffer (``self.mean = 0.9 * self.mean + ...``) leaves copies and graphs
    with the old tensor.
    """

    def __init__(self, model: nn.Module) -> None:
        self._locations: list[tuple[dict[str, Any], str, str, Tensor, int]] = [
            (values, name, f"{path}.{name}".lstrip("."), value, value.data_ptr())
            for path, module in model.named_modules()
            for values in (module._parameters, module._buffers)
            for name, value in values.items()
            if value is not None
        ]

    def change(self) -> str | None:
        """Describe the first tensor that was replaced, without waiting for the device; None if there is none."""
        for values, name, path, value, pointer in self._locations:
            if values.get(name) is not value or value.data_ptr() != pointer:
                return f"the model has assigned a new tensor to {path}; change it in place"
        return None

    def restore(self) -> None:
        """Put back every tensor."""
        for values, name, _, value, _ in self._locations:
            values[name] = value
