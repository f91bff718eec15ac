"""Statistics (NS) and affine parameters (AP) of single channels (paper A, fig. 4 and 5; paper E, fig. 5 and 6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from advnorm._core.errors import ConfigError, Description, Problem, raise_problems, unknown_name
from advnorm._core.settings import Setting
from advnorm.analysis.banks import (
    AffineBank,
    Gaussian,
    affine_banks,
    default_layer,
    norm_layers,
    statistics_banks,
    stored_statistics,
)
from advnorm.analysis.base import Finding, register_analysis
from advnorm.analysis.batches import Images
from advnorm.analysis.moments import collect_moments, norm_statistics, ns_name, update_settings
from advnorm.analysis.plots import Figure, domain_style, formula, new_figure
from advnorm.analysis.settings import BatchSize, Inputs, LayerName, RouteSetting, Seed, StatisticsMode, setting_problems
from advnorm.analysis.targets import craft_inputs, default_branch, target_conditions
from advnorm.attacks.base import Progress
from advnorm.evaluation.target import EvaluationTarget
from advnorm.norms import mixture_norms
from advnorm.norms.plan import SHARED

Channels = Annotated[int | Sequence[int], Setting("Channels by number, or how many to draw at random.")]
BatchCount = Annotated[int, Setting("Number of batches.", "[1, inf)")]


@dataclass(frozen=True, kw_only=True, eq=False)
class ChannelStatistics(Finding):
    """NS and AP of some channels of one layer, by label; deviations are roots of unbiased variances, as stored."""

    RECORD = ("analysis", "layer", "channels", "statistics", "affine", "conditions")
    analysis = "channels"

    layer: str
    channels: Sequence[int]
    statistics: Mapping[str, Gaussian]
    affine: Mapping[str, AffineBank] = field(default_factory=dict)

    def draw(self) -> Figure:
        rows: list[tuple[Mapping[str, Any], tuple[str, str]]] = [(self.statistics, ("Mean μ", "Deviation σ"))]
        rows += [(self.affine, ("Bias β", "Weight γ"))] if self.affine else []
        figure, panels = new_figure(len(rows), 2, height=1.0 + 2.3 * len(rows), squeeze=False, sharex=True)
        for (series, titles), row in zip(rows, panels):
            for index, (name, values) in enumerate(series.items()):
                for axes, line in zip(row, values):
                    axes.plot(line, label=formula(name), **domain_style(index, name) | {"linestyle": "none"})
            for axes, title in zip(row, titles):
                axes.set_title(title)
                for place in range(len(self.channels)):  # a line joins the points of one channel
                    column = [float(line.get_ydata()[place]) for line in axes.get_lines()[: len(series)]]
                    axes.vlines(place, min(column), max(column), color="#bbbbbb", linewidth=0.8, zorder=1)
            if len(series) > 1:
                row[1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        for axes in panels[-1]:
            axes.set_xticks(range(len(self.channels)), self.channels, rotation=90, fontsize=7)
            axes.set_xlabel(f"channel of {self.layer}")
        return figure


def channel_statistics(
    model: nn.Module,
    inputs: Mapping[str, Images],
    *,
    layer: LayerName = None,
    channels: Channels = 20,
    seed: Seed = 0,
    statistics: StatisticsMode = "batch_frozen",
    batch_size: BatchSize = 256,
    progress: Progress | None = None,
) -> ChannelStatistics:
    """Return NS of some channels for each affine bank and kind of images, and their AP (paper A, fig. 4 and 5).

    The default ``layer`` is the second norm of the first block.
    """
    layer = layer or default_layer(model)
    how: Any = {"statistics": statistics, "batch_size": batch_size, "progress": progress}
    found = norm_statistics(model, inputs, layers=layer, **how)
    series = {label: moments[layer].gaussian(unbiased=True) for label, moments in found.series.items()}
    return _select_channels(model, layer, channels, seed, series, {**found.conditions, "channels_drawn_by_seed": seed})


def stored_channels(
    model: nn.Module, *, layer: LayerName = None, channels: Channels = 20, seed: Seed = 0
) -> ChannelStatistics:
    """Return the running statistics of some channels in each bank, and their AP (paper E, fig. 5)."""
    layer = layer or default_layer(model)
    banks = statistics_banks(norm_layers(model, layer)[layer])
    if not banks:
        raise ConfigError("not_supported", f"{layer} stores no statistics; only batch norms do", field="layer")
    series = {ns_name(bank, "running"): one for bank, one in banks.items()}
    return _select_channels(model, layer, channels, seed, series, {"channels_drawn_by_seed": seed})


def batch_channels(
    model: nn.Module,
    x: Tensor,
    *,
    count: BatchCount = 2,
    layer: LayerName = None,
    channels: Channels = 20,
    seed: Seed = 0,
    route: str | None = None,
    batch_size: BatchSize = 256,
) -> ChannelStatistics:
    """Compare ``count`` random batches with the running statistics on some channels (paper E, fig. 6)."""
    problems = setting_problems(batch_channels, locals())
    layer = layer or default_layer(model)
    if mixture_norms(model):
        message = "a mixture norm has batch statistics for concatenated batches only"
        hint = "use statistics_shift(..., layout='concatenated') or stored_channels"
        problems.append(Problem(code="not_supported", message=message, field="model", hint=hint))
    if not problems and len(x) < count * batch_size:
        message = f"{count} batches of {batch_size} need {count * batch_size} images"
        problems.append(Problem(code="conflict", message=message, field="count", got=Description(f"{len(x)} images")))
    raise_problems(problems, "bad analysis")
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    stored = stored_statistics(model, route)
    if layer not in stored:
        raise_problems([unknown_name("batch norm", layer, stored, field="layer")])
    series = {"running": stored[layer]}
    for number, rows in enumerate(order[: count * batch_size].split(batch_size), 1):
        how = {**update_settings(model, route), "layers": layer, "batch_size": batch_size}
        series[f"batch {number}"] = collect_moments(model, x[rows], **how)[layer].gaussian(unbiased=True)
    conditions = {"route": route, "batch_size": batch_size, "drawn_by_seed": seed}
    return _select_channels(model, layer, channels, seed, series, conditions, affine=False)


def _select_channels(
    model: nn.Module,
    layer: str,
    channels: int | Sequence[int],
    seed: int,
    series: Mapping[str, Gaussian],
    conditions: Mapping[str, Any],
    *,
    affine: bool = True,
) -> ChannelStatistics:
    """Keep the selected channels of statistics and, with ``affine``, of the affine banks."""
    numbers = _channel_numbers(len(next(iter(series.values())).mean), channels, seed)
    banks = affine_banks(norm_layers(model, layer)[layer]) if affine else {}
    return ChannelStatistics(
        layer=layer,
        channels=numbers,
        statistics={name: Gaussian(one.mean[numbers], one.std[numbers]) for name, one in series.items()},
        affine={
            "AP" if bank == SHARED else f"AP_{bank}": AffineBank(one.bias[numbers], one.weight[numbers])
            for bank, one in banks.items()
        },
        conditions=conditions,
    )


def _channel_numbers(total: int, channels: int | Sequence[int], seed: int) -> list[int]:
    """Return the given channels, or random ones in ascending order."""
    drawn = isinstance(channels, int)
    if (drawn and channels < 1) or (not drawn and (not channels or not all(0 <= one < total for one in channels))):
        message = f"{{field}} must be a number of at least 1, or a list of channels from 0 to {total - 1}"
        raise ConfigError("out_of_range", message, field="channels", got=channels)
    if drawn:
        order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
        return sorted(order[:channels].tolist())
    return list(channels)


@register_analysis("channels", summary="NS and AP of 20 channels, by affine bank and images", paper="A fig. 4, 5")
def channels_of_run(
    target: EvaluationTarget,
    *,
    inputs: Inputs = ("clean", "adv"),
    layer: LayerName = None,
    channels: Channels = 20,
    seed: Seed = 0,
    statistics: StatisticsMode = "batch_frozen",
    route: RouteSetting = None,
    progress: Progress | None = None,
) -> ChannelStatistics:
    """Return NS and AP of the channels of a run; ``route`` is the branch of the attacks."""
    images = craft_inputs(target, inputs, route=route, progress=progress)
    how: Any = {"layer": layer, "channels": channels, "seed": seed, "statistics": statistics}
    found = channel_statistics(target.model, images, **how, batch_size=target.batch_size)
    return found.under(target_conditions(target, inputs, through=route, **found.conditions))


@register_analysis("stored_channels", summary="running statistics and AP of 20 channels, by bank", paper="E fig. 5")
def stored_channels_of_run(
    target: EvaluationTarget, *, layer: LayerName = None, channels: Channels = 20, seed: Seed = 0
) -> ChannelStatistics:
    """Return the stored statistics and AP of the channels of a run."""
    found = stored_channels(target.model, layer=layer, channels=channels, seed=seed)
    return found.under(target_conditions(target, **found.conditions))


@register_analysis("batch_channels", summary="batches against running statistics on 20 channels", paper="E fig. 6")
def batch_channels_of_run(
    target: EvaluationTarget,
    *,
    images: Annotated[str, Setting("Images by name: clean, adv, noise, or an attack's name.")] = "adv",
    count: BatchCount = 2,
    layer: LayerName = None,
    channels: Channels = 20,
    seed: Seed = 0,
    route: RouteSetting = None,
    progress: Progress | None = None,
) -> ChannelStatistics:
    """Compare batches of the images of a run with its running statistics."""
    branch = default_branch(target.model, route)
    x = craft_inputs(target, [images], route=branch, progress=progress)[images]
    how: Any = {"count": count, "layer": layer, "channels": channels, "seed": seed, "route": branch}
    found = batch_channels(target.model, x, **how, batch_size=max(1, min(target.batch_size, len(x) // count)))
    return found.under(target_conditions(target, [images], through=branch, **found.conditions))
