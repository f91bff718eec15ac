"""The typed configuration of a training run: everything that determines its result, checked before anything runs.

Values and their types are in values.py, text in text.py.
"""

from __future__ import annotations

import inspect
import json
import re
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import yaml

from advnorm._core import records
from advnorm._core.errors import ConfigError, Problem, did_you_mean, first_line, raise_all, raise_problems, shown
from advnorm._core.settings import (
    Named,
    convert_fields,
    convert_options,
    from_mapping,
    in_range,
    range_words,
    to_json,
)
from advnorm.attacks import PGD, Attack
from advnorm.attacks import get as get_attack
from advnorm.attacks.pgd import Keep, Start, Target
from advnorm.config.text import Dumper, overridden, read_json_file, read_yaml, text_of
from advnorm.data.registry import DATASETS
from advnorm.models import create_model
from advnorm.norms import Mode, RoutedNorm
from advnorm.objectives import OBJECTIVES, REGULARIZERS, SECOND_PASSES
from advnorm.objectives.dual import clean_images
from advnorm.objectives.ligs import ATTACKS
from advnorm.objectives.second_pass import rows_of_second_pass
from advnorm.threat import Norm, ThreatModel, parse_length

T = TypeVar("T")
LARGEST = sys.float_info.max  # NaN and infinity fail the comparison, and integers that are no float


# -- the settings ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AttackConfig:
    """The attack of training: the settings of :class:`advnorm.attacks.PGD`, which explains and checks them."""

    steps: int = PGD.steps
    step_size: float | str | None = PGD.step_size
    start: Start | float = PGD.start
    loss: str = PGD.loss
    target: Target | None = PGD.target
    restarts: int = PGD.restarts
    momentum: float = PGD.momentum
    keep: Keep = PGD.keep
    statistics: Mode = PGD.statistics

    def __post_init__(self) -> None:
        raise_problems(convert_fields(self), "bad attack")

    def build(self, threat: ThreatModel, *, seed: int = 0) -> PGD:
        """The attack against a threat model."""
        return PGD(threat=threat, seed=seed, **vars(self))


#: How two images of a batch become one.
Mix = Literal["none", "mixup", "cutmix"]
#: The name of training's own attack among those for validation.
TRAINING = "training"
#: What a number may be, as an interval.
LIMITS = {
    "epochs": "[1, inf)",
    "budget": "[1, inf)",
    "mix_alpha": "(0, inf)",
    "batch_size": "[1, inf)",
    "eps_warmup_epochs": "[0, inf)",
    "steps_warmup_epochs": "[0, inf)",
    "held_out": "[0, inf)",
    "lr": "(0, inf)",
    "momentum": "[0, 1)",
    "weight_decay": "[0, inf)",
    "grad_clip": "(0, inf)",
    "gamma": "(0, 1]",
    "warmup_epochs": "[0, inf)",
    "peak_share": "(0, 1)",
    "ema": "(0, 1)",
    "label_smoothing": "[0, 1)",
    "running_epochs": "[0, inf)",
    "validate_every": "[0, inf)",
    "validation_images": "[1, inf)",
    "seed": "[0, 2147483647]",  # leaves room for steps and ranks beside it in a 63-bit seed
}


#: Options of other functions that are no options here, and where they went.
_NOT_NORM_OPTIONS = {
    "sync": "use sync_statistics",
    "process_group": "the training sets it",
    "device": "the training sets it",
    "dtype": "use precision",
}
_NOT_MODEL_OPTIONS = {
    "norm": "norm is a setting of its own",
    "norm_options": "norm_options is a setting of its own",
    "num_classes": "the data set says how many there are",
    "in_channels": "the data set says how many there are",
}
_NOT_DATA_OPTIONS = {
    "root": "where the files are is no part of a configuration; say it where the training is started",
    "download": "say it where the training is started",
}
_NOT_OBJECTIVE_OPTIONS = {
    "label_smoothing": "label_smoothing is a setting of its own",
    "statistics": "use running_epochs",
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """One training run. A wrong configuration cannot be made: all that is wrong with it comes in one error.

    ``model``, ``data`` and ``objective`` take a name, ``Named("trades", beta=6)`` or ``{"name": "trades", "beta": 6}``.
    The page docs/configuration.md explains every setting.
    """

    model: Named = Named("small_cnn")
    norm: str = "bn"
    norm_options: dict[str, Any] = field(default_factory=dict, hash=False)
    dual_head: bool = False  # a linear layer per domain (paper A, table 7)
    weights: str | None = None

    data: Named = Named("digits")
    augment: Literal["none", "flip", "crop_flip"] = "none"
    held_out: int | float = 0.1  # a count or a share

    mix: Mix = "none"
    mix_alpha: float = 1.0

    objective: Named = Named("hybrid")
    regularizer: Named | None = None  # ligs (paper D, fig. 5)
    second_pass: Named | None = None  # apart, sam, apart_sam, awp (paper B)
    threat: Norm = "Linf"
    eps: float | str = "8/255"
    attack: AttackConfig = AttackConfig()
    eps_warmup_epochs: int = 0
    steps_warmup_epochs: int = 0

    epochs: int = 10
    budget: int = 1  # times the epochs, and all that counts in epochs (paper B, table 1)
    batch_size: int = 128  # of all ranks together; in training the rest of an epoch that fills no batch is left out

    optimizer: Literal["sgd", "adam", "adagrad", "rmsprop"] = "sgd"
    lr: float = 0.1
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 5e-4
    norm_weight_decay: bool = True
    grad_clip: float | None = None

    schedule: Literal["step", "cosine", "one_cycle", "constant"] = "step"
    milestones: tuple[float, ...] = ()
    gamma: float = 0.1
    warmup_epochs: float = 0.0
    peak_share: float = 0.3

    ema: float | None = None
    ema_buffers: Literal["average", "copy"] = "copy"
    label_smoothing: float = 0.0
    running_epochs: int = 0  # paper E, sec. 4.3
    train_only: Literal["all", "norms"] = "all"  # paper E, sec. 4.4
    sync_statistics: bool = False

    precision: Literal["auto", "float32", "tf32", "bf16"] = "auto"
    channels_last: Literal["auto"] | bool = "auto"
    compile: Literal["auto"] | bool = "auto"
    deterministic: bool = False  # on CUDA: the same bits every time, in place of the fastest kernels

    validate_every: int = 1
    validation_attack: str = "pgd10"  # a name, or "training": its own attack
    validation_images: int | None = None
    snapshots: tuple[int, ...] = ()  # epochs after which the model is kept, to look at it along training

    seed: int = 0
    name: str | None = None

    def __post_init__(self) -> None:
        raise_all(self.problems(), "bad configuration")

    # -- checks ----------------------------------------------------------------------------------------------------

    def problems(self) -> list[str | Problem]:
        """All that is wrong, with the cure; a setting with a problem of its own is left out of the later checks."""
        converted = convert_fields(self)
        bad = {problem.field.partition(".")[0] for problem in converted}

        def fine(*names: str) -> bool:
            return bad.isdisjoint(names)

        problems = [*converted, *self._name_problems(fine)]
        for name, limit in LIMITS.items():
            value = getattr(self, name)
            if fine(name) and value is not None and not in_range(limit, value):
                problems.append(f"{name} must {range_words(limit)}, got {value!r}")
                bad.add(name)
        return [*problems, *self._schedule_problems(fine), *self._held_out_problems(fine), *self._attack_problems(fine)]

    def _name_problems(self, fine: Callable[..., bool]) -> list[Any]:
        problems: list[Any] = []
        if fine("model", "norm", "norm_options"):
            problems += self._model_problems(fine)
        if fine("objective"):
            problems += self._objective_problems(fine)
        problems += self._extra_problems(fine)
        if fine("data"):
            problems += self._data_set_problems()
        if fine("name") and self.name is not None and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}", self.name):
            problems.append(
                f"name becomes that of a folder: at most 100 letters, digits, '_', '.' and '-', got {shown(self.name)}"
            )
        if fine("weights") and self.weights is not None:
            if not self.weights:
                problems.append("weights is empty; name a .safetensors file or the folder of a run, or leave it out")
            elif Path(self.weights).suffix in (".pt", ".pth", ".ckpt", ".pkl", ".bin"):
                problems.append(
                    f"weights come as .safetensors or as the folder of a run, got {shown(self.weights)}; "
                    "pickles are never opened"
                )
        return problems

    def _model_problems(self, fine: Callable[..., bool]) -> list[Any]:
        problems = [
            f"norm_options.{name}: {cure}" for name, cure in _NOT_NORM_OPTIONS.items() if name in self.norm_options
        ]
        problems += [f"model.{name}: {cure}" for name, cure in _NOT_MODEL_OPTIONS.items() if name in self.model.options]
        if self.norm_options.get("track_running_stats") is False:
            problems.append(
                "norm_options.track_running_stats: attacks and validation use running statistics; leave it out"
            )
        if problems:
            return problems
        try:
            parameters, statistics = _norms_of(json.dumps(to_json((self.model, self.norm, self.norm_options))))
        except ConfigError as error:
            return list(error.problems)
        except Exception as error:  # whatever a registered model says to options nobody thought of
            reason = first_line(error)
            return [f"cannot build {shown(self.model)} with norm_options {shown(self.norm_options)}: {reason}"]
        if fine("train_only", "weights") and self.train_only == "norms":
            if not parameters:
                problems.append(f"train_only='norms' and norm {self.norm!r} has no parameters; use train_only='all'")
            elif self.weights is None:
                problems.append("train_only='norms' needs a trained network to start from; give its weights")
        if statistics:
            return problems
        if fine("sync_statistics") and self.sync_statistics:
            problems.append(f"norm {self.norm!r} has no batch statistics to synchronize; use sync_statistics=False")
        if fine("second_pass") and self.second_pass is not None and self.second_pass.name in ("apart", "apart_sam"):
            problems.append(
                f"norm {self.norm!r} has no batch statistics to perturb; use second_pass=sam or another norm"
            )
        if fine("running_epochs") and self.running_epochs > 0:
            problems.append(f"norm {self.norm!r} has no running statistics; use running_epochs=0")
        return problems

    def _objective_problems(self, fine: Callable[..., bool]) -> list[Any]:
        if self.objective.name not in OBJECTIVES:
            return [f"unknown objective {shown(self.objective.name)}{did_you_mean(self.objective.name, OBJECTIVES)}"]
        kind = OBJECTIVES.get(self.objective.name)
        objective, problems = self._with_options("objective", kind.options(), _NOT_OBJECTIVE_OPTIONS)
        if problems or not fine("norm", "norm_options"):
            return problems
        statistics = self.attack.statistics if fine("attack") else "running"
        return kind.problems(self.norm, self.norm_options, attack_statistics=statistics, **objective.options)

    def _group_problems(self, options: Mapping[str, Any], fine: Callable[..., bool]) -> list[Any]:
        """Whether each domain's images of a second pass make equal groups."""
        groups, samples = options.get("groups", 1), options.get("samples", 1.0)
        share = self.objective.options.get("clean_share", 1.0) if fine("objective") else 1.0
        if not (isinstance(groups, int) and isinstance(samples, int | float) and groups > 1):
            return []
        if groups > self.batch_size:
            return [f"second_pass.groups ({groups}) is more than batch_size ({self.batch_size})"]
        rows = rows_of_second_pass(self.batch_size, samples, groups)
        if not rows:
            return [f"second_pass.samples ({samples}) of batch_size ({self.batch_size}) is less than groups ({groups})"]
        clean = clean_images(rows, share)
        if not clean % groups:
            return []
        return [
            f"second_pass.groups ({groups}) does not divide the {clean} clean images of the second pass, a share of "
            f"{share}; change groups, samples, batch_size or objective.clean_share"
        ]

    def _extra_problems(self, fine: Callable[..., bool]) -> list[Any]:
        """What is wrong with the regularizer, the second pass and the mixing of images."""
        problems: list[Any] = []
        for label, registry in (("regularizer", REGULARIZERS), ("second_pass", SECOND_PASSES)):
            named = getattr(self, label)
            if not fine(label) or named is None:
                continue
            if named.name not in registry:
                hint = did_you_mean(named.name, [*registry, "none"])
                problems.append(f"unknown {label.replace('_', ' ')} {shown(named.name)}{hint}")
                continue
            kind = registry.get(named.name)
            fitted, bad = self._with_options(label, kind.options(), {})
            problems += bad or [f"{label}: {problem}" for problem in kind.setting_problems(**fitted.options)]
            if not bad and fine("batch_size"):
                samples = fitted.options.get("samples", 1)
                if isinstance(samples, int) and samples > self.batch_size:
                    problems.append(f"second_pass.samples ({samples}) is more than batch_size ({self.batch_size})")
                problems += self._group_problems(fitted.options, fine)
        if fine("mix", "objective") and self.mix != "none" and self.objective.name in OBJECTIVES:
            if OBJECTIVES.get(self.objective.name).needs_attack:
                problems.append(
                    f"mix={self.mix!r} gives soft labels, and the attack of objective {self.objective.name!r} needs "
                    "hard ones; use objective='standard' or mix='none'"
                )
            shift = self.regularizer.options.get("shift") if fine("regularizer") and self.regularizer else None
            if shift in ATTACKS:
                problems.append(f"mix={self.mix!r} gives soft labels; use regularizer.shift=gaussian or uniform")
        return problems

    def _data_set_problems(self) -> list[Any]:
        if self.data.name not in DATASETS:
            return [f"unknown data set {shown(self.data.name)}{did_you_mean(self.data.name, DATASETS)}"]
        source = DATASETS.get(self.data.name)
        if "train" not in source.splits:
            trainable = [name for name in DATASETS if "train" in DATASETS.get(name).splits]
            return [f"{self.data.name} is for evaluation only; train on one of {', '.join(trainable)}"]
        parameters = inspect.signature(source.read, eval_str=True).parameters
        allowed = {name: parameters[name] for name in source.options}
        return self._with_options("data", allowed, _NOT_DATA_OPTIONS)[1]

    def _with_options(
        self, label: str, parameters: Mapping[str, inspect.Parameter], elsewhere: Mapping[str, str]
    ) -> tuple[Named, list[Any]]:
        named = getattr(self, label)
        options, problems = convert_options(label, parameters, named.options, elsewhere)
        object.__setattr__(self, label, Named(named.name, **options))
        return getattr(self, label), [*problems]

    def _schedule_problems(self, fine: Callable[..., bool]) -> list[Any]:
        problems: list[Any] = []
        if fine("epochs"):
            for name in ("warmup_epochs", "eps_warmup_epochs", "steps_warmup_epochs", "running_epochs"):
                if fine(name) and getattr(self, name) > self.epochs:
                    problems.append(f"{name} must be at most epochs ({self.epochs}), got {getattr(self, name)}")
        if fine("epochs", "running_epochs", "weights") and self.running_epochs == self.epochs and not self.weights:
            problems.append(
                "running_epochs leaves no epoch that estimates the statistics; make it smaller, or give weights"
            )
        if fine("epochs", "snapshots") and self.snapshots:
            ordered = all(a < b for a, b in zip(self.snapshots, self.snapshots[1:]))
            if not (ordered and self.snapshots[0] >= 1 and self.snapshots[-1] <= self.epochs):
                problems.append(
                    f"snapshots must increase and lie between 1 and epochs ({self.epochs}), "
                    f"got {shown(list(self.snapshots))}"
                )
        if fine("milestones") and self.milestones:
            if fine("schedule") and self.schedule != "step":
                problems.append(f"milestones belong to schedule='step', the schedule is {self.schedule!r}; drop either")
            ordered = all(a < b for a, b in zip(self.milestones, self.milestones[1:]))
            if fine("epochs") and not (ordered and self.milestones[0] > 0 and self.milestones[-1] < self.epochs):
                problems.append(
                    f"milestones must increase and lie between 0 and epochs ({self.epochs}), "
                    f"got {shown(list(self.milestones))}; set milestones too, or another schedule"
                )
        problems += self._idle_problems(fine)
        if fine("schedule", "warmup_epochs") and self.schedule == "one_cycle" and self.warmup_epochs:
            problems.append(
                "schedule='one_cycle' warms up by itself; use warmup_epochs=0, and peak_share for its length"
            )
        if fine("nesterov", "momentum", "optimizer") and self.nesterov:
            if self.optimizer != "sgd":
                problems.append(
                    f"nesterov belongs to optimizer='sgd', the optimizer is {self.optimizer!r}; drop either"
                )
            elif not self.momentum:
                problems.append("nesterov needs a momentum above 0; give one, or use nesterov=False")
        return problems

    def _idle_problems(self, fine: Callable[..., bool]) -> list[Any]:
        """Settings that were changed and have no effect with the others: a run would be another by its name alone."""
        needs = {
            "gamma": (("schedule", "milestones"), bool(self.milestones), "milestones, and so to schedule='step'"),
            "peak_share": (("schedule",), self.schedule == "one_cycle", "schedule='one_cycle'"),
            "mix_alpha": (("mix",), self.mix != "none", "mix='mixup' or 'cutmix'"),
        }
        return [
            f"{name} belongs to {to}, and has no effect here; drop it"
            for name, (others, used, to) in needs.items()
            if fine(name, *others) and not used and getattr(self, name) != getattr(Config, name)
        ]

    def _held_out_problems(self, fine: Callable[..., bool]) -> list[Any]:
        problems: list[Any] = []
        if fine("held_out"):
            if isinstance(self.held_out, float) and self.held_out >= 1:
                problems.append(f"held_out is a share below 1 or a whole number of images, got {self.held_out!r}")
            elif fine("validate_every") and self.validate_every and not self.held_out:
                problems.append(
                    "validation needs held-out images: give held_out, for example 0.1, or use validate_every=0"
                )
            elif fine("validation_images") and isinstance(self.held_out, int):
                most = self.validation_images or 0
                if most > self.held_out > 0:
                    problems.append(
                        f"validation_images ({most}) is more than held_out ({self.held_out}); "
                        "hold out more, or leave validation_images out to take all"
                    )
        return problems

    def _attack_problems(self, fine: Callable[..., bool]) -> list[Any]:
        problems: list[Any] = []
        # The attacks are checked against another eps where this one is bad; L2 has no largest length.
        threat = ThreatModel(norm=self.threat if fine("threat") else "L2", eps="1/255")
        if fine("threat", "eps"):
            try:
                threat = ThreatModel(norm=self.threat, eps=self.eps)
            except ConfigError as error:
                problems += error.problems
        if fine("attack"):
            try:
                attack = self.attack.build(threat)
                if fine("objective") and self.objective.name in OBJECTIVES:
                    OBJECTIVES.get(self.objective.name).adapt_attack(attack)
            except ConfigError as error:
                problems += (problem.inside("attack") for problem in error.problems)
        if fine("validation_attack"):
            try:
                if self.validation_attack != TRAINING:
                    get_attack(self.validation_attack, threat=threat)
            except ValueError as error:  # a ConfigError, or a number in the name that is none
                problems.append(f"validation_attack: {error}")
        return problems

    # -- what it means ---------------------------------------------------------------------------------------------

    def scaled(self) -> Config:
        """The same training with its budget worked in: epochs, decay points and warm-ups that many times as long."""
        times = self.budget
        counted = ("epochs", "warmup_epochs", "eps_warmup_epochs", "steps_warmup_epochs", "running_epochs")
        return replace(
            self,
            budget=1,
            milestones=tuple(round(times * milestone, 9) for milestone in self.milestones),
            snapshots=tuple(times * epoch for epoch in self.snapshots),
            **{name: times * getattr(self, name) for name in counted},
        )

    def build_attack(self, epoch: int | None = None) -> PGD:
        """The attack of training in an epoch, counted from 0; without an epoch, after all warm-ups.

        During the first n = ``eps_warmup_epochs`` epochs eps is ``(epoch + 1) / (n + 1)`` of its full length; so are
        the steps with ``steps_warmup_epochs``, rounded up.
        """
        done, whole = _warmed(self.eps_warmup_epochs, epoch)
        threat = ThreatModel(norm=self.threat, eps=parse_length(self.eps) * (done / whole))
        done, whole = _warmed(self.steps_warmup_epochs, epoch)
        return replace(self.attack, steps=-(-self.attack.steps * done // whole)).build(threat, seed=self.seed)

    def build_validation_attack(self) -> Attack:
        """The attack on held-out images: one by name, or that of training, after all warm-ups."""
        if self.validation_attack == TRAINING:
            return self.build_attack()
        return get_attack(self.validation_attack, threat=ThreatModel(norm=self.threat, eps=self.eps), seed=self.seed)

    @property
    def digest(self) -> str:
        """A hash of every setting but name and seed, so that a run's seeds share it; ``"8/255"`` is its number."""
        content = self.to_dict()
        del content["name"], content["seed"]
        if not self.snapshots:  # came later, and is none of the method
            del content["snapshots"]
        content["eps"] = parse_length(self.eps)
        if self.attack.step_size is not None:
            content["attack"]["step_size"] = parse_length(self.attack.step_size)
        return records.digest(json.dumps(content, sort_keys=True))

    @property
    def run_name(self) -> str:
        """The name of the run: the given one, or one made of the main settings and the digest."""
        if self.name is not None:
            return self.name
        eps = self.eps if isinstance(self.eps, str) else f"{self.eps:g}"
        length = re.sub(
            r"[^A-Za-z0-9.]+", "_", f"eps{eps.strip()}" if self.threat == "Linf" else f"{self.threat}_{eps}"
        )
        parts = (self.data.name, self.model.name, self.norm, self.objective.name, length, self.digest[:8])
        return "-".join(parts)

    # -- to and from plain data ------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; ``Config.from_dict`` gives the same configuration back, exactly."""
        return {f.name: to_json(getattr(self, f.name)) for f in fields(self)}

    def to_yaml(self) -> str:
        """A file for :func:`load_config`."""
        return yaml.dump(self.to_dict(), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Config:
        """A configuration from plain data; what is left out has its default."""
        return cls._overridden(settings, ())

    def with_overrides(self, overrides: Sequence[str]) -> Config:
        """A changed configuration: ``config.with_overrides(["attack.steps=20", "eps=16/255"])``.

        Milestones and snapshots move along with ``epochs`` where these alone are changed: a schedule keeps its shape.
        """
        return self._overridden(self.to_dict(), overrides)

    @classmethod
    def _overridden(cls, settings: Any, overrides: Sequence[str]) -> Config:
        if not isinstance(settings, Mapping):
            raise ConfigError(f"a configuration is a mapping of settings, got {shown(settings)}; write key: value")
        changed, problems = overridden(settings, overrides, _IN_PARTS)
        before, now = (given.get("epochs", cls.epochs) for given in (settings, changed))
        moved = {"milestones": lambda at: round(at, 4), "snapshots": lambda at: max(1, round(at))}
        for name, rounded in moved.items() if now != before else ():
            places = changed.get(name)
            if places and places is settings.get(name):  # not set by an override
                with suppress(TypeError, ValueError, ZeroDivisionError):  # told with the rest
                    changed[name] = list(dict.fromkeys(rounded(place * now / before) for place in places))
        found = [p if isinstance(p, Problem) else Problem(code="unnamed", message=p) for p in problems]
        return from_mapping(cls, changed, found)


#: Settings whose parts can be set one by one, as ``attack.steps=20``, with their defaults.
_IN_PARTS: dict[str, Any] = {
    "norm_options": {},
    "regularizer": {},
    "second_pass": {},
    **{f.name: to_json(f.default) for f in fields(Config) if isinstance(f.default, Named | AttackConfig)},
}


def _warmed(epochs: int, epoch: int | None) -> tuple[int, int]:
    """Which part of the full strength an epoch has, as a fraction."""
    return (1, 1) if epoch is None or epoch >= epochs else (epoch + 1, epochs + 1)


@lru_cache(maxsize=256)
def _norms_of(spec: str) -> tuple[bool, bool]:
    """Whether the norms of a network have parameters, and batch statistics; it is built without memory.

    Errors are not kept: a model that is registered later is found.
    """
    model, norm, norm_options = json.loads(spec)
    name = model.pop("name")
    if isinstance(means := model.get("mean"), list):  # of channels that the data will say
        model["in_channels"] = len(means)
    with torch.device("meta"):
        network = create_model(name, norm=norm, norm_options=norm_options, **model)
    norms = [module for module in network.modules() if isinstance(module, RoutedNorm)]
    return (
        any(True for module in norms for _ in module.parameters()),
        any(module.plan.statistics == "batch" for module in norms),
    )


def explain(config: Config) -> list[tuple[str, Any, bool]]:
    """Every setting as ``(key, value, is_default)``; parts have dotted keys, as overrides do."""
    defaults = _rows(Config())
    for label, registry in (("objective", OBJECTIVES), ("regularizer", REGULARIZERS), ("second_pass", SECOND_PASSES)):
        if (named := getattr(config, label)) is not None:
            for name, parameter in registry.get(named.name).options().items():
                if label != "objective" or name not in _NOT_OBJECTIVE_OPTIONS:
                    defaults[f"{label}.{name}"] = parameter.default
    rows = {**defaults, **_rows(config)}
    order = [f.name for f in fields(config)]
    return [
        (key, rows[key], key in defaults and defaults[key] == rows[key])
        for key in sorted(rows, key=lambda key: order.index(key.partition(".")[0]))
    ]


def _rows(config: Config) -> dict[str, Any]:
    rows = {}
    for key, value in config.to_dict().items():
        if not isinstance(value, dict):
            rows[key] = value
            continue
        if "name" in value:
            rows[key] = value.pop("name")
        rows |= {f"{key}.{part}": item for part, item in value.items()}
    return rows


# -- files -------------------------------------------------------------------------------------------------------------


def load_config(source: str | Path, overrides: Sequence[str] = ()) -> Config:
    """A configuration from a ``.yaml``, ``.yml``, ``.json`` or ``.py`` file, with ``key=value`` overrides.

    A Python file is run; it defines ``config``, a :class:`Config` or a function that returns one.
    """
    path = Path(source)
    readers = {".yaml": read_yaml, ".yml": read_yaml, ".json": read_json_file, ".py": read_python}
    if path.suffix not in readers:
        raise ConfigError(f"{path}: a configuration is a file that ends in {', '.join(readers)}")
    try:
        return Config._overridden(readers[path.suffix](path), overrides)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error.__cause__


def read_python(path: Path) -> dict[str, Any]:
    text_of(path)  # a missing file is told as for the other kinds
    try:
        config = runpy.run_path(str(path)).get("config")
        config = config() if callable(config) else config
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"running it raised {type(error).__name__}: {error}") from error
    if not isinstance(config, Config):
        raise ConfigError(f"must define config, a Config or a function that returns one; found {shown(config)}")
    return config.to_dict()
