"""The settings of AutoAttack and the attacks that they select."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from advnorm._core.errors import Problem, unknown_name
from advnorm.attacks.apgd import APGD
from advnorm.attacks.base import Attack, count_problems
from advnorm.attacks.fab import FAB
from advnorm.attacks.search import Search
from advnorm.attacks.square import Square

Version = Literal["standard", "plus", "rand"]
Precision = Literal["float32", "tf32", "bf16"]

VERSIONS: Mapping[str, tuple[str, ...]] = {
    "standard": ("apgd-ce", "apgd-t", "fab-t", "square"),
    "plus": ("apgd-ce", "apgd-dlr", "fab", "square", "apgd-t", "fab-t"),
    "rand": ("apgd-ce", "apgd-dlr"),
}


@dataclass(frozen=True, kw_only=True)
class AutoAttackSettings(Attack):
    """The settings of :class:`AutoAttack`."""

    needs_gradients = False  # on a model without gradients only Square runs

    version: Version = "standard"
    attacks: tuple[str, ...] | None = None
    precision: Precision = "float32"
    steps: int = 100
    targets: int = 9
    queries: int = 5000
    samples: int = 20
    batch_size: int | None = None

    def problems(self) -> list[Problem]:
        problems = super().problems()
        for name, allowed in (("version", tuple(VERSIONS)), ("precision", get_args(Precision))):
            if getattr(self, name) not in allowed:
                problems.append(unknown_name(name, getattr(self, name), allowed))
        for name in ("steps", "targets", "queries", "samples"):
            problems += count_problems(name, getattr(self, name))
        if self.batch_size is not None:
            problems += count_problems("batch_size", self.batch_size)
        if self.attacks is None:
            return problems
        if isinstance(self.attacks, str) or not self.attacks:
            message = "{field} must be a tuple of names such as ('apgd-ce', 'square')"
            return [*problems, Problem(code="wrong_type", field="attacks", message=message, got=self.attacks)]
        names = dict.fromkeys(name for version in VERSIONS.values() for name in version)
        problems += [unknown_name("attack", name, names, "attacks") for name in self.attacks if name not in names]
        if len(set(self.attacks)) < len(self.attacks):
            message = "{field} must name each attack once"
            problems.append(Problem(code="conflict", field="attacks", message=message, got=self.attacks))
        return problems

    def input_problems(self, shape: Sequence[int], classes: int) -> list[Problem]:
        return [problem for search in self.stages().values() for problem in search.input_problems(shape, classes)]

    def stages(self) -> dict[str, Search]:
        """The attacks by name, in order, with the authors' settings."""
        sparse, plus = self.threat.norm == "L1", self.version == "plus"
        base = {name: getattr(self, name) for name in ("threat", "seed", "route", "statistics")}
        restarts = 5 if plus or (sparse and self.version == "standard") else 1
        samples = self.samples if self.version == "rand" else 1
        apgd: dict[str, Any] = {**base, "steps": self.steps, "samples": samples}
        targets = min(self.targets, 5) if sparse and not plus else self.targets
        table: dict[str, Search] = {
            "apgd-ce": APGD(**apgd, restarts=restarts),
            "apgd-dlr": APGD(**apgd, restarts=restarts, loss="dlr"),
            "apgd-t": APGD(**apgd, loss="dlr", targets=targets),
            "fab": FAB(**base, steps=self.steps, targets=0, restarts=5),
            "fab-t": FAB(**base, steps=self.steps, targets=self.targets),
            "square": Square(**base, queries=self.queries),
        }
        return {name: table[name] for name in self.attacks or VERSIONS[self.version]}
