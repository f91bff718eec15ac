"""``create_model``: a name and options to a model; every problem with them is told at once."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

import torch

from advnorm._core.errors import ConfigError, did_you_mean, raise_all
from advnorm._core.registry import Registry
from advnorm.models.layers import ACTIVATIONS, ImageClassifier, LayerFactory
from advnorm.norms import list_norms, make_norm

CIFAR10_MEAN, CIFAR10_STD = (0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A registered model: ``build(layers, **options)``, its input normalization, the options only it takes."""

    build: Callable[..., ImageClassifier]
    mean: tuple[float, ...] | None = CIFAR10_MEAN
    std: tuple[float, ...] | None = CIFAR10_STD
    has_norm: bool = True
    options: Mapping[str, type] = field(default_factory=dict)


MODELS: Registry[ModelSpec] = Registry("model")


def list_models(pattern: str = "*") -> list[str]:
    """Names of the registered models that match a shell pattern."""
    return MODELS.names(pattern)


def create_model(
    name: str,
    num_classes: int = 10,
    norm: str | None = None,
    *,
    width: float = 1.0,
    activation: str = "relu",
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    norm_options: Mapping[str, Any] | None = None,
    in_channels: int = 3,
    normalize: bool = True,
    **options: Any,
) -> ImageClassifier:
    """Build a registered model; see ``list_models()`` and ``list_norms()``.

    norm: None is ``"bn"``, and ``"none"`` for the Fixup networks, which have no place for a norm. With ``"none"``
        convolutions get a bias, and the last one of each residual branch starts at 1/sqrt(number of blocks) of
        its usual scale, so that the signal does not grow with depth.
    norm_options: passed to the norm's factory, for example ``{"domains": ("a", "b", "c")}``.
    width: multiplies all channels (rounded, 8 at least).
    mean, std: input normalization inside the model, a number or one per channel; default: CIFAR-10's, ImageNet's for
        ``imagenet_*``, none for ``small_cnn``. ``normalize=False`` leaves it out.
    """
    spec = MODELS.get(name) if name in MODELS else None
    problems = [] if spec else [f"unknown model {name!r}{did_you_mean(name, MODELS)}"]
    for label, number in (("num_classes", num_classes), ("in_channels", in_channels)):
        if isinstance(number, bool) or not isinstance(number, Integral):
            problems.append(f"{label} must be an integer, got {number!r}")
        elif number < 1:
            problems.append(f"{label} must be at least 1, got {number}")
    if not isinstance(width, Real) or not 0 < width < math.inf:
        problems.append(f"width must be a number above 0, got {width!r}")
    if activation not in ACTIVATIONS:
        problems.append(f"unknown activation {activation!r}{did_you_mean(activation, ACTIVATIONS)}")
    if norm is None:
        norm = "bn" if spec is None or spec.has_norm else "none"
    if norm_options is not None and not isinstance(norm_options, Mapping):
        raise ConfigError(f"norm_options maps options to values, such as {{'eps': 1e-3}}, got {norm_options!r}")
    norm_options = dict(norm_options or {})
    problems += _norm_problems(name, spec, norm, norm_options)
    problems += _option_problems(name, spec, options)

    given = mean is not None or std is not None
    if not given and spec is not None:
        mean, std = spec.mean, spec.std
    if not normalize:
        if given:
            problems.append("normalize=False leaves mean and std out; give either")
        mean = std = None
    if (mean is None) != (std is None):
        problems.append("mean and std belong together, give both or neither")
    mean = _per_channel("mean", mean, in_channels, problems)
    std = _per_channel("std", std, in_channels, problems)
    if std is not None and min(std, default=1.0) <= 0:
        problems.append(f"std must be above 0, got {std}")
    raise_all(problems, "bad model")

    layers = LayerFactory(
        num_classes=num_classes,
        norm_name=norm,
        norm_options=norm_options,
        width=width,
        activation=activation,
        in_channels=in_channels,
        mean=mean,
        std=std,
    )
    return MODELS.get(name).build(layers, **options)


def _norm_problems(name: str, spec: ModelSpec | None, norm: str, options: Mapping[str, Any]) -> list[str]:
    if norm not in list_norms():
        return [f"unknown norm {norm!r}{did_you_mean(norm, list_norms())}"]
    if spec is not None and not spec.has_norm and (norm != "none" or options):
        return [f"{name} has no normalization, leave norm out or use norm='none', got {norm!r} with options {options}"]
    try:
        with torch.device("meta"):
            groups = options.get("num_groups")
            channels = 64 * groups if isinstance(groups, int) and groups > 0 else 64  # divisible by the groups
            make_norm(norm, channels, dim=2, **options)
    except (ConfigError, TypeError) as error:
        return [f"norm_options: {error}"]
    return []


def _option_problems(name: str, spec: ModelSpec | None, options: Mapping[str, Any]) -> list[str]:
    if spec is None:  # nothing is known about the options of an unknown model
        return []
    common = [p.name for p in inspect.signature(create_model).parameters.values() if p.kind is p.KEYWORD_ONLY]
    problems = []
    for option, value in options.items():
        if option not in spec.options:
            hint = did_you_mean(option, ["num_classes", "norm", *common, *spec.options])
            problems.append(f"unknown option {option!r} of {name}{hint}")
        elif not isinstance(value, spec.options[option]):
            problems.append(f"{option} must be a {spec.options[option].__name__}, got {value!r}")
    return problems


def _per_channel(
    label: str, value: float | Sequence[float] | None, in_channels: int, problems: list[str]
) -> tuple[float, ...] | None:
    if value is None:
        return None
    try:
        values = tuple(float(v) for v in ((value,) if isinstance(value, (int, float)) else value))
    except (TypeError, ValueError):
        values = (math.nan,)
    if not all(map(math.isfinite, values)):
        problems.append(f"{label} must be a finite number or one per channel, got {value!r}")
    elif len(values) not in (1, in_channels):
        hint = "give mean and std for your data, or normalize=False"
        problems.append(f"{label} has {len(values)} values but in_channels is {in_channels}, {hint}")
    return values
