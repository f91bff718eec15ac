"""The base of every objective: a module that takes images and labels, attacks, and returns the loss with its terms."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from advnorm._core.distributed import rank
from advnorm._core.errors import AdvnormError, ConfigError, Description, Problem, collect_problems, raise_problems
from advnorm._core.precision import at_least_float32
from advnorm._core.registry import Registry
from advnorm._core.settings import Setting, class_settings, convert, convert_options
from advnorm._core.tensors import pixel_conversion
from advnorm._core.wrappers import dtype_of
from advnorm.attacks.base import Attack, validated_index
from advnorm.attacks.inputs import image_range_problems, label_problems, negative_label_problems, validate_classes
from advnorm.attacks.model_access import extract_logits, predicting
from advnorm.norms import Mode, domains, route, routed_modules, statistics
from advnorm.norms.factory import NormNames, make_plans
from advnorm.norms.norm_layers import override
from advnorm.norms.plan import Plan
from advnorm.objectives.execution import EAGER, CraftedBatch, Execution, ObjectiveOutput

#: Both domains in one batch (clean first), or one forward each, clean first: different methods (paper C, sec. 3.1).
Layout = Literal["concatenated", "sequential"]
#: What the training pass normalizes with: each norm's own training flag, or the stored statistics (paper E, sec. 4.3).
TrainingStatistics = Literal["batch", "running"]


class Objective(nn.Module):
    """A loss of ``(x, y)`` that crafts its own adversarial images. Wrap it in DDP as a whole: one reduction per step.

    ``model`` is any classifier of images in [0, 1]. With routed norms each domain's images take their own route;
    without, clean and adversarial images take the same one. ``attack`` runs on the bare model, through the route
    ``"adv"`` unless it names one, and changes neither parameters nor statistics nor gradients.

    If a training leaves a domain out (``classical`` on ``dual_bn``), that domain's parameters get no gradient: give
    DDP ``find_unused_parameters=True``, or freeze them.

    The options of an objective are its settings: attributes that its class and its bases declare with a
    :class:`Setting`. A subclass that only changes a default assigns the attribute. Every assignment is validated; a
    training changes ``attack`` and ``statistics`` from epoch to epoch.
    """

    needs_attack: ClassVar[bool] = True
    #: The domains whose images the training pass sees, and whose banks it trains and updates.
    domains: ClassVar[tuple[str, ...]] = ("clean", "adv")
    #: One line for listings, and the paper it comes from.
    summary: ClassVar[str] = ""
    paper: ClassVar[str] = ""

    label_smoothing: Annotated[float, Setting("Label smoothing of the cross-entropy terms.", "[0, 1)")] = 0.0
    statistics: Annotated[TrainingStatistics, Setting("Statistics of the training pass.")] = "batch"

    def __init_subclass__(cls) -> None:
        """Put the options into the signature, for help and completion."""
        parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
        fixed = [parameter for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
        cls.__signature__ = inspect.Signature([*fixed, *cls.options().values()])

    def __init__(self, model: nn.Module, attack: Attack | None = None, **options: Any) -> None:
        settings = self._validate(model, attack, options)
        super().__init__()
        self.model = model
        self.attack = attack
        for name, value in settings.items():
            setattr(self, name, value)
        #: Seed of the images of a second pass and of the noise of LIGS; an attack has its own.
        self.seed = 0
        self._batches_without_index = 0
        self._range_checked = False  # of the first batch's images
        self._largest_label: int | None = None  # of the first batch

    @classmethod
    def _validate(cls, model: nn.Module, attack: Attack | None, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings in their types, or raise one error with all problems."""
        settings, problems = cls.convert_settings(options)
        problems += cls._attack_problems(attack)
        with collect_problems(problems):
            plans = list(dict.fromkeys(module.plan for module in routed_modules(model).values()))
            problems += cls.plan_problems(plans, attack_statistics=getattr(attack, "statistics", "running"), **settings)
        raise_problems(problems, f"bad objective {cls.__name__}")
        return settings

    @classmethod
    def options(cls) -> Mapping[str, inspect.Parameter]:
        """The settings of this objective, its own before those of its bases."""
        return class_settings(cls)

    @classmethod
    def convert_settings(cls, options: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
        """Return all settings in their types, with the default instead of a missing or wrong one, and the problems."""
        converted, problems = convert_options("", cls.options(), options)
        wrong = {problem.field for problem in problems}
        settings = {name: parameter.default for name, parameter in cls.options().items()}
        return settings | {name: value for name, value in converted.items() if name not in wrong}, problems

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.options():
            value = convert(name, self.options()[name].annotation, value)
        super().__setattr__(name, value)

    @classmethod
    def problems(
        cls,
        norm: NormNames,
        norm_options: Mapping[str, Any] | None = None,
        *,
        attack_statistics: Mode = "running",
        **options: Any,
    ) -> list[Problem]:
        """The problems of this objective, with options in their types, on a network with the named norms."""
        try:
            plans = list(dict.fromkeys(make_plans(norm, norm_options or {}).values()))
        except (AdvnormError, TypeError):
            return []  # the configuration reports an unknown norm
        return cls.plan_problems(plans, attack_statistics=attack_statistics, **cls.convert_settings(options)[0])

    @classmethod
    def plan_problems(cls, plans: Sequence[Plan], *, attack_statistics: Mode, **settings: Any) -> list[Problem]:
        """The problems of a complete set of valid settings on a network with these plans; subclasses add to it."""
        problems = []
        for plan in plans:
            missing = [domain for domain in cls.domains if domain not in plan.domains]
            if missing:
                message = (
                    f"{cls.__name__} trains on {' and '.join(cls.domains)} images, and {plan.name} has the domains "
                    f"{', '.join(plan.domains)}"
                )
                hint = f"add {' and '.join(missing)} to its domains"
                problems.append(Problem(code="conflict", message=message, field="norm", hint=hint))
        if cls.needs_attack and attack_statistics != "running":
            seen = f"an attack with statistics={attack_statistics!r} sees one"
            problems += both_domains_problems(plans, seen, "attack.statistics", "attack with statistics='running'")
        return problems

    def trained_domains(self) -> tuple[str, ...]:
        """The domains whose parameters get a gradient in each step."""
        return self.domains

    def tested_domains(self) -> tuple[str, ...]:
        """The domains whose branches validation uses; images of another domain go through the first of them."""
        return self.trained_domains()

    def images_per_domain(self, batch_size: int) -> dict[str, int]:
        """Number of images of each domain in the training pass of a batch."""
        return dict.fromkeys(self.domains, batch_size)

    @property
    def loss_variant(self) -> Hashable:
        """Key of the graphs of :meth:`compute_loss`: settings that change its operations between epochs."""
        return self.statistics

    @property
    def innermost(self) -> Objective:
        """The objective inside all wrappers, which runs the forwards."""
        return self

    @property
    def attack(self) -> Attack | None:
        """Crafts the adversarial images."""
        return self._attack

    @attack.setter
    def attack(self, attack: Attack | None) -> None:
        raise_problems(self._attack_problems(attack), f"bad attack of {type(self).__name__}")
        self._attack = None if attack is None else self.adapt_attack(attack)

    @classmethod
    def _attack_problems(cls, attack: Any) -> list[Problem]:
        example = "PGD(threat=ThreatModel(eps='8/255'), steps=10)"
        problems: list[Problem] = []
        if isinstance(attack, Attack):
            with collect_problems(problems):
                cls.adapt_attack(attack)
        elif attack is not None:
            message = f"{{field}} must be an Attack such as {example}"
            problems.append(Problem(code="wrong_type", message=message, field="attack", got=attack))
        elif cls.needs_attack:
            message, hint = f"{cls.__name__} needs an attack", f"for example {example}"
            problems.append(Problem(code="missing_attack", message=message, field="attack", hint=hint))
        return problems

    @classmethod
    def adapt_attack(cls, attack: Attack) -> Attack:
        """Return an attack with the settings that this objective needs; reject an unsuitable one."""
        return attack

    # -- crafting --------------------------------------------------------------------------------------------------

    def craft(self, x: Tensor, y: Tensor, index: Tensor, execution: Execution = EAGER) -> Tensor:
        """Craft adversarial images for ``x``, inside ball and box; ``index`` identifies each image for its noise."""
        assert self.attack is not None
        attack, extra = self.attack, {}
        own = partial(self.logits, execution=execution)
        predict, clean = execution.surrogate or own, self._branch("clean")
        if getattr(attack, "loss", None) == "kl":  # the clean output, once, through the branch it is trained in
            with predicting(self.model, route=clean, statistics=attack.statistics), torch.no_grad():
                extra["clean"] = (predict if self._share_banks(clean, self.attack_route) else own)(x)
        with predicting(self.model, route=self.attack_route, statistics=attack.statistics):
            return attack.constrain(attack.perturb(predict, x, y, attack.noise(index), **extra), x)

    @property
    def attack_route(self) -> str | None:
        """The route of the attack's forwards."""
        own = None if self.attack is None else self.attack.route
        return own if own is not None else self._branch("adv")

    def _share_banks(self, one: str | None, other: str | None) -> bool:
        """Whether two routes go through the same banks."""
        if one is None or other is None:
            return one == other
        plans = [module.plan for module in routed_modules(self.model).values()]
        return all(
            banks[plan.index(one)] == banks[plan.index(other)]
            for plan in plans
            for banks in (plan.normalized_by, plan.affine)
            if banks  # empty without statistics or without parameters
        )

    def _branch(self, domain: str) -> str | None:
        return domain if domain in domains(self.model) else None

    def _fresh_index(self, x: Tensor) -> Tensor:
        """Identities that no image had before, for loops that pass no index."""
        start = self._batches_without_index * 2**20 + rank() * 2**40
        self._batches_without_index += 1
        return torch.arange(start, start + len(x), device=x.device)

    # -- the training pass -----------------------------------------------------------------------------------------

    def run_model(self, x: Tensor) -> Any:
        """The plain forward of the model, which a step program compiles."""
        return self.model(x)

    def logits(self, x: Tensor, execution: Execution = EAGER) -> Tensor:
        """Logits in float32 at least: half precision rounds small losses away."""
        logits = at_least_float32(extract_logits((execution.network or self.run_model)(x.to(self.dtype)), len(x)))
        if self._largest_label is not None and self._largest_label >= logits.shape[1]:
            largest, self._largest_label = self._largest_label, None  # the next batch is checked again
            validate_classes(largest, logits)
        return logits

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model's parameters, to which images are converted."""
        return dtype_of(self.model)

    def domain_logits(
        self, images: Mapping[str, Tensor], layout: Layout = "concatenated", execution: Execution = EAGER
    ) -> dict[str, Tensor]:
        """Logits of each domain's images in training, by one forward or by one forward per domain.

        Domains that are not trained, or that lend their statistics, are forwarded in the same batch.
        """
        images = {domain: x for domain, x in images.items() if len(x)}
        trained = {domain: x for domain, x in images.items() if domain in self.trained_domains()}
        needed = self._forwarded(set(trained))
        forwarded = {domain: x for domain, x in images.items() if domain in needed}
        with self.training_statistics():
            if not forwarded and (layout == "sequential" or len(images) == 1):
                logits = {}
                for domain, x in images.items():
                    with self._routed(domain):
                        logits[domain] = self.logits(x, execution)
                return logits
            first, counts = ({domain: len(x) for domain, x in part.items()} for part in (forwarded, trained))
            with self._routed(counts, first):
                together = self.logits(torch.cat([*forwarded.values(), *trained.values()]), execution)
            pieces = together.split([*first.values(), *counts.values()])
            by_domain = dict(zip([*forwarded, *trained], pieces))  # a domain in both has its trained logits
            return {domain: by_domain[domain] for domain in images}

    def _forwarded(self, trained: set[str]) -> set[str]:
        """The domains whose images are forwarded for their statistics, beside the ``trained`` ones."""
        found = set(self.domains) - trained
        if self.statistics == "batch":
            found.update(*(module.plan.forwarded_for(trained) for module in routed_modules(self.model).values()))
        return found

    def _routed(
        self, where: str | Mapping[str, int], forwarded: Mapping[str, int] | None = None
    ) -> AbstractContextManager[Any]:
        if not routed_modules(self.model):
            return nullcontext()
        return route(self.model, where, forwarded=forwarded or None)  # pyright: ignore[reportReturnType]

    @contextmanager
    def training_statistics(self) -> Iterator[None]:
        """Scope: what the training pass normalizes with."""
        with ExitStack() as stack:
            if self.statistics == "running":
                for module in self.model.modules():
                    if isinstance(module, _NormBase):
                        override(stack, module, "training", False)
                if routed_modules(self.model):
                    stack.enter_context(statistics(self.model, mode="running"))
            yield

    def cross_entropy(self, logits: Tensor, y: Tensor) -> Tensor:
        """Mean cross-entropy with the label smoothing of this objective."""
        return F.cross_entropy(logits, y, label_smoothing=self.label_smoothing)

    def craft_batch(
        self, x: Tensor, y: Tensor, index: Tensor | None = None, execution: Execution = EAGER
    ) -> CraftedBatch:
        """Validate a batch and craft its adversarial images if the objective attacks. No ``index``: fresh noise."""
        _validate_image_dtype(x)
        _validate_labels(x, y)
        hard = y.numel() and not y.is_floating_point()
        if self._largest_label is None and hard and not torch.compiler.is_compiling():
            least, largest = (int(value) for value in y.aminmax())
            raise_problems(negative_label_problems(least), "bad batch")
            self._largest_label = largest
        if self.needs_attack:
            self.validate_images(x)
        if not len(x):
            raise ConfigError("empty", "the batch is empty", field="images", hint="skip empty batches")
        index = self._fresh_index(x) if index is None else validated_index(index, x)
        craft = execution.craft or partial(self.craft, execution=execution)
        hard_labels = y if y.dim() == 1 else y.argmax(1)  # of mixed images, the class with the larger share
        return CraftedBatch(x, y, index, craft(x, hard_labels, index) if self.needs_attack else None)

    def validate_images(self, x: Tensor) -> None:
        """Reject images that an attack would not perturb by eps: outside of its box, or in half precision.

        Only the first batch's range is read, because that waits for the device.
        """
        _validate_image_dtype(x)
        if torch.finfo(x.dtype).bits < 32:
            message = "{field} must be float32, because half precision cannot hold a perturbed pixel"
            hint = "use x.float(), and autocast or a model in half precision for speed"
            raise ConfigError("wrong_dtype", message, field="images", got=Description(x.dtype), hint=hint)
        if self._range_checked or torch.compiler.is_compiling():
            return
        if x.numel():
            raise_problems(image_range_problems(*(value.item() for value in x.detach().aminmax())), "bad batch")
        self._range_checked = True

    def compute_loss(self, batch: CraftedBatch, execution: Execution = EAGER) -> ObjectiveOutput:
        """Compute the loss of a crafted batch and the terms that it consists of."""
        raise NotImplementedError

    def describe(self) -> str:
        """The objective with its settings, on one line."""
        return f"{type(self).__name__}({self.extra_repr()})"

    def describe_choices(self) -> str:
        """The objective with its attack and the settings that differ from their defaults, on one line."""
        found = [] if self.attack is None else [f"attack={_attack_choices(self.attack)}"]
        found += [
            f"{name}={getattr(self, name)}"
            for name, setting in self.options().items()
            if getattr(self, name) != setting.default
        ]
        return f"{type(self).__name__}({', '.join(found)})"

    def forward(
        self, x: Tensor, y: Tensor, *, index: Tensor | None = None, execution: Execution = EAGER
    ) -> ObjectiveOutput:
        """The loss of images ``x`` with labels ``y``; ``index`` identifies each image for its attack's noise."""
        return self.compute_loss(self.craft_batch(x, y, index, execution), execution)

    def extra_repr(self) -> str:
        attack = None if self.attack is None else dataclasses.replace(self.attack, progress=None)
        return f"attack={attack!r}, {self.setting_words()}"

    def setting_words(self) -> str:
        """The settings and their values."""
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in self.options())


def _attack_choices(attack: Attack) -> str:
    fields = [field for field in dataclasses.fields(attack) if field.repr]
    chosen = {
        field.name: getattr(attack, field.name) for field in fields if getattr(attack, field.name) != field.default
    }
    return f"{type(attack).__name__}({', '.join(f'{name}={value}' for name, value in chosen.items())})"


OBJECTIVES: Registry[type[Objective]] = Registry("objective")
register_objective = OBJECTIVES.register
"""Decorator that registers a subclass of :class:`Objective`: ``@register_objective(name)``, without keywords."""


def list_objectives(pattern: str = "*") -> list[str]:
    """Names of the registered objectives that match a shell pattern."""
    return OBJECTIVES.names(pattern)


def needs_both_domains(plan: Plan) -> bool:
    """Whether a norm needs images of both domains in each batch, because it uses the other domain's statistics."""
    return plan.mixture or plan.crosses


def both_domains_problems(plans: Sequence[Plan], but: str, field: str, hint: str) -> list[Problem]:
    """The problem of each norm that needs both domains, where only one is available."""
    return [
        Problem("conflict", f"{name} normalizes with the statistics of both domains, and {but}", field, hint=hint)
        for name in dict.fromkeys(plan.name for plan in plans if needs_both_domains(plan))
    ]


def _validate_image_dtype(x: Tensor) -> None:
    if not isinstance(x, Tensor):
        got = Description(type(x).__name__)
        raise ConfigError("wrong_type", "{field} must be a tensor of floats in [0, 1]", field="images", got=got)
    if not x.is_floating_point():
        message, got = "{field} must be floats in [0, 1]", Description(x.dtype)
        raise ConfigError("wrong_dtype", message, field="images", got=got, hint=f"use {pixel_conversion(x)}")


def _validate_labels(x: Tensor, y: Tensor) -> None:
    """Reject labels that are neither classes nor probabilities by class, without a device synchronization."""
    if not isinstance(y, Tensor):
        got = Description(type(y).__name__)
        raise ConfigError("wrong_type", "{field} must be a tensor of class numbers", field="labels", got=got)
    if y.is_floating_point() and y.dim() == 2 and len(y) == len(x):
        return
    raise_problems(label_problems(x, y), "bad batch")
