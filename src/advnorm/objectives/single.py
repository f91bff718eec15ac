"""Training on one domain: clean images (standard), or adversarial ones (Madry et al. 2018)."""

from __future__ import annotations

from torch import Tensor

from advnorm.objectives.base import OBJECTIVES, Objective, Step


class Standard(Objective):
    """``L_CE(x, y)``: clean images through the route ``"clean"``."""

    needs_attack = False
    domains = ("clean",)
    summary, paper = "cross-entropy on clean images", "B, D"

    def forward(self, x: Tensor, y: Tensor, *, index: Tensor | None = None) -> Step:
        logits = self.passed({"clean": x})
        loss = self.cross_entropy(logits["clean"], y)
        return Step(loss, logits, {"clean_ce": loss.detach()})


class Classical(Objective):
    """``max_δ L_CE(x + δ, y)``: adversarial images alone, through the route ``"adv"`` (paper A, eq. 1)."""

    domains = ("adv",)
    summary, paper = "cross-entropy on adversarial images (Madry)", "A (eq. 1), E"

    def forward(self, x: Tensor, y: Tensor, *, index: Tensor | None = None) -> Step:
        index = self._fresh_index(x) if index is None else index
        logits = self.passed({"adv": self.adversarial(x, y, index)})
        loss = self.cross_entropy(logits["adv"], y)
        return Step(loss, logits, {"adv_ce": loss.detach()})


OBJECTIVES.add("standard", Standard)
OBJECTIVES.add("classical", Classical)
