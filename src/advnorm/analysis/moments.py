"""Moments of every norm's input, under a chosen affine bank and for chosen images (NS in paper A, sec. 5)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

import advnorm.attacks as attack_names
from advnorm._core.errors import ConfigError, did_you_mean, raise_all
from advnorm._core.modes import hooks_run
from advnorm._core.precision import float32_as
from advnorm._core.wrappers import device_of, unwrapped
from advnorm.analysis.base import COLOURS, DOMAIN_COLOURS, LINES, MARKERS, Finding, batches, register
from advnorm.analysis.views import one_domain_problems, setting_problems
from advnorm.attacks import Attack, AutoAttack, attacked
from advnorm.attacks.base import Progress
from advnorm.evaluation.plan import branches
from advnorm.evaluation.target import EvaluationTarget
from advnorm.norms import Mode, Route, RoutedNorm, functional, pair_banks, routed_modules
from advnorm.norms import route as route_scope
from advnorm.norms.norm_layers import NORM_LAYERS
from advnorm.norms.plan import SHARED
from advnorm.threat import ThreatModel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Images as one tensor, or batch by batch: tensors, or tuples whose first entry is the images.
Images = Tensor | Iterable[Any]


class Gaussian(NamedTuple):
    """The channels of one layer as independent Gaussians, float64."""

    mean: Tensor
    std: Tensor


@dataclass(frozen=True, eq=False)
class LayerMoments:
    """Mean and biased variance per channel of so many values, float64."""

    mean: Tensor
    var: Tensor
    count: int

    @property
    def unbiased(self) -> Tensor:
        """The variance as a bank stores it: ``var · n / (n - 1)``."""
        return self.var * (self.count / max(1, self.count - 1))

    def gaussian(self, *, unbiased: bool = False) -> Gaussian:
        return Gaussian(self.mean, (self.unbiased if unbiased else self.var).sqrt())


#: Moments by layer, in the order in which the layers ran.
Moments = dict[str, LayerMoments]

# -- what a model holds ------------------------------------------------------------------------------------------------


def norm_layers(model: nn.Module, layers: str | Sequence[str] | None = None) -> dict[str, nn.Module]:
    """The norm layers of a model by name, or those named; ``norm="none"`` has them too, where a norm would stand."""
    found = {name: module for name, module in unwrapped(model).named_modules() if isinstance(module, NORM_LAYERS)}
    if not found:
        raise ConfigError(
            f"{type(model).__name__} has no norm layers to look at; build it with norm='none' to look where they would "
            "stand"
        )
    wanted = found if layers is None else [layers] if isinstance(layers, str) else list(layers)
    raise_all([f"unknown layer {name!r}{did_you_mean(name, found)}" for name in wanted if name not in found], "layers")
    return {name: found[name] for name in wanted}


def default_layer(model: nn.Module) -> str:
    """The second norm of the first residual block (paper A, fig. 4), else the second norm of the model."""
    names = list(norm_layers(model))
    block = [name for name in names if name.endswith("layer1.0.bn2")]
    return (block or names[1:2] or names)[0]


def statistics_banks(norm: nn.Module) -> dict[str, Gaussian]:
    """Running mean and deviation (of the unbiased variance) that a batch norm stores, by bank; nothing for others."""
    if isinstance(norm, RoutedNorm):
        banks = norm.plan.statistics_banks if norm.track_running_stats else ()
        stored = {bank: norm.statistics_bank(bank)[:2] for bank in banks}
    else:
        stored = {SHARED: (getattr(norm, "running_mean", None), getattr(norm, "running_var", None))}
    return {
        bank: Gaussian(_plain(mean), _plain(var).sqrt())
        for bank, (mean, var) in stored.items()
        if mean is not None and var is not None
    }


def affine_banks(norm: nn.Module) -> dict[str, Gaussian]:
    """Bias and weight of a norm by bank: mean and deviation of what leaves it for standardized input."""
    if isinstance(norm, RoutedNorm):
        stored = {bank: norm.affine_bank(bank) for bank in norm.plan.affine_banks}
    else:
        stored = {SHARED: (getattr(norm, "weight", None), getattr(norm, "bias", None))}
    return {
        bank: Gaussian(_plain(torch.zeros_like(weight) if bias is None else bias), _plain(weight))
        for bank, (weight, bias) in stored.items()
        if weight is not None
    }


def stored_statistics(model: nn.Module, domain: str | None = None) -> dict[str, Gaussian]:
    """Running statistics of every batch norm for a domain: of the bank that its samples feed."""
    found = _of_domain(model, domain, statistics_banks, "feeds")
    if not found:
        raise ConfigError("no norm of this model stores statistics; only batch norms do")
    return found


def affine_parameters(model: nn.Module, domain: str | None = None) -> dict[str, Gaussian]:
    """Affine parameters of every norm for a domain, as in :func:`affine_banks`."""
    return _of_domain(model, domain, affine_banks, "affine")


def _of_domain(
    model: nn.Module, domain: str | None, banks_of: Callable[[nn.Module], dict[str, Gaussian]], assigned: str
) -> dict[str, Gaussian]:
    found: dict[str, Gaussian] = {}
    for name, norm in norm_layers(model).items():
        banks = banks_of(norm)
        bank = SHARED
        if banks and isinstance(norm, RoutedNorm):
            if domain is None and len(banks) > 1:
                raise ConfigError(f"the model has several banks; name a domain: {', '.join(norm.plan.domains)}")
            bank = getattr(norm.plan, assigned)[0 if domain is None else norm.plan.index(domain)]
        if banks:
            found[name] = banks[bank]
    return found


def _plain(value: Tensor) -> Tensor:
    return value.detach().double().cpu().flatten()


# -- what goes through it ----------------------------------------------------------------------------------------------


def watch(
    model: nn.Module,
    x: Images,
    see: Callable[[str, Tensor], None],
    *,
    layers: str | Sequence[str] | None = None,
    route: Route | None = None,
    pair: tuple[str, str] | None = None,
    statistics: Mode = "running",
    batch_size: int = 256,
) -> Tensor:
    """Forward images; ``see(layer, input)`` gets what enters each norm. Returns the predicted classes.

    ``route`` is the branch, or of a concatenated batch the number of images of each domain; ``pair`` instead names the
    domain whose statistics bank and the one whose affine bank are used. The model is as before afterwards, also after
    an error.
    """
    model = unwrapped(model)
    problems = setting_problems(model, route=route, statistics=statistics, batch_size=batch_size)
    if not isinstance(route, Mapping):
        problems += one_domain_problems(model, statistics, paired=pair is not None)
    if route is not None and pair is not None:
        problems.append("give a route or a pair of banks, not both")
    raise_all(problems, "bad analysis")
    device = device_of(model)
    chosen = norm_layers(model, layers)
    classes = []
    with ExitStack() as stack:
        predict = stack.enter_context(attacked(model, statistics=statistics))
        if route is not None:
            stack.enter_context(route_scope(model, route))
        if pair is not None:
            stack.enter_context(pair_banks(model, statistics=pair[0], affine=pair[1]))
        stack.enter_context(float32_as("ieee", device))
        stack.enter_context(torch.no_grad())
        stack.enter_context(hooks_run())
        for name, norm in chosen.items():
            hook = norm.register_forward_pre_hook(_hook(see, name))
            stack.callback(hook.remove)
        for images in in_batches(x, batch_size):
            _check_floats(images)
            classes.append(predict(images.to(device)).argmax(1).cpu())
    if not classes:
        raise ConfigError("there are no images: an empty tensor, or an iterator that was used up already")
    return torch.cat(classes)


def in_batches(x: Images, batch_size: int) -> Iterator[Tensor]:
    """The images batch by batch, as they come or so many at a time."""
    for batch in (x[part] for part in batches(len(x), batch_size)) if isinstance(x, Tensor) else x:
        yield batch[0] if isinstance(batch, tuple | list) else batch


def _check_floats(x: Any) -> None:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise ConfigError(f"images must be float tensors, got {kind}; of bytes take x.float() / 255")


def _hook(see: Callable[[str, Tensor], None], name: str) -> Callable[..., None]:
    return lambda norm, args: see(name, by_channel(norm, args[0]))


def by_channel(norm: nn.Module, x: Tensor) -> Tensor:
    """The input of a norm with its channels in dimension 1; those of a transformer's layer norm come last."""
    shape = tuple(getattr(norm, "normalized_shape", ()))
    if isinstance(norm, RoutedNorm) and norm.plan.statistics == "last":
        shape = norm.shape
    if shape and tuple(x.shape[-len(shape) :]) == shape:
        return x.flatten(-len(shape)).movedim(-1, 1)
    return x


def collect_moments(
    model: nn.Module,
    x: Images,
    *,
    route: str | None = None,
    pair: tuple[str, str] | None = None,
    statistics: Mode = "running",
    layers: str | Sequence[str] | None = None,
    batch_size: int = 256,
) -> Moments:
    """Mean and variance of what enters each norm, pooled over all images exactly, in float64.

    In paper A's notation ``collect_moments(model, clean, pair=("adv", "adv"), statistics="batch_frozen")`` is NS with
    superscript adv (the affine bank in force) and subscript clean (the images): what ``advnorm.recalibrate`` would
    store. ``statistics`` says what the layers before normalize by: their ``running`` statistics, as at test time, or
    each batch's own (``batch_frozen``), as in training; then the result depends on the batches.
    """
    settings: Any = {"route": route, "pair": pair, "statistics": statistics, "layers": layers, "batch_size": batch_size}
    return moments_and_classes(model, x, **settings)[0]


def moments_and_classes(model: nn.Module, x: Images, **settings: Any) -> tuple[Moments, Tensor]:
    """:func:`collect_moments`, and the classes that the same forwards predict."""
    pooled: dict[str, tuple[Tensor, Tensor, Tensor]] = {}

    def see(name: str, value: Tensor) -> None:
        mean, var = functional.moments(value.double()[None])
        count = mean.new_full((1, 1), value.numel() // mean.shape[1])
        if name in pooled:
            both = [torch.cat(values) for values in zip(pooled[name], (mean, var, count))]
            mean, var, count = (value[None] for value in functional.pool_moments(*both))
        pooled[name] = mean, var, count

    classes = watch(model, x, see, **settings)
    found = {name: LayerMoments(m[0].cpu(), v[0].cpu(), int(n)) for name, (m, v, n) in pooled.items()}
    broken = [name for name, one in found.items() if not bool((one.mean + one.var).isfinite().all())]
    raise_all([f"what enters {name} is not finite" for name in broken[:3]], "check model and images")
    return found, classes


# -- images of a subject -----------------------------------------------------------------------------------------------


def attack_branch(model: nn.Module, route: str | None = None) -> str | None:
    """The branch that attacks go through: the one named, else ``adv``, else the last; None for a model without."""
    known = branches(model)
    if route is not None or not known:
        return route
    return "adv" if "adv" in known else known[-1]


def named_attack(name: str, device: torch.device, *, threat: ThreatModel, seed: int) -> Attack:
    """An attack by name; ``autoattack`` searches in bf16 on a GPU, where float32 takes many times as long.

    What it finds counts after a float32 forward in both.
    """
    fast = {"precision": "bf16"} if device.type == "cuda" and name == "autoattack" else {}
    return attack_names.get(name, threat=threat, seed=seed, **fast)


def input_attacks(
    subject: EvaluationTarget, names: Sequence[str], *, route: str | None = None
) -> dict[str, Attack | None]:
    """What makes a subject's images of each name: nothing ``clean`` ones, its own attack ``adv``, uniform noise of the
    same eps ``noise``, else the attack of that name, such as ``autoattack``; through the branch ``route``.

    All of them on stored statistics: to craft images must not move what is looked at.
    """
    names = [names] if isinstance(names, str) else list(names)
    if not names:
        raise ConfigError("no images named; give one kind or several, such as clean, adv, noise or autoattack")
    made: dict[str, Attack | None] = {}
    for name in names:
        attack = subject.attack
        if name not in ("clean", "adv"):
            named = "noise-uniform" if name == "noise" else name
            attack = named_attack(named, device_of(subject.model), threat=attack.threat, seed=attack.seed)
        attack = dataclasses.replace(attack, route=attack_branch(subject.model, route), statistics="running")
        made[name] = None if name == "clean" else attack
    return made


def input_images(
    subject: EvaluationTarget, names: Sequence[str], *, route: str | None = None, progress: Progress | None = None
) -> dict[str, Tensor]:
    """A subject's images by name, as :func:`input_attacks` makes them.

    AutoAttack leaves an image as it is that is misclassified already, or that resists.
    """
    made: dict[str, Tensor] = {}
    model = subject.model
    device = device_of(model)
    for name, attack in input_attacks(subject, names, route=route).items():
        if attack is None:
            made[name] = subject.images
            continue
        if isinstance(attack, AutoAttack):
            attack = dataclasses.replace(attack, progress=progress)
            made[name] = attack.evaluate(model, subject.images, subject.labels, bar=False).x_adv.cpu()
            continue
        parts = []
        for part in batches(len(subject.images), subject.batch_size):
            x, y = subject.images[part].to(device), subject.labels[part].to(device)
            parts.append(attack(model, x, y, index=torch.arange(part.start, part.stop)).cpu())
            if progress is not None:
                progress(part.stop, len(subject.images))
        made[name] = torch.cat(parts)
    return made


def conditions_of(
    subject: EvaluationTarget, inputs: Sequence[str] = (), *, through: str | None = None, **more: Any
) -> dict[str, Any]:
    """What a finding on a subject holds under, in JSON's types; ``inputs`` were crafted ``through`` a branch."""
    told = {"subject": subject.name, **subject.conditions, "batch_size": subject.batch_size, **more}
    if inputs:
        attacks = input_attacks(subject, inputs, route=through)
        told |= {
            "inputs": {name: attack and repr(attack) for name, attack in attacks.items()},
            "crafted_through": attack_branch(subject.model, through),
        }
    return told


# -- statistics of all layers ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class NormStatistics(Finding):
    """NS by affine bank (superscript) and images (subscript): ``moments["adv"]["clean"]`` is NS^adv_clean."""

    moments: Mapping[str, Mapping[str, Moments]]
    conditions: Mapping[str, Any] = field(default_factory=dict)

    @property
    def series(self) -> dict[str, Moments]:
        """The same under one label each."""
        return {ns_name(a, i): moments for a, row in self.moments.items() for i, moments in row.items()}

    def record(self) -> dict[str, Any]:
        def plain(one: LayerMoments) -> dict[str, Any]:
            return {"mean": one.mean.tolist(), "biased_variance": one.var.tolist(), "values_per_channel": one.count}

        layers = {
            affine: {images: {name: plain(one) for name, one in moments.items()} for images, moments in row.items()}
            for affine, row in self.moments.items()
        }
        return {"analysis": "moments", "moments": layers, "conditions": dict(self.conditions)}

    def draw(self) -> Figure:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7.0, 5.4))
        panels = figure.subplots(2, 1, sharex=True)
        names: list[str] = []
        for index, (label, moments) in enumerate(self.series.items()):
            names = list(moments)
            values = [[one.mean.square().mean().sqrt(), one.var.mean().sqrt()] for one in moments.values()]
            for axes, line in zip(panels, zip(*values)):
                axes.plot(range(len(line)), line, label=formula(label), **look(index, label))
        panels[0].set(title="Size of the channels' means", ylabel="root mean square")
        panels[1].set(title="Size of the channels' deviations", ylabel="root mean square")
        for axes in panels:
            axes.set_ylim(bottom=0)
        label_layers(panels[1], names)
        legend_below(figure, panels[0])
        return figure


def norm_statistics(
    model: nn.Module,
    inputs: Mapping[str, Images],
    *,
    affines: Sequence[str] | None = None,
    statistics: Mode = "batch_frozen",
    layers: str | Sequence[str] | None = None,
    batch_size: int = 256,
    progress: Progress | None = None,
) -> NormStatistics:
    """NS of every kind of images under every affine bank (paper A, sec. 5.1, fig. 4).

    By default as a re-calibration does: each batch is normalized by its own moments on its way through the network.
    """
    if not inputs:
        raise ConfigError("no images to look at; give them by name, such as {'clean': x}")
    affines = tuple(affines or branches(model) or (SHARED,))
    found: dict[str, dict[str, Moments]] = {affine: {} for affine in affines}
    for done, (affine, name) in enumerate(((a, i) for a in affines for i in inputs), 1):
        found[affine][name] = collect_moments(
            model,
            inputs[name],
            **under(affine, statistics),
            layers=layers,
            batch_size=batch_size,
        )
        if progress is not None:
            progress(done, len(affines) * len(inputs))
    return NormStatistics(moments=found, conditions={"statistics": statistics, "batch_size": batch_size})


def under(affine: str | None, statistics: Mode) -> dict[str, Any]:
    """How to collect under an affine bank. Batch statistics are those of the batch, also in a crossed norm."""
    bank = {} if affine in (None, SHARED) else {"pair": (affine, affine)}
    if bank and statistics == "running":
        bank = {"route": affine}
    return {"statistics": statistics, **bank}


def feeding(model: nn.Module, domain: str | None) -> dict[str, Any]:
    """How to collect what a domain's samples feed their bank with, from batches of them alone.

    In a crossed norm they are scaled as what that bank normalizes: its bank ``adv`` is NS^clean_adv.
    """
    if domain is None:
        return {"statistics": "batch_frozen"}
    plans = [module.plan for module in routed_modules(model).values() if domain in module.plan.domains]
    plan = next((plan for plan in plans if plan.crosses), None)
    scaled_as = domain if plan is None else plan.domains[plan.affine.index(plan.banks(domain, forwarded=True)[2])]
    return {"statistics": "batch_frozen", "pair": (domain, scaled_as)}


@register("moments", summary="mean and deviation of every norm's input, by affine bank and images", paper="A sec. 5")
def moments_of_run(
    subject: EvaluationTarget,
    *,
    inputs: Sequence[str] = ("clean", "adv"),
    statistics: Mode = "batch_frozen",
    route: str | None = None,
    progress: Progress | None = None,
) -> NormStatistics:
    """``inputs``: images by name; ``route``: the branch that attacks go through (``adv``)."""
    images = input_images(subject, inputs, route=route, progress=progress)
    found = norm_statistics(subject.model, images, statistics=statistics, batch_size=subject.batch_size)
    return dataclasses.replace(found, conditions=conditions_of(subject, inputs, through=route, **found.conditions))


# -- what the figures of this layer share ------------------------------------------------------------------------------


def ns_name(affine: str, images: str) -> str:
    """NS with superscript and subscript as paper A writes it, as plain text: ``NS^adv_clean``."""
    return f"NS_{images}" if affine == SHARED else f"NS^{affine}_{images}"


_SYMBOL = re.compile(r"(NS|AP)(?:\^(.+?))?(?:_(.+))?")


def formula(name: str) -> str:
    """``NS^adv_clean`` or ``AP_adv`` as matplotlib's formula; other text stays as it is."""
    found = _SYMBOL.fullmatch(name)
    if found is None:
        return name
    marks = (f"{sign}{{\\mathrm{{{text}}}}}" for sign, text in zip("^_", found.groups()[1:]) if text)
    return f"$\\mathrm{{{found[1]}}}{''.join(marks)}$".replace("_", r"\_").replace(r"\_{", "_{")


def look(index: int, name: str = "") -> dict[str, Any]:
    """Colour and markers of a series. The first is largest, so that none hides another where they fall together.

    A domain has a colour of its own in every figure: NS that of its affine bank, hollow where the images are another's.
    """
    found = _SYMBOL.fullmatch(name)
    above, below = found.groups()[1:] if found else (None, name)
    hollow = above is not None and above != below and below in DOMAIN_COLOURS
    return {
        "color": DOMAIN_COLOURS.get(above or below or "", COLOURS[index % len(COLOURS)]),
        "marker": MARKERS[index % len(MARKERS)],
        "markersize": max(3.5, 6.5 - index),
        "linestyle": LINES[index // len(COLOURS) % 3],
        "fillstyle": "none" if hollow else "full",
    }


def label_layers(axes: Any, names: Sequence[str]) -> None:
    """Layers along the horizontal axis, in the order in which they run; of very many every n-th is named."""
    step = -(-len(names) // 40)
    axes.set_xticks(range(0, len(names), step), names[::step], rotation=90 if len(names) > 8 else 0, fontsize=7)
    axes.set_xlabel("norm layer, in the order of the forward pass")


def legend_below(figure: Any, axes: Any, columns: int = 4) -> None:
    """One legend for all panels, below them."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(columns, len(labels)))
