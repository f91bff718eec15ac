"""A cascade as an attack and as an evaluation, and AutoAttack.

Source: Croce & Hein 2020, "Reliable evaluation of adversarial robustness with an ensemble of diverse parameter-free
attacks"; settings and checks as in the authors' code (github.com/fra31/auto-attack).
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from torch import Tensor, nn

from advnorm._core.errors import Problem, unknown_name
from advnorm._core.precision import float32_as, snapshot_precision
from advnorm._core.progress import show_progress
from advnorm._core.records import digest, model_fingerprint
from advnorm._core.seeding import ImageNoise, seed_generators
from advnorm._core.settings import Setting
from advnorm._core.wrappers import device_of
from advnorm.attacks.apgd import APGD
from advnorm.attacks.autoattack.cascade import Cascade
from advnorm.attacks.autoattack.record import CascadeRecord, CascadeResult
from advnorm.attacks.autoattack.settings import CascadeSettings
from advnorm.attacks.base import Steps, detach, validated_index
from advnorm.attacks.fab import FAB
from advnorm.attacks.inputs import validate_batch, validating_first_logits
from advnorm.attacks.model_access import Predict, predicting
from advnorm.attacks.names import NameOption, count_options, register_attack
from advnorm.attacks.search import Search
from advnorm.attacks.square import Queries, Square
from advnorm.attacks.surrogate import PRECISION_OPTIONS, SearchPrecision, search_surrogate
from advnorm.norms.routed_module import validate_module

SearchRows = Annotated[
    int | None, Setting("Rows of one forward, one per target or restart of an image; none: a fast size.", "[1, inf)")
]
Version = Literal["standard", "plus", "rand"]
VERSIONS: Mapping[str, tuple[str, ...]] = {
    "standard": ("apgd-ce", "apgd-t", "fab-t", "square"),
    "plus": ("apgd-ce", "apgd-dlr", "fab", "square", "apgd-t", "fab-t"),
    "rand": ("apgd-ce", "apgd-dlr"),
}


class CascadeAttack(CascadeSettings):
    """A cascade: each stage runs on the images that the stages before it did not fool.

    A success counts only after a strict float32 forward of the projected image. After a search in ``tf32`` or ``bf16``,
    FAB-T in float32 continues from the best point of each surviving image whose margin is at most ``close`` times the
    difference of margins between the two precisions. The batch size is halved after an out-of-memory error.
    """

    def perturb(self, predict: Predict, x: Tensor, y: Tensor, noise: ImageNoise) -> Tensor:
        with float32_as("ieee", x.device):
            surrogate, scope = search_surrogate(self.precision, predict, x.device)
            cascade = Cascade(self, predict, x, y, noise, surrogate=surrogate, precision=scope)
            return cascade.run().x_adv

    def evaluate(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        *,
        index: Tensor | None = None,
        record: Path | str | None = None,
        bar: bool | None = None,
        search: Predict | None = None,
    ) -> CascadeResult:
        """Attack the images and measure robust accuracy; ``x`` may be on another device than the model.

        ``record``: a folder that is written after each batch, resumed after a kill, and finally holds the result.
        ``bar``: show a progress bar; None shows it on a terminal. ``search``: a fast surrogate of the model (compiled,
        folded, half precision) that guides the search instead of ``precision``; the model itself decides.
        """
        validate_module(model)
        largest_label = validate_batch(x, y)
        index = validated_index(index, x)
        device = device_of(model, x.device)
        callers_precision = snapshot_precision(device)
        with ExitStack() as stack:
            stack.enter_context(float32_as("ieee", device))
            predict = stack.enter_context(predicting(model, route=self.route, statistics=self.statistics))
            x, y = detach(x), detach(y)
            seed_generators(self.seed, device)  # for randomized models; `predicting` restores the caller's state
            predict = validating_first_logits(predict, largest_label)
            noise, given = self.noise(index.to(device)), search is not None
            surrogate, scope = search, callers_precision
            if not given:
                settings = {"route": self.route, "statistics": self.statistics}
                surrogate, scope = search_surrogate(self.precision, predict, device, model, **settings)
            cascade = Cascade(self, predict, x, y, noise, surrogate=surrogate, precision=scope, given=given)
            if record is not None:
                cascade.record = CascadeRecord(Path(record), self._request(model, x, y, index, cascade))
            if sys.stderr.isatty() if bar is None else bar:
                task = stack.enter_context(show_progress()).task(self.title, 100, unit="percent")
                title = self.title
                cascade.reports.append(lambda name, share: task.update(100 * share, description=f"{title}: {name}"))
            return cascade.run()

    def _request(self, model: nn.Module, x: Tensor, y: Tensor, index: Tensor, cascade: Cascade) -> dict[str, Any]:
        """The evaluation that a record belongs to, without the batch size, on which no result depends.

        A model is identified by its structure, its tensors and some logits, which show scopes and settings.
        """
        logits = cascade.victim.strict_logits(x[:8].to(cascade.device)).tolist()
        return {
            "attack": repr(dataclasses.replace(self, batch_size=None)),
            "search": "given" if cascade.given else self.precision,
            "model": model_fingerprint(model),
            **{name: digest(value) for name, value in (("images", x), ("labels", y), ("index", index))},
            # As text, since JSON has no infinity: an excluded class has a logit of -inf.
            "logits": [[str(v) for v in row] for row in logits],
        }


@register_attack(
    "autoattack",
    options={
        **count_options("steps", "queries"),
        **{version: NameOption(setting="version", value=version) for version in VERSIONS},
        **PRECISION_OPTIONS,
    },
    summary="APGD-CE, APGD-T, FAB-T and Square in a cascade",
    paper="A, C",
)
@dataclass(frozen=True, kw_only=True)
class AutoAttack(CascadeAttack):
    """The cascade of Croce & Hein 2020: APGD-CE, targeted APGD on the DLR loss, targeted FAB and Square.

    Version ``plus`` adds restarts and untargeted attacks. ``rand`` is for randomized models: every gradient is the mean
    of ``samples`` forwards.
    """

    version: Annotated[Version, Setting("Which attacks run, with the authors' settings.")] = "standard"
    attacks: Annotated[
        tuple[str, ...] | None, Setting("Names of the attacks in order, instead of the attacks of a version.")
    ] = None
    precision: SearchPrecision = "float32"
    steps: Steps = 100
    targets: Annotated[int, Setting("Number of most likely other classes to target.", "[1, inf)")] = 9
    queries: Queries = 5000
    samples: Annotated[int, Setting("Forwards per gradient in version `rand`.", "[1, inf)")] = 20
    batch_size: SearchRows = None

    def problems(self) -> list[Problem]:
        problems, attacks = super().problems(), self.attacks
        if isinstance(attacks, tuple):
            names = dict.fromkeys(name for version in VERSIONS.values() for name in version)
            problems += [unknown_name("attack", name, names, "attacks") for name in attacks if name not in names]
            if not attacks or len(set(attacks)) < len(attacks):
                message = "{field} must name at least one attack, and each once"
                problems.append(Problem(code="conflict", field="attacks", message=message, got=attacks))
        return problems

    @property
    def title(self) -> str:
        return f"AutoAttack {self.version}"

    @property
    def gradient_samples(self) -> int | None:
        return self.samples if self.version == "rand" else None

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
