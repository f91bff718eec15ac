"""Training on one domain: clean images (standard), or adversarial ones (Madry et al. 2018)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from advnorm.norms.plan import Plan
from advnorm.objectives.base import OBJECTIVES, Objective, needs_both_domains
from advnorm.objectives.execution import EAGER, CraftedBatch, Execution, ObjectiveOutput


class SingleDomain(Objective):
    """The images of one domain alone, so that no norm may need another's."""

    @classmethod
    def plan_problems(cls, plans: Iterable[Plan], **options: Any) -> list[str]:
        plans = list(plans)
        return super().plan_problems(plans, **options) + [
            f"{name} normalizes with the statistics of both domains, and {cls.__name__} trains on one; use another "
            "norm, or an objective of both such as Hybrid"
            for name in dict.fromkeys(plan.name for plan in plans if needs_both_domains(plan))
        ]

    def _domain_loss(self, domain: str, x: Tensor, y: Tensor, execution: Execution) -> ObjectiveOutput:
        logits = self.domain_logits({domain: x}, execution=execution)
        loss = self.cross_entropy(logits[domain], y)
        return ObjectiveOutput(loss, logits, {f"{domain}_ce": loss.detach()}, {domain: y})


class Standard(SingleDomain):
    """``L_CE(x, y)``: clean images through the route ``"clean"``."""

    needs_attack = False
    domains = ("clean",)
    summary, paper = "cross-entropy on clean images", "B, D"

    def compute_loss(self, batch: CraftedBatch, execution: Execution = EAGER) -> ObjectiveOutput:
        return self._domain_loss("clean", batch.x, batch.y, execution)


class Classical(SingleDomain):
    """``max_δ L_CE(x + δ, y)``: adversarial images alone, through the route ``"adv"`` (paper A, eq. 1)."""

    domains = ("adv",)
    summary, paper = "cross-entropy on adversarial images (Madry)", "A (eq. 1), E"

    def compute_loss(self, batch: CraftedBatch, execution: Execution = EAGER) -> ObjectiveOutput:
        assert batch.x_adv is not None
        return self._domain_loss("adv", batch.x_adv, batch.y, execution)


OBJECTIVES.add("standard", Standard)
OBJECTIVES.add("classical", Classical)
