"""Statistics and affine parameters of single channels, and how far batches are from the running statistics."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor, nn

from advnorm._core.errors import ConfigError, did_you_mean, raise_all
from advnorm.analysis.base import Finding, register
from advnorm.analysis.domain_gap import distances
from advnorm.analysis.moments import (
    Gaussian,
    Images,
    LayerMoments,
    Moments,
    affine_banks,
    attack_branch,
    collect_moments,
    conditions_of,
    default_layer,
    feeding,
    formula,
    in_batches,
    input_images,
    label_layers,
    look,
    norm_layers,
    norm_statistics,
    ns_name,
    statistics_banks,
    stored_statistics,
    watch,
)
from advnorm.attacks.base import Progress
from advnorm.evaluation.plan import branches
from advnorm.evaluation.target import EvaluationTarget
from advnorm.norms import Mode, RoutedNorm, domains, functional, mixture_norms, routed_modules
from advnorm.norms.plan import SHARED
from advnorm.objectives.base import OBJECTIVES, Layout

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Channels by number, or how many to draw by lot.
Channels = int | Sequence[int]


def chosen_channels(total: int, channels: Channels, seed: int) -> list[int]:
    """The channels named, or so many by lot, in ascending order."""
    if isinstance(channels, int):
        if channels < 1:
            raise ConfigError(f"channels must be a number of at least 1 or a list of channels, got {channels}")
        order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
        return sorted(order[:channels].tolist())
    wrong = [channel for channel in channels if not 0 <= channel < total]
    if wrong or not channels:
        raise ConfigError(f"the layer has the channels 0 to {total - 1}, got {list(channels)}")
    return list(channels)


@dataclass(frozen=True, kw_only=True, eq=False)
class ChannelStatistics(Finding):
    """NS and AP of some channels of one layer, by label; deviations are roots of unbiased variances, as stored."""

    layer: str
    channels: Sequence[int]
    statistics: Mapping[str, Gaussian]
    affine: Mapping[str, Gaussian] = field(default_factory=dict)
    conditions: Mapping[str, Any] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        def plain(series: Mapping[str, Gaussian], mean: str, std: str) -> dict[str, Any]:
            return {name: {mean: one.mean.tolist(), std: one.std.tolist()} for name, one in series.items()}

        return {
            "analysis": "channels",
            "layer": self.layer,
            "channels": list(self.channels),
            "statistics": plain(self.statistics, "mean", "std"),
            "affine": plain(self.affine, "bias", "weight"),
            "conditions": dict(self.conditions),
        }

    def draw(self) -> Figure:
        from matplotlib.figure import Figure

        rows = [(self.statistics, ("Mean μ", "Deviation σ"))]
        rows += [(self.affine, ("Bias β", "Weight γ"))] if self.affine else []
        figure = Figure(figsize=(7.0, 1.0 + 2.3 * len(rows)))
        panels = figure.subplots(len(rows), 2, squeeze=False, sharex=True)
        for (series, titles), row in zip(rows, panels):
            for index, (name, values) in enumerate(series.items()):
                for axes, line in zip(row, values):
                    axes.plot(line, label=formula(name), **look(index, name) | {"linestyle": "none"})
            for axes, title in zip(row, titles):
                axes.set_title(title)
                for place in range(len(self.channels)):  # joins what belongs to one channel
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
    layer: str | None = None,
    channels: Channels = 20,
    seed: int = 0,
    statistics: Mode = "batch_frozen",
    batch_size: int = 256,
    progress: Progress | None = None,
) -> ChannelStatistics:
    """NS of some channels for each affine bank and kind of images, and their AP (paper A, fig. 4 and 5).

    ``layer``: by default the second norm of the first block; ``channels``: by number, or how many to draw by lot.
    """
    layer = layer or default_layer(model)
    found = norm_statistics(
        model, inputs, statistics=statistics, layers=layer, batch_size=batch_size, progress=progress
    )
    series = {
        ns_name(affine, name): moments[layer].gaussian(unbiased=True)
        for affine, row in found.moments.items()
        for name, moments in row.items()
    }
    return _picked(model, layer, channels, seed, series, {**found.conditions, "channels_drawn_by_seed": seed})


def stored_channels(
    model: nn.Module, *, layer: str | None = None, channels: Channels = 20, seed: int = 0
) -> ChannelStatistics:
    """Running statistics of some channels in each bank, and their AP (paper E, fig. 5)."""
    layer = layer or default_layer(model)
    banks = statistics_banks(norm_layers(model, layer)[layer])
    if not banks:
        raise ConfigError(f"{layer} stores no statistics; only batch norms do")
    series = {ns_name(bank, "running"): one for bank, one in banks.items()}
    return _picked(model, layer, channels, seed, series, {"channels_drawn_by_seed": seed})


def batch_channels(
    model: nn.Module,
    x: Tensor,
    *,
    count: int = 2,
    layer: str | None = None,
    channels: Channels = 20,
    seed: int = 0,
    route: str | None = None,
    batch_size: int = 256,
) -> ChannelStatistics:
    """Statistics of ``count`` batches drawn by lot against the running ones, on some channels (paper E, fig. 6)."""
    layer = layer or default_layer(model)
    problems = _count_problems(count)
    if mixture_norms(model):
        problems.append(
            "a mixture norm has batch statistics for concatenated batches only; see statistics_shift(..., "
            "layout='concatenated'), and stored_channels for what it stores"
        )
    if not problems and len(x) < count * batch_size:
        problems.append(f"{count} batches of {batch_size} need {count * batch_size} images, got {len(x)}")
    raise_all(problems, "bad analysis")
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    stored = stored_statistics(model, route)
    if layer not in stored:
        raise ConfigError(f"{layer!r} stores no statistics{did_you_mean(layer, stored)}")
    series = {"running": stored[layer]}
    for number, chosen in enumerate(order[: count * batch_size].split(batch_size), 1):
        how = {**feeding(model, route), "layers": layer, "batch_size": batch_size}
        series[f"batch {number}"] = collect_moments(model, x[chosen], **how)[layer].gaussian(unbiased=True)
    conditions = {"route": route, "batch_size": batch_size, "drawn_by_seed": seed}
    return _picked(model, layer, channels, seed, series, conditions, affine=False)


def _count_problems(count: Any) -> list[str]:
    good = isinstance(count, int) and not isinstance(count, bool) and count >= 1
    return [] if good else [f"count must be a number of batches of at least 1, got {count!r}"]


def _picked(
    model: nn.Module,
    layer: str,
    channels: Channels,
    seed: int,
    series: Mapping[str, Gaussian],
    conditions: Mapping[str, Any],
    *,
    affine: bool = True,
) -> ChannelStatistics:
    """The chosen channels of given statistics and, with ``affine``, of the affine banks."""
    numbers = chosen_channels(len(next(iter(series.values())).mean), channels, seed)
    banks = affine_banks(norm_layers(model, layer)[layer]) if affine else {}
    banks = {"AP" if bank == SHARED else f"AP_{bank}": one for bank, one in banks.items()}

    def pick(values: Mapping[str, Gaussian]) -> dict[str, Gaussian]:
        return {name: Gaussian(one.mean[numbers], one.std[numbers]) for name, one in values.items()}

    return ChannelStatistics(
        layer=layer, channels=numbers, statistics=pick(series), affine=pick(banks), conditions=conditions
    )


@register("channels", summary="NS and AP of 20 channels, by affine bank and images", paper="A fig. 4, 5")
def channels_of_run(
    subject: EvaluationTarget,
    *,
    inputs: Sequence[str] = ("clean", "adv"),
    layer: str | None = None,
    channels: Channels = 20,
    seed: int = 0,
    statistics: Mode = "batch_frozen",
    route: str | None = None,
    progress: Progress | None = None,
) -> ChannelStatistics:
    """``inputs``: images by name; ``route``: the branch that attacks go through (``adv``)."""
    images = input_images(subject, inputs, route=route, progress=progress)
    how: Any = {"layer": layer, "channels": channels, "seed": seed, "statistics": statistics}
    found = channel_statistics(subject.model, images, **how, batch_size=subject.batch_size)
    return dataclasses.replace(found, conditions=conditions_of(subject, inputs, through=route, **found.conditions))


@register("stored_channels", summary="running statistics of 20 channels in each bank, with their AP", paper="E fig. 5")
def stored_channels_of_run(
    subject: EvaluationTarget, *, layer: str | None = None, channels: Channels = 20, seed: int = 0
) -> ChannelStatistics:
    """``layer`` by name; ``channels`` by number, or how many to draw by lot."""
    found = stored_channels(subject.model, layer=layer, channels=channels, seed=seed)
    return dataclasses.replace(found, conditions=conditions_of(subject, **found.conditions))


@register("batch_channels", summary="batches against running statistics on 20 channels", paper="E fig. 6")
def batch_channels_of_run(
    subject: EvaluationTarget,
    *,
    images: str = "adv",
    count: int = 2,
    layer: str | None = None,
    channels: Channels = 20,
    seed: int = 0,
    route: str | None = None,
    progress: Progress | None = None,
) -> ChannelStatistics:
    """``images`` by name; ``route``: the branch that is attacked and looked at (``adv``)."""
    raise_all(_count_problems(count), "bad analysis")
    branch = attack_branch(subject.model, route)
    x = input_images(subject, [images], route=branch, progress=progress)[images]
    how: Any = {"count": count, "layer": layer, "channels": channels, "seed": seed, "route": branch}
    found = batch_channels(subject.model, x, **how, batch_size=max(1, min(subject.batch_size, len(x) // count)))
    return dataclasses.replace(found, conditions=conditions_of(subject, [images], through=branch, **found.conditions))


# -- batches against running statistics --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class StatisticsShift(Finding):
    """Distance between each batch's moments and the running statistics: ``layers[images][layer]``, one per batch."""

    layers: Mapping[str, Mapping[str, Sequence[float]]]
    conditions: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sums(self) -> dict[str, float]:
        """Summed over the layers, mean over the batches."""
        return {
            images: sum(sum(values) / len(values) for values in layers.values())
            for images, layers in self.layers.items()
        }

    def record(self) -> dict[str, Any]:
        layers = {images: {name: list(v) for name, v in row.items()} for images, row in self.layers.items()}
        return {
            "analysis": "statistics_shift",
            "sums": self.sums,
            "layers": layers,
            "conditions": dict(self.conditions),
        }

    def draw(self) -> Figure:
        from matplotlib.figure import Figure

        figure = Figure()
        axes = figure.subplots()
        names: list[str] = []
        for index, (images, layers) in enumerate(self.layers.items()):
            names = list(layers)
            middle = [sum(values) / len(values) for values in layers.values()]
            axes.plot(middle, label=f"{images} (sum {self.sums[images]:.3g})", **look(index, images))
            low, high = ([pick(values) for values in layers.values()] for pick in (min, max))
            axes.fill_between(range(len(names)), low, high, color=look(index, images)["color"], alpha=0.2, linewidth=0)
        axes.set(title="Batches against running statistics", ylabel=r"$W_2^2$, mean and range of batches")
        axes.set_ylim(bottom=0)
        axes.legend()
        label_layers(axes, names)
        return figure


def statistics_shift(
    model: nn.Module,
    inputs: Mapping[str, Images],
    *,
    routes: Mapping[str, str | None] | None = None,
    layout: Layout = "sequential",
    batch_size: int = 256,
    progress: Progress | None = None,
) -> StatisticsShift:
    """Squared 2-Wasserstein distance between the moments of batches and the running statistics (paper C, fig. 4).

    The difference between the normalization in training and at test time: ``inputs`` are for each name a tensor, or
    batches; ``layout`` says whether a batch goes through the network alone, normalized by its own moments, or
    ``concatenated`` with the others' batches, by the moments of all images that feed the same bank. ``routes``: the
    branch of each name, by default the one that is called the same. Both variances are unbiased.
    """
    if not inputs:
        raise ConfigError("no images to look at; give them by name, such as {'clean': x}")
    known = _branches_fed(model)
    chosen = {name: (name if known else None) for name in inputs} | dict(routes or {})
    problems = [
        f"no branch for {name!r}: say routes={{{name!r}: ...}}, one of {', '.join(known)}"
        for name in inputs
        if known and chosen[name] not in known
    ]
    if layout not in get_args(Layout):
        problems.append(f"unknown layout {layout!r}{did_you_mean(layout, get_args(Layout))}")
    if layout == "sequential" and mixture_norms(model):
        problems.append("a mixture norm has batch statistics for concatenated batches only; use layout='concatenated'")
    if layout == "concatenated" and known and len(set(chosen.values())) < len(chosen):
        problems.append(
            f"a concatenated batch has one kind of images for each branch, got the routes {chosen}; use "
            "layout='sequential'"
        )
    raise_all(problems, "bad analysis")
    stored = {name: stored_statistics(model, chosen[name]) for name in inputs}
    # Where domains are crossed, a bank is fed by images that are forwarded for it and meet no others' moments.
    crossed = any(module.plan.crosses for module in routed_modules(model).values())
    alone = layout == "sequential" or crossed
    found: dict[str, dict[str, list[float]]] = {name: {} for name in inputs}
    for done, names in enumerate(([name] for name in inputs) if alone else [list(inputs)], 1):
        for parts in zip_longest(*(in_batches(inputs[name], batch_size) for name in names)):
            if any(part is None for part in parts):
                raise ConfigError(f"concatenated batches need as many of each kind of images: {', '.join(names)}")
            batch = dict(zip(names, parts))
            routed = {chosen[name]: len(part) for name, part in batch.items()} if known else None
            how = feeding(model, chosen[names[0]]) if alone else {"statistics": "batch_frozen", "route": routed}
            for name, moments in _fed_moments(model, batch, chosen, layers=list(stored[names[0]]), **how).items():
                current = {layer: one.gaussian(unbiased=True) for layer, one in moments.items()}
                for layer, distance in distances(current, stored[name]).items():
                    found[name].setdefault(layer, []).append(distance.total)
        if progress is not None:
            progress(done * len(names), len(inputs))
    return StatisticsShift(layers=found, conditions={"routes": chosen, "layout": layout, "variance": "unbiased"})


def _branches_fed(model: nn.Module) -> tuple[str, ...]:
    """The branches of a model, or the domains whose statistics a mixture norm keeps apart."""
    return branches(model) or (domains(model) if mixture_norms(model) else ())


def _fed_moments(
    model: nn.Module, batch: Mapping[str, Tensor], routes: Mapping[str, str | None], **how: Any
) -> dict[str, Moments]:
    """Moments of what feeds the bank of each kind of images at every norm, in one forward of all of them."""
    found: dict[str, Moments] = {name: {} for name in batch}
    sizes = [len(part) for part in batch.values()]
    norms = norm_layers(model)

    def bank(layer: str, name: str) -> str:
        norm, domain = norms[layer], routes[name]
        return norm.plan.feeds[norm.plan.index(domain)] if isinstance(norm, RoutedNorm) and domain else SHARED

    def see(layer: str, value: Tensor) -> None:
        parts = dict(zip(batch, value.double().split(sizes)))
        for name in parts:
            fed = torch.cat([part for other, part in parts.items() if bank(layer, other) == bank(layer, name)])
            mean, var = functional.moments(fed[None])
            found[name][layer] = LayerMoments(mean[0].cpu(), var[0].cpu(), fed.numel() // fed.shape[1])

    watch(model, torch.cat(list(batch.values())), see, batch_size=sum(sizes), **how)
    return found


@register("statistics_shift", summary="distance between batches and running statistics, by layer", paper="C fig. 4")
def statistics_shift_of_run(
    subject: EvaluationTarget,
    *,
    inputs: Sequence[str] = ("clean", "adv"),
    layout: Layout | None = None,
    progress: Progress | None = None,
) -> StatisticsShift:
    """``inputs``: images by name; a model with branches looks at each through its own, or through that of ``adv``.

    ``layout``: by default that of the run's training, where ``inputs`` are what it trains on, clean and adv.
    """
    images = input_images(subject, inputs, progress=progress)
    known = _branches_fed(subject.model)
    routes = {name: name if name in known else attack_branch(subject.model) for name in images}
    how = layout or (_trained_layout(subject) if set(images) == {"clean", "adv"} else "sequential")
    found = statistics_shift(subject.model, images, routes=routes, layout=how, batch_size=subject.batch_size)
    return dataclasses.replace(found, conditions=conditions_of(subject, inputs, **found.conditions))


def _trained_layout(subject: EvaluationTarget) -> Layout:
    """How the batches of a subject's training were made; one after the other where that is not known."""
    objective = subject.conditions.get("config", {}).get("objective", {})
    known = OBJECTIVES.get(objective["name"]).options() if objective else {}
    return objective.get("layout", known["layout"].default) if "layout" in known else "sequential"


@dataclass(frozen=True, kw_only=True, eq=False)
class ShiftAlongTraining(Finding):
    """Batches against running statistics at several steps of a training (paper C, fig. 4)."""

    shifts: Mapping[int, StatisticsShift]

    def record(self) -> dict[str, Any]:
        steps = {str(step): shift.record() for step, shift in sorted(self.shifts.items())}
        return {"analysis": "shift_along_training", "steps": steps}

    def draw(self) -> Figure:
        from matplotlib.figure import Figure

        figure = Figure()
        axes = figure.subplots()
        steps = sorted(self.shifts)
        for index, name in enumerate(self.shifts[steps[0]].layers):
            axes.plot(steps, [self.shifts[step].sums[name] for step in steps], label=name, **look(index, name))
        axes.set(title="Batches against running statistics along training", xlabel="training step")
        axes.set_ylabel(r"$W_2^2$ summed over all norms")
        axes.set_yscale("log")  # the first steps are far from the initial 0 and 1
        axes.legend()
        return figure
