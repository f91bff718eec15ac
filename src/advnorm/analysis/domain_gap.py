"""How far apart two domains lie in a network: distances between statistics and between affine banks, and what a swap
of statistics does to accuracy (paper A, sec. 5; paper C, eq. 7)."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from advnorm._core.errors import ConfigError, raise_all
from advnorm._core.wrappers import device_of, unwrapped
from advnorm.analysis.base import Finding, bar_look, percent, register
from advnorm.analysis.moments import (
    Gaussian,
    Images,
    LayerMoments,
    affine_parameters,
    attack_branch,
    conditions_of,
    formula,
    input_images,
    label_layers,
    legend_below,
    look,
    moments_and_classes,
    named_attack,
    norm_statistics,
    ns_name,
    under,
)
from advnorm.attacks import Attack
from advnorm.attacks.base import Progress
from advnorm.evaluation.benchmark import benchmark
from advnorm.evaluation.plan import branches
from advnorm.evaluation.target import EvaluationTarget
from advnorm.norms import Mode, RoutedNorm, pair_banks, recalibrate, route, routed_modules

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The norms' own default; what a norm adds to a variance is also the least that a relative distance divides by.
EPS = 1e-5


class Distance(NamedTuple):
    """The two parts of a squared 2-Wasserstein distance: of the means and of the deviations, summed over channels."""

    mean: float
    std: float

    @property
    def total(self) -> float:
        return self.mean + self.std


def wasserstein(first: Gaussian, second: Gaussian, *, relative: bool = False) -> Distance:
    """``Σ_c (μ₁ - μ₂)² + (σ₁ - σ₂)²`` of two diagonal Gaussians (paper C, eq. 7).

    ``relative``: every channel in units of its own deviation, the root mean square of the two. A batch norm does not
    see the scale of the weights before it, but the absolute distance does.
    """
    unit = ((first.std.square() + second.std.square()) / 2 + EPS).sqrt() if relative else torch.ones(())
    parts = ((one - other) / unit for one, other in zip(first, second))
    return Distance(*(part.square().sum().item() for part in parts))


#: Distances by layer.
Distances = dict[str, Distance]


def distances(first: Mapping[str, Gaussian], second: Mapping[str, Gaussian], *, relative: bool = False) -> Distances:
    """The distance at every layer that both have."""
    return {name: wasserstein(first[name], second[name], relative=relative) for name in first if name in second}


def summed(layers: Distances) -> float:
    """The distance summed over all layers (paper C, table 2)."""
    return sum(distance.total for distance in layers.values())


def _gaussians(moments: Mapping[str, LayerMoments]) -> dict[str, Gaussian]:
    # Biased: the moments of these very images, as in paper C, eq. 8 and 9.
    return {name: one.gaussian() for name, one in moments.items()}


def _plain(layers: Distances) -> dict[str, Any]:
    return {name: {"mean": d.mean, "std": d.std, "total": d.total} for name, d in layers.items()}


# -- between images ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class DomainGap(Finding):
    """Distances between what different images bring to each norm, for every pair of them, and what they cost."""

    absolute: Mapping[tuple[str, str], Distances]
    relative: Mapping[tuple[str, str], Distances]
    accuracy: Mapping[str, float]
    conditions: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sums(self) -> dict[tuple[str, str], float]:
        """Summed over all layers (paper C, table 2)."""
        return {names: summed(layers) for names, layers in self.absolute.items()}

    def record(self) -> dict[str, Any]:
        def named(gaps: Mapping[tuple[str, str], Distances]) -> dict[str, Any]:
            return {"-".join(names): _plain(layers) for names, layers in gaps.items()}

        return {
            "analysis": "domain_gap",
            "sums": {"-".join(names): value for names, value in self.sums.items()},
            "relative_sums": {"-".join(names): summed(layers) for names, layers in self.relative.items()},
            "accuracy": dict(self.accuracy),
            "layers": named(self.absolute),
            "relative_layers": named(self.relative),
            "conditions": dict(self.conditions),
        }

    def table(self) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
        return _summed_table({"": self})

    def draw(self) -> Figure:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7.0, 5.6))
        panels = figure.subplots(2, 1, sharex=True)
        names: list[str] = []
        for axes, gaps in zip(panels, (self.absolute, self.relative)):
            for index, (pair_names, layers) in enumerate(gaps.items()):
                names = list(layers)
                label = f"{' – '.join(pair_names)} (sum {self.sums[pair_names]:.3g})"
                axes.plot(range(len(names)), [d.total for d in layers.values()], label=label, **look(index))
            axes.set_ylim(bottom=0)
        panels[0].set(title="Distance between the inputs of each norm", ylabel=r"$W_2^2$ over all channels")
        panels[1].set(title="The same, each channel in units of its deviation", ylabel=r"relative $W_2^2$")
        label_layers(panels[1], names)
        legend_below(figure, panels[0], columns=3)
        return figure


def domain_gap(
    model: nn.Module,
    x: Images,
    x_adv: Images,
    *,
    others: Mapping[str, Images] | None = None,
    labels: Tensor | None = None,
    route: str | None = None,
    statistics: Mode = "running",
    layers: str | Sequence[str] | None = None,
    batch_size: int = 256,
    progress: Progress | None = None,
) -> DomainGap:
    """Squared 2-Wasserstein distances between the inputs of every norm for clean, adversarial and ``others`` images.

    All pairs, per layer and summed (paper C, eq. 7 and table 2; paper A, fig. 7), under one branch ``route``, so that
    the affine parameters play no part. With ``labels`` also the accuracy on each kind of images (paper A, table 6).
    """
    inputs = {"clean": x, "adv": x_adv, **(others or {})}
    found: dict[str, dict[str, Gaussian]] = {}
    accuracy: dict[str, float] = {}
    for done, (name, images) in enumerate(inputs.items(), 1):
        how = {**under(route, statistics), "layers": layers, "batch_size": batch_size}
        moments, classes = moments_and_classes(model, images, **how)
        found[name] = _gaussians(moments)
        if labels is not None:
            if labels.shape != classes.shape:
                raise ConfigError(
                    f"labels must have shape ({len(classes)},), one per {name} image, got {tuple(labels.shape)}"
                )
            accuracy[name] = (classes == labels.cpu()).double().mean().item()
        if progress is not None:
            progress(done, len(inputs))
    pairs = list(combinations(found, 2))
    return DomainGap(
        absolute={(a, b): distances(found[a], found[b]) for a, b in pairs},
        relative={(a, b): distances(found[a], found[b], relative=True) for a, b in pairs},
        accuracy=accuracy,
        conditions={
            "route": route,
            "statistics": statistics,
            "batch_size": batch_size if all(isinstance(images, Tensor) for images in inputs.values()) else "as given",
            "variance": "biased",
        },
    )


@register("domain_gap", summary="distances between clean, adversarial and other inputs, by layer", paper="A fig. 7, C")
def domain_gap_of_run(
    subject: EvaluationTarget,
    *,
    inputs: Sequence[str] = ("adv", "noise"),
    route: str | None = None,
    statistics: Mode = "running",
    progress: Progress | None = None,
) -> DomainGap:
    """``inputs``: beside the clean images; ``route``: the branch that is attacked and looked at (``adv``)."""
    branch = attack_branch(subject.model, route)
    kinds = [inputs] if isinstance(inputs, str) else list(inputs)
    images = input_images(subject, ["clean", *kinds], route=branch, progress=progress)
    if "adv" not in images:
        raise ConfigError(f"inputs must have 'adv' among them, got {kinds}")
    others = {name: value for name, value in images.items() if name not in ("clean", "adv")}
    found = domain_gap(
        subject.model,
        images["clean"],
        images["adv"],
        others=others,
        labels=subject.labels,
        route=branch,
        statistics=statistics,
        batch_size=subject.batch_size,
    )
    told = conditions_of(subject, ["clean", *kinds], through=branch, **found.conditions)
    return dataclasses.replace(found, conditions=told)


def _summed_table(gaps: Mapping[str, DomainGap]) -> tuple[list[str], list[list[str]]]:
    """Of each run the accuracies and the distances summed over its norms, as paper C's table 2 has them."""
    first = next(iter(gaps.values()))
    head = ["run", *(f"accuracy, {kind}" for kind in first.accuracy), *(" – ".join(names) for names in first.sums)]
    rows = [
        [name, *map(percent, gap.accuracy.values()), *(f"{value:.4g}" for value in gap.sums.values())]
        for name, gap in gaps.items()
    ]
    return (head, rows) if any(gaps) else (head[1:], [row[1:] for row in rows])


@dataclass(frozen=True, kw_only=True, eq=False)
class DomainGapTable(Finding):
    """Summed distances of several runs beside their accuracies (paper C, table 2)."""

    rows: Mapping[str, DomainGap]

    def record(self) -> dict[str, Any]:
        return {"analysis": "domain_gap_table", "runs": {name: gap.record() for name, gap in self.rows.items()}}

    def table(self) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
        return _summed_table(self.rows)

    def draw(self) -> Figure:
        from matplotlib.figure import Figure

        pairs = list(next(iter(self.rows.values())).sums)
        height = 0.8 / len(pairs)
        figure = Figure(figsize=(7.0, 1.2 + 0.25 * len(pairs) * len(self.rows)))
        axes = figure.subplots()
        for index, names in enumerate(pairs):
            values = [gap.sums[names] for gap in self.rows.values()]
            places = [row + index * height for row in range(len(self.rows))]
            bars = axes.barh(places, values, height, label=" – ".join(names), **bar_look(index))
            axes.bar_label(bars, fmt="%.3g", padding=3, fontsize=7)
        told = [
            "\n".join([name, *(f"{kind} {100 * share:.1f} %" for kind, share in gap.accuracy.items())])
            for name, gap in self.rows.items()
        ]
        axes.set_yticks([row + 0.4 - height / 2 for row in range(len(told))], told, fontsize=7)
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.grid(visible=False, axis="y")
        axes.grid(visible=True, axis="x")
        axes.set(title="Distance between domains", xlabel=r"$W_2^2$ summed over all norms")
        legend_below(figure, axes)
        return figure


@register(
    "domain_gap_table",
    summary="summed distances of several runs with their accuracies",
    paper="C table 2",
    several=True,
)
def domain_gap_table(
    subjects: Sequence[EvaluationTarget],
    *,
    inputs: Sequence[str] = ("adv", "autoattack"),
    route: str | None = None,
    statistics: Mode = "running",
    progress: Progress | None = None,
) -> DomainGapTable:
    """``inputs``: beside the clean images. A falsely robust network shows by a large distance and by its accuracies."""
    if len({subject.name for subject in subjects}) < len(subjects):
        raise ConfigError(f"runs need names of their own, got {[subject.name for subject in subjects]}")
    rows = {
        subject.name: domain_gap_of_run(subject, inputs=inputs, route=route, statistics=statistics, progress=progress)
        for subject in subjects
    }
    return DomainGapTable(rows=rows)


# -- between branches --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class BranchGap(Finding):
    """Distances of statistics (NS) under one affine bank, of the branches' own NS, and of affine parameters (AP)."""

    absolute: Mapping[str, Distances]
    relative: Mapping[str, Distances]
    domains: tuple[str, str]
    conditions: Mapping[str, Any] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        return {
            "analysis": "branch_gap",
            "domains": list(self.domains),
            "sums": {name: summed(layers) for name, layers in self.absolute.items()},
            "relative_sums": {name: summed(layers) for name, layers in self.relative.items()},
            "layers": {name: _plain(layers) for name, layers in self.absolute.items()},
            "relative_layers": {name: _plain(layers) for name, layers in self.relative.items()},
            "conditions": dict(self.conditions),
        }

    def draw(self) -> Figure:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7.0, 6.0))
        panels = figure.subplots(2, 2, sharex=True, sharey="row")
        # A norm without parameters has no AP, and a place among the others all the same.
        names = list(self.absolute["NS"])
        for row, gaps in zip(panels, (self.absolute, self.relative)):
            for index, (label, layers) in enumerate(gaps.items()):
                places = [names.index(name) for name in layers]
                for axes, line in zip(row, zip(*layers.values())):
                    axes.plot(places, line, label=self._label(label), **look(index))
            for axes in row:
                axes.set_ylim(bottom=0)
        panels[0, 0].set(title="Means μ, and biases β", ylabel="Σ of squared differences")
        panels[0, 1].set(title="Deviations σ, and weights γ")
        panels[1, 0].set(ylabel="in units of each channel's\ndeviation, or weight")
        for axes in panels[1]:
            label_layers(axes, names)
        legend_below(figure, panels[0, 0], columns=2)
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
    statistics: Mode = "batch_frozen",
    batch_size: int = 256,
    progress: Progress | None = None,
) -> BranchGap:
    """Layer-wise distances of NS and of AP between two branches (paper A, fig. 6).

    ``NS under adv`` compares clean and adversarial images with the same affine bank, ``NS`` each branch's own images
    with its own bank (what prior work showed), ``AP`` the affine banks. The paper does not say how it measures the
    distance of AP; here it is eq. 7 of paper C with bias and weight for mean and deviation: for a standardized input
    they are the mean and the deviation of what leaves the norm.
    """
    known = branches(model)
    if not set(domains) <= set(known) or len(set(domains)) != 2:
        raise ConfigError(
            f"branch_gap compares two of the model's branches, got {domains}; it has: {', '.join(known) or 'none'}; a "
            "norm with branches is dual_bn"
        )
    found = norm_statistics(
        model,
        dict(zip(domains, (x, x_adv))),
        affines=domains,
        statistics=statistics,
        batch_size=batch_size,
        progress=progress,
    )
    one, other = domains
    ns = {a: {i: _gaussians(moments) for i, moments in row.items()} for a, row in found.moments.items()}
    ap = {domain: affine_parameters(model, domain) for domain in domains}
    # In the order of the forward pass, as the others.
    ap = {domain: {name: bank[name] for name in ns[one][one] if name in bank} for domain, bank in ap.items()}
    compared = {
        f"NS under {other}": (ns[other][one], ns[other][other]),
        f"NS under {one}": (ns[one][one], ns[one][other]),
        "NS": (ns[one][one], ns[other][other]),
        "AP": (ap[one], ap[other]),
    }
    return BranchGap(
        absolute={name: distances(*sides) for name, sides in compared.items()},
        relative={name: distances(*sides, relative=True) for name, sides in compared.items()},
        domains=domains,
        conditions={**found.conditions, "variance": "biased"},
    )


@register(
    "branch_gap", summary="distances of NS and of AP between the clean and the adversarial branch", paper="A fig. 6"
)
def branch_gap_of_run(
    subject: EvaluationTarget,
    *,
    statistics: Mode = "batch_frozen",
    route: str | None = None,
    progress: Progress | None = None,
) -> BranchGap:
    """``route``: the branch that attacks go through (``adv``)."""
    images = input_images(subject, ("clean", "adv"), route=route, progress=progress)
    found = branch_gap(
        subject.model, images["clean"], images["adv"], statistics=statistics, batch_size=subject.batch_size
    )
    told = conditions_of(subject, ("clean", "adv"), through=route, **found.conditions)
    return dataclasses.replace(found, conditions=told)


# -- swapped and re-calibrated statistics ------------------------------------------------------------------------------


class SwapRow(NamedTuple):
    """Accuracy with the statistics ``ns`` (affine bank in force, images) and the affine bank ``ap``."""

    setup: str
    ns: tuple[str, str]
    ap: str
    accuracy: Mapping[str, float]  # clean, and by attack


@dataclass(frozen=True, kw_only=True, eq=False)
class SwapTable(Finding):
    """Accuracy of each affine bank with default, swapped and re-calibrated statistics (paper A, table 5)."""

    rows: tuple[SwapRow, ...]
    conditions: Mapping[str, Any] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        rows = [
            {"setup": row.setup, "NS": {"under": row.ns[0], "of": row.ns[1]}, "AP": row.ap, **row.accuracy}
            for row in self.rows
        ]
        return {"analysis": "swap_table", "rows": rows, "conditions": dict(self.conditions)}

    def table(self) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
        rows = [
            [row.setup, ns_name(*row.ns), f"AP_{row.ap}", *map(percent, row.accuracy.values())] for row in self.rows
        ]
        return ["setup", "statistics", "affine", *self.rows[0].accuracy], rows

    def draw(self) -> Figure:
        from matplotlib.figure import Figure

        columns = list(self.rows[0].accuracy)
        height = 0.8 / len(columns)
        figure = Figure(figsize=(7.0, 1.4 + 0.22 * len(columns) * len(self.rows)))
        axes = figure.subplots()
        for index, name in enumerate(columns):
            places = [row + index * height for row in range(len(self.rows))]
            values = [100 * row.accuracy[name] for row in self.rows]
            bars = axes.barh(places, values, height, label=name, **bar_look(index))
            axes.bar_label(bars, fmt="%.1f", padding=3, fontsize=7)
        told = [f"{row.setup}: {formula(ns_name(*row.ns))}, {formula(f'AP_{row.ap}')}" for row in self.rows]
        axes.set_yticks([row + 0.4 - height / 2 for row in range(len(told))], told)
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.grid(visible=True, axis="x")
        axes.set(title="Statistics swapped and re-calibrated", xlabel="accuracy (%)", xlim=(0, 108))
        legend_below(figure, axes)
        return figure


def swap_table(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    attacks: Mapping[str, Attack],
    *,
    x_adv: Tensor,
    calibration: Mapping[str, Tensor] | None = None,
    domains: tuple[str, str] = ("clean", "adv"),
    batch_size: int = 256,
    progress: Progress | None = None,
) -> SwapTable:
    """Accuracy of each branch with its own statistics, the other branch's, and re-calibrated ones (paper A, table 5).

    ``attacks`` by name, each computed anew on what is judged. ``x_adv`` are adversarial images to re-calibrate with;
    ``calibration`` gives images of both domains in place of ``x`` and ``x_adv``, from the training set for example.
    NS^adv_clean replaces the adversarial branch's statistics by those of clean images under its affine bank.
    """
    problems = _swap_problems(model, domains)
    problems += [] if attacks else ["give at least one attack by name, such as {'pgd10': PGD(...)}"]
    problems += [f"the attack {name!r} must have no route of its own" for name in attacks if attacks[name].route]
    raise_all(problems, "bad swap table")
    images = dict(calibration or zip(domains, (x, x_adv)))
    other = dict(zip(domains, reversed(domains)))
    rows: list[SwapRow] = []
    total = 3 * len(domains)

    def judge(setup: str, ns: tuple[str, str], ap: str, judged: nn.Module, scope: AbstractContextManager[Any]) -> None:
        threat = next(iter(attacks.values())).threat
        with scope:
            result = benchmark(judged, (x, y), threat, attacks, batch_size=batch_size)
        robust = {name: result.robust_accuracy(name) for name in attacks}
        rows.append(SwapRow(setup, ns, ap, {"clean": result.clean_accuracy(), **robust}))
        if progress is not None:
            progress(len(rows), total)

    for ap in reversed(domains):
        judge("default", (ap, ap), ap, model, route(model, ap))
    for ap in reversed(domains):
        judge("swapped", (other[ap], other[ap]), ap, model, pair_banks(model, statistics=other[ap], affine=ap))
    for ap in reversed(domains):
        fresh = copy.deepcopy(unwrapped(model))
        recalibrate(fresh, images[other[ap]], route=ap, batch_size=batch_size)
        judge("re-calibrated", (ap, other[ap]), ap, fresh, route(fresh, ap))
    conditions = {"attacks": {name: repr(attack) for name, attack in attacks.items()}, "images": len(x)}
    return SwapTable(rows=tuple(rows), conditions={**conditions, "re-calibrated_on": len(images[domains[0]])})


def _swap_problems(model: nn.Module, domains: tuple[str, str]) -> list[str]:
    """What speaks against swapping the statistics of two domains: each is normalized by a bank that it alone feeds."""
    known = branches(model)
    if not set(domains) <= set(known):
        have = f"it has {', '.join(known)}" if known else "it has none; a norm with branches is dual_bn"
        return [f"statistics are swapped between the branches {' and '.join(domains)} of a model, and {have}"]
    plans = dict.fromkeys(module.plan for module in routed_modules(model).values() if isinstance(module, RoutedNorm))
    return [
        f"{plan.name} does not normalize each branch by statistics of its own images, so that there are none to swap; "
        "use dual_bn or dual_stats_bn"
        for plan in plans
        if plan.statistics != "batch" or plan.crosses or len({plan.feeds[plan.index(d)] for d in domains}) < 2
    ]


@register("swap_table", summary="accuracy with default, swapped and re-calibrated statistics", paper="A table 5")
def swap_table_of_run(
    subject: EvaluationTarget, *, attacks: Sequence[str] = ("pgd10",), progress: Progress | None = None
) -> SwapTable:
    """``attacks``: by name. Re-calibration takes the subject's images and what its attack makes of them."""
    raise_all(_swap_problems(subject.model, ("clean", "adv")), "bad swap table")
    names = [attacks] if isinstance(attacks, str) else list(attacks)
    how = {"threat": subject.attack.threat, "seed": subject.attack.seed}
    built = {name: named_attack(name, device_of(subject.model), **how) for name in names}
    x_adv = input_images(subject, ("adv",), progress=progress)["adv"]
    found = swap_table(
        subject.model,
        subject.images,
        subject.labels,
        built,
        x_adv=x_adv,
        batch_size=subject.batch_size,
        progress=progress,
    )
    return dataclasses.replace(found, conditions=conditions_of(subject, **found.conditions))
