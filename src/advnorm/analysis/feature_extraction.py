"""Feature data sets from any model (paper D, eq. 2, 3, app. B.3 and E; Ilyas et al. 2019)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from advnorm._core.errors import ConfigError, Problem, raise_problems, unknown_name
from advnorm._core.modes import running_eagerly
from advnorm._core.provenance import environment
from advnorm._core.records import model_fingerprint
from advnorm._core.seeding import ImageNoise
from advnorm._core.settings import Setting, convert_fields
from advnorm._core.wrappers import device_of, unwrap_model
from advnorm.analysis.images import track
from advnorm.analysis.settings import Seed, as_tuple, setting_problems
from advnorm.attacks import PGD, input_gradient, predicting
from advnorm.attacks.inputs import validate_batch
from advnorm.attacks.model_access import Predict
from advnorm.data import FeatureFolder, FolderData, ImageData
from advnorm.data.feature_sets import describe_set, shard_rows
from advnorm.norms.routed_linear import RoutedLinear
from advnorm.threat import ThreatModel

Towards = Literal["features", "random", "next"]
Start = Literal["other_class", "any"]


ShardSize = Annotated[int, Setting("Number of images in a file, forwarded as one batch.", "[1, inf)")]
Part = Annotated[Sequence[int], Setting("(i, n): make every n-th file from the i-th on.")]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a feature data set is made from images x with classes y.

    ``towards="features"``: the penultimate activations of an image x' become those of x (eq. 3), anywhere in the box;
    the label is y. x' has another class than x (paper D), or with ``start="any"`` is any image (Ilyas et al.).
    ``"random"`` and ``"next"``: x becomes an adversarial example for a random class, or for the class y + ``offset``,
    within ``eps`` (L2); that class is the label.
    """

    towards: Annotated[Towards, Setting("What the optimization matches: features, a random class, the next class.")]
    steps: Annotated[int, Setting("Number of gradient steps.", "[1, inf)")]
    step_size: Annotated[float, Setting("Length of a step (L2).", "(0, inf)")] = 0.1
    eps: Annotated[float | None, Setting("Largest L2 distance; none for features.", "(0, inf)")] = None
    start: Annotated[Start, Setting("Class of the start images for features.")] = "other_class"
    offset: Annotated[int, Setting("Distance of the next class.")] = 1

    def __post_init__(self) -> None:
        problems = convert_fields(self)
        if self.towards == "features" and self.eps is not None:
            message = "{field} does not apply: features are matched anywhere in the box (app. B.3)"
            problems.append(Problem(code="conflict", message=message, field="eps", hint="leave eps out"))
        if self.towards != "features" and self.eps is None:
            problems.append(Problem("missing_option", "a target class needs {field}, the largest L2 distance", "eps"))
        raise_problems(problems, "bad recipe")


#: The sets of paper D with the settings of app. B.3 and of Ilyas et al. (app. C). D_R comes from a robust model, D_NR
#: from a standard one; D_conflict is D_det made from the images of D_R.
RECIPES: Mapping[str, Recipe] = {
    "D_R": Recipe(towards="features", steps=1000),
    "D_NR": Recipe(towards="features", steps=1000),
    "D_rand": Recipe(towards="random", steps=100, eps=0.5),
    "D_det": Recipe(towards="next", steps=100, eps=0.5),
    "D_conflict": Recipe(towards="next", steps=100, eps=0.5),
}


# -- tensors --------------------------------------------------------------------------------------------------------


def penultimate(model: nn.Module, x: Tensor, **through: Any) -> Tensor:
    """Return g(x), the input of the classifier, ``(N, features)``, detached. ``through``: layer and route of g."""
    with activations(model, **through) as g, torch.no_grad():
        return g(x)


def match_features(
    model: nn.Module, x: Tensor, start: Tensor, *, steps: int, step_size: float = 0.1, **through: Any
) -> Tensor:
    """Minimize ``||g(x) - g(x')||_2`` over images x' in the box, from ``start``, by L2 steps of fixed length (D eq. 3).

    Return the nearest iterate, because steps of fixed length oscillate around the minimum.
    """
    with activations(model, **through) as g:
        with torch.no_grad():
            wanted = g(x)
        image = best = start.detach()
        least = torch.full((len(x),), torch.inf, device=x.device)
        for step in range(steps + 1):
            image = image.detach().requires_grad_()
            # The square has the same direction of descent, and a gradient at distance 0.
            distance = (g(image) - wanted).square().sum(1)
            nearer = (distance < least).detach()
            best = torch.where(nearer.view(-1, *(1,) * (x.dim() - 1)), image.detach(), best)
            least = torch.where(nearer, distance.detach(), least)
            if step == steps:
                break
            descent = L2.steepest(input_gradient(distance, image))
            image = (image.detach() - step_size * descent).clamp(0, 1)
    return best


L2 = ThreatModel(norm="L2", eps=1.0)  # for directions and distances; eps has no effect


def towards_class(
    model: nn.Module, x: Tensor, y: Tensor, target: Tensor, *, eps: float, route: str | None = None, **steps: Any
) -> Tensor:
    """Return L2 adversarial examples for the classes ``target``, starting at the clean images.

    The target may be the class of the image, unlike in a call of the attack.
    """
    attack = PGD(threat=ThreatModel(norm="L2", eps=eps), start="clean", route=route, **steps)
    validate_batch(x, target)
    with predicting(model, route=route) as predict:
        index = torch.arange(len(x), device=x.device)  # no random number is drawn
        return attack.constrain(attack.perturb(predict, x, y, attack.noise(index), target=target), x)


@contextmanager
def activations(model: nn.Module, layer: str | None = None, route: str | None = None) -> Iterator[Predict]:
    """Scope: a function g from images to the input of ``layer``, by default the last linear one, in eval mode."""
    model = unwrap_model(model)
    captured: list[Tensor] = []
    handle = _find_head(model, layer).register_forward_pre_hook(lambda _module, args: captured.append(args[0]))
    try:
        with predicting(model, route=route) as predict, running_eagerly():

            def g(x: Tensor) -> Tensor:
                captured.clear()
                predict(x)
                if len(captured) != 1 or len(captured[0]) != len(x):
                    message = f"{{field}} must be called once for each batch, but was called {len(captured)} times"
                    raise ConfigError("not_supported", message, field="layer", hint="choose another layer")
                return captured.pop().flatten(1).float()

            yield g
    finally:
        handle.remove()


def _find_head(model: nn.Module, layer: str | None) -> nn.Module:
    modules = dict(model.named_modules())
    linear = [name for name, module in modules.items() if isinstance(module, nn.Linear | RoutedLinear)]
    if layer is None and not linear:
        hint = "set it to the module whose input are the features"
        raise ConfigError("missing_option", "the model has no linear layer", field="layer", hint=hint)
    name = linear[-1] if layer is None else layer
    if name not in modules:
        raise_problems([unknown_name("module", name, modules, field="layer")])
    return modules[name]


# -- data sets ---------------------------------------------------------------------------------------------------------


def extract_features(
    model: nn.Module,
    data: ImageData | FolderData,
    recipe: str | Recipe,
    root: Path | str,
    *,
    name: str | None = None,
    route: str | None = None,
    layer: str | None = None,
    seed: Seed = 0,
    shard_size: ShardSize = 500,
    part: Part = (0, 1),
    **changes: Any,
) -> FeatureFolder:
    """Make a feature data set from every image of ``data``, on the device of the model, in ``root/<split>``.

    ``recipe`` is ``D_R``, ``D_NR``, ``D_rand``, ``D_det``, ``D_conflict`` (:data:`RECIPES`) or your own with a
    ``name``; ``changes`` are settings of it, such as ``steps=100``. A shard of ``shard_size`` images is one batch.
    After a kill the same call resumes, with the same result; a call that fails before its first shard writes nothing.
    ``part=(i, n)`` makes every n-th shard from the i-th on, for n devices that share the folder.
    ``load("features", split, root)`` reads a finished set.
    """
    problems = setting_problems(extract_features, locals())
    data = data.in_memory()
    chosen, name = resolve_recipe(recipe, name, changes)
    if name == "D_conflict" and data.name != "D_R":
        message, hint = "D_conflict starts from the images of D_R", "load a D_R as data, or make D_det"
        problems.append(Problem(code="conflict", message=message, field="data", got=data.name, hint=hint))
    part = as_tuple(part)
    if not any(problem.field == "part" for problem in problems) and (len(part) != 2 or not 0 <= part[0] < part[1]):
        problems.append(Problem("out_of_range", "{field} must be (i, n) with 0 <= i < n", "part", got=part))
    raise_problems(problems, f"bad feature data set {name}")
    if layer is not None:
        _find_head(unwrap_model(model), layer)  # raises before any work
    folder = FeatureFolder(Path(root) / data.split)
    about = describe_set(
        data,
        name,
        shard_size=shard_size,
        recipe=dataclasses.asdict(chosen),
        seed=seed,
        model={"fingerprint": model_fingerprint(unwrap_model(model)), "route": route, "layer": layer},
        made_with=environment(device_of(model)),
    )
    folder.check_recipe(about)
    shards = shard_rows(about)
    mine = [number for number in shards if number % part[1] == part[0]]
    missing = set(folder.missing_shards() if folder.exists else shards)
    for number in track(mine):
        if number in missing:
            rows = torch.arange(len(data))[shards[number]]
            made = apply_recipe(model, data, rows, chosen, route=route, layer=layer, seed=seed)
            folder.create(about)  # not before the first shard exists
            folder.write_shard(number, made.images, made.labels, made.starts)
    return folder


def resolve_recipe(recipe: str | Recipe, name: str | None, changes: Mapping[str, Any]) -> tuple[Recipe, str]:
    """Return the recipe with its changes, and the name of the set."""
    known = [field.name for field in dataclasses.fields(Recipe)]
    problems = [unknown_name("setting", key, known, field=key) for key in changes if key not in known]
    if isinstance(recipe, str) and recipe not in RECIPES:
        problems.append(unknown_name("recipe", recipe, RECIPES))
    raise_problems(problems, "bad recipe")
    chosen = dataclasses.replace(RECIPES[recipe] if isinstance(recipe, str) else recipe, **changes)
    return chosen, name or (recipe if isinstance(recipe, str) else "features")


class ExtractedFeatures(NamedTuple):
    """Images made by a recipe, their labels, and their start images."""

    images: Tensor
    labels: Tensor
    starts: Tensor  # classes of the start images
    start_images: Tensor


def apply_recipe(
    model: nn.Module, data: ImageData, rows: Tensor, recipe: Recipe, *, seed: int = 0, **through: Any
) -> ExtractedFeatures:
    """Make images by a recipe for some rows of a data set, in one batch; noise depends on row and seed only."""
    device = device_of(model)
    noise = ImageNoise(seed, rows).fold("features")
    x, y = data.pixels(rows).to(device), data.labels[rows]
    how: Any = {"steps": recipe.steps, "step_size": recipe.step_size}
    if recipe.towards == "features":
        begin = start_rows(data.labels, rows, noise, recipe.start)
        start = data.pixels(begin).to(device)
        return ExtractedFeatures(match_features(model, x, start, **how, **through), y, data.labels[begin], start)
    if recipe.towards == "random":
        target = noise.integers(data.num_classes, draw="target")  # the images carry no information about it
    else:
        target = (y + recipe.offset) % data.num_classes
    how |= {"eps": recipe.eps, "route": through.get("route")}
    return ExtractedFeatures(towards_class(model, x, y.to(device), target.to(device), **how), target, y, x)


def start_rows(labels: Tensor, rows: Tensor, noise: ImageNoise, start: Start) -> Tensor:
    """Draw a start row for each row: any image, or uniformly one of another class."""
    if start == "any":
        return noise.integers(len(labels), draw="start")
    order = labels.argsort(stable=True)
    counts = torch.bincount(labels)
    if int((counts > 0).sum()) < 2:
        message = "all images have one class, but a start image needs another class than its image"
        raise ConfigError("not_supported", message, field="data", hint="use start='any', or more images")
    first = (counts.cumsum(0) - counts)[labels[rows]]  # first position of the row's own class in `order`
    own = counts[labels[rows]]
    others = len(labels) - own
    place = (noise.bits((), "start") * others) >> 32
    return order[torch.where(place < first, place, place + own)]
