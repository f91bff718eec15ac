"""Features and adversarial examples of one model in another (paper D, table 3), and conflicting features (fig. 7)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from advnorm._core.errors import ConfigError, Description, Problem, raise_problems, unknown_name
from advnorm._core.settings import Setting
from advnorm._core.wrappers import device_of
from advnorm.analysis.base import Finding, format_percent, register_analysis
from advnorm.analysis.batches import measure_accuracy, predict_classes, track
from advnorm.analysis.feature_extraction import RECIPES, make_features
from advnorm.analysis.feature_pictures import count_classes, target_images
from advnorm.analysis.plots import COLOURS, MARKERS, Figure, label_line_ends, legend_below, new_figure, wrap_names
from advnorm.analysis.settings import BatchSize, EveryRouteSetting, Seed, empty_problems, require_any
from advnorm.analysis.targets import BranchView, branch_views, view_conditions
from advnorm.attacks.base import Progress
from advnorm.attacks.inputs import validate_batch
from advnorm.data.feature_sets import parse_set_name
from advnorm.evaluation.target import EvaluationTarget


@dataclass(frozen=True, kw_only=True)
class Transfer(Finding):
    """Accuracy of each target model on the images from each source: ``accuracy[source][model]``."""

    RECORD = ("what", "accuracy", "images", "conditions")

    accuracy: Mapping[str, Mapping[str, float]]
    images: Mapping[str, int]  # by source
    what: str = "images"

    def table(self) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
        rows = [
            [source, target, format_percent(value)]
            for source, row in self.accuracy.items()
            for target, value in row.items()
        ]
        return [f"{self.what} from", "evaluated on", "accuracy"], rows

    def draw(self) -> Figure:
        targets = list(next(iter(self.accuracy.values())))
        left, below = wrap_names(self.accuracy, 24), wrap_names(targets, 60 // len(targets))
        lines = max(name.count("\n") + 1 for name in left)
        figure, axes = new_figure(height=1.6 + max(0.42, 0.1 + 0.16 * lines) * len(left))
        values = [list(row.values()) for row in self.accuracy.values()]
        shades = axes.imshow(
            [[100 * value for value in row] for row in values], cmap="cividis", vmin=0, vmax=100, aspect="auto"
        )
        for line, row in enumerate(values):
            for column, value in enumerate(row):
                colour = "black" if value > 0.55 else "white"
                axes.text(column, line, f"{100 * value:.1f}", ha="center", va="center", color=colour)
        axes.grid(False)
        axes.spines[:].set_visible(False)
        axes.set_xticks(range(len(below)), below)
        axes.set_yticks(range(len(left)), left)
        axes.tick_params(length=0)
        axes.set(xlabel="evaluated on", ylabel=f"{self.what} from", title=f"Transfer of {self.what}: accuracy (%)")
        figure.colorbar(shades, ax=axes, label="accuracy (%)", fraction=0.04, pad=0.02)
        return figure


def check_comparable(views: Sequence[BranchView]) -> None:
    """Raise if networks cannot classify each other's images: other image shapes or numbers of classes."""
    _check_equal("image shapes", {view.name: tuple(view.target.images.shape[1:]) for view in views})
    classes = {view.name: count_classes(view.target.model, view.target.images[:1], view.route) for view in views}
    _check_equal("numbers of classes", classes)


def _check_equal(what: str, values: Mapping[str, Any]) -> None:
    if len(set(values.values())) > 1:
        got = Description(", ".join(f"{value} for {name}" for name, value in values.items()))
        hint = "compare runs with the same data"
        raise ConfigError("conflict", f"the runs have different {what}", field="targets", got=got, hint=hint)


def transfer(
    models: Mapping[str, nn.Module],
    sets: Mapping[str, tuple[Tensor, Tensor]],
    *,
    routes: Mapping[str, str | None] | None = None,
    batch_size: BatchSize = 256,
    what: str = "images",
    conditions: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Transfer:
    """Return the accuracy of every model on every set of images and labels (D table 3).

    ``sets``: images in [0, 1] with labels by their source, such as extracted features, or adversarial examples of each
    model. ``routes`` names the branch of models that have several.
    """
    routes = routes or {}
    problems = empty_problems(models, "models", "{'bn': model}")
    problems += empty_problems(sets, "sets", "{'bn': (images, labels)}")
    problems += [unknown_name("model", name, models, field="routes") for name in routes if name not in models]
    raise_problems(problems, "bad transfer")
    accuracy = {}
    for source, (images, labels) in track(sets.items(), progress):
        validate_batch(images, labels)
        accuracy[source] = {
            name: measure_accuracy(model, images, labels, route=routes.get(name), batch_size=batch_size)
            for name, model in models.items()
        }
    return Transfer(
        accuracy=accuracy,
        images={source: len(labels) for source, (_, labels) in sets.items()},
        what=what,
        conditions=conditions or {},
    )


@register_analysis("transfer", summary="features or attacks of each run on all", paper="D table 3", several=True)
def transfer_between_runs(
    targets: Sequence[EvaluationTarget],
    *,
    source: Annotated[
        Literal["features", "adversarial"], Setting("Images from each run: features (eq. 3) or adversarial examples.")
    ] = "features",
    steps: Annotated[int, Setting("Number of gradient steps for features (eq. 3).", "[1, inf)")] = RECIPES["D_R"].steps,
    route: EveryRouteSetting = None,
    layer: Annotated[str | None, Setting("Module whose input are the features. Default: the last linear one.")] = None,
    seed: Seed = 0,
    progress: Progress | None = None,
) -> Transfer:
    """Cross-evaluate runs on features or adversarial examples of the test images (D table 3)."""
    views = branch_views(targets, route)
    check_comparable(views)
    recipe = dataclasses.replace(RECIPES["D_R"], steps=steps)
    total = sum(len(view.target.images) for view in views)
    sets: dict[str, tuple[Tensor, Tensor]] = {}
    done = 0
    for name, target, branch in views:
        data = target_images(target, branch)
        # Running statistics, because crafting must not change the statistics.
        attack = dataclasses.replace(target.attack, route=branch, statistics="running")
        device, parts = device_of(target.model), []
        for rows in torch.arange(len(data)).split(target.batch_size):
            if source == "features":
                made = make_features(target.model, data, rows, recipe, route=branch, layer=layer, seed=seed).images
            else:
                x, y = data.pixels(rows).to(device), data.labels[rows].to(device)
                made = attack(target.model, x, y, index=rows)
            parts.append(made.cpu())
            done += len(rows)
            if progress is not None:
                progress(done, total)
        sets[name] = torch.cat(parts), data.labels
    return transfer(
        {view.name: view.target.model for view in views},
        sets,
        routes={view.name: view.route for view in views},
        batch_size=views[0].target.batch_size,
        what="features" if source == "features" else "adversarial examples",
        conditions={
            "source": source,
            "steps": steps if source == "features" else None,
            "layer": layer,
            "seed": seed,
            "runs": view_conditions(views),
        },
    )


# -- conflicting features ----------------------------------------------------------------------------------------------


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
        axes.set(ylim=(0, 105), ylabel="test images classified by them (%)")
        axes.set_title("Which features decide after training on conflicting ones")
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
    pairs = models.items() if isinstance(models, Mapping) else models
    return _align(((name, model, route) for name, model in pairs), x, y, offset, batch_size)


def _align(
    models: Iterable[tuple[Any, nn.Module, str | None]], x: Tensor, y: Tensor, offset: int, batch_size: int
) -> Alignment:
    """Return the alignment of networks, each through its branch."""
    validate_batch(x, y)
    names, robust, non_robust = [], [], []
    for name, model, route in models:
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


@register_analysis("alignment", summary="which of conflicting features decide", paper="D fig. 7", several=True)
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
    models = ((view.name, view.target.model, view.route) for view in views)
    return _align(models, x, y, offset, size).under({"runs": view_conditions(views)})


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
    raise_problems(problems, "bad alignment")
    _check_equal("class offsets", offsets)
    return next(iter(offsets.values()), 1 if given is None else given)
