"""A quick estimate of the robust accuracy under AutoAttack: short rounds, and only where an image may still fall.

The idea of an adaptive ensemble is from Liu et al. 2022, "Practical evaluation of adversarial robustness via Adaptive
Auto Attack": learn from the rounds before, and spend passes on the images that can still be fooled. Theirs learns from
other images of the batch. Here every decision depends on the image alone, so the batch size changes no result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from torch import Tensor

from advnorm._core.settings import Setting
from advnorm.attacks.apgd import APGD
from advnorm.attacks.autoattack.attack import CascadeAttack, SearchRows
from advnorm.attacks.base import Steps
from advnorm.attacks.names import count_options, register_attack
from advnorm.attacks.search import Search
from advnorm.attacks.square import Queries, Square
from advnorm.attacks.surrogate import PRECISION_OPTIONS, SearchPrecision

#: Margins above this share of the clean margin: the gradients did not help, and Square tries without them.
STUCK = 0.9


@register_attack(
    "quick",
    options={**count_options("steps", "targets", "restarts", "queries"), **PRECISION_OPTIONS},
    summary="an estimate of AutoAttack by an adaptive cascade with about a tenth of its passes",
)
@dataclass(frozen=True, kw_only=True)
class Quick(CascadeAttack):
    """APGD in five rounds on the margin, whose gradient keeps its direction if the logits are scaled.

    | stage | steps | variants of an image | margin left |
    |---|---|---|---|
    | ``first`` | ``steps / 2`` | one random start | any |
    | ``restarts`` | ``steps`` | ``restarts`` random starts | any |
    | ``targets`` | ``steps / 2`` | ``targets`` classes | at most ``hopeless`` |
    | ``deep`` | ``steps`` | ``8 restarts`` random starts | at most ``near`` |
    | ``boundary`` | ``2 steps`` | the 3 most likely classes at the best point, from there | at most ``near`` |
    | ``square`` | ``queries`` | one | more than 0.9, or zero gradients |

    A stage attacks the robust images in its range of the margin left: the lowest margin so far as a share of the clean
    margin. So passes are spent on images that may still fall.
    """

    steps: Steps = 20
    targets: Annotated[int, Setting("Number of most likely other classes to target.", "[1, inf)")] = 9
    restarts: Annotated[int, Setting("Random starts of stage `restarts`; `deep` has 8 times as many.", "[1, inf)")] = 2
    queries: Queries = 300
    hopeless: Annotated[float, Setting("Margin left above which an image skips `targets`.", "[0, 1]")] = 0.5
    near: Annotated[float, Setting("Margin left above which it skips `deep` and `boundary`.", "[0, 1]")] = 0.15
    precision: SearchPrecision = "float32"
    batch_size: SearchRows = None

    continued = frozenset({"boundary"})
    close = 1  # the stage in float32 takes a large part of the time on a GPU

    @property
    def title(self) -> str:
        return "Quick estimate (not AutoAttack)"

    @property
    def note(self) -> str:
        return "a quick estimate with a fraction of AutoAttack's passes; use autoattack for a final number"

    def stages(self) -> dict[str, Search]:
        base: dict[str, Any] = {name: getattr(self, name) for name in ("threat", "seed", "route", "statistics")}
        half, double = max(self.steps // 2, 1), 2 * self.steps
        return {
            "first": APGD(**base, loss="cw", steps=half),
            "restarts": APGD(**base, loss="cw", steps=self.steps, restarts=self.restarts),
            "targets": APGD(**base, loss="cw", steps=half, targets=self.targets),
            "deep": APGD(**base, loss="cw", steps=self.steps, restarts=8 * self.restarts),
            "boundary": APGD(**base, loss="cw", steps=double, targets=min(3, self.targets)),
            "square": Square(**base, queries=self.queries),
        }

    def selected(self, stage: str, remaining: Tensor, zero_gradient: Tensor) -> Tensor:
        if stage == "square":
            return zero_gradient | (remaining > STUCK)
        limit = {"targets": self.hopeless, "deep": self.near, "boundary": self.near}.get(stage)
        return super().selected(stage, remaining, zero_gradient) if limit is None else ~(remaining > limit)
