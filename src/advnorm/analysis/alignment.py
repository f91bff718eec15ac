"""Which features decide after training on conflicting ones (paper D, fig. 7)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from torch import Tensor, nn

from advnorm._core.errors import ConfigError, Description, Problem, raise_problems
from advnorm._core.settings import Setting
from advnorm.analysis.base import (
    BatchSize,
    EveryRouteSetting,
    Finding,
    format_percent,
    register_analysis,
    require_any,
)
from advnorm.analysis.feature_pictures import count_classes
from advnorm.analysis.plots import COLOURS, MARKERS, label_line_ends, legend_below, new_figure, wrap_names
from advnorm.analysis.targets import branch_views, view_conditions
from advnorm.analysis.transfer import check_comparable, predict_classes
from advnorm.attacks.base import check_images
from advnorm.data.feature_sets import parse_set_name
from advnorm.evaluation.target import EvaluationTarget

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class Alignment(Finding):
    """How often networks predict the class of an image's robust, and of its non-robust features (D fig. 7)."""

    RECORD = (
        *("names", "aligned_with_robust_features", "aligned_with_non_robust_features"),
        *("offset", "images", "conditions"),
    )

    names: tuple[str | int, ...]  # of the networks, or epochs of one
    aligned_with_robust_features: tuple[float, ...]
    aligned_with_non_robust_features: tuple[float, ...]
    offset: int
    images: int
    conditions: Mapping[str, Any] = field(default_factory=dict)

    def table(self) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
        columns = (self.aligned_with_robust_features, self.aligned_with_non_robust_features)
        rows = zip(map(str, self.names), *(map(format_percent, column) for column in columns))
        return ["network", "class of robust features", "class of non-robust features"], [list(row) for row in rows]

    def draw(self) -> Figure:
        figure, axes = new_figure(height=3.2)
        series = {
            "robust features": self.aligned_with_robust_features,
            "non-robust features": self.aligned_with_non_robust_features,
        }
        by_epoch = len(self.names) > 1 and all(isinstance(name, int) for name in self.names)
        for i, (label, values) in enumerate(series.items()):
            height = [100 * value for value in values]
            if by_epoch:
                axes.plot([int(name) for name in self.names], height, color=COLOURS[i], marker=MARKERS[i], label=label)
            else:
                places = [place + (i - 0.5) * 0.36 for place in range(len(self.names))]
                bars = axes.bar(places, height, 0.34, color=COLOURS[i], label=label)
                axes.bar_label(bars, fmt="%.1f", padding=1, fontsize=8)
        axes.set(
            ylim=(0, 105),
            ylabel="test images classified by them (%)",
            title="Which features decide after training on conflicting ones",
        )
        if by_epoch:
            axes.set_xlabel("epoch")
            axes.margins(x=0.02)
            last = max(int(name) for name in self.names)
            label_line_ends(axes, list(series), [(last, 100 * values[-1]) for values in series.values()])
        else:
            axes.set_xticks(range(len(self.names)), wrap_names(self.names, 80 // len(self.names)))
            legend_below(figure, axes.containers, list(series))
        return figure


def alignment(
    models: Mapping[Any, nn.Module] | Iterable[tuple[Any, nn.Module]],
    x: Tensor,
    y: Tensor,
    *,
    offset: int = 1,
    route: str | None = None,
    batch_size: BatchSize = 256,
) -> Alignment:
    """Evaluate networks trained on D_conflict or D_det on ordinary images ``x`` of classes ``y`` (D fig. 7).

    In these sets an image with the robust features of class t and the non-robust features of class t + ``offset`` has
    the label t + ``offset``. On an image of class y, a network that learned robust features predicts y + ``offset``; a
    network that learned non-robust features predicts y. ``models``: by name, or pairs of an epoch and a network.
    """
    check_images(x, y)
    names, robust, non_robust = [], [], []
    for name, model in models.items() if isinstance(models, Mapping) else models:
        classes = count_classes(model, x[:1], route)
        if offset % classes == 0:
            message = f"{{field}} must not be a multiple of the {classes} classes"
            raise ConfigError("out_of_range", message, field="offset", got=offset)
        predicted = predict_classes(model, x, route=route, batch_size=batch_size)
        names.append(name)
        robust.append(float((predicted == (y.cpu() + offset) % classes).double().mean()))
        non_robust.append(float((predicted == y.cpu()).double().mean()))
    require_any(names, "models", "{'bn': model}")
    return Alignment(
        names=tuple(names),
        aligned_with_robust_features=tuple(robust),
        aligned_with_non_robust_features=tuple(non_robust),
        offset=offset,
        images=len(y),
    )


@register_analysis(
    "alignment",
    summary="do runs trained on D_conflict rely on robust features?",
    paper="D fig. 7",
    several=True,
)
def alignment_of_runs(
    targets: Sequence[EvaluationTarget],
    *,
    offset: Annotated[int | None, Setting("Class offset of the training sets. Default: that of the runs.")] = None,
    route: EveryRouteSetting = None,
) -> Alignment:
    """Evaluate runs trained on conflicting features on the test images of the first: ordinary ones (``add_split``)."""
    offset = _common_offset(targets, offset)
    views = branch_views(targets, route)
    check_comparable(views)
    x, y, size = views[0].target.images, views[0].target.labels, views[0].target.batch_size
    parts = [
        alignment({name: target.model}, x, y, offset=offset, route=branch, batch_size=size)
        for name, target, branch in views
    ]
    return Alignment(
        names=tuple(view.name for view in views),
        aligned_with_robust_features=tuple(part.aligned_with_robust_features[0] for part in parts),
        aligned_with_non_robust_features=tuple(part.aligned_with_non_robust_features[0] for part in parts),
        offset=offset,
        images=len(y),
        conditions={"runs": view_conditions(views)},
    )


def _common_offset(targets: Sequence[EvaluationTarget], given: int | None) -> int:
    """Return the class offset of the conflicting features that all runs were trained on."""
    problems, offsets = [], {}
    for target in targets:
        if (source := target.conditions.get("trained_on")) is None:
            continue
        recipe, offset = parse_set_name(source)
        if recipe not in ("D_conflict", "D_det"):
            message = f"{target.name} was trained on {source}, whose features do not conflict"
            hint = "train on a D_conflict or D_det (data=features)"
            problems.append(Problem(code="not_supported", message=message, field="targets", hint=hint))
        elif given not in (None, offset):
            message = f"{target.name} was trained on features with {{field}} {offset}"
            problems.append(Problem(code="conflict", message=message, field="offset", got=given, hint="leave it out"))
        else:
            offsets[target.name] = offset
    if len(set(offsets.values())) > 1:
        got = Description(", ".join(f"{offset} for {name}" for name, offset in offsets.items()))
        message = "the runs have different offsets"
        hint = "compare runs of one offset"
        problems.append(Problem(code="conflict", message=message, field="targets", got=got, hint=hint))
    raise_problems(problems, "bad alignment")
    return next(iter(offsets.values()), 1 if given is None else given)
