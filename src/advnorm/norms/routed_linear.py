"""A linear layer per domain behind a shared encoder (paper A, table 7: Dual Linear)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from advnorm.norms.plan import Plan
from advnorm.norms.routed_module import RoutedModule
from advnorm.norms.segments import map_parts


class RoutedLinear(RoutedModule):
    """``nn.Linear`` with a weight and a bias per domain: ``weight_clean``, ``bias_adv``, …"""

    def __init__(
        self, in_features: int, out_features: int, plan: Plan, *, bias: bool = True, device: str | None = None
    ) -> None:
        super().__init__(plan)
        self.in_features, self.out_features = in_features, out_features
        for bank in plan.affine_banks:
            linear = nn.Linear(in_features, out_features, bias=bias, device=device)
            setattr(self, f"weight_{bank}", linear.weight)
            setattr(self, f"bias_{bank}", linear.bias)

    def bank(self, bank: str) -> tuple[nn.Parameter, nn.Parameter | None]:
        """Weight and bias of a domain's head."""
        return getattr(self, f"weight_{bank}"), getattr(self, f"bias_{bank}")

    def forward(self, x: Tensor) -> Tensor:
        segments = self.segments(x.shape[0], needs_route=self.plan.routed)
        return map_parts(x, segments, lambda part, segment: F.linear(part, *self.bank(segment.affine)))

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, domains={'|'.join(self.plan.domains)}"
