"""Which banks a training uses: those that get gradients, for DDP, and those of each domain, for the record."""

from __future__ import annotations

from typing import Any

from advnorm.norms import routed_modules
from advnorm.norms.plan import Plan
from advnorm.objectives import Objective


def leaves_banks_unused(objective: Objective) -> bool:
    """Whether some affine banks get no gradient in a step, so that DDP must find unused parameters."""
    trained = set(objective.trained_domains())
    return any(
        {module.plan.affine[module.plan.index(domain)] for domain in trained & set(module.plan.domains)}
        != set(module.plan.affine_banks)
        for module in routed_modules(objective.model).values()
    )


def routing(objective: Objective) -> list[dict[str, Any]]:
    """For each kind of norm, the banks that normalize and scale each domain's training images, and that they update."""
    plans: dict[Plan, int] = {}
    for module in routed_modules(objective.model).values():
        plans[module.plan] = plans.get(module.plan, 0) + 1
    trained = objective.trained_domains()
    return [
        {"norm": plan.name, "layers": layers, "domains": {name: _banks(plan, name, trained) for name in plan.domains}}
        for plan, layers in plans.items()
    ]


def _banks(plan: Plan, domain: str, trained: tuple[str, ...]) -> dict[str, str | None]:
    """The banks of a domain's images in training; None if training has no such images.

    Images that are both trained on and forwarded update their bank while they are forwarded.
    """
    forwarded = domain in plan.forwarded_for(trained)
    if domain not in trained and not forwarded:
        return {"normalized_by": None, "feed": None, "scaled_by": None}
    by, _, affine = plan.banks(domain, forwarded=domain not in trained)
    if plan.statistics != "batch":
        return {"scaled_by": affine}
    if plan.mixture:
        by = "mixture of " + ", ".join(plan.statistics_banks)
    return {"normalized_by": by, "feed": plan.banks(domain, forwarded=forwarded)[1] or None, "scaled_by": affine}
