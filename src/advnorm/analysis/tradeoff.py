"""The trade-off between clean and robust accuracy along the interpolation of two branches of one network."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

import torch
from torch import Tensor, nn

from advnorm._core.errors import Problem, raise_problems
from advnorm._core.settings import Setting
from advnorm._core.wrappers import device_of
from advnorm.analysis.banks import has_batch_statistics, routed_copy
from advnorm.analysis.base import Finding, TableData, format_percent, register_analysis
from advnorm.analysis.images import craft_inputs, create_attack, predict_classes, target_conditions, track
from advnorm.analysis.plots import Figure, Panel, line_figure
from advnorm.analysis.settings import BatchSize, setting_problems
from advnorm.attacks import Attack
from advnorm.evaluation.benchmark import benchmark
from advnorm.evaluation.model_branches import branches
from advnorm.evaluation.target import EvaluationTarget
from advnorm.norms import recalibrate
from advnorm.surgery import strip

Mixtures = Annotated[int, Setting("Number of mixtures, from one branch to the other.", "[2, inf)")]


class MixtureRow(NamedTuple):
    """Accuracies of one mixture; ``share`` is that of the second branch."""

    share: float
    statistics: str  # interpolated or recalibrated
    clean: float
    robust: float


@dataclass(frozen=True, kw_only=True, eq=False)
class TradeOff(Finding):
    """Clean and robust accuracy by the share of the second branch, with interpolated and recalibrated statistics."""

    RECORD = ("analysis", "domains", "attack", "rows", "conditions")
    analysis = "tradeoff"

    domains: tuple[str, str]
    attack: str
    rows: tuple[MixtureRow, ...]

    def table(self) -> TableData:
        rows = [[f"{r.share:.2f}", r.statistics, *map(format_percent, (r.clean, r.robust))] for r in self.rows]
        return [f"share of {self.domains[1]}", "statistics", "clean", self.attack], rows

    def draw(self) -> Figure:
        kinds = list(dict.fromkeys(row.statistics for row in self.rows))

        def curve(kind: str, accuracy: str) -> dict[float, float]:
            return {row.share: 100 * getattr(row, accuracy) for row in self.rows if row.statistics == kind}

        settings = {"ylabel": "accuracy (%)", "ylim": (0, 102)}
        lines = {
            f"{words}, {kind} statistics": curve(kind, accuracy)
            for kind in kinds
            for accuracy, words in (("clean", "clean"), ("robust", self.attack))
        }
        panel = Panel(f"From the branch {self.domains[0]} to {self.domains[1]}", lines, settings)
        xlabel = f"share of {self.domains[1]}"
        if "recalibrated" in kinds:
            xlabel += "\nrecalibrated statistics: moments of the evaluated images"
        return line_figure([panel], xlabel=xlabel, label=str)


def tradeoff(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    attack: Attack,
    *,
    x_adv: Tensor,
    name: str = "attack",
    domains: tuple[str, str] = ("clean", "adv"),
    mixtures: Mixtures = 11,
    batch_size: BatchSize = 256,
) -> TradeOff:
    """Return the accuracies of networks between two branches: :func:`advnorm.strip` with shares of both.

    ``attack`` runs against every mixture. Recalibrated statistics are the moments of images in the mixture's shares:
    clean ones of ``x`` and adversarial ones of ``x_adv``, the same images as ``x``. No label plays a part in it if
    ``x_adv`` maximizes the loss of predicted classes.
    """
    problems = setting_problems(tradeoff, {"mixtures": mixtures, "batch_size": batch_size})
    known = branches(model)
    if not set(domains) <= set(known):
        message = f"the model must have the branches {' and '.join(domains)}"
        hint = f"it has {', '.join(known)}" if known else "it has none; a norm with branches is dual_bn"
        problems.append(Problem(code="wrong_route", message=message, field="domains", hint=hint))
    if len(x_adv) != len(x):
        message = f"{{field}} must be the adversarial images of all {len(x)} images"
        problems.append(Problem(code="wrong_shape", message=message, field="x_adv", got=len(x_adv)))
    raise_problems(problems, "bad trade-off")
    rows: list[MixtureRow] = []
    for step in track(range(mixtures)):
        share = step / (mixtures - 1)
        plain = strip(model, route={domains[0]: 1 - share, domains[1]: share})
        networks = {"interpolated": plain}
        if has_batch_statistics(plain):
            networks["recalibrated"] = routed_copy(plain)
            images = mixed_images(x, x_adv, share)
            recalibrate(networks["recalibrated"], images, batch_size=batch_size)
        for kind, network in networks.items():
            found = benchmark(network, (x, y), attack.threat, {name: attack}, batch_size=batch_size)
            rows.append(MixtureRow(share, kind, found.accuracy(), found.robust_accuracy(name)))
    conditions = {"attack": repr(attack), "images": len(x), "recalibrated_by": "the evaluated images"}
    return TradeOff(domains=domains, attack=name, rows=tuple(rows), conditions=conditions)


def mixed_images(x: Tensor, x_adv: Tensor, share: float) -> Tensor:
    """Return the images, of which a share, spread evenly, is replaced by its adversarial ones."""
    count = round(share * len(x))
    rows = torch.arange(count) * len(x) // max(count, 1)
    images = x.clone()
    images[rows] = x_adv[rows].to(images)
    return images


@register_analysis("tradeoff", summary="accuracies between the two branches of a network", paper="")
def tradeoff_of_run(
    target: EvaluationTarget,
    *,
    attack: Annotated[str, Setting("Attack by name.")] = "pgd10",
    mixtures: Mixtures = 11,
) -> TradeOff:
    """Evaluate the mixtures of a run's branches on its test images.

    The adversarial images that recalibrate the statistics are crafted against predicted classes: those of the labels
    would carry the labels into the statistics.
    """
    device, how = device_of(target.model), {"threat": target.attack.threat, "seed": target.attack.seed}
    built = create_attack(attack, device, **how)
    x_adv = target.images
    if "adv" in branches(target.model):
        predicted = predict_classes(target.model, x_adv, batch_size=target.batch_size, route="adv")
        x_adv = craft_inputs(replace(target, data=(x_adv, predicted)), ("adv",))["adv"]
    data = (target.model, target.images, target.labels, built)
    found = tradeoff(*data, x_adv=x_adv, name=attack, mixtures=mixtures, batch_size=target.batch_size)
    return found.under(target_conditions(target, **found.conditions))
