"""Distance between the moments of batches and the running statistics (paper C, fig. 4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from advnorm._core.errors import ConfigError, Problem, raise_problems
from advnorm._core.settings import Setting
from advnorm.analysis.banks import layer_distances, norm_layers, stored_statistics
from advnorm.analysis.base import Finding, TableData, register_analysis
from advnorm.analysis.images import Images, default_branch, iterate_batches, measure_images, track
from advnorm.analysis.moments import LayerMoments, Moments, observe_norm_inputs, update_settings
from advnorm.analysis.plots import Figure, Panel, line_figure
from advnorm.analysis.settings import BatchSize, Inputs, require_any, setting_problems
from advnorm.evaluation.model_branches import branches
from advnorm.evaluation.target import EvaluationTarget
from advnorm.norms import RoutedNorm, domains, functional, mixture_norms, routed_modules
from advnorm.norms.plan import SHARED
from advnorm.objectives.base import OBJECTIVES, Layout

LayoutSetting = Annotated[Layout, Setting("How batches are forwarded: one domain at a time, or all together.")]
OwnMoments = Annotated[
    Literal["shared", "own"],
    Setting("Moments of all images that update a bank together, or of each kind of images alone (paper C, fig. 4)."),
]
RunLayout = Annotated[Layout | None, Setting("How batches are forwarded. Default: as in the training of the run.")]


@dataclass(frozen=True, kw_only=True, eq=False)
class StatisticsShift(Finding):
    """Distance between each batch's moments and the running statistics: ``layers[images][layer]``, one per batch."""

    RECORD = ("analysis", "sums", "layers", "conditions")
    analysis = "statistics_shift"

    layers: Mapping[str, Mapping[str, Sequence[float]]]

    @property
    def sums(self) -> dict[str, float]:
        """Distances summed over the layers, averaged over the batches."""
        return {
            images: sum(sum(values) / len(values) for values in layers.values())
            for images, layers in self.layers.items()
        }

    def table(self) -> TableData:
        return ["images", "distance, summed over the layers"], [[name, f"{one:.4g}"] for name, one in self.sums.items()]

    def draw(self) -> Figure:
        settings = {"ylabel": r"$W_2^2$, mean and range of batches", "ylim": (0, None)}
        panel = Panel("Batches against running statistics", self.layers, settings)
        return line_figure([panel], label=lambda images: f"{images} (sum {self.sums[images]:.3g})")


def statistics_shift(
    model: nn.Module,
    inputs: Mapping[str, Images],
    *,
    routes: Mapping[str, str | None] | None = None,
    layout: LayoutSetting = "sequential",
    moments: OwnMoments = "shared",
    batch_size: BatchSize = 256,
) -> StatisticsShift:
    """Return squared 2-Wasserstein distances between the moments of batches and the running statistics.

    They show the difference between the normalization in training and at test time (paper C, fig. 4). ``inputs``: a
    tensor or batches by name. A ``sequential`` batch is forwarded alone and normalized by its own moments. In a
    ``concatenated`` batch, the images that update the same bank share its moments. ``moments`` compares these
    (``shared``), or those of each kind of images alone (``own``). ``routes``: the branch of each name, by default the
    branch of the same name. Both variances are unbiased.
    """
    problems = setting_problems(statistics_shift, locals())
    require_any(inputs, "inputs", "{'clean': x}")
    known = _updated_domains(model)
    chosen = {name: (name if known else None) for name in inputs} | dict(routes or {})
    for name in inputs:
        if known and chosen[name] not in known:
            message, hint = f"no branch for {name!r}", f"set routes={{{name!r}: ...}} to one of {', '.join(known)}"
            problems.append(Problem(code="missing_route", message=message, field="routes", hint=hint))
    if layout == "sequential" and mixture_norms(model):
        message = "a mixture norm has batch statistics for concatenated batches only"
        problems.append(Problem(code="conflict", message=message, field="layout", hint="use layout='concatenated'"))
    if layout == "concatenated" and known and len(set(chosen.values())) < len(chosen):
        message, hint = "a concatenated batch has one kind of images for each branch", "use layout='sequential'"
        problems.append(Problem(code="conflict", message=message, field="routes", got=chosen, hint=hint))
    raise_problems(problems, "bad analysis")
    stored = {name: stored_statistics(model, chosen[name]) for name in inputs}
    # A crossed norm forwards the images that update a bank separately, so that they share no moments with others.
    crossed = any(module.plan.crosses for module in routed_modules(model).values())
    alone = layout == "sequential" or crossed
    found: dict[str, dict[str, list[float]]] = {name: {} for name in inputs}
    for names in track([[name] for name in inputs] if alone else [list(inputs)]):
        for parts in zip_longest(*(iterate_batches(inputs[name], batch_size) for name in names)):
            if any(part is None for part in parts):
                message = f"concatenated batches need the same number of {' and '.join(names)} images"
                raise ConfigError("wrong_shape", message, field="inputs")
            batch = dict(zip(names, parts))
            routed = {chosen[name]: len(part) for name, part in batch.items()} if known else None
            how = update_settings(model, chosen[names[0]]) if alone else {"statistics": "batch_frozen", "route": routed}
            how |= {"own": moments == "own", "layers": list(stored[names[0]])}
            for name, measured in _update_moments(model, batch, chosen, **how).items():
                current = {layer: one.gaussian(unbiased=True) for layer, one in measured.items()}
                for layer, distance in layer_distances(current, stored[name]).items():
                    found[name].setdefault(layer, []).append(distance.total)
    conditions = {"routes": chosen, "layout": layout, "moments": moments, "variance": "unbiased"}
    return StatisticsShift(layers=found, conditions=conditions)


def _updated_domains(model: nn.Module) -> tuple[str, ...]:
    """Return the branches of a model, or the domains whose statistics a mixture norm keeps separate."""
    return branches(model) or (domains(model) if mixture_norms(model) else ())


def _update_moments(
    model: nn.Module, batch: Mapping[str, Tensor], routes: Mapping[str, str | None], *, own: bool, **how: Any
) -> dict[str, Moments]:
    """Return the moments that update the bank of each kind of images at every norm, from one forward of all images.

    With ``own``, those of each kind alone.
    """
    found = {name: Moments() for name in batch}
    sizes = [len(part) for part in batch.values()]
    norms = norm_layers(model)

    def bank(layer: str, name: str) -> str:
        norm, domain = norms[layer], routes[name]
        return norm.plan.feeds[norm.plan.index(domain)] if isinstance(norm, RoutedNorm) and domain else SHARED

    def compute(layer: str, value: Tensor) -> None:
        parts = dict(zip(batch, value.double().split(sizes)))
        for name in parts:
            kinds = [name] if own else [other for other in parts if bank(layer, other) == bank(layer, name)]
            shared = torch.cat([parts[kind] for kind in kinds])
            mean, var = functional.moments(shared[None])
            found[name][layer] = LayerMoments(mean[0].cpu(), var[0].cpu(), shared.numel() // shared.shape[1])

    observe_norm_inputs(model, torch.cat(list(batch.values())), compute, batch_size=sum(sizes), **how)
    return found


@register_analysis("statistics_shift", summary="batches against running statistics, by layer", paper="C fig. 4")
def statistics_shift_of_run(
    target: EvaluationTarget,
    *,
    inputs: Inputs = ("clean", "adv"),
    layout: RunLayout = None,
    moments: OwnMoments = "shared",
) -> StatisticsShift:
    """Measure the shift of the images of a run, each kind through its own branch, else through that of ``adv``.

    The default ``layout`` is that of the training if ``inputs`` are clean and adv, else ``sequential``.
    """
    known = _updated_domains(target.model)
    routes = {name: name if name in known else default_branch(target.model) for name in inputs}
    layout = layout or (_training_layout(target) if set(inputs) == {"clean", "adv"} else "sequential")
    settings = {"routes": routes, "layout": layout, "moments": moments}
    return measure_images(statistics_shift, target, inputs=inputs, **settings)


def _training_layout(target: EvaluationTarget) -> Layout:
    """Return the layout of the batches in a target's training; ``sequential`` if it is not known."""
    objective = target.conditions.get("config", {}).get("objective", {})
    known = OBJECTIVES.get(objective["name"]).options() if objective else {}
    return objective.get("layout", known["layout"].default) if "layout" in known else "sequential"


@dataclass(frozen=True, kw_only=True, eq=False)
class ShiftAlongTraining(Finding):
    """The statistics shift at several steps of a training (paper C, fig. 4)."""

    RECORD = ("analysis", "steps")
    analysis = "shift_along_training"

    shifts: Mapping[int, StatisticsShift]

    @property
    def steps(self) -> dict[int, StatisticsShift]:
        """The shifts in the order of the steps."""
        return dict(sorted(self.shifts.items()))

    def draw(self) -> Figure:
        names = next(iter(self.shifts.values())).layers
        lines = {name: {step: shift.sums[name] for step, shift in self.steps.items()} for name in names}
        # Logarithmic, because the first steps are far from the initial 0 and 1.
        settings = {"ylabel": r"$W_2^2$ summed over all norms", "yscale": "log"}
        panel = Panel("Batches against running statistics along training", lines, settings)
        return line_figure([panel], xlabel="training step")
