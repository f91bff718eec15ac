"""Statistics (NS) and affine parameters (AP) of single channels (paper A, fig. 4 and 5; paper E, fig. 5 and 6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from advnorm._core.errors import ConfigError, Description, Problem, raise_problems, unknown_name
from advnorm._core.settings import Setting
from advnorm.analysis import banks
from advnorm.analysis.banks import AffineBank, Gaussian
from advnorm.analysis.base import Finding, register_analysis
from advnorm.analysis.images import Images, craft_inputs, default_branch, target_conditions
from advnorm.analysis.moments import collect_moments, norm_statistics, ns_name, update_settings
from advnorm.analysis.plots import Figure, Panel, line_figure
from advnorm.analysis.settings import BatchSize, LayerName, RouteSetting, Seed, StatisticsMode, setting_problems
from advnorm.evaluation.target import EvaluationTarget
from advnorm.norms import mixture_norms
from advnorm.norms.plan import SHARED

Channels = Annotated[int | Sequence[int], Setting("List of channels, or number of channels to draw at random.")]
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
        rows = [(self.statistics, ("Mean μ", "Deviation σ")), (self.affine, ("Bias β", "Weight γ"))]
        panels = [
            Panel(title, {name: dict(zip(map(str, self.channels), values[part])) for name, values in series.items()})
            for series, titles in rows
            for part, title in enumerate(titles)
            if series
        ]
        return line_figure(panels, columns=2, xlabel=f"channel of {self.layer}", points_only=True, sharex=True)


@register_analysis("channels", summary="NS and AP of 20 channels, by affine bank", paper="A fig. 4, 5", takes="images")
def channel_statistics(
    model: nn.Module,
    inputs: Mapping[str, Images],
    *,
    layer: LayerName = None,
    channels: Channels = 20,
    seed: Seed = 0,
    statistics: StatisticsMode = "batch_frozen",
    batch_size: BatchSize = 256,
) -> ChannelStatistics:
    """Return NS of some channels for each affine bank and kind of images, and their AP (paper A, fig. 4 and 5).

    The default ``layer`` is the second norm of the first block.
    """
    layer = layer or banks.default_layer(model)
    found = norm_statistics(model, inputs, layers=layer, statistics=statistics, batch_size=batch_size)
    series = {label: moments[layer].gaussian(unbiased=True) for label, moments in found.series.items()}
    selected = _select_channels(layer, series, channels, seed, banks.norm_layers(model)[layer])
    return selected.under({**found.conditions, "channels_drawn_by_seed": seed})


def stored_channels(
    model: nn.Module, *, layer: LayerName = None, channels: Channels = 20, seed: Seed = 0
) -> ChannelStatistics:
    """Return the running statistics of some channels in each bank, and their AP (paper E, fig. 5)."""
    layer = layer or banks.default_layer(model)
    norm = banks.norm_layers(model, layer)[layer]
    series = {ns_name(bank, "running"): one for bank, one in banks.statistics_banks(norm).items()}
    if not series:
        raise ConfigError("not_supported", f"{layer} stores no statistics; only batch norms do", field="layer")
    return _select_channels(layer, series, channels, seed, norm).under({"channels_drawn_by_seed": seed})


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
    layer = layer or banks.default_layer(model)
    if mixture_norms(model):
        message = "a mixture norm has batch statistics for concatenated batches only"
        hint = "use statistics_shift(..., layout='concatenated') or stored_channels"
        problems.append(Problem(code="not_supported", message=message, field="model", hint=hint))
    if not problems and len(x) < count * batch_size:
        message = f"{count} batches of {batch_size} need {count * batch_size} images"
        got, hint = Description(f"{len(x)} images"), "lower count or batch_size"
        problems.append(Problem(code="conflict", message=message, field="count", got=got, hint=hint))
    raise_problems(problems, "bad analysis")
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    stored = banks.stored_statistics(model, route)
    if layer not in stored:
        raise_problems([unknown_name("batch norm", layer, stored, field="layer")])
    series = {"running": stored[layer]}
    how = {**update_settings(model, route), "layers": layer, "batch_size": batch_size}
    for number, rows in enumerate(order[: count * batch_size].split(batch_size), 1):
        series[f"batch {number}"] = collect_moments(model, x[rows], **how)[layer].gaussian(unbiased=True)
    conditions = {"route": route, "batch_size": batch_size, "drawn_by_seed": seed}
    return _select_channels(layer, series, channels, seed).under(conditions)


def _select_channels(
    layer: str, series: Mapping[str, Gaussian], channels: Channels, seed: int, norm: nn.Module | None = None
) -> ChannelStatistics:
    """Keep the selected channels of statistics and of the affine banks of a norm."""
    numbers = _channel_numbers(len(next(iter(series.values())).mean), channels, seed)
    return ChannelStatistics(
        layer=layer,
        channels=numbers,
        statistics={name: Gaussian(one.mean[numbers], one.std[numbers]) for name, one in series.items()},
        affine={
            "AP" if bank == SHARED else f"AP_{bank}": AffineBank(one.bias[numbers], one.weight[numbers])
            for bank, one in (banks.affine_banks(norm) if norm else {}).items()
        },
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


@register_analysis(
    "stored_channels", summary="running statistics and AP of 20 channels", paper="E fig. 5", measure=stored_channels
)
def stored_channels_of_run(target: EvaluationTarget, **settings: Any) -> ChannelStatistics:
    """Return the stored statistics and AP of the channels of a run."""
    found = stored_channels(target.model, **settings)
    return found.under(target_conditions(target, **found.conditions))


@register_analysis(
    "batch_channels", summary="batches against running statistics, by channel", paper="E fig. 6", measure=batch_channels
)
def batch_channels_of_run(
    target: EvaluationTarget,
    *,
    images: Annotated[str, Setting("Images by name: clean, adv, noise, or an attack's name.")] = "adv",
    count: BatchCount = 2,
    route: RouteSetting = None,
    **settings: Any,
) -> ChannelStatistics:
    """Compare batches of the images of a run with its running statistics."""
    branch = default_branch(target.model, route)
    x = craft_inputs(target, [images], route=branch)[images]
    size = max(1, min(target.batch_size, len(x) // count))
    found = batch_channels(target.model, x, count=count, route=branch, batch_size=size, **settings)
    return found.under(target_conditions(target, [images], through=branch, **found.conditions))
