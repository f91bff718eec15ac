"""Training on one domain: clean images (standard), or adversarial ones (Madry et al. 2018)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from advnorm.norms.plan import Plan
from advnorm.objectives.base import OBJECTIVES, Objective, Step, needs_both


class SingleDomain(Objective):
    """The images of one domain alone, so that no norm may need another's."""

    @classmethod
    def plan_problems(cls, plans: Iterable[Plan], **options: Any) -> list[str]:
        plans = list(plans)
        return super().plan_problems(plans, **options) + [
            f"{name} normalizes with the statistics of both domains, and {cls.__name__} trains on one; use another "
            "norm, or an objective of both such as Hybrid"
            for name in dict.fromkeys(plan.name for plan in plans if needs_both(plan))
        ]


class Standard(SingleDomain):
    """``L_CE(x, y)``: clean images through the route ``"clean"``."""

    needs_attack = False
    domains = ("clean",)
    summary, paper = "cross-entropy on clean images", "B, D"

    def forward(self, x: Tensor, y: Tensor, *, index: Tensor | None = None) -> Step:
        logits = self.passed({"clean": x})
        loss = self.cross_entropy(logits["clean"], y)
        return Step(loss, logits, {"clean_ce": loss.detach()}, {"clean": y})


class Classical(SingleDomain):
    """``max_δ L_CE(x + δ, y)``: adversarial images alone, through the route ``"adv"`` (paper A, eq. 1)."""

    domains = ("adv",)
    summary, paper = "cross-entropy on adversarial images (Madry)", "A (eq. 1), E"

    def forward(self, x: Tensor, y: Tensor, *, index: Tensor | None = None) -> Step:
        index = self._fresh_index(x) if index is None else index
        logits = self.passed({"adv": self.adversarial(x, y, index)})
        loss = self.cross_entropy(logits["adv"], y)
        return Step(loss, logits, {"adv_ce": loss.detach()}, {"adv": y})


OBJECTIVES.add("standard", Standard)
OBJECTIVES.add("classical", Classical)
