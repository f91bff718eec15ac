"""Models by name: ``@register_model``, ``create_model`` and ``list_models``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from numbers import Integral
from typing import Annotated, Any

import torch

from advnorm._core.errors import Problem, SurgeryError, collect_problems, nearest_name, raise_problems, unknown_name
from advnorm._core.registry import Registry, keywords
from advnorm._core.settings import Setting, convert_options
from advnorm.models.layers import ACTIVATIONS, LayerFactory
from advnorm.models.libraries import (
    LIBRARIES,
    LIBRARY_OPTIONS,
    build_library_model,
    input_statistics,
    library_models,
    split_name,
    validate_name,
)
from advnorm.models.normalized import channel_problems, channel_values
from advnorm.norms import list_norms, make_norm
from advnorm.norms.factory import NormNames, make_plans
from advnorm.surgery import convert_norm

CIFAR10_MEAN, CIFAR10_STD = (0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class ModelSpec:
    """A registered model: ``build(layers, **options)``, its input normalization, and the options that only it has.

    >>> @register_model("tiny", mean=None, std=None)
    ... def tiny(layers):
    ...     return nn.Sequential(nn.Flatten(), nn.LazyLinear(layers.num_classes))
    """

    build: Callable[..., Any]
    _: KW_ONLY
    mean: tuple[float, ...] | None = CIFAR10_MEAN
    std: tuple[float, ...] | None = CIFAR10_STD
    has_norm: bool = True
    options: Mapping[str, type] = field(default_factory=dict)
    excluded: tuple[str, ...] = ()  # keywords of ``create_model`` that have no meaning for this model

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """The keyword parameters of ``create_model`` for this model, with its own options."""
        kind = inspect.Parameter.KEYWORD_ONLY
        own = {name: inspect.Parameter(name, kind, annotation=type_) for name, type_ in self.options.items()}
        shared = {name: value for name, value in keywords(create_model).items() if name not in self.excluded}
        return {**shared, **own}


class ModelRegistry(Registry[ModelSpec]):
    """The registered models, and those of libraries as ``timm:NAME``, ``torchvision:NAME``, ``transformers:FOLDER``."""

    def get(self, name: str) -> ModelSpec:
        if split_name(name) is None:
            return super().get(name)
        validate_name(name)
        mean, std = input_statistics(name)
        build = partial(build_library_model, name=name)
        return ModelSpec(build, mean=mean, std=std, options=LIBRARY_OPTIONS, excluded=("width", "activation"))

    def suggestions(self, name: object) -> list[str]:
        own = [*super().suggestions(name), *(f"{library}:NAME" for library in LIBRARIES)]
        return own if nearest_name(name, own) else library_models(name) or own

    def __contains__(self, name: object) -> bool:
        return split_name(name) is not None or super().__contains__(name)


MODELS = ModelRegistry("model", ModelSpec)
register_model = MODELS.register
"""Decorator that registers a function that builds a network: ``@register_model(name, mean=None, std=None)``.

The function gets ``layers``, which has ``num_classes``, ``in_channels``, ``norm_name`` and ``norm_options``.
``mean`` and ``std`` normalize the input (default: those of CIFAR-10; None: no normalization). ``has_norm=False``
declares a network without norms. ``options`` maps names of further keyword arguments of the function to their types.
"""


def list_models(pattern: str = "*") -> list[str]:
    """Names of the registered models that match a shell pattern."""
    return MODELS.names(pattern)


def create_model(
    name: str,
    num_classes: Annotated[int, Setting("Number of classes.", "[1, inf)")] = 10,
    norm: NormNames | None = None,
    *,
    width: Annotated[float, Setting("Multiplies all channels (rounded, at least 8).", "(0, inf)")] = 1.0,
    activation: str = "relu",
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    norm_options: Mapping[str, Any] | None = None,
    in_channels: Annotated[int, Setting("Number of image channels.", "[1, inf)")] = 3,
    normalize: bool = True,
    **options: Any,
) -> Any:
    """Build a model: a registered one (``list_models()``), or one of a library.

    name: ``"resnet18"``; ``"timm:efficientnet_b0"``; ``"torchvision:convnext_tiny"``; ``"transformers:"`` with a model
        type (``vit``), a ``.json`` file or a folder. Nothing is downloaded; ``pretrained`` names a file of weights.
    norm: a name of ``list_norms()``, or norms by pattern of the layers' names (see :func:`advnorm.convert_norm`).
        Default: ``"bn"``; networks of a library keep their norms; ``"none"`` for the Fixup networks, which have none.
        With ``"none"`` convolutions get a bias, and the last one of each residual branch starts at 1/sqrt(number of
        blocks) of its usual scale, so that the signal does not grow with depth.
    norm_options: passed to the norm's factory, for example ``{"domains": ("a", "b", "c")}``.
    mean, std: input normalization inside the model, a number or one per channel. Default: CIFAR-10's, ImageNet's for
        ``imagenet_*``, none for ``small_cnn``. ``normalize=False`` leaves it out.
    """
    spec = MODELS.get(name) if name in MODELS else None
    library = split_name(name) is not None
    if norm is None and not library:
        norm = "bn" if spec is None or spec.has_norm else "none"
    norm_options = dict(norm_options or {})
    problems = [] if spec else [unknown_name("model", name, MODELS.suggestions(name))]
    sizes: dict[str, Any] = {"num_classes": num_classes, "in_channels": in_channels, "width": width}
    sizes = {name: int(v) if isinstance(v, Integral) and not isinstance(v, bool) else v for name, v in sizes.items()}
    problems += convert_options("", inspect.signature(create_model, eval_str=True).parameters, sizes)[1]
    if activation not in ACTIVATIONS:
        problems.append(unknown_name("activation", activation, ACTIVATIONS))
    if library and (width, activation) != (1.0, "relu"):
        message = f"width and activation are not options of {name}"
        problems.append(Problem(code="not_supported", message=message, field="width", hint="leave them out"))
    problems += _norm_problems(name, spec, norm, norm_options)
    problems += [] if spec is None else convert_options("", spec.parameters, options)[1]
    if normalize and mean is None and std is None and spec is not None:
        mean, std = spec.mean, spec.std
    problems += _normalization_problems(mean, std, in_channels, normalize)
    raise_problems(problems, "bad model")
    mean, std = (None if value is None else channel_values(value) for value in (mean, std))
    converts = norm is not None and (library or not isinstance(norm, str))
    own: dict[str, Any] = {} if converts else {"norm_name": norm, "norm_options": norm_options}
    model = MODELS.get(name).build(LayerFactory(**own, activation=activation, mean=mean, std=std, **sizes), **options)
    if norm is not None and converts:
        try:
            convert_norm(model, norm, **norm_options)
        except SurgeryError as error:
            if norm != "none" or error.code != "no_norm":  # a norm-free network has what "none" asks for
                raise
    model.recipe = {"name": name, "norm": norm, "norm_options": norm_options, "activation": activation, **sizes}
    model.recipe |= {"normalize": False} if mean is None else {"mean": mean, "std": std}
    model.recipe |= options
    return model


def _norm_problems(
    name: str, spec: ModelSpec | None, norm: NormNames | None, options: Mapping[str, Any]
) -> list[Problem]:
    if norm is None or not isinstance(norm, str):
        problems: list[Problem] = []
        with collect_problems(problems):
            make_plans(norm or "bn", options)
        return problems
    if norm not in list_norms():
        return [unknown_name("norm", norm, list_norms())]
    if spec is not None and not spec.has_norm and (norm != "none" or options):
        hint = "leave {field} and norm_options out"
        return [Problem(code="conflict", message=f"{name} has no norms", field="norm", got=norm, hint=hint)]
    problems: list[Problem] = []
    groups = options.get("num_groups")
    channels = 64 * groups if isinstance(groups, int) and groups > 0 else 64  # divisible by the groups
    with collect_problems(problems, "norm_options"), torch.device("meta"):
        make_norm(norm, channels, dim=2, **options)
    return problems


def _normalization_problems(
    mean: float | Sequence[float] | None, std: float | Sequence[float] | None, in_channels: int, normalize: bool
) -> list[Problem]:
    problems: list[Problem] = []
    if not normalize and (mean is not None or std is not None):
        message = "{field}=False excludes mean and std"
        problems.append(Problem(code="conflict", message=message, field="normalize", hint="leave either out"))
    if (mean is None) != (std is None):
        problems.append(Problem("conflict", "mean and std belong together; give both or neither", "mean"))
    for name, value in (("mean", mean), ("std", std)):
        found = [] if value is None else channel_problems(name, value)
        if value is not None and not found and len(values := channel_values(value)) not in (1, in_channels):
            message = f"{{field}} has {len(values)} values but in_channels is {in_channels}"
            found = [Problem("wrong_shape", message, name, hint="give mean and std for your data, or normalize=False")]
        problems += found
    return problems
