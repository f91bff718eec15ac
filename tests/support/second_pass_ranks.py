"""One rank of the distributed tests of second passes: ``python second_pass_ranks.py RANK WORLD INIT_FILE OUT_FILE``.

The loop is that of objective_ranks.py; the cases are objectives with a second pass around them.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

from advnorm.objectives import LIGS, SECOND_PASSES, Objective
from support import objective_ranks


@dataclass(frozen=True)
class Wrapped:
    """A second pass around the objective of a case."""

    kind: str
    case: objective_ranks.Case
    settings: dict[str, Any] = field(default_factory=dict)
    ligs: bool = False

    def objective(self, *, sync: bool) -> Objective:
        inner = self.case.objective(sync=sync)
        return SECOND_PASSES.get(self.kind)(LIGS(inner, weight=0.5) if self.ligs else inner, **self.settings)

    @property
    def find_unused(self) -> bool:
        return self.case.find_unused

    @property
    def means(self) -> int:
        """Means over the ranks beside DDP's: the gradient of the statistics, and that which moves the weights."""
        return {"apart": 1, "sam": 1, "awp": 1, "apart_sam": 2}[self.kind]

    @property
    def forwards(self) -> int:
        """Forwards of both passes, LIGS's two gradients in each included: each talks once per synchronized norm."""
        return 2 * (self.case.forwards + 2 * self.ligs)


def _cases() -> dict[str, Wrapped]:
    case = objective_ranks.Case
    inner = {
        "standard-bn": case("standard", "bn"),
        "hybrid-dual_bn": case("hybrid", "dual_bn"),
        "hybrid-dual_bn-sequential": case("hybrid", "dual_bn", {"layout": "sequential"}),
        "trades-cross_bn": case("trades", "cross_bn"),
        "hybrid-gmm_bn": case("hybrid", "gmm_bn"),
    }
    settings = {
        "apart": {"radius": 0.1},
        "sam": {"rho": 0.3},
        "apart_sam": {"rho": 0.3, "radius": 0.1},
        "awp": {"gamma": 0.05, "norms": True},
    }
    cases = {
        f"{kind}-{key}": Wrapped(kind, case, given) for kind, given in settings.items() for key, case in inner.items()
    }
    cases["sam-ligs"] = Wrapped("sam", inner["standard-bn"], settings["sam"], ligs=True)
    return cases


CASES = _cases()
#: Trainings that leave a bank out, by the name of the second pass.
UNUSED = {
    f"{kind}-unused": Wrapped(kind, objective_ranks.Case(name, "dual_bn", find_unused=True))
    for kind, name in (("apart", "classical"), ("sam", "standard"), ("apart_sam", "standard"), ("awp", "classical"))
}

if __name__ == "__main__":
    objective_ranks.CASES = {**CASES, **UNUSED}  # type: ignore[assignment]
    objective_ranks.main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
