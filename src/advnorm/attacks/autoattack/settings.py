"""The settings of AutoAttack and the attacks that they select."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from advnorm._core.errors import Problem, unknown_name
from advnorm._core.settings import Setting
from advnorm.attacks.apgd import APGD
from advnorm.attacks.base import Attack, Steps
from advnorm.attacks.fab import FAB
from advnorm.attacks.search import Search
from advnorm.attacks.square import Queries, Square

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

    version: Annotated[Version, Setting("Which attacks run, with the authors' settings.")] = "standard"
    attacks: Annotated[
        tuple[str, ...] | None, Setting("Names of the attacks in order, instead of the attacks of a version.")
    ] = None
    precision: Annotated[Precision, Setting("Precision of the search; a float32 forward decides.")] = "float32"
    steps: Steps = 100
    targets: Annotated[int, Setting("Number of most likely other classes to target.", "[1, inf)")] = 9
    queries: Queries = 5000
    samples: Annotated[int, Setting("Forwards per gradient in version `rand`.", "[1, inf)")] = 20
    batch_size: Annotated[
        int | None,
        Setting("Rows of one forward, one per target or restart of an image; none: a fast size.", "[1, inf)"),
    ] = None

    def problems(self) -> list[Problem]:
        problems, attacks = super().problems(), self.attacks
        if isinstance(attacks, tuple):
            names = dict.fromkeys(name for version in VERSIONS.values() for name in version)
            problems += [unknown_name("attack", name, names, "attacks") for name in attacks if name not in names]
            if not attacks or len(set(attacks)) < len(attacks):
                message = "{field} must name at least one attack, and each once"
                problems.append(Problem(code="conflict", field="attacks", message=message, got=attacks))
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
