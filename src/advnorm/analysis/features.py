"""Feature data sets from any model (paper D, eq. 2, 3, app. B.3 and E; Ilyas et al. 2019), and pictures of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn

from advnorm._core.errors import ConfigError, did_you_mean, raise_all
from advnorm._core.modes import hooks_run
from advnorm._core.provenance import environment
from advnorm._core.records import model_fingerprint
from advnorm._core.seeding import ImageNoise
from advnorm._core.wrappers import device_of, unwrapped
from advnorm.analysis.base import Finding, register
from advnorm.analysis.views import wrapped
from advnorm.attacks import PGD, attacked, input_gradient
from advnorm.attacks.base import Predict, Progress, check_images
from advnorm.data import FeatureFolder, FolderData, ImageData, add_split, load
from advnorm.data.feature_sets import shard_rows
from advnorm.evaluation.plan import branches
from advnorm.evaluation.target import EvaluationTarget
from advnorm.norms.routed_linear import RoutedLinear
from advnorm.threat import ThreatModel
from advnorm.training.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Towards = Literal["features", "random", "next"]
Start = Literal["other_class", "any"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a feature data set is made from images x with classes y.

    ``towards="features"``: an image x' moves until its penultimate activations are those of x (eq. 3), anywhere in the
    box, and is labelled y. x' has another class than x (paper D), or with ``start="any"`` is drawn from all (Ilyas et
    al.). ``"random"`` and ``"next"``: x becomes an adversarial example for a random class, or for the class ``offset``
    further on, within ``eps`` (L2), and is labelled so.
    """

    towards: Towards
    steps: int
    step_size: float = 0.1
    eps: float | None = None
    start: Start = "other_class"
    offset: int = 1

    def __post_init__(self) -> None:
        problems = []
        if self.towards not in get_args(Towards):
            problems.append(f"unknown towards {self.towards!r}{did_you_mean(self.towards, get_args(Towards))}")
        if self.start not in get_args(Start):
            problems.append(f"unknown start {self.start!r}{did_you_mean(self.start, get_args(Start))}")
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            problems.append(f"steps must be an integer of at least 1, got {self.steps!r}")
        if not isinstance(self.step_size, int | float) or not self.step_size > 0:
            problems.append(f"step_size must be above 0, got {self.step_size!r}")
        if self.towards == "features" and self.eps is not None:
            problems.append("features are matched anywhere in the box (app. B.3); leave eps out")
        if self.towards != "features" and not (isinstance(self.eps, int | float) and self.eps > 0):
            problems.append(f"a target class needs eps above 0, the L2 distance allowed, got {self.eps!r}")
        if not isinstance(self.offset, int):
            problems.append(f"offset must be an integer, got {self.offset!r}")
        raise_all(problems, "bad recipe")


#: What is told where a start of another class is asked for and there is none.
ONE_CLASS = "all images have one class, and a start has another than its image; use start='any', or more images"
#: The sets of paper D with the settings of app. B.3 and of Ilyas et al. (app. C). D_R comes from a robust model, D_NR
#: from a standard one; D_conflict is D_det made from the images of D_R.
RECIPES: Mapping[str, Recipe] = {
    "D_R": Recipe(towards="features", steps=1000),
    "D_NR": Recipe(towards="features", steps=1000),
    "D_rand": Recipe(towards="random", steps=100, eps=0.5),
    "D_det": Recipe(towards="next", steps=100, eps=0.5),
    "D_conflict": Recipe(towards="next", steps=100, eps=0.5),
}


# -- on tensors --------------------------------------------------------------------------------------------------------


def penultimate(model: nn.Module, x: Tensor, *, layer: str | None = None, route: str | None = None) -> Tensor:
    """g(x): what enters the classifier, ``(N, features)``, detached.

    ``layer`` names the module whose input is meant; by default the last linear one.
    """
    with _activations(model, layer, route) as g, torch.no_grad():
        return g(x)


def match_features(
    model: nn.Module,
    x: Tensor,
    start: Tensor,
    *,
    steps: int = 1000,
    step_size: float = 0.1,
    layer: str | None = None,
    route: str | None = None,
    progress: Progress | None = None,
) -> Tensor:
    """``min ||g(x) - g(x')||_2`` over images x' in the box, from ``start``, by L2 steps of fixed length (D eq. 3).

    The nearest of all iterates is kept, since steps of fixed length walk around the minimum at the end.
    """
    if x.shape != start.shape:
        raise ConfigError(f"one start per image: got {tuple(start.shape)} for {tuple(x.shape)}")
    check_images(start, torch.zeros(len(start), dtype=torch.int64, device=start.device))
    with _activations(model, layer, route) as g:
        with torch.no_grad():
            wanted = g(x)
        image = best = start.detach()
        least = torch.full((len(x),), torch.inf, device=x.device)
        for step in range(steps + 1):
            image = image.detach().requires_grad_()
            # The square has the same direction of descent, and a gradient where the distance is 0.
            distance = (g(image) - wanted).square().sum(1)
            nearer = (distance < least).detach()
            best = torch.where(nearer.view(-1, *(1,) * (x.dim() - 1)), image.detach(), best)
            least = torch.where(nearer, distance.detach(), least)
            if step == steps:
                break
            descent = _L2.steepest(input_gradient(distance, image))
            image = (image.detach() - step_size * descent).clamp(0, 1)
            if progress is not None:
                progress(step + 1, steps)
    return best


_L2 = ThreatModel(norm="L2", eps=1.0)  # for the direction of its steps


def towards_class(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    target: Tensor,
    *,
    eps: float = 0.5,
    steps: int = 100,
    step_size: float = 0.1,
    route: str | None = None,
) -> Tensor:
    """L2 adversarial examples for the classes ``target``, from the clean image; the target may be the image's own."""
    threat = ThreatModel(norm="L2", eps=eps)
    attack = PGD(threat=threat, steps=steps, step_size=step_size, start="clean", route=route)
    check_images(x, target)
    with attacked(model, route=route) as predict:
        index = torch.arange(len(x), device=x.device)  # no random number is drawn
        return attack.kept(attack.perturb(predict, x, y, attack.noise(index), target=target), x)


@contextmanager
def _activations(model: nn.Module, layer: str | None, route: str | None) -> Iterator[Predict]:
    """Scope: images to the input of the classifier, through the model in eval mode; the hook goes with it."""
    model = unwrapped(model)
    head = _head(model, layer)
    seen: list[Tensor] = []
    handle = head.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    try:
        with attacked(model, route=route) as predict, hooks_run():

            def g(x: Tensor) -> Tensor:
                seen.clear()
                predict(x)
                if len(seen) != 1 or len(seen[0]) != len(x):
                    raise ConfigError(
                        f"the layer that stands for the features was called {len(seen)} times in a forward; name one "
                        "that is called once per batch, with layer="
                    )
                return seen.pop().flatten(1).float()

            yield g
    finally:
        handle.remove()


def _head(model: nn.Module, layer: str | None) -> nn.Module:
    modules = dict(model.named_modules())
    linear = [name for name, module in modules.items() if isinstance(module, nn.Linear | RoutedLinear)]
    if layer is None and not linear:
        raise ConfigError("the model has no linear layer; name the module whose input are the features, with layer=")
    name = linear[-1] if layer is None else layer
    if name not in modules:
        raise ConfigError(f"the model has no module {name!r}{did_you_mean(name, modules)}")
    return modules[name]


# -- data sets ---------------------------------------------------------------------------------------------------------


def extract_features(
    model: nn.Module,
    data: ImageData,
    recipe: str | Recipe,
    root: Path | str,
    *,
    name: str | None = None,
    route: str | None = None,
    layer: str | None = None,
    seed: int = 0,
    shard_size: int = 500,
    part: tuple[int, int] = (0, 1),
    progress: Progress | None = None,
    **changes: Any,
) -> FeatureFolder:
    """Make a feature data set from every image of ``data``, on the device of the model, into ``root/<split>``.

    ``recipe`` is ``D_R``, ``D_NR``, ``D_rand``, ``D_det``, ``D_conflict`` (:data:`RECIPES`) or one of your own with a
    ``name``; ``changes`` are settings of it, such as ``steps=100``. A shard of ``shard_size`` images is one batch. The
    same call goes on where an earlier one was killed, with the same result; one that fails before its first shard is
    made leaves nothing behind. ``part=(i, n)`` makes every n-th shard from the i-th on, for n devices that share the
    folder. ``load("features", split, root)`` reads what is finished.
    """
    chosen, name = _chosen(recipe, name, changes)
    problems = []
    if not isinstance(data, ImageData):
        problems.append(f"features are extracted from ImageData, got {type(data).__name__}; see in_memory()")
    elif name == "D_conflict" and data.name != "D_R":
        problems.append(
            f"D_conflict starts from the images of D_R, got {data.name}; give load('features', 'train', root) of one, "
            "or make D_det"
        )
    elif chosen.towards == "features" and chosen.start == "other_class" and len(data.labels.unique()) < 2:
        problems.append(ONE_CLASS)
    if isinstance(shard_size, bool) or not isinstance(shard_size, int) or shard_size < 1:
        problems.append(f"shard_size must be an integer of at least 1, got {shard_size!r}")
    if not (
        isinstance(part, tuple | list)
        and len(part) == 2
        and all(isinstance(number, int) for number in part)
        and 0 <= part[0] < part[1]
    ):
        problems.append(f"part is (i, n) with 0 <= i < n, got {part!r}")
    raise_all(problems, f"bad feature data set {name}")
    if layer is not None:
        _head(unwrapped(model), layer)  # which it has
    folder = FeatureFolder(Path(root) / data.split)
    about = {
        "name": name,
        "split": data.split,
        "images": len(data),
        "num_classes": data.num_classes,
        "shard_size": shard_size,
        "recipe": dataclasses.asdict(chosen),
        "seed": seed,
        "source": {"name": data.name, "split": data.split, "fingerprint": data.fingerprint},
        "model": {"fingerprint": model_fingerprint(unwrapped(model)), "route": route, "layer": layer},
        "made_with": environment(device_of(model)),
    }
    folder.check_recipe(about)
    shards = shard_rows(about)
    mine = [number for number in shards if number % part[1] == part[0]]
    missing = set(folder.missing_shards() if folder.exists else shards)
    for done, number in enumerate(mine):
        if number in missing:
            rows = torch.arange(len(data))[shards[number]]
            made = make_features(model, data, rows, chosen, route=route, layer=layer, seed=seed)
            folder.create(about)  # not before there is something to keep
            folder.write_shard(number, made.images, made.labels, made.starts)
        if progress is not None:
            progress(done + 1, len(mine))
    return folder


def _chosen(recipe: str | Recipe, name: str | None, changes: Mapping[str, Any]) -> tuple[Recipe, str]:
    """The recipe with its changes, and what the set is called."""
    if isinstance(recipe, str) and recipe not in RECIPES:
        raise ConfigError(f"unknown recipe {recipe!r}{did_you_mean(recipe, RECIPES)}")
    known = [field.name for field in dataclasses.fields(Recipe)]
    raise_all(
        [f"unknown setting {key!r}{did_you_mean(key, known)}" for key in changes if key not in known],
        "bad recipe",
    )
    chosen = dataclasses.replace(RECIPES[recipe] if isinstance(recipe, str) else recipe, **changes)
    return chosen, name or (recipe if isinstance(recipe, str) else "features")


@dataclass(frozen=True, kw_only=True, eq=False)
class Made:
    """Images made by a recipe, what they are labelled, and what each started from."""

    images: Tensor
    labels: Tensor
    starts: Tensor  # classes of the start images
    start_images: Tensor


def make_features(
    model: nn.Module,
    data: ImageData,
    rows: Tensor,
    recipe: Recipe,
    *,
    route: str | None = None,
    layer: str | None = None,
    seed: int = 0,
) -> Made:
    """Images by a recipe for some rows of a data set, in one batch; the noise of each is that of its row and seed."""
    device = device_of(model)
    noise = ImageNoise(seed, rows).fold("features")
    x, y = data.pixels(rows).to(device), data.labels[rows]
    if recipe.towards == "features":
        begin = start_rows(data.labels, rows, noise, recipe.start)
        start = data.pixels(begin).to(device)
        images = match_features(
            model, x, start, steps=recipe.steps, step_size=recipe.step_size, layer=layer, route=route
        )
        return Made(images=images, labels=y, starts=data.labels[begin], start_images=start)
    assert recipe.eps is not None
    if recipe.towards == "random":
        target = noise.integers(data.num_classes, draw="target")  # any class: the images' own tell nothing about it
    else:
        target = (y + recipe.offset) % data.num_classes
    images = towards_class(
        model,
        x,
        y.to(device),
        target.to(device),
        eps=recipe.eps,
        steps=recipe.steps,
        step_size=recipe.step_size,
        route=route,
    )
    return Made(images=images, labels=target, starts=y, start_images=x)


def start_rows(labels: Tensor, rows: Tensor, noise: ImageNoise, start: Start) -> Tensor:
    """For each row another one, drawn from all images, or uniformly from those of other classes."""
    if start == "any":
        return noise.integers(len(labels), draw="start")
    order = labels.argsort(stable=True)
    counts = torch.bincount(labels)
    if int((counts > 0).sum()) < 2:
        raise ConfigError(ONE_CLASS)
    first = (counts.cumsum(0) - counts)[labels[rows]]  # of the own class, in that order
    own = counts[labels[rows]]
    others = len(labels) - own
    place = (noise.bits((), "start") * others) >> 32
    return order[torch.where(place < first, place, place + own)]


# -- pictures ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class FeaturePictures(Finding):
    """Some images of a feature data set beside what they were made from, and what the model says of all made here."""

    name: str
    model: str
    recipe: Recipe
    source: Tensor
    start: Tensor
    made: Tensor
    labels: Tensor
    starts: Tensor
    distance_before: float  # ||g(x) - g(start)||, the mean over the images; of matched features
    distance_after: float
    accuracy: float  # how often the model says the label that the images are given
    moved: float  # the mean L2 distance from the start
    conditions: Mapping[str, Any]
    folder: str | None = None

    def record(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "model": self.model,
            "recipe": dataclasses.asdict(self.recipe),
            "images": len(self.labels),
            "feature_distance": {"before": self.distance_before, "after": self.distance_after},
            "accuracy": self.accuracy,
            "l2_from_start": self.moved,
            "labels": self.labels.tolist(),
            "starts": self.starts.tolist(),
            "folder": self.folder,
            "conditions": dict(self.conditions),
        }

    def draw(self) -> Figure:
        from matplotlib.figure import Figure

        matched = self.recipe.towards == "features"
        rows: list[tuple[str, Tensor, Callable[[int], str]]] = [
            ("start", self.start, lambda i: f"class {self.starts[i]}"),
            (f"made ({self.name})", self.made, lambda i: f"label {self.labels[i]}"),
        ]
        if matched:
            rows.insert(0, ("features of", self.source, lambda i: f"class {self.labels[i]}"))
        count = min(8, len(self.made))
        figure = Figure(figsize=(7.0, 0.55 + 1.05 * len(rows)))
        grid = figure.subplots(len(rows), count, squeeze=False)
        for line, (title, images, caption) in zip(grid, rows):
            for i, axes in enumerate(line):
                picture = images[i].permute(1, 2, 0).squeeze(-1).cpu().numpy()
                axes.imshow(picture, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
                axes.set(xticks=[], yticks=[])
                axes.grid(False)
                axes.spines[:].set_visible(False)
                axes.set_xlabel(caption(i), fontsize=8)
            line[0].set_ylabel(title, fontsize=9)
        share = f"the model says the label for {100 * self.accuracy:.0f} % of {len(self.labels)} images"
        figure.suptitle(
            wrapped([f"{self.name} from {self.model}: {share}"], 85)[0],
            fontsize=10,
            fontweight="bold",
            x=0.01,
            ha="left",
        )
        return figure


@register("features", summary="pictures of a feature data set; with out= its files", paper="D (eq. 2, 3, app. B.3, E)")
def features(
    subject: EvaluationTarget,
    *,
    recipe: str = "D_R",
    steps: int | None = None,
    route: str | None = None,
    layer: str | None = None,
    examples: int = 16,
    out: str | None = None,
    data_dir: str | None = None,
    seed: int = 0,
    shard_size: int = 500,
    part: tuple[int, int] = (0, 1),
    progress: Progress | None = None,
) -> FeaturePictures:
    """Pictures of a recipe, and how well it worked, on the first ``examples`` images.

    With ``out`` the whole set is made there from the training images of the run, which lie in ``data_dir``, and the
    ordinary test images are put beside it. D_conflict is made from a D_R, whose folder ``data_dir`` is.
    """
    chosen, _ = _chosen(recipe, None, {} if steps is None else {"steps": steps})
    if isinstance(examples, bool) or not isinstance(examples, int) or examples < 1:
        raise ConfigError(f"examples must be a number of images of at least 1, got {examples!r}")
    if route is None and (known := branches(subject.model)):
        raise ConfigError(f"{subject.name} has the branches {', '.join(known)}; say through which, with route=")
    data, test = _source(subject, recipe, route, out, data_dir)
    penultimate(subject.model, data.pixels(slice(0, 1)).to(device_of(subject.model)), layer=layer, route=route)
    if out is not None:
        extract_features(
            subject.model,
            data,
            recipe,
            out,
            route=route,
            layer=layer,
            seed=seed,
            shard_size=shard_size,
            part=part,
            progress=progress,
            steps=chosen.steps,
        )
        beside = FeatureFolder(Path(out) / "test")
        if test is not None and part[0] == 0 and not (beside.exists and not beside.missing_shards()):
            add_split(out, test)
    rows = torch.arange(min(examples, len(data)))
    made = make_features(subject.model, data, rows, chosen, route=route, layer=layer, seed=seed)
    source = data.pixels(rows).to(made.images.device)
    with attacked(subject.model, route=route) as predict, torch.no_grad():
        accuracy = (predict(made.images).argmax(1).cpu() == made.labels).double().mean()
    wanted, before, after = (
        penultimate(subject.model, x, layer=layer, route=route) for x in (source, made.start_images, made.images)
    )
    return FeaturePictures(
        name=recipe,
        model=subject.name,
        recipe=chosen,
        source=source.cpu(),
        start=made.start_images.cpu(),
        made=made.images.cpu(),
        labels=made.labels,
        starts=made.starts,
        distance_before=_mean_distance(before, wanted),
        distance_after=_mean_distance(after, wanted),
        accuracy=float(accuracy),
        moved=float(_L2.distance(made.images, made.start_images).mean()),
        folder=out,
        conditions={**subject.conditions, "route": route, "layer": layer, "seed": seed},
    )


def _mean_distance(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm(dim=1).mean())


def classes_of(model: nn.Module, x: Tensor, route: str | None) -> int:
    """How many classes a model tells apart."""
    with attacked(model, route=route) as predict, torch.no_grad():
        return predict(x.to(device_of(model))).shape[1]


def images_of(subject: EvaluationTarget, route: str | None) -> ImageData:
    """The test images of a subject as a data set; of few images not every class is among them."""
    images, labels = subject.images.cpu(), subject.labels.cpu()
    classes = classes_of(subject.model, images[:1], route)
    return ImageData(name=subject.name, split="test", images=images, labels=labels, num_classes=classes)


def _source(
    subject: EvaluationTarget, recipe: str, route: str | None, out: str | None, data_dir: str | None
) -> tuple[ImageData, ImageData | None]:
    """What a set is made from: the images of a D_R, the training images of the run, or its test images at hand.

    For the files of a set also the test images that belong beside them, where there are any.
    """
    if recipe == "D_conflict":
        if data_dir is None:
            raise ConfigError("D_conflict is made from the images of a D_R; name its folder with --set data_dir=...")
        read = partial(load, "features", root=data_dir)
    elif out is None:
        if data_dir is not None:
            raise ConfigError(
                "data_dir is where the images lie that the files of a set are made from; say where to put them, with "
                "out=, or leave it out: pictures alone are made of the test images"
            )
        return images_of(subject, route), None
    elif subject.folder is None:
        raise ConfigError("the training images are known of a run only; use extract_features with your data")
    else:
        settings = Run.open(subject.folder).config.data
        read = partial(load, settings.name, root=data_dir, **settings.options)
    data, test = _in_memory(read("train")), None
    if out is not None:
        with suppress(ConfigError):  # whoever judges without them is told what to do
            test = _in_memory(read("test"))
    return data, test


def _in_memory(data: ImageData | FolderData) -> ImageData:
    return data.in_memory() if isinstance(data, FolderData) else data
