"""A linear layer per domain behind a shared encoder (paper A, table 7: Dual Linear)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from advnorm.norms.plan import Plan
from advnorm.norms.routing import Routed, per_part


class RoutedLinear(Routed):
    """``nn.Linear`` with a weight and a bias per domain: ``weight_clean``, ``bias_adv``, …"""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        plan: Plan,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(plan)
        self.in_features, self.out_features = in_features, out_features
        for bank in plan.affine_banks:
            linear = nn.Linear(in_features, out_features, bias=bias, device=device, dtype=dtype)
            setattr(self, f"weight_{bank}", linear.weight)
            setattr(self, f"bias_{bank}", linear.bias)

    def bank(self, bank: str) -> tuple[nn.Parameter, nn.Parameter | None]:
        """Weight and bias of a domain's head."""
        return getattr(self, f"weight_{bank}"), getattr(self, f"bias_{bank}")

    def forward(self, x: Tensor) -> Tensor:
        runs = self.runs(x.shape[0], needs_route=self.plan.routed)
        return per_part(x, runs, lambda part, run: F.linear(part, *self.bank(run.affine)))

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, domains={'|'.join(self.plan.domains)}"
