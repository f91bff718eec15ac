"""Features and adversarial examples of one model in another (paper D, table 3), and conflicting features (fig. 7)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from advnorm._core.errors import ConfigError, Description, Problem, raise_problems, unknown_name
from advnorm._core.settings import Setting
from advnorm._core.wrappers import device_of
from advnorm.analysis.base import BranchView, Finding, TableData, format_percent, register_analysis, view_conditions
from advnorm.analysis.feature_extraction import RECIPES, Recipe, apply_recipe
from advnorm.analysis.feature_pictures import count_classes, target_images
from advnorm.analysis.images import measure_accuracy, predict_classes, track
from advnorm.analysis.plots import Figure, Panel, bar_figure, line_figure, new_figure, wrap_names
from advnorm.analysis.settings import BatchSize, Seed, empty_problems, require_any
from advnorm.attacks.inputs import validate_batch
from advnorm.data.feature_sets import parse_set_name


@dataclass(frozen=True, kw_only=True)
class Transfer(Finding):
    """Accuracy of each target model on the images from each source: ``accuracy[source][model]``."""

    RECORD = ("what", "accuracy", "images", "conditions")

    accuracy: Mapping[str, Mapping[str, float]]
    images: Mapping[str, int]  # by source
    what: str = "images"

    def table(self) -> TableData:
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
        figure, (axes,) = new_figure(height=1.6 + max(0.42, 0.1 + 0.16 * lines) * len(left))
        values = [[100 * share for share in row.values()] for row in self.accuracy.values()]
        shades = axes.imshow(values, cmap="cividis", vmin=0, vmax=100, aspect="auto")
        for line, column in product(range(len(left)), range(len(below))):
            value = values[line][column]
            colour = "black" if value > 55 else "white"
            axes.text(column, line, f"{value:.1f}", ha="center", va="center", color=colour)
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
    for source, (images, labels) in track(sets.items()):
        validate_batch(images, labels)
        accuracy[source] = {
            name: measure_accuracy(model, images, labels, route=routes.get(name), batch_size=batch_size)
            for name, model in models.items()
        }
    return Transfer(accuracy=accuracy, images={name: len(labels) for name, (_, labels) in sets.items()}, what=what)


@register_analysis("transfer", summary="features or attacks of each run on all", paper="D table 3", takes="branches")
def transfer_between_runs(
    views: Sequence[BranchView],
    *,
    source: Annotated[
        Literal["features", "adversarial"], Setting("Images from each run: features (eq. 3) or adversarial examples.")
    ] = "features",
    steps: Annotated[int, Setting("Number of gradient steps for features (eq. 3).", "[1, inf)")] = RECIPES["D_R"].steps,
    layer: Annotated[str | None, Setting("Module whose input are the features. Default: the last linear one.")] = None,
    seed: Seed = 0,
) -> Transfer:
    """Cross-evaluate runs on features or adversarial examples of the test images (D table 3)."""
    check_comparable(views)
    recipe = dataclasses.replace(RECIPES["D_R"], steps=steps) if source == "features" else None
    found = transfer(
        {view.name: view.target.model for view in views},
        {view.name: _craft(view, recipe, layer, seed) for view in views},
        routes={view.name: view.route for view in views},
        batch_size=views[0].target.batch_size,
        what="features" if recipe else "adversarial examples",
    )
    conditions = {"source": source, "steps": recipe and recipe.steps, "layer": layer, "seed": seed}
    return found.under({**conditions, "runs": view_conditions(views)})


def _craft(view: BranchView, recipe: Recipe | None, layer: str | None, seed: int) -> tuple[Tensor, Tensor]:
    """Return features of the test images by a recipe, else adversarial examples, and their labels."""
    model, data, parts = view.target.model, target_images(view.target, view.route), []
    # Running statistics, because crafting must not change the statistics.
    attack = dataclasses.replace(view.target.attack, route=view.route, statistics="running")
    for rows in track(torch.arange(len(data)).split(view.target.batch_size)):
        if recipe is not None:
            made = apply_recipe(model, data, rows, recipe, route=view.route, layer=layer, seed=seed).images
        else:
            x, y = (part.to(device_of(model)) for part in (data.pixels(rows), data.labels[rows]))
            made = attack(model, x, y, index=rows)
        parts.append(made.cpu())
    return torch.cat(parts), data.labels


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

    def table(self) -> TableData:
        columns = (self.aligned_with_robust_features, self.aligned_with_non_robust_features)
        rows = zip(map(str, self.names), *(map(format_percent, column) for column in columns))
        return ["network", "class of robust features", "class of non-robust features"], [list(row) for row in rows]

    def draw(self) -> Figure:
        series = {
            "robust features": [100 * share for share in self.aligned_with_robust_features],
            "non-robust features": [100 * share for share in self.aligned_with_non_robust_features],
        }
        title, label = "Which features decide after training on conflicting ones", "test images classified by them (%)"
        if len(self.names) > 1 and all(isinstance(name, int) for name in self.names):
            lines = {name: dict(zip(self.names, values)) for name, values in series.items()}
            return line_figure([Panel(title, lines, {"ylabel": label, "ylim": (0, 105)})], xlabel="epoch")
        rows = wrap_names(self.names, 24)
        return bar_figure(rows, series, number_format="%.1f", title=title, xlabel=label, xlim=(0, 108))


def alignment(
    models: Mapping[Any, nn.Module] | Iterable[tuple[Any, nn.Module]],
    x: Tensor,
    y: Tensor,
    *,
    offset: int = 1,
    route: str | Mapping[Any, str | None] | None = None,
    batch_size: BatchSize = 256,
) -> Alignment:
    """Evaluate networks trained on D_conflict or D_det on ordinary images ``x`` of classes ``y`` (D fig. 7).

    In these sets an image with the robust features of class t and the non-robust features of class t + ``offset`` has
    the label t + ``offset``. On an image of class y, a network that learned robust features predicts y + ``offset``; a
    network that learned non-robust features predicts y. ``models``: by name, or pairs of an epoch and a network.
    ``route``: the branch of all networks, or of each one by name.
    """
    validate_batch(x, y)
    names, robust, non_robust = [], [], []
    for name, model in models.items() if isinstance(models, Mapping) else models:
        branch = route[name] if isinstance(route, Mapping) else route
        classes = count_classes(model, x[:1], branch)
        if offset % classes == 0:
            message = f"{{field}} must not be a multiple of the {classes} classes"
            raise ConfigError("out_of_range", message, field="offset", got=offset)
        predicted = predict_classes(model, x, route=branch, batch_size=batch_size)
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


@register_analysis("alignment", summary="which of conflicting features decide", paper="D fig. 7", takes="branches")
def alignment_of_runs(
    views: Sequence[BranchView],
    *,
    offset: Annotated[int | None, Setting("Class offset of the training sets. Default: that of the runs.")] = None,
) -> Alignment:
    """Evaluate runs trained on conflicting features on the test images of the first: ordinary ones (``add_split``)."""
    offset = _common_offset(views, offset)
    check_comparable(views)
    models, routes = {view.name: view.target.model for view in views}, {view.name: view.route for view in views}
    _, x, y = views[0].data
    found = alignment(models, x, y, offset=offset, route=routes, batch_size=views[0].target.batch_size)
    return found.under({"runs": view_conditions(views)})


def _common_offset(views: Sequence[BranchView], given: int | None) -> int:
    """Return the class offset of the conflicting features that all runs were trained on."""
    problems, offsets = [], {}
    for target in {view.target.name: view.target for view in views}.values():
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
