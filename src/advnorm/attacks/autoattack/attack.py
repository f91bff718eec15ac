"""AutoAttack as an attack and as an evaluation.

Source: Croce & Hein 2020, "Reliable evaluation of adversarial robustness with an ensemble of diverse parameter-free
attacks"; settings and checks as in the authors' code (github.com/fra31/auto-attack).
"""

from __future__ import annotations

import dataclasses
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from advnorm._core.precision import float32_as, snapshot_precision
from advnorm._core.progress import show_progress
from advnorm._core.records import digest, model_fingerprint
from advnorm._core.seeding import ImageNoise
from advnorm.attacks.autoattack.cascade import Cascade
from advnorm.attacks.autoattack.record import AutoAttackResult, CascadeRecord
from advnorm.attacks.autoattack.settings import VERSIONS, AutoAttackSettings, Precision
from advnorm.attacks.autoattack.surrogate import search_surrogate
from advnorm.attacks.base import detach, validated_index
from advnorm.attacks.inputs import validate_batch, validating_first_logits
from advnorm.attacks.model_access import Predict, predicting
from advnorm.attacks.names import NameOption, count_options, register_attack


@register_attack(
    "autoattack",
    options={
        **count_options("steps", "queries"),
        **{version: NameOption(setting="version", value=version) for version in VERSIONS},
        **{precision: NameOption(setting="precision", value=precision) for precision in get_args(Precision)},
    },
    summary="APGD-CE, APGD-T, FAB-T and Square in a cascade",
    paper="A, C",
)
@dataclass(frozen=True, kw_only=True)
class AutoAttack(AutoAttackSettings):
    """A cascade: each attack runs on the images that the attacks before it did not fool.

    Version ``plus`` adds restarts and untargeted attacks. ``rand`` is for randomized models: every gradient is the mean
    of ``samples`` forwards. A success counts only after a strict float32 forward of the projected image. After a search
    in ``tf32`` or ``bf16``, FAB-T in float32 continues from the best point of each surviving image whose margin is at
    most 8 times the difference of margins between the two precisions. The batch size is halved after an out-of-memory
    error.
    """

    def perturb(self, predict: Predict, x: Tensor, y: Tensor, noise: ImageNoise) -> Tensor:
        with float32_as("ieee", x.device):
            surrogate, scope = search_surrogate(self, predict, x.device)
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
    ) -> AutoAttackResult:
        """Attack the images and measure robust accuracy; ``x`` may be on another device than the model.

        ``record``: a folder that is written after each batch, resumed after a kill, and finally holds the result.
        ``bar``: show a progress bar; None shows it on a terminal. ``search``: a fast surrogate of the model (compiled,
        folded, half precision) that guides the search instead of ``precision``; the model itself decides.
        """
        largest_label = validate_batch(x, y)
        index = validated_index(index, x)
        tensors = (*model.parameters(), *model.buffers()) if isinstance(model, nn.Module) else ()
        device = next((tensor.device for tensor in tensors), x.device)
        callers_precision = snapshot_precision(device)
        with ExitStack() as stack:
            stack.enter_context(float32_as("ieee", device))
            predict = stack.enter_context(predicting(model, route=self.route, statistics=self.statistics))
            x, y = detach(x), detach(y)
            torch.manual_seed(self.seed)  # for randomized models; `predicting` restores the caller's state
            predict = validating_first_logits(predict, largest_label)
            noise, given = self.noise(index.to(device)), search is not None
            surrogate, scope = search, callers_precision
            if not given:
                surrogate, scope = search_surrogate(self, predict, device, model)
            cascade = Cascade(self, predict, x, y, noise, surrogate=surrogate, precision=scope, given=given)
            if record is not None:
                cascade.record = CascadeRecord(Path(record), self._request(model, x, y, index, cascade))
            if sys.stderr.isatty() if bar is None else bar:
                task = stack.enter_context(show_progress()).task("AutoAttack", 100, unit="percent")
                cascade.reports.append(lambda name, share: task.update(100 * share, description=f"AutoAttack: {name}"))
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
