"""Distances between kinds of images and between branches at every norm (paper C, eq. 7; paper A, fig. 6 and 7)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from operator import itemgetter
from typing import Any, ClassVar

from torch import Tensor, nn

from advnorm._core.errors import ConfigError
from advnorm.analysis.banks import Distances, Gaussian, affine_parameters, layer_distances
from advnorm.analysis.base import Finding, TableData, format_percent, register_analysis
from advnorm.analysis.images import Images, craft_inputs, default_branch, target_conditions, track
from advnorm.analysis.moments import affine_bank_settings, collect_moments, norm_statistics, ns_name
from advnorm.analysis.plots import Figure, Panel, bar_figure, each_value, formula, line_figure
from advnorm.analysis.settings import BatchSize, Inputs, RouteSetting, StatisticsMode
from advnorm.evaluation.model_branches import branches
from advnorm.evaluation.target import EvaluationTarget

#: Two sides of a comparison: Gaussians or affine banks by layer.
Sides = tuple[Mapping[str, Any], Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerDistances(Finding):
    """Distances between two sides by comparison and layer, absolute and relative to each channel's deviation."""

    #: Titles of the two parts of a distance in the figure.
    PARTS: ClassVar = ("Means μ", "Deviations σ")

    sides: Mapping[Any, Sides]

    @cached_property
    def layers(self) -> dict[Any, Distances]:
        """Distances by comparison and layer."""
        return {name: layer_distances(*both) for name, both in self.sides.items()}

    @cached_property
    def relative_layers(self) -> dict[Any, Distances]:
        """Relative distances by comparison and layer."""
        return {name: layer_distances(*both, relative=True) for name, both in self.sides.items()}

    @property
    def sums(self) -> dict[Any, float]:
        """Distances summed over all layers (paper C, table 2)."""
        return {name: sum(one.total for one in layers.values()) for name, layers in self.layers.items()}

    @property
    def relative_sums(self) -> dict[Any, float]:
        """Relative distances summed over all layers."""
        return {name: sum(one.total for one in layers.values()) for name, layers in self.relative_layers.items()}

    @property
    def set_distances(self) -> dict[Any, dict[str, dict[str, float]]]:
        """1-Wasserstein distances between the *sets* of channel values, by comparison and layer.

        Sorting discards which channel a value belongs to, so this is no distance between statistics. Paper A's public
        code computes it.
        """
        return {
            name: {
                layer: {
                    part: (one.double().sort().values - other.double().sort().values).abs().mean().item()
                    for part, one, other in zip(first[layer]._fields, first[layer], second[layer])
                }
                for layer in first
                if layer in second
            }
            for name, (first, second) in self.sides.items()
        }

    @abstractmethod
    def label(self, name: Any) -> str:
        """Return the text of a comparison in the legend."""

    def draw(self) -> Figure:
        rows = (self.layers, "Σ of squared differences"), (self.relative_layers, "Σ of relative differences, squared")
        panels = []
        for gaps, unit in rows:
            lines = {self.label(name): gap for name, gap in gaps.items()}
            axes = {"ylabel": unit, "ylim": (0, None)}
            panels += [Panel(title, each_value(lines, itemgetter(i)), axes) for i, title in enumerate(self.PARTS)]
        return line_figure(panels, columns=2, sharex=True, sharey="row")


# -- between images ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class DomainGap(LayerDistances):
    """Distances at each norm for every pair of kinds of images, and the accuracy on each kind."""

    RECORD = (
        "analysis",
        "sums",
        "relative_sums",
        "accuracy",
        "layers",
        "relative_layers",
        "set_distances",
        "conditions",
    )
    analysis = "domain_gap"

    accuracy: Mapping[str, float]

    def table(self) -> TableData:
        head, rows = _table({"": self})
        return head[1:], [row[1:] for row in rows]

    def label(self, name: tuple[str, str]) -> str:
        return f"{' – '.join(name)} (sum {self.sums[name]:.3g})"


def domain_gap(
    model: nn.Module,
    x: Images,
    x_adv: Images,
    *,
    others: Mapping[str, Images] | None = None,
    labels: Tensor | None = None,
    route: str | None = None,
    statistics: StatisticsMode = "running",
    layers: str | Sequence[str] | None = None,
    batch_size: BatchSize = 256,
) -> DomainGap:
    """Return squared 2-Wasserstein distances between clean, adversarial and ``others`` images at every norm.

    All pairs, per layer and summed (paper C, eq. 7 and table 2; paper A, fig. 7), under one branch ``route``, so that
    the affine parameters do not contribute. ``labels`` add the accuracy on each kind of images (paper A, table 6).
    """
    inputs = {"clean": x, "adv": x_adv, **(others or {})}
    found: dict[str, dict[str, Gaussian]] = {}
    accuracy: dict[str, float] = {}
    how = {**affine_bank_settings(route, statistics), "layers": layers, "batch_size": batch_size}
    for name, images in track(inputs.items()):
        moments = collect_moments(model, images, **how)
        # Biased variances: the moments of these images themselves (paper C, eq. 8 and 9).
        found[name] = {layer: one.gaussian() for layer, one in moments.items()}
        if labels is not None:
            if labels.shape != moments.classes.shape:
                message = f"{{field}} must have shape ({len(moments.classes)},), one for each {name} image"
                raise ConfigError("wrong_shape", message, field="labels", got=tuple(labels.shape))
            accuracy[name] = (moments.classes == labels.cpu()).double().mean().item()
    size = batch_size if all(isinstance(images, Tensor) for images in inputs.values()) else "as given"
    conditions = {"route": route, "statistics": statistics, "batch_size": size, "variance": "biased"}
    sides = {(a, b): (found[a], found[b]) for a, b in combinations(found, 2)}
    return DomainGap(sides=sides, accuracy=accuracy, conditions=conditions)


@register_analysis(
    "domain_gap", summary="distances between kinds of images, by layer", paper="A fig. 7, C", measure=domain_gap
)
def domain_gap_of_run(
    target: EvaluationTarget, *, inputs: Inputs = ("adv", "noise"), route: RouteSetting = None, **settings: Any
) -> DomainGap:
    """Compare the clean images of a run with ``inputs``, one of which is ``adv``."""
    if "adv" not in inputs:
        raise ConfigError("missing_option", "{field} must contain 'adv'", field="inputs", got=list(inputs))
    branch, names = default_branch(target.model, route), ("clean", *inputs)
    images = craft_inputs(target, names, route=branch)
    settings |= {"labels": target.labels, "route": branch, "batch_size": target.batch_size}
    found = domain_gap(target.model, images.pop("clean"), images.pop("adv"), others=images, **settings)
    return found.under(target_conditions(target, names, through=branch, **found.conditions))


def _table(gaps: Mapping[str, DomainGap]) -> tuple[list[str], list[list[str]]]:
    """Return accuracies and summed distances of each run, as in paper C's table 2."""
    first = next(iter(gaps.values()))
    head = ["run", *(f"accuracy, {kind}" for kind in first.accuracy), *(" – ".join(pair) for pair in first.sums)]
    rows = [
        [name, *map(format_percent, gap.accuracy.values()), *(f"{value:.4g}" for value in gap.sums.values())]
        for name, gap in gaps.items()
    ]
    return head, rows


@dataclass(frozen=True, kw_only=True, eq=False)
class DomainGapTable(Finding):
    """Summed distances and accuracies of several runs (paper C, table 2)."""

    RECORD = ("analysis", "runs")
    analysis = "domain_gap_table"

    runs: Mapping[str, DomainGap]

    def table(self) -> TableData:
        return _table(self.runs)

    def draw(self) -> Figure:
        rows = [
            "\n".join([name, *(f"{kind} {format_percent(share)}" for kind, share in gap.accuracy.items())])
            for name, gap in self.runs.items()
        ]
        pairs = next(iter(self.runs.values())).sums
        series = {" – ".join(pair): [gap.sums[pair] for gap in self.runs.values()] for pair in pairs}
        words = {"title": "Distance between domains", "xlabel": r"$W_2^2$ summed over all norms"}
        return bar_figure(rows, series, number_format="%.3g", **words)


@register_analysis(
    "domain_gap_table", summary="summed distances of several runs", paper="C table 2", takes="runs", measure=domain_gap
)
def domain_gap_table(
    targets: Sequence[EvaluationTarget],
    *,
    inputs: Inputs = ("adv", "autoattack"),
    route: RouteSetting = None,
    **settings: Any,
) -> DomainGapTable:
    """Compare runs. A network with false robustness has a large distance and different accuracies."""
    names = [target.name for target in targets]
    if len(set(names)) < len(names):
        raise ConfigError("conflict", "the names of the runs must differ", field="targets", got=names)
    settings |= {"inputs": inputs, "route": route}
    return DomainGapTable(runs={target.name: domain_gap_of_run(target, **settings) for target in targets})


# -- between branches --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class BranchGap(LayerDistances):
    """Distances of NS under one affine bank, of the branches' own NS, and of AP."""

    RECORD = (
        "analysis",
        "domains",
        "sums",
        "relative_sums",
        "layers",
        "relative_layers",
        "set_distances",
        "conditions",
    )
    analysis = "branch_gap"

    PARTS = ("Means μ, and biases β", "Deviations σ, and weights γ")
    domains: tuple[str, str]

    def table(self) -> TableData:
        rows = [[name, f"{self.sums[name]:.4g}", f"{self.relative_sums[name]:.4g}"] for name in self.sides]
        return ["parameters", "distance", "relative distance"], rows

    def label(self, name: str) -> str:
        one, other = self.domains
        if name == "AP":
            return f"AP: {formula(f'AP_{one}')} – {formula(f'AP_{other}')}"
        if name == "NS":
            return f"NS, own AP each: {formula(ns_name(one, one))} – {formula(ns_name(other, other))}"
        affine = name.removeprefix("NS under ")
        return f"NS, one AP: {formula(ns_name(affine, one))} – {formula(ns_name(affine, other))}"


def branch_gap(
    model: nn.Module,
    x: Images,
    x_adv: Images,
    *,
    domains: tuple[str, str] = ("clean", "adv"),
    statistics: StatisticsMode = "batch_frozen",
    batch_size: BatchSize = 256,
) -> BranchGap:
    """Return layer-wise distances of NS and of AP between two branches (paper A, fig. 6).

    ``NS under adv`` compares clean and adversarial images under the same affine bank. ``NS`` compares each branch's own
    images under its own bank, as earlier work did. ``AP`` compares the affine banks. The paper does not define the
    distance of AP; here it is eq. 7 of paper C with bias and weight instead of mean and deviation, because they are the
    mean and the deviation of the norm's output for a standardized input.
    """
    known = branches(model)
    if not set(domains) <= set(known) or len(set(domains)) != 2:
        hint = f"the model has: {', '.join(known) or 'none'}; a norm with branches is dual_bn"
        raise ConfigError("wrong_route", "{field} must be two branches", field="domains", got=domains, hint=hint)
    images = dict(zip(domains, (x, x_adv)))
    found = norm_statistics(model, images, affines=domains, statistics=statistics, batch_size=batch_size)
    one, other = domains
    ns = {
        affine: {name: {layer: m.gaussian() for layer, m in moments.items()} for name, moments in row.items()}
        for affine, row in found.moments.items()
    }
    ap = {domain: affine_parameters(model, domain) for domain in domains}
    # In the order of the forward pass, as NS.
    ap = {domain: {name: bank[name] for name in ns[one][one] if name in bank} for domain, bank in ap.items()}
    sides: dict[str, Sides] = {
        f"NS under {other}": (ns[other][one], ns[other][other]),
        f"NS under {one}": (ns[one][one], ns[one][other]),
        "NS": (ns[one][one], ns[other][other]),
        "AP": (ap[one], ap[other]),
    }
    return BranchGap(sides=sides, domains=domains, conditions={**found.conditions, "variance": "biased"})


@register_analysis(
    "branch_gap", summary="distances of NS and of AP between the branches", paper="A fig. 6", measure=branch_gap
)
def branch_gap_of_run(target: EvaluationTarget, *, route: RouteSetting = None, **settings: Any) -> BranchGap:
    """Compare the branches of a run; ``route`` is the branch of the attack."""
    inputs = ("clean", "adv")
    images = craft_inputs(target, inputs, route=route)
    found = branch_gap(target.model, *images.values(), batch_size=target.batch_size, **settings)
    return found.under(target_conditions(target, inputs, through=route, **found.conditions))
