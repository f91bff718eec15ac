"""The specimens of the gallery: classifiers whose robustness is known, each with the reason why it is known.

*sound*: trained by a method whose robustness strong evaluations confirm. *undefended*: trained on clean images, and no
usual attack reports robustness. *false*: a usual attack (FGSM or PGD-10 through the defence) reports an accuracy far
above the accuracy that an attack by someone who knows the defence leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from advnorm._core.registry import Registry
from advnorm.evaluation.gallery.defences import (
    BatchScaledLogits,
    BitDepth,
    BlockTransform,
    MedianFilter,
    Noise,
    OffGridBranch,
    Quantized,
    RandomMember,
    RandomResize,
    ScaledLogits,
    SteepTanh,
    TestDropout,
    Vote,
    Wave,
    replace_activations,
    softened,
    with_mean_sparse,
)
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


def add_specimen(name: str, truth: Truth, why: str, build: Build, expert: Build | None = None, **details: Any) -> None:
    SPECIMENS.add(name, Specimen(name=name, truth=truth, why=why, build=build, expert=expert, **details))


def trained(name: str) -> Build:
    return lambda parents: parents.get(name)


def _mean_sparse(parents: Parents) -> nn.Module:
    return with_mean_sparse(parents.get("pgd_at"), parents.train_data[0][:512].to(parents.device), 1.0)


def large_eps(scale: Scale) -> ThreatModel:
    return ThreatModel(eps=scale.large_eps)


def small_eps(scale: Scale) -> ThreatModel:
    return ThreatModel(eps=scale.small_eps)


def _l2(scale: Scale) -> ThreatModel:
    return ThreatModel(norm="L2", eps=scale.l2_eps)


# -- sound -------------------------------------------------------------------------------------------------------------

MADRY = "trained on PGD images of this radius (Madry et al. 2018); AutoAttack confirms such networks on RobustBench"
add_specimen("pgd_at", "sound", MADRY, trained("pgd_at"))
add_specimen("pgd_at_wide", "sound", MADRY, trained("pgd_at_wide"))
add_specimen("trades", "sound", "TRADES (Zhang et al. 2019), confirmed by AutoAttack on RobustBench", trained("trades"))
add_specimen("awp", "sound", "AWP (Wu et al. 2020), confirmed by AutoAttack on RobustBench", trained("awp"))
add_specimen(
    "hybrid_dual",
    "sound",
    "the adversarial branch of dual BN (paper A, table 1: AutoAttack confirms it)",
    lambda p: strip(p.get("hybrid_dual"), route="adv"),
)
add_specimen("kl", "sound", "hybrid training with a KL term (paper A, table 8; paper C, table 3)", trained("kl"))
add_specimen("pgd_at_small_eps", "sound", MADRY, trained("pgd_at_small_eps"), threat=small_eps)
add_specimen("pgd_at_l2", "sound", MADRY, trained("pgd_at_l2"), threat=_l2)
add_specimen("pgd_at_gn", "sound", MADRY, trained("pgd_at_gn"))
add_specimen(
    "pgd_at_temperature",
    "sound",
    "a sound network with logits times 3: no attack loses its gradient at this scale",
    lambda p: nn.Sequential(p.get("pgd_at"), ScaledLogits(3.0)),
)
add_specimen(
    "pgd_at_noise",
    "sound",
    "a sound network with a little noise at test time, which changes few answers",
    lambda p: nn.Sequential(Noise(0.05 * p.scale.eps), p.get("pgd_at")),
    trained("pgd_at"),
)
add_specimen("trades_small_eps", "sound", "TRADES, evaluated at half its radius", trained("trades"), threat=small_eps)

# -- undefended --------------------------------------------------------------------------------------------------------

PLAIN = "trained on clean images alone; PGD-10 finds that it is not robust"
add_specimen("undefended", "undefended", PLAIN, trained("undefended"))
add_specimen("undefended_wide", "undefended", PLAIN, trained("undefended_wide"))
add_specimen("undefended_ln", "undefended", PLAIN, trained("undefended_ln"))
add_specimen("noise_trained", "undefended", "trained on weak noise, which is no defence", trained("noise_trained"))
add_specimen(
    "undefended_l2",
    "undefended",
    PLAIN,
    trained("undefended_wide"),
    threat=lambda scale: ThreatModel(norm="L2", eps=2 * scale.l2_eps),
)
add_specimen(
    "hybrid_dual_clean",
    "undefended",
    "the clean branch of dual BN (paper A, table 1: 0.3 % under PGD-10)",
    lambda p: strip(p.get("hybrid_dual"), route="clean"),
    threat=large_eps,
)
add_specimen(
    "gradient_regularized",
    "undefended",
    "the gradient is penalized at the images alone (Ross & Doshi-Velez 2018); at a large radius nothing is left",
    trained("gradient_regularized"),
    threat=large_eps,
)

# -- false -------------------------------------------------------------------------------------------------------------

FRAGILE = "the network behind the defence was trained on clean images, and attacks on it transfer"
add_specimen(
    "hybrid_single",
    "false",
    "hybrid training with a single BN at a large radius (paper A, table 3: PGD-10 29.9, AutoAttack 0.5)",
    trained("hybrid_single"),
    threat=large_eps,
)
add_specimen(
    "scaled_logits",
    "false",
    "logits times 10,000: the answers of the undefended network, without a gradient",
    lambda p: nn.Sequential(p.get("undefended"), ScaledLogits(1e4)),
    trained("undefended"),
)
add_specimen(
    "distilled",
    "false",
    "trained at temperature 100 and tested without it (Papernot et al. 2016; Carlini & Wagner 2017)",
    lambda p: nn.Sequential(p.get("distilled"), ScaledLogits(100.0)),
    trained("distilled"),
)
add_specimen(
    "quantized",
    "false",
    FRAGILE,
    lambda p: nn.Sequential(Quantized(16), p.get("undefended")),
    trained("undefended"),
)
add_specimen(
    "thermometer",
    "false",
    "thermometer encoding of an undefended network (broken by Athalye et al. 2018)",
    trained("thermometer"),
    lambda p: softened(p.get("thermometer")),
)
add_specimen("bit_depth", "false", FRAGILE, lambda p: BitDepth(p.get("undefended"), 3), trained("undefended"))
add_specimen(
    "kwta",
    "false",
    "k-WTA trained on clean images (Xiao et al. 2020; broken by Tramèr et al. 2020)",
    trained("kwta"),
    lambda p: softened(p.get("kwta")),
    threat=lambda scale: ThreatModel(eps=0.75 * scale.eps),
)
add_specimen(
    "mean_sparse",
    "false",
    "MeanSparse with a large threshold on a sound network: it is less robust than the network alone",
    _mean_sparse,
    lambda p: softened(_mean_sparse(p)),
)
add_specimen(
    "random_resize",
    "false",
    "random resizing of an undefended network (Xie et al. 2018; broken by Athalye et al. 2018)",
    lambda p: nn.Sequential(RandomResize(), Quantized(255), p.get("random_resize")),
    trained("random_resize"),
)
add_specimen(
    "random_noise",
    "false",
    FRAGILE,
    lambda p: nn.Sequential(Noise(p.scale.eps), p.get("noise_trained_strongly"), ScaledLogits(1e4)),
    trained("noise_trained_strongly"),
)
add_specimen(
    "random_dropout",
    "false",
    FRAGILE,
    lambda p: nn.Sequential(TestDropout(0.3), p.get("dropout_trained"), ScaledLogits(1e3)),
    trained("dropout_trained"),
)
add_specimen(
    "median_filter",
    "false",
    FRAGILE,
    lambda p: nn.Sequential(MedianFilter(0.5), p.get("undefended")),
    trained("undefended"),
)
add_specimen(
    "block_transform",
    "false",
    FRAGILE,
    lambda p: nn.Sequential(BlockTransform(0.1), p.get("undefended_wide")),
    trained("undefended_wide"),
)
add_specimen(
    "saturating",
    "false",
    "activations so steep that they have no gradient; the same weights with a slope are not robust",
    lambda p: replace_activations(p.get("saturating"), lambda: SteepTanh(200.0)),
    trained("saturating"),
)
add_specimen(
    "batch_scaled",
    "false",
    "logits scaled by a statistic of the batch: the answers of the undefended network, without a gradient",
    lambda p: nn.Sequential(p.get("undefended_wide"), BatchScaledLogits(1e4)),
    trained("undefended_wide"),
)
add_specimen(
    "fgsm_at",
    "false",
    "one-step training that overfits to one step (Wong et al. 2020): PGD-10 removes what FGSM reports",
    trained("fgsm_at"),
    threat=large_eps,
)
add_specimen(
    "off_grid_branch",
    "false",
    "images off the data's grid take a branch without gradients; the network in both branches is undefended",
    lambda p: OffGridBranch(p.get("undefended_ln"), 16),
    trained("undefended_ln"),
)
add_specimen(
    "vote",
    "false",
    "a vote of undefended networks, too sharp for gradients",
    lambda p: Vote([p.get("undefended"), p.get("undefended_wide"), p.get("undefended_ln")]),
    lambda p: Vote([p.get("undefended"), p.get("undefended_wide"), p.get("undefended_ln")], sharpness=1.0),
)
add_specimen(
    "wave",
    "false",
    FRAGILE,
    lambda p: nn.Sequential(Wave(), p.get("undefended")),
    trained("undefended"),
)
add_specimen(
    "quantized_sound",
    "false",
    "a sound network behind rounded pixels: PGD-10 has no gradient and reports the clean accuracy",
    lambda p: nn.Sequential(Quantized(8), p.get("pgd_at")),
    trained("pgd_at"),
)
add_specimen(
    "random_member",
    "false",
    "a random choice among undefended networks in each forward",
    lambda p: nn.Sequential(RandomMember([p.get("undefended"), p.get("undefended_ln")]), ScaledLogits(1e3)),
    lambda p: Vote([p.get("undefended"), p.get("undefended_ln")], sharpness=1.0),
)
add_specimen(
    "kwta_full_eps",
    "false",
    "the network of kwta at the full radius, where PGD-10 overstates less",
    trained("kwta"),
    lambda p: softened(p.get("kwta")),
)
