"""Moments of the input of every norm, under a chosen affine bank and for chosen images (NS in paper A, sec. 5)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from advnorm._core.errors import ConfigError, Description, Problem, raise_problems
from advnorm._core.modes import running_eagerly
from advnorm._core.precision import float32_as
from advnorm._core.wrappers import device_of, unwrap_model
from advnorm.analysis.banks import Gaussian, norm_layers
from advnorm.analysis.base import Finding, register_analysis
from advnorm.analysis.images import Images, iterate_batches, track
from advnorm.analysis.plots import Figure, Panel, each_value, line_figure
from advnorm.analysis.settings import BatchSize, StatisticsMode, require_any, setting_problems
from advnorm.attacks import predicting
from advnorm.evaluation.model_branches import branches
from advnorm.norms import Route, RoutedNorm, functional, pair_banks, routed_modules
from advnorm.norms import route as route_scope
from advnorm.norms.plan import SHARED
from advnorm.norms.recalibration import PooledMoments, add_moments
from advnorm.surgery.adapters import has_channels_last

#: Receives the name of a layer and its input with the channels in dimension 1.
Observer = Callable[[str, Tensor], None]


@dataclass(frozen=True, eq=False)
class LayerMoments:
    """Mean and biased variance of each channel of a layer's input, float64."""

    mean: Tensor
    biased_variance: Tensor
    values_per_channel: int

    @property
    def unbiased_variance(self) -> Tensor:
        """The variance as a bank stores it: ``var · n / (n - 1)``."""
        return self.biased_variance * (self.values_per_channel / max(1, self.values_per_channel - 1))

    def gaussian(self, *, unbiased: bool = False) -> Gaussian:
        """Return mean and standard deviation."""
        return Gaussian(self.mean, (self.unbiased_variance if unbiased else self.biased_variance).sqrt())


class Moments(dict[str, LayerMoments]):
    """Moments by layer, in the order in which the layers ran, and the classes that the same forwards predict."""

    classes: Tensor


def observe_norm_inputs(
    model: nn.Module,
    x: Images,
    observer: Observer,
    *,
    layers: str | Sequence[str] | None = None,
    route: Route | None = None,
    pair: tuple[str, str] | None = None,
    statistics: StatisticsMode = "running",
    batch_size: BatchSize = 256,
) -> Tensor:
    """Forward images and pass the input of each norm to ``observer``. Return the predicted classes.

    ``route`` is the branch, or the number of images of each domain in a concatenated batch. ``pair`` instead names the
    domain of the statistics bank and the domain of the affine bank. The model is unchanged afterwards, also after an
    error.
    """
    model = unwrap_model(model)
    problems = setting_problems(observe_norm_inputs, locals(), any_bank=pair is not None)
    if route is not None and pair is not None:
        message = "{field} cannot be combined with a pair of banks"
        problems.append(Problem(code="conflict", message=message, field="route", hint="give one of them"))
    raise_problems(problems, "bad analysis")
    device = device_of(model)
    classes = []
    with ExitStack() as stack:
        predict = stack.enter_context(predicting(model, statistics=statistics))
        if route is not None:
            stack.enter_context(route_scope(model, route))
        if pair is not None:
            stack.enter_context(pair_banks(model, statistics=pair[0], affine=pair[1]))
        stack.enter_context(float32_as("ieee", device))
        stack.enter_context(torch.no_grad())
        stack.enter_context(running_eagerly())
        for name, norm in norm_layers(model, layers).items():
            # The hook keeps its own name, not that of the last layer.
            hook = partial(lambda name, norm, args: observer(name, channels_second(norm, args[0])), name)
            stack.callback(norm.register_forward_pre_hook(hook).remove)
        for images in iterate_batches(x, batch_size):
            if not isinstance(images, Tensor) or not images.is_floating_point():
                got = Description(images.dtype if isinstance(images, Tensor) else type(images).__name__)
                message, hint = "{field} must be float tensors", "divide bytes by 255: x.float() / 255"
                raise ConfigError("wrong_dtype", message, field="images", got=got, hint=hint)
            classes.append(predict(images.to(device)).argmax(1).cpu())
    require_any(classes, "images", "a list of batches; an iterator can be used only once")
    return torch.cat(classes)


def channels_second(norm: nn.Module, x: Tensor) -> Tensor:
    """Return the input of a norm with its channels in dimension 1; a transformer's layer norm has them last."""
    shape = norm.shape if isinstance(norm, RoutedNorm) else tuple(getattr(norm, "normalized_shape", ()))
    if shape and has_channels_last(norm) and tuple(x.shape[-len(shape) :]) == shape:
        return x.flatten(-len(shape)).movedim(-1, 1)
    return x


def collect_moments(
    model: nn.Module,
    x: Images,
    *,
    route: str | None = None,
    pair: tuple[str, str] | None = None,
    statistics: StatisticsMode = "running",
    layers: str | Sequence[str] | None = None,
    batch_size: BatchSize = 256,
) -> Moments:
    """Return mean and variance of the input of each norm, pooled over all images exactly, in float64.

    In paper A's notation ``collect_moments(model, clean, pair=("adv", "adv"), statistics="batch_frozen")`` is NS with
    superscript adv (the affine bank) and subscript clean (the images), which ``advnorm.recalibrate`` would store.
    ``statistics`` normalizes the layers before: the ``running`` ones, as at test time, or those of each batch
    (``batch_frozen``), as in training; then the result depends on the batches.
    """
    pooled: PooledMoments = {}

    def pool(name: str, value: Tensor) -> None:
        mean, var = functional.moments(value.double()[None])
        add_moments(pooled, name, mean, var, count=value.numel() // mean.shape[1])

    how: Any = {"route": route, "pair": pair, "statistics": statistics, "layers": layers, "batch_size": batch_size}
    classes = observe_norm_inputs(model, x, pool, **how)
    found = Moments({name: LayerMoments(m[0].cpu(), v[0].cpu(), int(n)) for name, (m, v, n) in pooled.items()})
    found.classes = classes
    broken = [name for name, one in found.items() if not bool((one.mean + one.biased_variance).isfinite().all())]
    if broken:
        message = f"the input of {', '.join(broken[:3])} is not finite"
        raise ConfigError("not_finite", message, field="images", hint="check model and images")
    return found


def affine_bank_settings(affine: str | None, statistics: str) -> dict[str, Any]:
    """Return settings to collect moments under an affine bank.

    Batch statistics are those of the batch itself, also in a crossed norm.
    """
    if affine in (None, SHARED):
        return {"statistics": statistics}
    bank = {"route": affine} if statistics == "running" else {"pair": (affine, affine)}
    return {"statistics": statistics, **bank}


def update_settings(model: nn.Module, domain: str | None) -> dict[str, Any]:
    """Return settings to collect the moments by which the samples of a domain alone update their bank.

    A crossed norm scales these samples as it scales those that the bank normalizes: its bank ``adv`` is NS^clean_adv.
    """
    if domain is None:
        return {"statistics": "batch_frozen"}
    plans = [module.plan for module in routed_modules(model).values() if domain in module.plan.domains]
    plan = next((plan for plan in plans if plan.crosses), None)
    scaled_as = domain if plan is None else plan.domains[plan.affine.index(plan.banks(domain, forwarded=True)[2])]
    return {"statistics": "batch_frozen", "pair": (domain, scaled_as)}


# -- all layers --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class NormStatistics(Finding):
    """NS by affine bank (superscript) and images (subscript): ``moments["adv"]["clean"]`` is NS^adv_clean."""

    RECORD = ("analysis", "moments", "conditions")
    analysis = "moments"

    moments: Mapping[str, Mapping[str, Moments]]

    @property
    def series(self) -> dict[str, Moments]:
        """The moments by label."""
        return {ns_name(a, i): moments for a, row in self.moments.items() for i, moments in row.items()}

    def draw(self) -> Figure:
        sizes: dict[str, Callable[[LayerMoments], Any]] = {
            "means": lambda one: one.mean.square().mean().sqrt(),
            "deviations": lambda one: one.biased_variance.mean().sqrt(),
        }
        axes = {"ylabel": "root mean square", "ylim": (0, None)}
        lines = {f"Size of the channels' {what}": each_value(self.series, size) for what, size in sizes.items()}
        return line_figure([Panel(title, line, axes) for title, line in lines.items()], sharex=True)


def ns_name(affine: str, images: str) -> str:
    """Return NS with superscript and subscript, as paper A writes it, in plain text: ``NS^adv_clean``."""
    return f"NS_{images}" if affine == SHARED else f"NS^{affine}_{images}"


@register_analysis("moments", summary="mean and deviation of every norm's input", paper="A sec. 5", takes="images")
def norm_statistics(
    model: nn.Module,
    inputs: Mapping[str, Images],
    *,
    affines: Sequence[str] | None = None,
    statistics: StatisticsMode = "batch_frozen",
    layers: str | Sequence[str] | None = None,
    batch_size: BatchSize = 256,
) -> NormStatistics:
    """Return NS of every kind of images under every affine bank (paper A, sec. 5.1, fig. 4).

    By default the network normalizes each batch by its own moments, as a re-calibration does.
    """
    require_any(inputs, "inputs", "{'clean': x}")
    affines = tuple(affines or branches(model) or (SHARED,))
    found: dict[str, dict[str, Moments]] = {affine: {} for affine in affines}
    for affine, name in track((affine, name) for affine in affines for name in inputs):
        how = affine_bank_settings(affine, statistics)
        found[affine][name] = collect_moments(model, inputs[name], **how, layers=layers, batch_size=batch_size)
    return NormStatistics(moments=found, conditions={"statistics": statistics, "batch_size": batch_size})
