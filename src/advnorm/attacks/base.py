"""What every attack promises, and the machinery that keeps it: guarded access to the model, checks, names.

The result lies inside ball and box exactly, in float32, detached, and the model is bit for bit as before: parameters,
``requires_grad``, ``.grad``, statistics, the training flag of each module, and the random state of others; also when
something raises in the middle.
"""

from __future__ import annotations

import dataclasses
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from advnorm._core.errors import ConfigError, did_you_mean, raise_all
from advnorm._core.modes import evaluating
from advnorm._core.registry import Registry
from advnorm._core.seeding import ImageNoise
from advnorm._core.wrappers import dtype_of
from advnorm.norms import MODES, Mode, RoutedModule, Scope, routed_modules
from advnorm.norms import route as route_scope
from advnorm.norms.updates import AttributeOverrides, disable_updates
from advnorm.threat import Norm, ThreatModel

#: Images to float32 logits ``(N, classes)``.
Predict = Callable[[Tensor], Tensor]
#: Called with the work done and the work in all.
Progress = Callable[[int, int], None]

# -- the model under attack --------------------------------------------------------------------------------------------


@contextmanager
def attacked(model: nn.Module, *, route: str | None = None, statistics: Mode = "running") -> Iterator[Predict]:
    """Scope in which a model can be attacked or judged; yields ``predict``: images to float32 logits.

    Every module is in eval mode, parameters need no gradients (so that none are computed), and gradients with respect
    to the images are enabled. ``statistics`` says what batch norms use: the ``running`` statistics, those of the
    ``batch`` while moving the running ones, or those of the batch with the running ones frozen (``batch_frozen``). A
    norm that was in eval mode inside a model in train mode was frozen by its owner and stays on its running statistics.
    ``route`` is the branch of a model with routed norms; without it an enclosing ``advnorm.route`` counts.
    Routed norms reduce nothing over ranks: the statistics of a batch are those of this rank's images.
    On exit every flag and the global random state are what they were. Only ``batch`` leaves a trace, in the statistics.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"an attack needs an nn.Module, got {type(model).__name__}; wrap a function in a module")
    if statistics not in MODES:
        raise ConfigError(f"unknown statistics mode {statistics!r}{did_you_mean(statistics, MODES)}")
    if isinstance(model, DistributedDataParallel):
        model = model.module  # an attack reduces nothing over ranks
    if route is not None and not routed_modules(model):
        raise ConfigError(f"{type(model).__name__} has no routed norms, and so no route {route!r}; leave route out")
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(_cuda_devices(model)))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        frozen = {module for module in model.modules() if model.training and not module.training}
        stack.enter_context(evaluating(model))
        flags = AttributeOverrides()
        stack.callback(flags.restore)
        if statistics != "running":
            for module in model.modules():
                if isinstance(module, _NormBase) and module not in frozen:
                    flags.set(module, "training", True)
                    if statistics != "batch":
                        disable_updates(flags, module)
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.is_leaf:
                flags.set(parameter, "requires_grad", False)
        if routed_modules(model):
            # The likelihood of a mixture norm is collected for the training pass, not for the attack's forwards.
            stack.enter_context(Scope(model, {"mode": statistics, "likelihoods": None, "local": True}))
            for module in frozen:
                if isinstance(module, RoutedModule):
                    stack.enter_context(Scope(module, {"mode": "running"}))
            if route is not None:
                stack.enter_context(route_scope(model, route))
        yield _predictor(model)


def _cuda_devices(model: nn.Module) -> list[int]:
    if not torch.cuda.is_available() or torch.cuda.is_current_stream_capturing():
        return []
    tensors = [*model.parameters(), *model.buffers()]
    return sorted({t.device.index for t in tensors if t.is_cuda} | {torch.cuda.current_device()})


def _predictor(model: nn.Module) -> Predict:
    dtype = dtype_of(model)

    def predict(x: Tensor) -> Tensor:
        return logits_of(model(x.to(dtype)), len(x)).float()

    return predict


def logits_of(output: Any, batch: int) -> Tensor:
    """The logits in what a model returned: a tensor, an object with ``.logits``, or a mapping with ``"logits"``."""
    logits = output
    if not isinstance(output, Tensor):
        logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise ConfigError(
            f"the model returned {type(output).__name__} and an attack needs logits; wrap it in a module whose forward "
            "returns them, for example `return self.model(x)[0]`"
        )
    if logits.dim() != 2 or len(logits) != batch or logits.shape[1] < 2:
        raise ConfigError(
            f"the model returned shape {tuple(logits.shape)} for {batch} images; an attack needs logits of shape "
            f"({batch}, classes) with at least 2 classes"
        )
    return logits


def input_gradient(value_N: Tensor, x: Tensor) -> Tensor:
    """Gradient of each image's value with respect to that image, float32: the sum keeps it free of the batch size."""
    grad = None
    if value_N.requires_grad:
        (grad,) = torch.autograd.grad(value_N.sum(), x, allow_unused=True)
    if grad is None:
        raise ConfigError(
            "the logits do not depend on the images by differentiable operations (detach, no_grad, rounding or numpy "
            "inside the forward?); use an attack without gradients, such as 'square'"
        )
    return grad.detach()


# -- the contract ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Attack(ABC):
    """An attack on single images. Subclasses say in :meth:`perturb` how; this class keeps the promises.

    ``route`` and ``statistics`` say which branch is attacked and what its batch norms use, see :func:`attacked`.
    ``progress`` is called during long runs with the work done and the work in all.
    """

    #: Whether it needs the gradients of the logits with respect to the images.
    by_gradients: ClassVar[bool] = True

    threat: ThreatModel
    seed: int = 0
    route: str | None = None
    statistics: Mode = "running"
    progress: Progress | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        raise_all(self.problems(), f"bad attack {type(self).__name__}")

    def problems(self) -> list[str]:
        """What is wrong with the settings; subclasses add theirs to ``super().problems()``."""
        problems = []
        if not isinstance(self.threat, ThreatModel):
            problems.append(f"threat must be a ThreatModel such as ThreatModel(eps='8/255'), got {self.threat!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            problems.append(f"seed must be an integer, got {self.seed!r}")
        if self.route is not None and not isinstance(self.route, str):
            problems.append(f"route must be the name of a domain, such as 'adv', or None, got {self.route!r}")
        if self.statistics not in MODES:
            problems.append(f"unknown statistics mode {self.statistics!r}{did_you_mean(self.statistics, MODES)}")
        return problems

    def misfits(self, shape: Sequence[int], classes: int) -> list[str]:
        """What speaks against it on images of this shape, and on a model of so many classes."""
        return []

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, *, index: Tensor | None = None) -> Tensor:
        """Adversarial images for ``x`` with labels ``y``; ``index`` is each image's identity for its noise.

        With an index (an image's place in its data set) the result does not depend on the other images of the batch,
        as far as the model's arithmetic does not.
        """
        return self._run(model, x, y, index, self.perturb)

    @abstractmethod
    def perturb(self, predict: Predict, x: Tensor, y: Tensor, noise: ImageNoise) -> Tensor:
        """Images near ``x`` that ``predict`` gets wrong. The caller checks the input and projects the result.

        This is also the fast path for training loops and CUDA graphs, inside a scope :func:`attacked` of their own:
        ``attack.kept(attack.perturb(predict, x, y, attack.noise(index)), x)`` waits for no device.
        """

    def _run(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        index: Tensor | None,
        perturb: Callable[[Predict, Tensor, Tensor, ImageNoise], Tensor],
    ) -> Tensor:
        largest_label = check_images(x, y)
        with attacked(model, route=self.route, statistics=self.statistics) as predict:
            images, labels = usable(x), usable(y)
            index = torch.arange(len(x), device=x.device) if index is None else index.to(x.device)
            if len(index) != len(x):
                raise ConfigError(f"index names {len(index)} images and the batch has {len(x)}")
            x_adv = perturb(checked(predict, largest_label, images), images, labels, self.noise(index))
            return self.kept(x_adv, images)

    def noise(self, index: Tensor) -> ImageNoise:
        """The random numbers that this attack draws for each image."""
        return ImageNoise(self.seed, index).fold(type(self).__name__)

    def kept(self, x_adv: Tensor, x: Tensor) -> Tensor:
        """What :meth:`perturb` found, inside ball and box and in the layout of ``x``, detached.

        A pixel that is not finite, from gradients that are not, is left as it was.
        """
        x_adv = x_adv.detach()
        x_adv = self.threat.project(torch.where(x_adv.isfinite(), x_adv, x), x)
        return torch.empty_like(x).copy_(x_adv)


def usable(value: Tensor) -> Tensor:
    """A tensor that gradients can be asked for, outside of inference mode, whatever mode it was made in."""
    return value.detach().clone() if value.is_inference() else value.detach()


def range_problems(low: float, high: float) -> list[str]:
    """What is wrong with images whose values reach from ``low`` to ``high``: an attack would cut them to its box."""
    if low >= 0 and high <= 1:
        return []
    if low < 0:
        cure = "input normalization belongs inside the model; attack the pixels"
    elif high > 2:
        cure = f"divide by {255 if high <= 255 else 65535}"
    else:
        cure = "check the data for NaN" if math.isnan(low) else "remove rounding errors with x.clamp(0, 1)"
    return [f"images must lie in [0, 1], got values from {low:g} to {high:g}; {cure}"]


def check_images(x: Tensor, y: Tensor) -> int:
    """Refuse, with the cure, images and labels that cannot be meant; returns the largest label; one device sync."""
    problems = []
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        raise ConfigError(f"images and labels must be tensors, got {type(x).__name__} and {type(y).__name__}")
    if x.dtype != torch.float32:
        wide = x.dtype == torch.uint16 or (x.numel() > 0 and x.float().amax().item() > 255)
        cure = "x.float()" if x.is_floating_point() else f"x.float() / {65535 if wide else 255}"
        problems.append(f"images must be float32, got {x.dtype}; use {cure}")
    if x.dim() < 2:
        problems.append(f"images must have shape (N, ...), got {tuple(x.shape)}; add a batch dimension: x[None]")
    problems += label_problems(x, y)
    if x.device != y.device:
        problems.append(f"images are on {x.device} and labels on {y.device}; use y.to(x.device)")
    if x.numel() == 0:
        problems.append("the batch is empty; skip empty batches, or check that the data set is not empty")
    raise_all(problems, "bad batch")
    low, high, least, most = torch.stack([v.double() for v in (*x.detach().aminmax(), *y.aminmax())]).tolist()
    problems += range_problems(low, high)
    problems += ignored_problems(least)
    raise_all(problems, "bad batch")
    return int(most)


def label_problems(x: Tensor, y: Tensor) -> list[str]:
    """What is wrong with the labels of images, by what waits for no device."""
    problems = []
    if y.dtype != torch.int64:
        cure = "y.argmax(1)" if y.dim() == 2 else "y.long()"
        problems.append(f"labels must be int64, got {y.dtype}; use {cure}")
    if y.dim() != 1 or x.dim() == 0 or len(y) != len(x):
        problems.append(f"labels must have shape ({len(x) if x.dim() else 'N'},), one per image, got {tuple(y.shape)}")
    return problems


def ignored_problems(least: float) -> list[str]:
    """What is wrong with labels of which this is the least."""
    return [f"labels must be at least 0, got {least:g}; drop or relabel ignored samples"] if least < 0 else []


def check_classes(largest_label: int, logits: Tensor) -> None:
    """Refuse labels that the model has no logit for."""
    if largest_label >= logits.shape[1]:
        raise ConfigError(
            f"labels go up to {largest_label} and the model has {logits.shape[1]} classes; labels count from 0"
        )


def checked(predict: Predict, largest_label: int, clean: Tensor | None = None) -> Predict:
    """``predict`` that checks the first logits it sees: enough classes for the labels, and no NaN.

    ``clean``: the images, where the first that it sees may be perturbed ones: NaN of these alone is a wrong prediction.
    """
    first = True

    def guarded(x: Tensor) -> Tensor:
        nonlocal first
        logits = predict(x)
        if first:
            first = False
            check_classes(largest_label, logits)
            if bool(logits.isnan().any()) and (clean is None or bool(predict(clean).isnan().any())):
                raise ConfigError(
                    "the model returns NaN logits; check its weights, and its statistics (was it ever trained?)"
                )
        return logits

    return guarded


# -- names -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Option:
    """An option in an attack's name: which setting it sets, and to what; ``parse`` reads the number after it.

    ``number`` is the only one that it takes, where that is so. ``norm``: the only norm of the threat that the number is
    meant for.
    """

    setting: str
    value: Any = None
    parse: Callable[[str], Any] | None = None
    number: str = ""
    norm: Norm | None = None


@dataclass(frozen=True, kw_only=True)
class Family:
    """Attacks of one kind by name: ``<family><steps>[-option[value]]*``, for example ``pgd20-restarts5``.

    ``steps`` is the number in the listed name, or None where the name takes no number.
    """

    build: Callable[..., Attack]
    steps: int | None = None
    options: Mapping[str, Option] = field(default_factory=dict)
    summary: str
    paper: str = ""


ATTACKS: Registry[Family] = Registry("attack")


def register(
    name: str,
    build: Callable[..., Attack],
    *,
    summary: str,
    paper: str = "",
    steps: int | None = None,
    options: Mapping[str, Option] | None = None,
) -> None:
    """Give an attack a name. ``build`` takes its settings as keywords, with ``steps`` where the name has a number."""
    ATTACKS.add(name, Family(build=build, steps=steps, options=options or {}, summary=summary, paper=paper))


def list_attacks(pattern: str = "*") -> list[str]:
    """Names that :func:`get` takes, one per kind of attack, that match a shell pattern."""
    return [f"{name}{ATTACKS.get(name).steps or ''}" for name in ATTACKS.names(pattern)]


def get(name: str, **settings: Any) -> Attack:
    """An attack by name: ``get("pgd20-restarts5", threat=threat)``; keywords set what the name does not say."""
    family, named = parse_name(name)
    build, by_name = family.build, dict(named)
    if isinstance(build, partial):
        build, by_name = build.func, {**build.keywords, **named}
    problems = [] if "threat" in settings else ["threat is missing; give threat=ThreatModel(eps='8/255')"]
    problems += [f"the name sets {key!r} already; change one of the two" for key in settings if key in by_name]
    norm = getattr(settings.get("threat"), "norm", None)
    problems += [
        f"option {word!r} is for {option.norm}, and the threat is {norm}; give an attack in place of its name, with "
        f"{option.setting}= of its own"
        for word, option in family.options.items()
        if option.norm is not None and option.setting in named and norm not in (None, option.norm)
    ]
    if isinstance(build, type) and issubclass(build, Attack):
        known = [f.name for f in dataclasses.fields(build) if f.init]
        problems += [f"unknown setting {key!r}{did_you_mean(key, known)}" for key in settings if key not in known]
    raise_all(problems, f"bad attack {name!r}")
    return family.build(**named, **settings)


def parse_name(name: str) -> tuple[Family, dict[str, Any]]:
    """The family that a name belongs to, and the settings that the name gives."""
    for family_name in sorted(ATTACKS, key=len, reverse=True):
        match = re.fullmatch(re.escape(family_name) + r"(\d+)?((?:-[a-z_]+[\d.]*)*)", str(name))
        if match is None:
            continue
        family, problems = ATTACKS.get(family_name), []
        settings: dict[str, Any] = {}
        if match[1] is not None and family.steps is None:
            problems.append(f"{family_name} takes no number of steps, got {match[1]}")
        elif family.steps is not None:
            settings["steps"] = int(match[1] or family.steps)
        for word, number in re.findall(r"-([a-z_]+)([\d.]*)", match[2]):
            option = family.options.get(word)
            if option is None:
                problems.append(f"unknown option {word!r}{did_you_mean(word, family.options)}")
            elif (option.parse is None) == bool(number):
                problems.append(f"option {word!r} {'needs a' if option.parse else 'takes no'} number")
            elif option.setting in settings:
                problems.append(f"{option.setting} is set twice")
            else:
                try:
                    settings[option.setting] = option.parse(number) if option.parse else option.value
                except ValueError:
                    kind = "a whole number" if option.parse is int else "a number"
                    problems.append(f"option {word!r} needs {kind}, got {number!r}")
        raise_all(problems, f"bad attack {name!r}")
        return family, settings
    raise ConfigError(f"unknown attack {name!r}{did_you_mean(name, list_attacks())}")
