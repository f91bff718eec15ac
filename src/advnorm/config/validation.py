"""Problems of settings that depend on each other or on registries. Nothing is built, computed or changed here."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from advnorm._core.errors import NOTHING, AdvnormError, Problem, collect_problems, unknown_name
from advnorm._core.registry import Registry, keywords
from advnorm._core.settings import convert_options, in_range
from advnorm.attacks import PGD
from advnorm.attacks import get as get_attack
from advnorm.config.fields import TRAINING, TrainingSettings
from advnorm.data.registry import DATASETS, resolve_source
from advnorm.models.registry import MODELS
from advnorm.norms import RoutedNorm
from advnorm.norms.factory import make_plans
from advnorm.objectives import OBJECTIVES, REGULARIZERS, SECOND_PASSES
from advnorm.objectives.dual import clean_images
from advnorm.objectives.ligs import ATTACKS
from advnorm.objectives.second_pass import rows_of_second_pass
from advnorm.threat import ThreatModel

#: Settings whose options are converted to the types of the registered object's parameters.
WITH_OPTIONS: Mapping[str, Registry[Any]] = {
    "data": DATASETS,
    "objective": OBJECTIVES,
    "regularizer": REGULARIZERS,
    "second_pass": SECOND_PASSES,
}
#: Parameters of registered objects that are not options here, and where to set them.
ELSEWHERE: Mapping[str, Mapping[str, str]] = {
    "norm_options": {
        "sync": "use sync_statistics",
        "process_group": "the training sets it",
        "device": "the training sets it",
        "dtype": "use precision",
    },
    "model": {
        "norm": "norm is a setting of its own",
        "norm_options": "norm_options is a setting of its own",
        "num_classes": "the data set gives it",
        "in_channels": "the data set gives it",
    },
    "data": {
        "root": "name the folder where the training is started",
        "download": "ask for a download where the training is started",
    },
    "objective": {"label_smoothing": "label_smoothing is a setting of its own", "statistics": "use running_epochs"},
}


def option_parameters(label: str, name: str) -> Mapping[str, inspect.Parameter]:
    """The parameters that take the options of the setting ``label`` with this registered name."""
    if label == "data":
        return DATASETS.get(resolve_source(name)[0]).options
    return WITH_OPTIONS[label].get(name).options()


def is_known(label: str, name: str) -> bool:
    """Whether the setting ``label`` accepts this name; data may also be a folder or a file."""
    if label != "data":
        return name in WITH_OPTIONS[label]
    problems: list[Problem] = []
    with collect_problems(problems):
        resolve_source(name)
    return not problems


def setting_problems(settings: TrainingSettings, invalid: Iterable[str] = ()) -> list[Problem]:
    """List the problems of converted settings. An ``invalid`` setting is reported already and left out."""
    checks = _Checks(settings, set(invalid))
    checks.check_names()
    checks.check_model()
    checks.check_objective()
    checks.check_second_pass()
    checks.check_mix()
    checks.check_memory()
    checks.check_schedule()
    checks.check_effects()
    checks.check_validation_images()
    checks.check_attacks()
    return checks.problems


class _Checks:
    def __init__(self, settings: TrainingSettings, invalid: set[str]) -> None:
        self.settings, self.invalid = settings, invalid
        self.problems: list[Problem] = []

    def valid(self, *names: str) -> bool:
        return self.invalid.isdisjoint(names)

    def reject(self, field: str, message: str, hint: str = "", *, got: Any = NOTHING, code: str = "conflict") -> None:
        self.problems.append(Problem(code=code, message=message, field=field, got=got, hint=hint))

    def check_names(self) -> None:
        s = self.settings
        for label, registry in WITH_OPTIONS.items():
            named = getattr(s, label)
            if self.valid(label) and label == "data":
                with collect_problems(found := list[Problem]()):
                    resolve_source(named.name)
                self.problems += found
                self.invalid.update(problem.field for problem in found)
            elif self.valid(label) and named is not None and named.name not in registry:
                names = registry.suggestions(named.name) + (["none"] if label in ("regularizer", "second_pass") else [])
                self.problems.append(unknown_name(registry.kind, named.name, names, field=label))
                self.invalid.add(label)
        if self.valid("data") and "train" not in DATASETS.get(resolve_source(s.data.name)[0]).splits:
            trainable = ", ".join(name for name in DATASETS if "train" in DATASETS.get(name).splits)
            words = f"{s.data.name} has no training images"
            self.reject("data", words, f"use one of {trainable}", code="not_supported")
        if self.valid("name") and s.name is not None and not re.fullmatch(r"\w[\w.-]{0,99}", s.name, re.ASCII):
            words = "{field} becomes the name of a folder: at most 100 letters, digits, '_', '.' and '-'"
            self.reject("name", words, got=s.name, code="out_of_range")

    def check_model(self) -> None:
        s = self.settings
        if not self.valid("model", "norm", "norm_options"):
            return
        before = len(self.problems)
        with collect_problems(self.problems):
            spec = MODELS.get(s.model.name)
            self.problems += convert_options("model", spec.parameters, s.model.options, ELSEWHERE["model"])[1]
            if not spec.has_norm and s.norm != "none":
                self.reject("norm", f"{s.model.name} has no norms", "use norm='none'", got=s.norm)
        if s.norm_options.get("track_running_stats") is False:
            words = "attacks and validation need running statistics"
            self.reject("norm_options.track_running_stats", words, "leave it out")
        known = keywords(RoutedNorm)
        typed = {name: value for name, value in s.norm_options.items() if name in known}
        self.problems += convert_options("norm_options", known, typed, ELSEWHERE["norm_options"])[1]
        try:
            plans = make_plans(s.norm, s.norm_options).values()
        except AdvnormError as error:
            known_norm = error.problems[0].field != "norm"
            self.problems += (p.inside("norm_options") if known_norm else p for p in error.problems)
        else:
            if len(self.problems) == before:
                kinds = {plan.statistics for plan in plans}
                affine = kinds != {"none"} and s.norm_options.get("affine", True)
                self.check_norm(has_parameters=bool(affine), has_statistics="batch" in kinds)

    def check_norm(self, *, has_parameters: bool, has_statistics: bool) -> None:
        """Check settings that need parameters or batch statistics in the norms."""
        s = self.settings
        if self.valid("train_only", "weights") and s.train_only == "norms":
            if not has_parameters:
                self.reject("train_only", f"norm {s.norm!r} has no parameters to train", "use train_only='all'")
            elif s.weights is None:
                self.reject("train_only", "training only the norms starts from a trained network", "set weights")
        if has_statistics:
            return
        if self.valid("sync_statistics") and s.sync_statistics:
            words = f"norm {s.norm!r} has no batch statistics to synchronize"
            self.reject("sync_statistics", words, "use sync_statistics=False")
        if self.valid("second_pass") and s.second_pass is not None and s.second_pass.name in ("apart", "apart_sam"):
            words = f"norm {s.norm!r} has no batch statistics to perturb"
            self.reject("second_pass", words, "use second_pass=sam or another norm")
        if self.valid("running_epochs") and s.running_epochs > 0:
            self.reject("running_epochs", f"norm {s.norm!r} has no running statistics", "use running_epochs=0")

    def check_objective(self) -> None:
        s = self.settings
        if self.valid("objective", "norm", "norm_options"):
            statistics = s.attack.statistics if self.valid("attack") else "running"
            kind = OBJECTIVES.get(s.objective.name)
            found = kind.problems(s.norm, s.norm_options, attack_statistics=statistics, **s.objective.options)
            self.problems += (problem.inside("objective") for problem in found)

    def check_second_pass(self) -> None:
        s = self.settings
        for label in ("regularizer", "second_pass"):
            named = getattr(s, label)
            if self.valid(label) and named is not None:
                found = WITH_OPTIONS[label].get(named.name).option_problems(**named.options)
                self.problems += (problem.inside(label) for problem in found)
        if not self.valid("second_pass", "batch_size") or s.second_pass is None:
            return
        groups = s.second_pass.options.get("groups", 1)
        samples = s.second_pass.options.get("samples", 1.0)
        if isinstance(samples, int) and samples > s.batch_size:
            self.reject("second_pass.samples", f"{{field}} must be at most batch_size ({s.batch_size})", got=samples)
        if groups <= 1:
            return
        rows = rows_of_second_pass(s.batch_size, samples, groups)
        share = s.objective.options.get("clean_share", 1.0) if self.valid("objective") else 1.0
        clean = clean_images(rows, share) if rows else 0
        if not rows:
            words = f"{{field}} must be at most the number of images: {samples} of batch_size ({s.batch_size})"
            self.reject("second_pass.groups", words, got=groups)
        elif clean % groups:
            words = f"{{field}} must divide the number of clean images in the second pass ({clean})"
            hint = "change groups, samples, batch_size or objective.clean_share"
            self.reject("second_pass.groups", words, hint, got=groups)

    def check_mix(self) -> None:
        s = self.settings
        if not self.valid("mix", "objective") or s.mix == "none":
            return
        if self.valid("regularizer") and s.regularizer and s.regularizer.options.get("shift") in ATTACKS:
            words = f"{{field}}={s.mix!r} gives soft labels, but the regularizer's attack needs hard labels"
            self.reject("mix", words, "use regularizer.shift=gaussian or uniform")

    def check_memory(self) -> None:
        s = self.settings
        if self.valid("accumulate", "batch_size") and s.batch_size % s.accumulate:
            words = f"{{field}} must divide batch_size ({s.batch_size})"
            self.reject("accumulate", words, got=s.accumulate)
        if self.valid("accumulate", "second_pass") and s.accumulate > 1 and s.second_pass is not None:
            words = f"second_pass {s.second_pass.name} takes the whole batch at once"
            self.reject("accumulate", words, "use accumulate=1, or a smaller batch_size")
        if self.valid("recompute", "compile") and s.recompute and s.compile is True:
            self.reject("compile", "recompute=true runs without compilation", "use compile=false")
        if not self.valid("parallel") or s.parallel == "ddp":
            return
        for name in ("second_pass", "regularizer"):
            if self.valid(name) and getattr(s, name) is not None:
                self.reject(name, "{field} is not available with parallel=fsdp", "use parallel=ddp")
        for name in ("compile", "channels_last"):
            if self.valid(name) and getattr(s, name) is True:
                self.reject(name, f"parallel=fsdp needs {name}=false", "leave it out")

    def check_schedule(self) -> None:
        s = self.settings
        if self.valid("epochs"):
            warmups = ("warmup_epochs", "eps_warmup_epochs", "steps_warmup_epochs", "second_pass_warmup_epochs")
            for name in (*warmups, "running_epochs"):
                if self.valid(name) and getattr(s, name) > s.epochs:
                    words = f"{{field}} must be at most epochs ({s.epochs})"
                    self.reject(name, words, got=getattr(s, name), code="out_of_range")
            if self.valid("running_epochs", "weights") and s.running_epochs == s.epochs and not s.weights:
                words = "{field} leaves no epoch that estimates the statistics"
                self.reject("running_epochs", words, "make it smaller, or set weights")
            self.check_increasing("snapshots", f"[1, {s.epochs}]")
            self.check_increasing("milestones", f"(0, {s.epochs})")
        if self.valid("milestones", "schedule") and s.milestones and s.schedule != "step":
            self.reject("milestones", "{field} belong to schedule='step'", "leave either out", got=s.schedule)
        if self.valid("schedule", "warmup_epochs") and s.schedule == "one_cycle" and s.warmup_epochs:
            words = "schedule='one_cycle' has its own warm-up"
            self.reject("warmup_epochs", words, "use warmup_epochs=0, and peak_share for its length")
        if self.valid("nesterov", "momentum", "optimizer") and s.nesterov:
            if s.optimizer != "sgd":
                self.reject("nesterov", "{field} belongs to optimizer='sgd'", "leave either out", got=s.optimizer)
            elif not s.momentum:
                self.reject("nesterov", "{field} needs a momentum above 0", "set momentum, or use nesterov=False")

    def check_increasing(self, name: str, interval: str) -> None:
        if not self.valid(name):
            return
        values = getattr(self.settings, name)
        if not all(a < b for a, b in pairwise(values)) or not all(in_range(interval, value) for value in values):
            words = f"{{field}} must increase and lie in {interval}, in epochs"
            self.reject(name, words, got=list(values), code="out_of_range")

    def check_effects(self) -> None:
        """Reject changed settings without an effect: two runs would differ in name only."""
        s = self.settings
        needs = {
            "gamma": (("schedule", "milestones"), bool(s.milestones), "milestones, and so to schedule='step'"),
            "peak_share": (("schedule",), s.schedule == "one_cycle", "schedule='one_cycle'"),
            "mix_alpha": (("mix",), s.mix != "none", "mix='mixup' or 'cutmix'"),
            "second_pass_warmup_epochs": (("second_pass",), s.second_pass is not None, "a second_pass"),
            "monitor": (("validate_every",), bool(s.validate_every), "validate_every above 0"),
            "monitor_attack": (("monitor",), bool(s.monitor), "monitor above 0"),
        }
        for name, (others, used, owner) in needs.items():
            if self.valid(name, *others) and not used and getattr(s, name) != getattr(TrainingSettings, name):
                self.reject(name, f"{{field}} has an effect only with {owner}", f"set that too, or leave {name} out")

    def check_validation_images(self) -> None:
        s = self.settings
        if not self.valid("held_out"):
            return
        if isinstance(s.held_out, float) and s.held_out >= 1:
            words = "{field} must be a share below 1 or a whole number of images"
            self.reject("held_out", words, got=s.held_out, code="out_of_range")
        elif self.valid("validate_every") and s.validate_every and not s.held_out:
            words = "validation needs held-out images"
            self.reject("held_out", words, "set held_out, for example 0.1, or use validate_every=0")
        elif self.valid("validation_images") and (s.validation_images or 0) > s.held_out >= 1:
            words, hint = f"{{field}} must be at most held_out ({s.held_out})", "leave it out to use all"
            self.reject("validation_images", words, hint, got=s.validation_images)
        elif self.valid("monitor") and s.monitor > s.held_out >= 1:
            self.reject("monitor", f"{{field}} must be at most held_out ({s.held_out})", "use fewer", got=s.monitor)

    def check_attacks(self) -> None:
        s = self.settings
        # If eps has a problem, the attacks are checked against another one; L2 has no largest length.
        threat = ThreatModel(norm=s.threat if self.valid("threat") else "L2", eps="1/255")
        if self.valid("threat", "eps"):
            with collect_problems(self.problems):
                threat = ThreatModel(norm=s.threat, eps=s.eps)
        if self.valid("attack"):
            with collect_problems(self.problems, "attack"):
                attack = s.attack.build(threat)
                if self.valid("steps_warmup_epochs") and s.steps_warmup_epochs and not hasattr(attack, "steps"):
                    words = f"the attack {s.attack.name!r} has no steps to warm up"
                    self.reject("steps_warmup_epochs", words, "use steps_warmup_epochs=0")
                if isinstance(attack, PGD) and attack.precision is not None:
                    hint = "leave it out of the attack, and set the precision of the training"
                    self.reject("attack.precision", "{field} has no effect in a training", hint, got=attack.precision)
                if self.valid("objective"):
                    OBJECTIVES.get(s.objective.name).adapt_attack(attack)
        for name in ("validation_attack", "monitor_attack"):
            if self.valid(name) and getattr(s, name) != TRAINING:
                with collect_problems(self.problems, name):
                    get_attack(getattr(s, name), threat=threat)
