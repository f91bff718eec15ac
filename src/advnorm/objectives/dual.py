"""Training on clean and adversarial images together: hybrid training, its regularizers, Cross-AT and TRADES."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from advnorm._core.errors import ConfigError, Description, Problem
from advnorm._core.settings import Setting
from advnorm.attacks.autoattack import CascadeAttack
from advnorm.attacks.base import Attack
from advnorm.attacks.losses import kl_to_clean
from advnorm.attacks.pgd import PGD
from advnorm.attacks.search import Search
from advnorm.norms import mixture_likelihood
from advnorm.norms.plan import Plan
from advnorm.objectives.base import Layout, Objective, both_domains_problems, register_objective
from advnorm.objectives.execution import EAGER, CraftedBatch, Execution, ObjectiveOutput


class DualDomain(Objective):
    """``Σ weight · term`` over cross-entropies of both domains, their divergence, logit distance and likelihood.

    Subclasses define the :meth:`weights` of the terms. ``clean_share`` is the share of the clean images of a batch that
    are used: at least one image, spread evenly over the batch, or none if it is 0. All adversarial images are used
    (paper E, sec. 4.1).
    """

    layout: Annotated[Layout, Setting("One forward of both domains, or one forward for each.")] = "concatenated"
    clean_share: Annotated[float, Setting("Share of the clean images that are used.", "[0, 1]")] = 1.0
    likelihood_weight: Annotated[float, Setting("Weight of the likelihood of mixture norms.", "[0, inf)")] = 0.0
    likelihood_positions: Annotated[
        Literal["sum", "mean"], Setting("Whether the likelihood is summed or averaged over the positions of a layer.")
    ] = "sum"

    @classmethod
    def plan_problems(cls, plans: Sequence[Plan], **settings: Any) -> list[Problem]:
        problems = super().plan_problems(plans, **settings)
        if settings["layout"] == "sequential":
            seen, hint = "a sequential forward sees one", "use layout='concatenated'"
            problems += both_domains_problems(plans, seen, "layout", hint)
        if settings["clean_share"] == 0:
            seen, hint = "clean_share=0 leaves out the clean images", "set clean_share above 0, or use another norm"
            problems += both_domains_problems(plans, seen, "clean_share", hint)
        if not problems and settings["likelihood_weight"] and not any(plan.mixture for plan in plans):
            message, hint = "{field} needs a mixture norm", "use norm='gmm_bn', or leave it at 0"
            problems.append(Problem(code="conflict", message=message, field="likelihood_weight", hint=hint))
        return problems

    def weights(self, clean: int, adv: int) -> dict[str, float]:
        """The weight of each term, given the numbers of images; a term without a weight is not computed."""
        raise NotImplementedError

    def trained_domains(self) -> tuple[str, ...]:
        return self.domains if self.clean_share else ("adv",)

    def images_per_domain(self, batch_size: int) -> dict[str, int]:
        return {"clean": clean_images(batch_size, self.clean_share), "adv": batch_size}

    def compute_loss(self, batch: CraftedBatch, execution: Execution = EAGER) -> ObjectiveOutput:
        x, y, x_adv = batch.x, batch.y, batch.x_adv
        assert x_adv is not None
        kept = self._kept(x)
        labels = {"clean": y[kept], "adv": y}
        with mixture_likelihood(self.model) if self.likelihood_weight else nullcontext() as likelihood:
            logits = self.domain_logits({"clean": x[kept], "adv": x_adv}, self.layout, execution)
        weights = self.weights(len(labels["clean"]), len(y))
        terms = {
            name: self._term(name, logits, labels, kept) for name in weights if name == "adv_ce" or "clean" in logits
        }
        if likelihood is not None:
            weights["likelihood"] = self.likelihood_weight
            terms["likelihood"] = likelihood.loss(self.likelihood_positions)
        loss = logits["adv"].new_zeros(())
        for name, term in terms.items():
            loss = loss + weights[name] * term
        labels = {domain: labels[domain] for domain in logits}
        return ObjectiveOutput(loss, logits, {name: term.detach() for name, term in terms.items()}, labels)

    def _kept(self, x: Tensor) -> slice | Tensor:
        """The rows whose clean images are used."""
        count = clean_images(len(x), self.clean_share)
        if self.clean_share in (0, 1):
            return slice(0, count)
        return torch.arange(count, device=x.device) * len(x) // count

    def _term(
        self, name: str, logits: Mapping[str, Tensor], labels: Mapping[str, Tensor], kept: slice | Tensor
    ) -> Tensor:
        """A term of one domain, or of pairs of clean images and the adversarial ones in the rows ``kept``."""
        if name in ("clean_ce", "adv_ce"):
            domain = name.removesuffix("_ce")
            return self.cross_entropy(logits[domain], labels[domain])
        clean, adv = logits["clean"], logits["adv"][kept]
        if name == "kl":
            return kl_to_clean(adv, clean.log_softmax(1)).mean()
        assert name == "pairing"
        return F.mse_loss(adv, clean)


def clean_images(batch: int, share: float) -> int:
    """Number of clean images of a batch that are used."""
    return max(1, round(share * batch)) if share else 0


@register_objective("hybrid")
class Hybrid(DualDomain):
    """``γ L_CE(x, y) + (1 - γ) max_δ L_CE(x + δ, y)`` with γ = ``clean_weight`` (paper A, eq. 2; C, eq. 1; E, eq. 1).

    ``kl_weight`` β adds ``β KL(f(x) || f(x_adv))`` (C, eq. 3; A, table 8), ``pairing_weight`` the mean squared
    difference of the logits (ALP; paper E, sec. 4.1), ``likelihood_weight`` the likelihood of mixture norms (C, eq.
    21).

    With ``clean_share`` below 1 the loss is the weighted mean over the used images: weight γ for each clean image,
    1 - γ for each adversarial image. ``clean_share=0`` is adversarial training.
    """

    summary, paper = "clean and adversarial cross-entropy (MAT)", "A (eq. 2), C (eq. 1), E (eq. 1)"

    clean_weight: Annotated[float, Setting("Weight γ of clean images; adversarial images have 1 - γ.", "[0, 1]")] = 0.5
    kl_weight: Annotated[float, Setting("Weight of the KL term.", "[0, inf)")] = 0.0
    pairing_weight: Annotated[float, Setting("Weight of the squared logit difference.", "[0, inf)")] = 0.0

    @classmethod
    def plan_problems(cls, plans: Sequence[Plan], **settings: Any) -> list[Problem]:
        problems = super().plan_problems(plans, **settings)
        if problems or settings["clean_share"] > 0:
            return problems
        if settings["kl_weight"] or settings["pairing_weight"]:
            message = "kl_weight and pairing_weight compare clean with adversarial outputs, and {field} is 0"
            problems.append(Problem(code="conflict", message=message, field="clean_share", hint="raise clean_share"))
        if settings["clean_weight"] == 1:
            message = "the loss is empty with {field} 0 and clean_weight 1"
            problems.append(Problem(code="conflict", message=message, field="clean_share", hint="change one of them"))
        return problems

    def weights(self, clean: int, adv: int) -> dict[str, float]:
        share, rest = self.clean_weight * clean, (1 - self.clean_weight) * adv
        total = share + rest
        weights = {"clean_ce": share / total, "adv_ce": rest / total}
        weights.update({name: w for name, w in (("kl", self.kl_weight), ("pairing", self.pairing_weight)) if w})
        return weights


@register_objective("kl")
class KL(Hybrid):
    """Hybrid training with ``β KL(f(x) || f(x_adv))``, β = ``kl_weight`` (paper C, eq. 3; A, table 8)."""

    summary, paper = "hybrid with a KL term between the outputs", "A (table 8), C (eq. 3)"
    kl_weight = 1.0


@register_objective("alp")
class ALP(Hybrid):
    """Hybrid training with the mean squared difference of clean and adversarial logits (ALP; paper E, sec. 4.1)."""

    summary, paper = "hybrid with paired logits (ALP)", "E (sec. 4.1)"
    pairing_weight = 0.5


@register_objective("advprop")
class AdvProp(Hybrid):
    """Hybrid training for clean accuracy: adversarial images train an auxiliary norm, and tests use the clean branch.

    The loss is the mean of the clean and the adversarial cross-entropy, half the sum of Xie et al. (2020). For the
    paper's step sizes, double the learning rate of SGD and halve the weight decay. Use a norm with two branches
    (``dual_bn``). Validation sends clean and attacked images through the clean branch.
    """

    summary, paper = "hybrid for clean accuracy, tested by the clean branch", "Xie et al. 2020"

    def tested_domains(self) -> tuple[str, ...]:
        return ("clean",)


@register_objective("cross")
class Cross(DualDomain):
    """Cross-AT: ``max_δ L_CE(x + δ, y)`` with the adversarial images normalized by the clean ones' statistics.

    The clean images are forwarded without a loss. Gradients also flow through their statistics, unless the norm has
    ``other_gradient=False`` (paper A, sec. 3, fig. 1). The norm is ``cross_bn``. Training updates its branch ``adv``,
    which the paper calls BN_clean; evaluate images of both domains through it. The other branch gets no gradient, so
    DDP needs ``find_unused_parameters=True``.
    """

    summary, paper = "adversarial images normalized by clean statistics (Cross-AT)", "A (fig. 1, 2)"

    @classmethod
    def plan_problems(cls, plans: Sequence[Plan], **settings: Any) -> list[Problem]:
        problems = super().plan_problems(plans, **settings)
        if not any(_crosses(plan) for plan in plans):
            message, hint = "Cross-AT normalizes adversarial images by clean statistics", "use norm='cross_bn'"
            problems.append(Problem(code="conflict", message=message, field="norm", hint=hint))
        return problems

    def weights(self, clean: int, adv: int) -> dict[str, float]:
        return {"adv_ce": 1.0}

    def trained_domains(self) -> tuple[str, ...]:
        return ("adv",)


@register_objective("trades")
class TRADES(DualDomain):
    """``L_CE(x, y) + β max_δ KL(f(x) || f(x + δ))`` (Zhang et al. 2019; paper C, eq. 2).

    The attack maximizes the KL divergence. PGD runs with ``loss="kl"`` and must not have a target; the clean output is
    computed once. Searches and cascades are rejected. Other attacks keep their settings.
    """

    summary, paper = "clean cross-entropy and KL to the adversarial output", "C (eq. 2)"

    beta: Annotated[float, Setting("Weight of the KL term.", "[0, inf)")] = 6.0

    @classmethod
    def plan_problems(cls, plans: Sequence[Plan], **settings: Any) -> list[Problem]:
        problems = super().plan_problems(plans, **settings)
        if settings["clean_share"] != 1:
            message = "{field} must be 1, because TRADES compares each adversarial output with the clean output"
            problems.append(Problem(code="conflict", message=message, field="clean_share", hint="leave it at 1"))
        return problems

    def weights(self, clean: int, adv: int) -> dict[str, float]:
        return {"clean_ce": 1.0, "kl": self.beta}

    @classmethod
    def adapt_attack(cls, attack: Attack) -> Attack:
        target = attack.target if isinstance(attack, PGD) else None
        if target is not None or isinstance(attack, Search | CascadeAttack):
            got = Description(type(attack).__name__ if target is None else f"the target {target!r}")
            message = "{field} must be able to maximize the KL divergence to the clean output for TRADES"
            raise ConfigError("conflict", message, "attack", got=got, hint="use PGD without a target")
        return dataclasses.replace(attack, loss="kl") if isinstance(attack, PGD) else attack


def _crosses(plan: Plan) -> bool:
    """Whether adversarial samples are normalized by the bank that clean samples update."""
    if plan.statistics != "batch" or plan.mixture or not {"clean", "adv"} <= set(plan.domains):
        return False
    clean, adv = plan.index("clean"), plan.index("adv")
    return plan.normalized_by[adv] == plan.feeds[clean] != plan.feeds[adv]
