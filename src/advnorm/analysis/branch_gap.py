"""Distances of statistics (NS) and of affine parameters (AP) between two branches (paper A, fig. 6)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from advnorm._core.errors import ConfigError
from advnorm.analysis.banks import affine_parameters
from advnorm.analysis.base import BatchSize, Finding, RouteSetting, StatisticsMode, register_analysis
from advnorm.analysis.moments import Images, norm_statistics, ns_name
from advnorm.analysis.plots import domain_style, formula, label_layers, legend_below, new_figure
from advnorm.analysis.targets import craft_inputs, target_conditions
from advnorm.analysis.wasserstein import Distances, layer_distances, sum_distances
from advnorm.attacks.base import Progress
from advnorm.evaluation.branches import branches
from advnorm.evaluation.target import EvaluationTarget

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True, eq=False)
class BranchGap(Finding):
    """Distances of NS under one affine bank, of the branches' own NS, and of AP."""

    RECORD = ("analysis", "domains", "sums", "relative_sums", "layers", "relative_layers", "conditions")
    analysis = "branch_gap"

    layers: Mapping[str, Distances]
    relative_layers: Mapping[str, Distances]
    domains: tuple[str, str]
    conditions: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sums(self) -> dict[str, float]:
        """Distances summed over all layers."""
        return {name: sum_distances(layers) for name, layers in self.layers.items()}

    @property
    def relative_sums(self) -> dict[str, float]:
        """Relative distances summed over all layers."""
        return {name: sum_distances(layers) for name, layers in self.relative_layers.items()}

    def draw(self) -> Figure:
        figure, panels = new_figure(2, 2, height=6.0, sharex=True, sharey="row")
        names = list(self.layers["NS"])  # a norm without AP keeps its place on the axis
        for row, gaps in zip(panels, (self.layers, self.relative_layers)):
            for index, (label, layers) in enumerate(gaps.items()):
                places = [names.index(name) for name in layers]
                for axes, line in zip(row, zip(*layers.values())):
                    axes.plot(places, line, label=self._label(label), **domain_style(index))
            for axes in row:
                axes.set_ylim(bottom=0)
        panels[0, 0].set(title="Means μ, and biases β", ylabel="Σ of squared differences")
        panels[0, 1].set(title="Deviations σ, and weights γ")
        panels[1, 0].set(ylabel="in units of each channel's\ndeviation, or weight")
        for axes in panels[1]:
            label_layers(axes, names)
        legend_below(figure, *panels[0, 0].get_legend_handles_labels())
        return figure

    def _label(self, name: str) -> str:
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
    progress: Progress | None = None,
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
    found = norm_statistics(
        model,
        dict(zip(domains, (x, x_adv))),
        affines=domains,
        statistics=statistics,
        batch_size=batch_size,
        progress=progress,
    )
    one, other = domains
    ns = {
        affine: {name: {layer: m.gaussian() for layer, m in moments.items()} for name, moments in row.items()}
        for affine, row in found.moments.items()
    }
    ap = {domain: affine_parameters(model, domain) for domain in domains}
    # In the order of the forward pass, as NS.
    ap = {domain: {name: bank[name] for name in ns[one][one] if name in bank} for domain, bank in ap.items()}
    compared = {
        f"NS under {other}": (ns[other][one], ns[other][other]),
        f"NS under {one}": (ns[one][one], ns[one][other]),
        "NS": (ns[one][one], ns[other][other]),
        "AP": (ap[one], ap[other]),
    }
    return BranchGap(
        layers={name: layer_distances(*sides) for name, sides in compared.items()},
        relative_layers={name: layer_distances(*sides, relative=True) for name, sides in compared.items()},
        domains=domains,
        conditions={**found.conditions, "variance": "biased"},
    )


@register_analysis(
    "branch_gap", summary="distances of NS and of AP between the clean and the adversarial branch", paper="A fig. 6"
)
def branch_gap_of_run(
    target: EvaluationTarget,
    *,
    statistics: StatisticsMode = "batch_frozen",
    route: RouteSetting = None,
    progress: Progress | None = None,
) -> BranchGap:
    """Compare the branches of a run; ``route`` is the branch of the attack."""
    inputs = ("clean", "adv")
    images = craft_inputs(target, inputs, route=route, progress=progress)
    found = branch_gap(target.model, *images.values(), statistics=statistics, batch_size=target.batch_size)
    return found.under(target_conditions(target, inputs, through=route, **found.conditions))
