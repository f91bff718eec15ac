"""Training on clean and adversarial images together: hybrid training, its regularizers, Cross-AT and TRADES."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from advnorm._core.errors import ConfigError, did_you_mean
from advnorm.attacks.autoattack import AutoAttack
from advnorm.attacks.base import Attack
from advnorm.attacks.losses import kl_to_clean
from advnorm.attacks.pgd import PGD
from advnorm.attacks.search import Search
from advnorm.norms import mixture_likelihood
from advnorm.norms.plan import Plan
from advnorm.objectives.base import (
    OBJECTIVES,
    Layout,
    Objective,
    needs_both_domains,
    share_problem,
    weight_problem,
)
from advnorm.objectives.execution import EAGER, CraftedBatch, Execution, ObjectiveOutput


class DualDomain(Objective):
    """``Σ weight · term`` over cross-entropies of both domains, their divergence, logit distance and likelihood.

    Which terms count, and how much, is what the named objectives differ in: :meth:`weights`. With ``clean_share`` s
    only a share s of each batch's clean images goes along, one at least, spread evenly over the batch; the adversarial
    ones all stay (paper E, sec. 4.1).
    """

    def __init__(
        self,
        model: nn.Module,
        attack: Attack | None = None,
        *,
        layout: Layout = "concatenated",
        clean_share: float = 1.0,
        likelihood_weight: float = 0.0,
        **options: Any,
    ) -> None:
        own = {"layout": layout, "clean_share": clean_share, "likelihood_weight": likelihood_weight}
        self.check(model, attack, **own, **options)
        super().__init__(model, attack, **options)
        self.layout: Layout = layout
        self.clean_share = clean_share
        self.likelihood_weight = likelihood_weight

    @classmethod
    def plan_problems(cls, plans: Iterable[Plan], **options: Any) -> list[str]:
        plans = list(plans)
        layout, share = options.get("layout", "concatenated"), options.get("clean_share", 1.0)
        nll = options.get("likelihood_weight", 0.0)
        problems = super().plan_problems(plans, **options) + weight_problem("likelihood_weight", nll)
        bad_share = share_problem("clean_share", share)
        problems += bad_share
        if layout not in get_args(Layout):
            problems.append(f"unknown layout {layout!r}{did_you_mean(layout, get_args(Layout))}")
        for name in dict.fromkeys(plan.name for plan in plans if needs_both_domains(plan)):
            if layout == "sequential":
                problems.append(
                    f"{name} normalizes with the statistics of both domains, and a sequential forward sees one; "
                    "use layout='concatenated'"
                )
            if not bad_share and share == 0:
                problems.append(f"{name} needs clean images in each batch; give clean_share above 0, or another norm")
        if not problems and nll and not any(plan.mixture for plan in plans):
            problems.append("likelihood_weight belongs to a mixture norm; use norm='gmm_bn', or leave it at 0")
        return problems

    def weights(self, clean: int, adv: int) -> dict[str, float]:
        """The weight of each term for so many clean and adversarial images; a term without one is not computed."""
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
        with mixture_likelihood(self.model) if self.likelihood_weight else nullcontext() as nll:
            logits = self.domain_logits({"clean": x[kept], "adv": x_adv}, self.layout, execution)
        clean, adv = logits.get("clean"), logits["adv"]
        terms: dict[str, Tensor] = {}
        loss = adv.new_zeros(())
        weights = self.weights(len(labels["clean"]), len(y))
        if nll is not None:
            weights["likelihood"] = self.likelihood_weight
        for name, weight in weights.items():
            if name == "adv_ce":
                terms[name] = self.cross_entropy(adv, y)
            elif name == "likelihood":
                assert nll is not None
                terms[name] = nll.loss()
            elif clean is not None:
                terms[name] = self._paired(name, clean, adv[kept], labels["clean"])
            if name in terms:
                loss = loss + weight * terms[name]
        labels = {domain: labels[domain] for domain in logits}
        return ObjectiveOutput(loss, logits, {name: term.detach() for name, term in terms.items()}, labels)

    def _kept(self, x: Tensor) -> slice | Tensor:
        """Which images go along clean too."""
        count = clean_images(len(x), self.clean_share)
        if self.clean_share in (0, 1):
            return slice(0, count)
        return torch.arange(count, device=x.device) * len(x) // count

    def _paired(self, name: str, clean: Tensor, adv: Tensor, y: Tensor) -> Tensor:
        """A term of the clean images, or of them and their adversarial counterparts."""
        if name == "clean_ce":
            return self.cross_entropy(clean, y)
        if name == "kl":
            return kl_to_clean(adv, clean.log_softmax(1)).mean()
        assert name == "pairing"
        return F.mse_loss(adv, clean)

    def extra_repr(self) -> str:
        settings = f"layout={self.layout!r}, clean_share={self.clean_share}"
        if self.likelihood_weight:
            settings += f", likelihood_weight={self.likelihood_weight}"
        return f"{settings}, {super().extra_repr()}"


def clean_images(batch: int, share: float) -> int:
    """How many of a batch's images go along clean."""
    return max(1, round(share * batch)) if share else 0


class Hybrid(DualDomain):
    """``γ L_CE(x, y) + (1 - γ) max_δ L_CE(x + δ, y)`` with γ = ``clean_weight`` (paper A, eq. 2; C, eq. 1; E, eq. 1).

    ``kl_weight`` β adds ``β KL(f(x) || f(x_adv))`` (C, eq. 3; A, table 8), ``pairing_weight`` the mean squared
    difference of the logits (ALP; paper E, sec. 4.1), ``likelihood_weight`` the likelihood of mixture norms (C, eq.
    21).

    With ``clean_share`` below 1 the loss is the mean over the images that are left, each clean one weighted by γ and
    each adversarial one by 1 - γ: at 0 it is adversarial training alone.
    """

    summary, paper = "clean and adversarial cross-entropy (MAT)", "A (eq. 2), C (eq. 1), E (eq. 1)"

    def __init__(
        self,
        model: nn.Module,
        attack: Attack | None = None,
        *,
        clean_weight: float = 0.5,
        kl_weight: float = 0.0,
        pairing_weight: float = 0.0,
        **options: Any,
    ) -> None:
        own = {"clean_weight": clean_weight, "kl_weight": kl_weight, "pairing_weight": pairing_weight}
        self.check(model, attack, **own, **options)
        super().__init__(model, attack, **options)
        self.clean_weight, self.kl_weight, self.pairing_weight = clean_weight, kl_weight, pairing_weight

    @classmethod
    def plan_problems(cls, plans: Iterable[Plan], **options: Any) -> list[str]:
        given = {name: parameter.default for name, parameter in cls.options().items()} | options
        share, clean, extra = given["clean_share"], given["clean_weight"], (given["kl_weight"], given["pairing_weight"])
        problems = super().plan_problems(plans, **options) + share_problem("clean_weight", clean)
        problems += weight_problem("kl_weight", extra[0]) + weight_problem("pairing_weight", extra[1])
        if not problems and share == 0 and any(extra):
            problems.append("kl_weight and pairing_weight compare clean with adversarial outputs; raise clean_share")
        if not problems and share == 0 and clean == 1:
            problems.append("nothing is left of the loss with clean_share 0 and clean_weight 1; change one of them")
        return problems

    def weights(self, clean: int, adv: int) -> dict[str, float]:
        share, rest = self.clean_weight * clean, (1 - self.clean_weight) * adv
        total = share + rest
        weights = {"clean_ce": share / total, "adv_ce": rest / total}
        weights.update({name: w for name, w in (("kl", self.kl_weight), ("pairing", self.pairing_weight)) if w})
        return weights

    def extra_repr(self) -> str:
        settings = f"clean_weight={self.clean_weight}, kl_weight={self.kl_weight}, pairing_weight={self.pairing_weight}"
        return f"{settings}, {super().extra_repr()}"


class KL(Hybrid):
    """Hybrid training with ``β KL(f(x) || f(x_adv))``, β = ``kl_weight`` (paper C, eq. 3; A, table 8)."""

    summary, paper = "hybrid with a KL term between the outputs", "A (table 8), C (eq. 3)"

    def __init__(self, model: nn.Module, attack: Attack | None = None, *, kl_weight: float = 1.0, **options: Any):
        super().__init__(model, attack, kl_weight=kl_weight, **options)


class ALP(Hybrid):
    """Hybrid training with the mean squared difference of clean and adversarial logits (ALP; paper E, sec. 4.1)."""

    summary, paper = "hybrid with paired logits (ALP)", "E (sec. 4.1)"

    def __init__(self, model: nn.Module, attack: Attack | None = None, *, pairing_weight: float = 0.5, **options: Any):
        super().__init__(model, attack, pairing_weight=pairing_weight, **options)


class Cross(DualDomain):
    """Cross-AT: ``max_δ L_CE(x + δ, y)`` with the adversarial images normalized by the clean ones' statistics.

    The clean images are only forwarded: there is no loss of theirs, but the weights learn through the statistics that
    they lend the adversarial ones too, unless the norm has ``other_gradient=False`` (paper A, sec. 3, fig. 1). The norm
    is ``cross_bn``, of which the branch ``adv`` alone is trained: BN_clean of the paper, for images of either domain.
    The other branch gets no gradient: give DDP ``find_unused_parameters=True``.
    """

    summary, paper = "adversarial images normalized by clean statistics (Cross-AT)", "A (fig. 1, 2)"

    @classmethod
    def plan_problems(cls, plans: Iterable[Plan], **options: Any) -> list[str]:
        plans = list(plans)
        problems = super().plan_problems(plans, **options)
        if not any(_crosses(plan) for plan in plans):
            problems.append("Cross-AT normalizes adversarial images by clean statistics; use norm='cross_bn'")
        return problems

    def weights(self, clean: int, adv: int) -> dict[str, float]:
        return {"adv_ce": 1.0}

    def trained_domains(self) -> tuple[str, ...]:
        return ("adv",)


class TRADES(DualDomain):
    """``L_CE(x, y) + β max_δ KL(f(x) || f(x + δ))`` (Zhang et al. 2019; paper C, eq. 2).

    The attack ascends the KL divergence: a given PGD, which may have no target, is taken with ``loss="kl"``, and the
    clean output that it starts from is computed once. An attack of your own is taken as it is.
    """

    summary, paper = "clean cross-entropy and KL to the adversarial output", "C (eq. 2)"

    def __init__(self, model: nn.Module, attack: Attack | None = None, *, beta: float = 6.0, **options: Any) -> None:
        self.check(model, attack, beta=beta, **options)
        super().__init__(model, attack, **options)
        self.beta = beta

    @classmethod
    def plan_problems(cls, plans: Iterable[Plan], **options: Any) -> list[str]:
        problems = super().plan_problems(plans, **options) + weight_problem("beta", options.get("beta", 6.0))
        if options.get("clean_share", 1) != 1:
            problems.append("TRADES compares each adversarial output with its clean one; leave clean_share at 1")
        return problems

    def weights(self, clean: int, adv: int) -> dict[str, float]:
        return {"clean_ce": 1.0, "kl": self.beta}

    @classmethod
    def adapt_attack(cls, attack: Attack) -> Attack:
        target = attack.target if isinstance(attack, PGD) else None
        if target is not None or isinstance(attack, Search | AutoAttack):
            what = type(attack).__name__ if target is None else f"the target {target!r}"
            raise ConfigError(
                f"TRADES ascends the KL divergence to the clean output, got {what}; use PGD without a target"
            )
        return dataclasses.replace(attack, loss="kl") if isinstance(attack, PGD) else attack

    def extra_repr(self) -> str:
        return f"beta={self.beta}, {super().extra_repr()}"


def _crosses(plan: Plan) -> bool:
    """Whether adversarial samples are normalized by the bank that clean ones feed."""
    if plan.statistics != "batch" or plan.mixture or not {"clean", "adv"} <= set(plan.domains):
        return False
    clean, adv = plan.index("clean"), plan.index("adv")
    return plan.normalized_by[adv] == plan.feeds[clean] != plan.feeds[adv]


for _name, _objective in (
    ("hybrid", Hybrid),
    ("kl", KL),
    ("alp", ALP),
    ("cross", Cross),
    ("trades", TRADES),
):
    OBJECTIVES.add(_name, _objective)
