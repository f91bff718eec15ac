"""Training on one domain: clean images (standard), or adversarial ones (Madry et al. 2018)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from advnorm._core.errors import Problem
from advnorm.norms.plan import Plan
from advnorm.objectives.base import Objective, both_domains_problems, register_objective
from advnorm.objectives.execution import EAGER, CraftedBatch, Execution, ObjectiveOutput


class SingleDomain(Objective):
    """Trains on the images of one domain, so that no norm may need the other domain."""

    @classmethod
    def plan_problems(cls, plans: Sequence[Plan], **settings: Any) -> list[Problem]:
        hint = "use another norm, or an objective of both domains such as Hybrid"
        problems = both_domains_problems(plans, f"{cls.__name__} trains on one", "norm", hint)
        return super().plan_problems(plans, **settings) + problems

    def _domain_loss(self, domain: str, x: Tensor, y: Tensor, execution: Execution) -> ObjectiveOutput:
        logits = self.domain_logits({domain: x}, execution=execution)
        loss = self.cross_entropy(logits[domain], y)
        return ObjectiveOutput(loss, logits, {f"{domain}_ce": loss.detach()}, {domain: y})


@register_objective("standard")
class Standard(SingleDomain):
    """``L_CE(x, y)``: clean images through the route ``"clean"``."""

    needs_attack = False
    domains = ("clean",)
    summary, paper = "cross-entropy on clean images", "B, D"

    def compute_loss(self, batch: CraftedBatch, execution: Execution = EAGER) -> ObjectiveOutput:
        return self._domain_loss("clean", batch.x, batch.y, execution)


@register_objective("classical")
class Classical(SingleDomain):
    """``max_δ L_CE(x + δ, y)``: adversarial images alone, through the route ``"adv"`` (paper A, eq. 1)."""

    domains = ("adv",)
    summary, paper = "cross-entropy on adversarial images (Madry)", "A (eq. 1), E"

    def compute_loss(self, batch: CraftedBatch, execution: Execution = EAGER) -> ObjectiveOutput:
        assert batch.x_adv is not None
        return self._domain_loss("adv", batch.x_adv, batch.y, execution)
