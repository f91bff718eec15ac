"""The plain form of the norm ``rms``."""

from __future__ import annotations

from torch import Tensor, nn

from advnorm.norms import functional


class SampleRMSNorm(nn.Module):
    """``w ⊙ x / √(mean(x²) + ε) + b`` with the mean over all channels and positions of a sample; ``strip`` builds it.

    Channels are the second dimension. ``torch.nn.RMSNorm`` normalizes the last dimensions instead.
    """

    def __init__(self, weight: Tensor | None, bias: Tensor | None, eps: float) -> None:
        super().__init__()
        self.weight, self.bias = (None if value is None else nn.Parameter(value) for value in (weight, bias))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.sample_rms_norm(x, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"eps={self.eps}"
