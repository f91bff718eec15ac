"""Pictures of a feature data set, and how well its recipe worked (paper D, eq. 2, 3, app. B.3 and E)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from advnorm._core.errors import ConfigError
from advnorm._core.settings import Setting
from advnorm._core.wrappers import device_of
from advnorm.analysis import feature_extraction as extraction
from advnorm.analysis.base import Finding, TableData, format_percent, register_analysis
from advnorm.analysis.feature_extraction import Part, Recipe, ShardSize
from advnorm.analysis.plots import Figure, new_figure, wrap_names
from advnorm.analysis.settings import Seed
from advnorm.attacks import predicting
from advnorm.data import FeatureFolder, ImageData, add_split, load
from advnorm.evaluation.model_branches import branches
from advnorm.evaluation.target import EvaluationTarget
from advnorm.training.run_folder import Run


@dataclass(frozen=True, kw_only=True, eq=False)
class FeaturePictures(Finding):
    """Some images of a feature data set with the images they were made from, and the model's predictions."""

    RECORD = (
        *("name", "model", "recipe", "images", "feature_distance", "accuracy", "l2_from_start"),
        *("labels", "starts", "folder", "conditions"),
    )

    name: str
    model: str
    recipe: Recipe
    source: Tensor
    start: Tensor
    made: Tensor
    labels: Tensor
    starts: Tensor
    images: int  # their number
    feature_distance: Mapping[str, float]  # mean of ||g(x) - g(x')|| before and after
    accuracy: float  # share of the made images that the model classifies as their label
    l2_from_start: float  # mean
    folder: str | None = None

    def table(self) -> TableData:
        distances = (*self.feature_distance.values(), self.l2_from_start)
        head = ["images", "predicted as their label", "distance of features before", "after", "L2 from the start"]
        return head, [[str(self.images), format_percent(self.accuracy), *(f"{value:.3g}" for value in distances)]]

    def draw(self) -> Figure:
        rows = [
            ("features of", self.source, "class", self.labels),
            ("start", self.start, "class", self.starts),
            (f"made ({self.name})", self.made, "label", self.labels),
        ]
        rows = rows if self.recipe.towards == "features" else rows[1:]
        count = min(8, len(self.made))
        figure, grid = new_figure(len(rows) * count, count, height=0.55 + 1.05 * len(rows))
        for axes, ((title, images, kind, classes), i) in zip(grid, product(rows, range(count))):
            picture = images[i].permute(1, 2, 0).squeeze(-1).cpu().numpy()
            axes.imshow(picture, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
            axes.set(xticks=[], yticks=[], ylabel="" if i else title)
            axes.grid(False)
            axes.spines[:].set_visible(False)
            axes.set_xlabel(f"{kind} {classes[i]}", fontsize=8)
        hits = f"the model predicts the label for {100 * self.accuracy:.0f} % of {self.images} images"
        title = wrap_names([f"{self.name} from {self.model}: {hits}"], 85)[0]
        figure.suptitle(title, fontsize=10, fontweight="bold", x=0.01, ha="left")
        return figure


@register_analysis("features", summary="pictures of a feature data set; with out= its files", paper="D (eq. 2, 3)")
def feature_pictures(
    target: EvaluationTarget,
    *,
    recipe: Annotated[str, Setting("D_R, D_NR, D_rand, D_det or D_conflict.")] = "D_R",
    steps: Annotated[int | None, Setting("Number of gradient steps. Default: that of the recipe.", "[1, inf)")] = None,
    route: Annotated[str | None, Setting("Branch of the model.")] = None,
    layer: Annotated[str | None, Setting("Module whose input are the features. Default: the last linear one.")] = None,
    examples: Annotated[int, Setting("Number of images in the pictures.", "[1, inf)")] = 16,
    out: Annotated[str | None, Setting("Folder for the files of the whole set.")] = None,
    data_dir: Annotated[str | None, Setting("Folder of the images that the files are made from.")] = None,
    seed: Seed = 0,
    shard_size: ShardSize = 500,
    part: Part = (0, 1),
) -> FeaturePictures:
    """Draw the first ``examples`` images of a recipe and measure how well it worked.

    With ``out`` the whole set is made there from the training images of the run in ``data_dir``, and the ordinary test
    images are added. D_conflict is made from a D_R, whose folder is ``data_dir``.
    """
    chosen, _ = extraction.resolve_recipe(recipe, None, {} if steps is None else {"steps": steps})
    if route is None and (known := branches(target.model)):
        message = f"{target.name} has the branches {', '.join(known)}"
        raise ConfigError("missing_route", message, field="route", hint="choose one with route=")
    data, test = _load_source(target, recipe, route, out, data_dir)
    through: Any = {"route": route, "layer": layer}
    first = data.pixels(slice(0, 1)).to(device_of(target.model))
    extraction.penultimate(target.model, first, **through)  # raises before any work
    if out is not None:
        how: Any = {"steps": chosen.steps, "seed": seed, "shard_size": shard_size, "part": part, **through}
        extraction.extract_features(target.model, data, recipe, out, **how)
        added = FeatureFolder(Path(out) / "test")
        if test is not None and part[0] == 0 and not (added.exists and not added.missing_shards()):
            add_split(out, test)
    rows = torch.arange(min(examples, len(data)))
    made = extraction.apply_recipe(target.model, data, rows, chosen, seed=seed, **through)
    source = data.pixels(rows).to(made.images.device)
    with predicting(target.model, route=route) as predict, torch.no_grad():
        accuracy = (predict(made.images).argmax(1).cpu() == made.labels).double().mean()
    wanted, before, after = (
        extraction.penultimate(target.model, x, **through).double() for x in (source, made.start_images, made.images)
    )
    return FeaturePictures(
        name=recipe,
        model=target.name,
        recipe=chosen,
        source=source.cpu(),
        start=made.start_images.cpu(),
        made=made.images.cpu(),
        labels=made.labels,
        starts=made.starts,
        images=len(rows),
        feature_distance={
            name: float((found - wanted).norm(dim=1).mean()) for name, found in (("before", before), ("after", after))
        },
        accuracy=float(accuracy),
        l2_from_start=float(extraction.L2.distance(made.images, made.start_images).mean()),
        folder=out,
        conditions={**target.conditions, **through, "seed": seed},
    )


def count_classes(model: nn.Module, x: Tensor, route: str | None) -> int:
    """Return the number of classes of a model."""
    with predicting(model, route=route) as predict, torch.no_grad():
        return predict(x.to(device_of(model))).shape[1]


def target_images(target: EvaluationTarget, route: str | None) -> ImageData:
    """Return the test images of a target as a data set; the model gives the number of classes."""
    images, labels = target.images.cpu(), target.labels.cpu()
    classes = count_classes(target.model, images[:1], route)
    return ImageData(name=target.name, split="test", images=images, labels=labels, num_classes=classes)


def _load_source(
    target: EvaluationTarget, recipe: str, route: str | None, out: str | None, data_dir: str | None
) -> tuple[ImageData, ImageData | None]:
    """Return the images that a set is made from: those of a D_R, the training images of the run, or its test images.

    For the files of a set also return the test images to add, if they exist.
    """
    if recipe == "D_conflict":
        if data_dir is None:
            message, hint = "D_conflict is made from the images of a D_R", "name its folder with --set data_dir=..."
            raise ConfigError("missing_option", message, field="data_dir", hint=hint)
        read = partial(load, "features", root=data_dir)
    elif out is None:
        if data_dir is not None:
            message = "{field} is the folder of the images for the files of a set; pictures alone use the test images"
            raise ConfigError("conflict", message, field="data_dir", hint="set out=, or leave data_dir out")
        return target_images(target, route), None
    elif target.folder is None:
        message, hint = "only a run has known training images", "use extract_features with your data"
        raise ConfigError("not_supported", message, field="target", hint=hint)
    else:
        settings = Run.open(target.folder).config.data
        read = partial(load, settings.name, root=data_dir, **settings.options)
    data, test = read("train").in_memory(), None
    if out is not None:
        with suppress(ConfigError):  # an evaluation without them raises with a hint
            test = read("test").in_memory()
    return data, test
