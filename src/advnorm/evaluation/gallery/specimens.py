"""The specimens of the gallery: classifiers whose robustness is known, each with the reason why it is known.

*sound*: trained by a method whose robustness strong evaluations confirm. *undefended*: trained on clean images, and no
usual attack reports robustness. *false*: a usual attack (FGSM or PGD-10 through the defence) reports an accuracy far
above the accuracy that an attack by someone who knows the defence leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from advnorm._core.registry import Registry
from advnorm.evaluation.gallery import defences
from advnorm.evaluation.gallery.parents import Parents, Scale
from advnorm.surgery import strip
from advnorm.threat import ThreatModel

Truth = Literal["sound", "false", "undefended"]
Part = Literal["fitted", "held_out", "blind"]
Build = Callable[[Parents], nn.Module]


@dataclass(frozen=True, kw_only=True)
class Specimen:
    """A classifier of known truth. ``expert`` builds the model that someone who knows the defence attacks instead."""

    name: str
    truth: Truth
    why: str
    build: Build
    expert: Build | None = None
    #: Not audited before the audit and its limits were final.
    blind: bool = False
    threat: Callable[[Scale], ThreatModel] = lambda scale: ThreatModel(eps=scale.eps)


SPECIMENS: Registry[Specimen] = Registry("specimen")


def list_specimens(truth: Truth | None = None) -> list[Specimen]:
    """Return the specimens, of one truth or all."""
    return [s for s in map(SPECIMENS.get, SPECIMENS) if truth in (None, s.truth)]


def part_of(specimen: Specimen) -> Part:
    """Return the part of a specimen: blind, or else every second one of each truth is held out, in declared order."""
    if specimen.blind:
        return "blind"
    seen = [other for other in list_specimens(specimen.truth) if not other.blind]
    return "held_out" if seen.index(specimen) % 2 else "fitted"


def add_specimen(
    name: str, why: str, build: Build | str = "", expert: Build | str | None = None, *, truth: Truth, **details: Any
) -> None:
    """Register a specimen: what it builds, or the parent that it is, without ``build`` the parent of its name."""
    build = trained(build or name) if isinstance(build, str) else build
    expert = trained(expert) if isinstance(expert, str) else expert
    SPECIMENS.add(name, Specimen(name=name, truth=truth, why=why, build=build, expert=expert, **details))


sound = partial(add_specimen, truth="sound")
false = partial(add_specimen, truth="false")
undefended = partial(add_specimen, truth="undefended")


def trained(name: str, change: Callable[[nn.Module], nn.Module] = lambda model: model) -> Build:
    return lambda parents: change(parents.get(name))


def stack(*parts: str | Callable[[Tensor], Tensor]) -> Build:
    """Build a sequence of parents and functions."""
    function = defences.Function
    return lambda p: nn.Sequential(*(p.get(part) if isinstance(part, str) else function(part) for part in parts))


def ensemble(answer: Callable[[nn.ModuleList, Tensor], Tensor], *names: str) -> Build:
    return lambda p: defences.Ensemble(map(p.get, names), answer)


def _mean_sparse(parents: Parents) -> nn.Module:
    return defences.with_mean_sparse(parents.get("pgd_at"), parents.train_data[0][:512].to(parents.device), 1.0)


def large_eps(scale: Scale) -> ThreatModel:
    return ThreatModel(eps=scale.large_eps)


def small_eps(scale: Scale) -> ThreatModel:
    return ThreatModel(eps=scale.small_eps)


def _l2(scale: Scale) -> ThreatModel:
    return ThreatModel(norm="L2", eps=scale.l2_eps)


# -- sound -------------------------------------------------------------------------------------------------------------

MADRY = "trained on PGD images of this radius (Madry et al. 2018); AutoAttack confirms such networks on RobustBench"
sound("pgd_at", MADRY)
sound("pgd_at_wide", MADRY)
sound("trades", "TRADES (Zhang et al. 2019), confirmed by AutoAttack on RobustBench")
sound("awp", "AWP (Wu et al. 2020), confirmed by AutoAttack on RobustBench")
sound(
    "hybrid_dual",
    "the adversarial branch of dual BN (paper A, table 1: AutoAttack confirms it)",
    trained("hybrid_dual", lambda model: strip(model, route="adv")),
)
sound("kl", "hybrid training with a KL term (paper A, table 8; paper C, table 3)")
sound("pgd_at_small_eps", MADRY, threat=small_eps)
sound("pgd_at_l2", MADRY, threat=_l2)
sound("pgd_at_gn", MADRY)
sound(
    "pgd_at_temperature",
    "a sound network with logits times 3: no attack loses its gradient at this scale",
    stack("pgd_at", defences.scaled_logits(3.0)),
)
sound(
    "pgd_at_noise",
    "a sound network with a little noise at test time, which changes few answers",
    lambda p: stack(defences.noise(0.05 * p.scale.eps), "pgd_at")(p),
    "pgd_at",
)
sound("trades_small_eps", "TRADES, evaluated at half its radius", "trades", threat=small_eps)

# -- undefended --------------------------------------------------------------------------------------------------------

PLAIN = "trained on clean images alone; PGD-10 finds that it is not robust"
undefended("undefended", PLAIN)
undefended("undefended_wide", PLAIN)
undefended("undefended_ln", PLAIN)
undefended("noise_trained", "trained on weak noise, which is no defence")
undefended("undefended_l2", PLAIN, "undefended_wide", threat=lambda scale: ThreatModel(norm="L2", eps=2 * scale.l2_eps))
undefended(
    "hybrid_dual_clean",
    "the clean branch of dual BN (paper A, table 1: 0.3 % under PGD-10)",
    trained("hybrid_dual", lambda model: strip(model, route="clean")),
    threat=large_eps,
)
undefended(
    "gradient_regularized",
    "the gradient is penalized at the images alone (Ross & Doshi-Velez 2018); at a large radius nothing is left",
    threat=large_eps,
)

# -- false -------------------------------------------------------------------------------------------------------------

FRAGILE = "the network behind the defence was trained on clean images, and attacks on it transfer"
false(
    "hybrid_single",
    "hybrid training with a single BN at a large radius (paper A, table 3: PGD-10 29.9, AutoAttack 0.5)",
    threat=large_eps,
)
false(
    "scaled_logits",
    "logits times 10,000: the answers of the undefended network, without a gradient",
    stack("undefended", defences.scaled_logits(1e4)),
    "undefended",
)
false(
    "distilled",
    "trained at temperature 100 and tested without it (Papernot et al. 2016; Carlini & Wagner 2017)",
    stack("distilled", defences.scaled_logits(100.0)),
    "distilled",
)
false("quantized", FRAGILE, stack(defences.quantized(16), "undefended"), "undefended")
false(
    "thermometer",
    "thermometer encoding of an undefended network (broken by Athalye et al. 2018)",
    "thermometer",
    trained("thermometer", defences.softened),
)
false("bit_depth", FRAGILE, lambda p: defences.BitDepth(p.get("undefended"), 3), "undefended")
false(
    "kwta",
    "k-WTA trained on clean images (Xiao et al. 2020; broken by Tramèr et al. 2020)",
    "kwta",
    trained("kwta", defences.softened),
    threat=lambda scale: ThreatModel(eps=0.75 * scale.eps),
)
false(
    "mean_sparse",
    "MeanSparse with a large threshold on a sound network: it is less robust than the network alone",
    _mean_sparse,
    lambda p: defences.softened(_mean_sparse(p)),
)
false(
    "random_resize",
    "random resizing of an undefended network (Xie et al. 2018; broken by Athalye et al. 2018)",
    stack(defences.random_resize, defences.quantized(255), "random_resize"),
    "random_resize",
)
false(
    "random_noise",
    FRAGILE,
    lambda p: stack(defences.noise(p.scale.eps), "noise_trained_strongly", defences.scaled_logits(1e4))(p),
    "noise_trained_strongly",
)
false(
    "random_dropout",
    FRAGILE,
    stack(lambda x: F.dropout(x, 0.3), "dropout_trained", defences.scaled_logits(1e3)),
    "dropout_trained",
)
false("median_filter", FRAGILE, stack(defences.half_median_filter, "undefended"), "undefended")
false("block_transform", FRAGILE, stack(defences.block_transform, "undefended_wide"), "undefended_wide")
false(
    "saturating",
    "activations so steep that they have no gradient; the same weights with a slope are not robust",
    trained("saturating", lambda model: defences.replace_activations(model, lambda: defences.SteepTanh(200.0))),
    "saturating",
)
false(
    "batch_scaled",
    "logits scaled by a statistic of the batch: the answers of the undefended network, without a gradient",
    stack("undefended_wide", defences.batch_scaled_logits(1e4)),
    "undefended_wide",
)
false(
    "fgsm_at",
    "one-step training that overfits to one step (Wong et al. 2020): PGD-10 removes what FGSM reports",
    threat=large_eps,
)
false(
    "off_grid_branch",
    "images off the data's grid take a branch without gradients; the network in both branches is undefended",
    lambda p: defences.OffGridBranch(p.get("undefended_ln"), 16),
    "undefended_ln",
)
false(
    "vote",
    "a vote of undefended networks, too sharp for gradients",
    ensemble(defences.vote, "undefended", "undefended_wide", "undefended_ln"),
    ensemble(defences.soft_vote, "undefended", "undefended_wide", "undefended_ln"),
)
false("wave", FRAGILE, stack(defences.wave, "undefended"), "undefended")
false(
    "quantized_sound",
    "a sound network behind rounded pixels: PGD-10 has no gradient and reports the clean accuracy",
    stack(defences.quantized(8), "pgd_at"),
    "pgd_at",
)
false(
    "random_member",
    "a random choice among undefended networks in each forward",
    lambda p: nn.Sequential(
        ensemble(defences.random_member, "undefended", "undefended_ln")(p),
        defences.Function(defences.scaled_logits(1e3)),
    ),
    ensemble(defences.soft_vote, "undefended", "undefended_ln"),
)
false(
    "kwta_full_eps",
    "the network of kwta at the full radius, where PGD-10 overstates less",
    "kwta",
    trained("kwta", defences.softened),
)
