"""Accuracy of models on the features and adversarial examples of other models (paper D, table 3)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from torch import Tensor, nn

from advnorm._core.errors import ConfigError, Description, raise_problems, unknown_name
from advnorm._core.precision import float32_as
from advnorm._core.settings import Setting
from advnorm._core.wrappers import device_of
from advnorm.analysis.base import (
    BatchSize,
    EveryRouteSetting,
    Finding,
    Seed,
    empty_problems,
    even_slices,
    format_percent,
    register_analysis,
    track,
)
from advnorm.analysis.feature_extraction import RECIPES, make_features
from advnorm.analysis.feature_pictures import count_classes, target_images
from advnorm.analysis.plots import new_figure, wrap_names
from advnorm.analysis.targets import BranchView, branch_views, view_conditions
from advnorm.attacks import attacked
from advnorm.attacks.base import Progress, check_images
from advnorm.evaluation.target import EvaluationTarget

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def predict_classes(model: nn.Module, images: Tensor, *, route: str | None = None, batch_size: int = 256) -> Tensor:
    """Return the predicted class of each image, in eval mode and strict float32; on the CPU."""
    device, classes = device_of(model), []
    with attacked(model, route=route) as predict, torch.no_grad(), float32_as("ieee", device):
        for rows in even_slices(len(images), batch_size):
            classes.append(predict(images[rows].to(device)).argmax(1).cpu())
    return torch.cat(classes)


def measure_accuracy(model: nn.Module, images: Tensor, labels: Tensor, **settings: Any) -> float:
    """Return the share of the images whose predicted class is their label."""
    return float((predict_classes(model, images, **settings) == labels.cpu()).double().mean())


@dataclass(frozen=True, kw_only=True)
class Transfer(Finding):
    """Accuracy of each target model on the images from each source: ``accuracy[source][model]``."""

    RECORD = ("what", "accuracy", "images", "conditions")

    accuracy: Mapping[str, Mapping[str, float]]
    images: Mapping[str, int]  # by source
    what: str = "images"
    conditions: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sources(self) -> list[str]:
        """The names of the sources."""
        return list(self.accuracy)

    @property
    def targets(self) -> list[str]:
        """The names of the target models."""
        return list(next(iter(self.accuracy.values())))

    def table(self) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
        rows = [
            [source, target, format_percent(value)]
            for source, row in self.accuracy.items()
            for target, value in row.items()
        ]
        return [f"{self.what} from", "evaluated on", "accuracy"], rows

    def draw(self) -> Figure:
        left, below = wrap_names(self.sources, 24), wrap_names(self.targets, 60 // len(self.targets))
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
    shapes = {view.name: tuple(view.target.images.shape[1:]) for view in views}
    _check_equal("image shapes", shapes)
    classes = {view.name: count_classes(view.target.model, view.target.images[:1], view.route) for view in views}
    _check_equal("numbers of classes", classes)


def _check_equal(what: str, values: Mapping[str, Any]) -> None:
    if len(set(values.values())) > 1:
        got = Description(", ".join(f"{value} for {name}" for name, value in values.items()))
        hint = "compare runs on one data set"
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
        check_images(images, labels)
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


@register_analysis(
    "transfer", summary="features or attacks from each run, evaluated on all", paper="D table 3", several=True
)
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
