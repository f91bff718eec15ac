"""How features and adversarial examples of one model fare in another (D table 3), and what conflicting ones teach."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn

from advnorm._core.errors import ConfigError, did_you_mean, raise_all
from advnorm._core.precision import float32_as
from advnorm._core.wrappers import device_of
from advnorm.analysis.base import COLOURS, MARKERS, Finding, batches, direct_labels, percent, register
from advnorm.analysis.features import RECIPES, classes_of, images_of, make_features
from advnorm.analysis.views import View, legend, views, wrapped
from advnorm.analysis.views import conditions as conditions_of
from advnorm.attacks import attacked
from advnorm.attacks.base import Progress, check_images
from advnorm.data.feature_sets import parse_set_name
from advnorm.evaluation.target import EvaluationTarget

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Source = Literal["features", "adversarial"]


def predicted(model: nn.Module, images: Tensor, *, route: str | None = None, batch_size: int = 256) -> Tensor:
    """The class that a model gives to each image, in eval mode and strict float32; on the CPU."""
    device, found = device_of(model), []
    with attacked(model, route=route) as predict, torch.no_grad(), float32_as("ieee", device):
        for rows in batches(len(images), batch_size):
            found.append(predict(images[rows].to(device)).argmax(1).cpu())
    return torch.cat(found)


def share(hits: Tensor) -> float:
    """How many of the images are meant, as a share of 1."""
    return float(hits.double().mean())


# -- transfer ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Transfer(Finding):
    """Accuracy of each target model on the images that come from each source."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    accuracy: tuple[tuple[float, ...], ...]  # by source, then by target
    images: tuple[int, ...]  # by source
    what: str = "images"
    conditions: Mapping[str, Any] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "accuracy": {
                source: dict(zip(self.targets, row)) for source, row in zip(self.sources, self.accuracy, strict=True)
            },
            "images": dict(zip(self.sources, self.images)),
            "conditions": dict(self.conditions),
        }

    def table(self) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
        rows = [
            [source, target, percent(value)]
            for source, row in zip(self.sources, self.accuracy)
            for target, value in zip(self.targets, row)
        ]
        return [f"{self.what} from", "judged by", "accuracy"], rows

    def draw(self) -> Figure:
        from matplotlib.figure import Figure

        left, below = wrapped(self.sources, 24), wrapped(self.targets, 60 // len(self.targets))
        lines = max(name.count("\n") + 1 for name in left)
        figure = Figure(figsize=(7.0, 1.6 + max(0.42, 0.1 + 0.16 * lines) * len(self.sources)))
        axes = figure.subplots()
        shades = axes.imshow(
            [[100 * value for value in row] for row in self.accuracy], cmap="cividis", vmin=0, vmax=100, aspect="auto"
        )
        for line, row in enumerate(self.accuracy):
            for column, value in enumerate(row):
                colour = "black" if value > 0.55 else "white"
                axes.text(column, line, f"{100 * value:.1f}", ha="center", va="center", color=colour)
        axes.grid(False)
        axes.spines[:].set_visible(False)
        axes.set_xticks(range(len(self.targets)), below)
        axes.set_yticks(range(len(self.sources)), left)
        axes.tick_params(length=0)
        axes.set(xlabel="judged by", ylabel=f"{self.what} from", title=f"How {self.what} transfer: accuracy (%)")
        figure.colorbar(shades, ax=axes, label="accuracy (%)", fraction=0.04, pad=0.02)
        return figure


def _of_one_data_set(seen: Sequence[View]) -> None:
    """Refuse networks that are to judge each other's images and cannot."""
    shapes = {view.name: tuple(view.subject.images.shape[1:]) for view in seen}
    if len(set(shapes.values())) > 1:
        told = ", ".join(f"{shape} for {name}" for name, shape in shapes.items())
        raise ConfigError(f"runs on images of different shapes: {told}; compare runs on one data set")
    classes = {view.name: classes_of(view.subject.model, view.subject.images[:1], view.route) for view in seen}
    if len(set(classes.values())) > 1:
        told = ", ".join(f"{count} for {name}" for name, count in classes.items())
        raise ConfigError(f"runs that tell different numbers of classes apart: {told}; compare runs on one data set")


def transfer(
    models: Mapping[str, nn.Module],
    sets: Mapping[str, tuple[Tensor, Tensor]],
    *,
    routes: Mapping[str, str | None] | None = None,
    batch_size: int = 256,
    what: str = "images",
    conditions: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Transfer:
    """Accuracy of every model on every set of images and labels (D table 3).

    ``sets``: images in [0, 1] with labels, by what they come from: extracted features, or adversarial examples from
    each of the models. ``routes`` names the branch of models that have several.
    """
    routes = routes or {}
    problems = [] if models else ["no models given"]
    problems += [] if sets else ["no sets of images given"]
    problems += [f"routes name no model {name!r}{did_you_mean(name, models)}" for name in routes if name not in models]
    raise_all(problems, "bad transfer")
    rows = []
    for number, (images, labels) in enumerate(sets.values()):
        check_images(images, labels)
        rows.append(
            tuple(
                share(predicted(model, images, route=routes.get(name), batch_size=batch_size) == labels.cpu())
                for name, model in models.items()
            )
        )
        if progress is not None:
            progress(number + 1, len(sets))
    return Transfer(
        sources=tuple(sets),
        targets=tuple(models),
        accuracy=tuple(rows),
        images=tuple(len(labels) for _, labels in sets.values()),
        what=what,
        conditions=conditions or {},
    )


@register("transfer", summary="features or attacks from each run, judged by all", paper="D table 3", several=True)
def transfer_between(
    subjects: Sequence[EvaluationTarget],
    *,
    source: Source = "features",
    steps: int = RECIPES["D_R"].steps,
    route: str | None = None,
    layer: str | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Transfer:
    """The cross-evaluation of D table 3 on the test images: ``source`` is ``features`` (eq. 3) or ``adversarial``.

    Networks with several branches count once for each, unless ``route`` names one. ``steps`` are those of eq. 3.
    """
    if source not in get_args(Source):
        raise ConfigError(f"unknown source {source!r}{did_you_mean(source, get_args(Source))}")
    seen = views(subjects, route)
    _of_one_data_set(seen)
    recipe = dataclasses.replace(RECIPES["D_R"], steps=steps)
    total = sum(len(view.subject.images) for view in seen)
    sets: dict[str, tuple[Tensor, Tensor]] = {}
    done = 0
    for name, subject, branch in seen:
        data = images_of(subject, branch)
        attack = dataclasses.replace(subject.attack, route=branch, statistics="running")  # looking moves none
        device, parts = device_of(subject.model), []
        for rows in torch.arange(len(data)).split(subject.batch_size):
            if source == "features":
                made = make_features(subject.model, data, rows, recipe, route=branch, layer=layer, seed=seed).images
            else:
                x, y = data.pixels(rows).to(device), data.labels[rows].to(device)
                made = attack(subject.model, x, y, index=rows)
            parts.append(made.cpu())
            done += len(rows)
            if progress is not None:
                progress(done, total)
        sets[name] = torch.cat(parts), data.labels
    return transfer(
        {view.name: view.subject.model for view in seen},
        sets,
        routes={view.name: view.route for view in seen},
        batch_size=seen[0].subject.batch_size,
        what="features" if source == "features" else "adversarial examples",
        conditions={
            "source": source,
            "steps": steps if source == "features" else None,
            "layer": layer,
            "seed": seed,
            "runs": conditions_of(seen),
        },
    )


# -- conflicting features ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Alignment(Finding):
    """How often networks say the class of an image's non-robust features, and that of its robust ones (D fig. 7)."""

    names: tuple[str | int, ...]  # of the networks, or epochs of one
    robust: tuple[float, ...]
    non_robust: tuple[float, ...]
    offset: int
    images: int
    conditions: Mapping[str, Any] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        return {
            "names": list(self.names),
            "aligned_with_robust_features": list(self.robust),
            "aligned_with_non_robust_features": list(self.non_robust),
            "offset": self.offset,
            "images": self.images,
            "conditions": dict(self.conditions),
        }

    def table(self) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
        rows = zip(map(str, self.names), map(percent, self.robust), map(percent, self.non_robust))
        return ["network", "as robust features say", "as non-robust ones say"], [list(row) for row in rows]

    def draw(self) -> Figure:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7.0, 3.2))
        axes = figure.subplots()
        series = {"robust features": self.robust, "non-robust features": self.non_robust}
        along = len(self.names) > 1 and all(isinstance(name, int) for name in self.names)
        for i, (label, values) in enumerate(series.items()):
            height = [100 * value for value in values]
            if along:
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
        if along:
            axes.set_xlabel("epoch")
            axes.margins(x=0.02)
            last = max(int(name) for name in self.names)
            direct_labels(axes, list(series), [(last, 100 * values[-1]) for values in series.values()])
        else:
            axes.set_xticks(range(len(self.names)), wrapped(self.names, 80 // len(self.names)))
            legend(figure, list(series), axes.containers)
        return figure


def alignment(
    models: Mapping[Any, nn.Module] | Iterable[tuple[Any, nn.Module]],
    x: Tensor,
    y: Tensor,
    *,
    offset: int = 1,
    route: str | None = None,
    batch_size: int = 256,
) -> Alignment:
    """Networks trained on D_conflict or D_det, judged on ordinary images ``x`` of classes ``y`` (D fig. 7).

    There an image with the robust features of class t and the non-robust ones of class t + ``offset`` is labelled
    t + ``offset``. On an image of class y a network that learned the former says y + ``offset``, one that learned the
    latter says y. ``models``: by name, or by epoch (pairs of a number and the network then, one after the other).
    """
    check_images(x, y)
    names, robust, non_robust = [], [], []
    for name, model in models.items() if isinstance(models, Mapping) else models:
        classes = classes_of(model, x[:1], route)
        if offset % classes == 0:
            raise ConfigError(f"offset must not be a multiple of the {classes} classes, got {offset}")
        found = predicted(model, x, route=route, batch_size=batch_size)
        names.append(name)
        robust.append(share(found == (y.cpu() + offset) % classes))
        non_robust.append(share(found == y.cpu()))
    if not names:
        raise ConfigError("no models given")
    return Alignment(
        names=tuple(names),
        robust=tuple(robust),
        non_robust=tuple(non_robust),
        offset=offset,
        images=len(y),
    )


@register("alignment", summary="do runs trained on D_conflict go by robust features?", paper="D fig. 7", several=True)
def alignment_of_runs(
    subjects: Sequence[EvaluationTarget], *, offset: int | None = None, route: str | None = None
) -> Alignment:
    """Runs trained on conflicting features, on the test images of the first: ordinary ones (see ``add_split``).

    ``offset`` is that of the set a run was trained on; give it where the run does not say on what it was.
    """
    offset = _offset(subjects, offset)
    seen = views(subjects, route)
    _of_one_data_set(seen)
    x, y, size = seen[0].subject.images, seen[0].subject.labels, seen[0].subject.batch_size
    parts = [
        alignment({name: subject.model}, x, y, offset=offset, route=branch, batch_size=size)
        for name, subject, branch in seen
    ]
    return Alignment(
        names=tuple(view.name for view in seen),
        robust=tuple(part.robust[0] for part in parts),
        non_robust=tuple(part.non_robust[0] for part in parts),
        offset=offset,
        images=len(y),
        conditions={"runs": conditions_of(seen)},
    )


def _offset(subjects: Sequence[EvaluationTarget], given: int | None) -> int:
    """How many classes further the conflicting features lead that all of the runs were trained on."""
    problems, offsets = [], {}
    for subject in subjects:
        if (source := subject.conditions.get("trained_on")) is None:
            continue
        recipe, offset = parse_set_name(source)
        if recipe not in ("D_conflict", "D_det"):
            problems.append(
                f"{subject.name} was trained on {source}, where the kinds of features do not say different classes; "
                "train on a D_conflict or D_det (data=features)"
            )
        elif given not in (None, offset):
            problems.append(f"{subject.name} was trained on features with offset {offset}, got {given}; leave it out")
        else:
            offsets[subject.name] = offset
    if len(set(offsets.values())) > 1:
        told = ", ".join(f"{offset} for {name}" for name, offset in offsets.items())
        problems.append(f"runs on features with different offsets: {told}; look at those of one offset at a time")
    raise_all(problems, "bad alignment")
    return next(iter(offsets.values()), 1 if given is None else given)
