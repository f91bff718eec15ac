"""A checked evaluation and its run: everything that can be wrong is found before any long work."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import advnorm.attacks as attack_names
from advnorm._core.errors import AdvnormError, ConfigError, did_you_mean, raise_all
from advnorm._core.locks import exclusive
from advnorm._core.progress import show_progress
from advnorm._core.provenance import environment
from advnorm._core.records import digest, model_fingerprint, writable_problems, write_json, writing
from advnorm.attacks import Attack, attacked, input_gradient
from advnorm.attacks.base import check_images, parse_name
from advnorm.data import FolderData, ImageData
from advnorm.evaluation.data_source import gather, gather_spread
from advnorm.evaluation.partial_record import (
    Partial,
    finished,
    partial_path,
)
from advnorm.evaluation.results import BenchmarkResult
from advnorm.evaluation.runner import First, Job, Runner
from advnorm.norms import MODES, Mode, RoutedModule, domains, frozen_mode, mixture_norms, routed_modules
from advnorm.threat import ThreatModel

#: Attacks by name, as instances, or instances under a name of the caller's.
Attacks = str | Attack | Sequence[str | Attack] | Mapping[str, Attack]
#: How a model without a given route is called in tables and records.
AS_CALLED = "as called"
#: Images at a time where the caller does not say; halved when memory runs out.
BATCH_SIZES = {"cpu": 128, "cuda": 512}
#: Images of the first forward, which finds what is wrong with a model before any long work.
PROBE = 4


def prepare(
    model: nn.Module,
    data: Any,
    threat: ThreatModel,
    attacks: Attacks,
    route: str | Sequence[str | None] | None = None,
    *,
    batch_size: int | None = None,
    device: str | torch.device | None = None,
    seed: int = 0,
    limit: int | None = None,
    any_threat: bool = False,
    spread: bool = False,
    statistics: Mode = "running",
    record: Path | str | None = None,
    surrogate: nn.Module | None = None,
    gradients: bool = True,
    about: Mapping[str, Any] | None = None,
) -> Case:
    """Check everything with one small forward per route; all that is wrong in one error.

    ``any_threat``: attacks may have threat models of their own. ``spread``: take ``limit`` images evenly from all data.
    ``surrogate``: another model that attacks will be computed on. ``gradients``: refuse attacks by gradients on a model
    without.
    """
    problems: list[Any] = [] if record is None else [*writable_problems(record)]
    about = about or {}
    try:
        json.dumps({**about}, allow_nan=False)
    except (TypeError, ValueError) as error:
        problems.append(f"about must be a mapping of plain data, for JSON: {error}")
        about = {}
    if not isinstance(model, nn.Module):
        problems.append(f"the model must be an nn.Module, got {type(model).__name__}; wrap a function in a module")
    if not isinstance(threat, ThreatModel):
        problems.append(f"threat must be a ThreatModel such as ThreatModel(eps='8/255'), got {threat!r}")
    for label, value in (("batch_size", batch_size), ("limit", limit)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            problems.append(f"{label} must be an integer of at least 1 or None, got {value!r}")
    routes = [route] if route is None or isinstance(route, str) or not isinstance(route, Iterable) else [*route]
    if strange := [name for name in routes if not (name is None or isinstance(name, str))]:
        problems.append(
            f"a route is the name of a branch, got {strange[0]!r}; leave it out for a model without branches"
        )
    elif not routes:
        problems.append("no route given; name branches, or leave route out for a model without")
    routes = list(dict.fromkeys(name for name in routes if name is None or isinstance(name, str)))
    if bad := statistics_problems(statistics):
        problems, statistics = [*problems, *bad], "running"
    jobs, bad = _jobs(attacks, threat, routes, seed, any_threat, statistics)
    problems += bad
    images = labels = index = None
    try:
        most = limit if limit is None or (isinstance(limit, int) and limit > 0) else PROBE
        if spread:
            images, labels, index = gather_spread(data, most)
        else:
            images, labels = gather(data, most)
            index = torch.arange(len(images))
        check_images(images, labels)
    except AdvnormError as error:
        problems.append(str(error))
        images = None
    alone = statistics != "running" and (batch_size == 1 or (images is not None and len(images) == 1))
    if alone:
        problems.append(
            "statistics of the batch need two images or more at a time; give more images and a larger batch_size, or "
            "use statistics='running'"
        )
    if isinstance(model, nn.Module):
        place, bad = _place(model, device)
        problems += bad
        if images is not None and labels is not None and not bad and not alone:
            few, classes = images[:PROBE].to(place), int(labels.max()) + 1
            of_route = {name: [job for job in jobs if job.route == name] for name in routes}
            problems += _once(
                {name: _probe(model, name, few, classes, statistics, of_route[name], gradients) for name in routes}
            )
            problems += _surrogate_problems(surrogate, routes, few, classes)
    raise_all(list(dict.fromkeys(problems)), "bad evaluation")
    assert images is not None and labels is not None and index is not None
    return Case(
        model=model,
        images=images,
        labels=labels,
        index=index,
        threat=threat,
        jobs=tuple(jobs),
        routes=tuple(routes),
        device=place,
        batch_size=batch_size or BATCH_SIZES.get(place.type, 128),
        seed=seed,
        statistics=statistics,
        record=record,
        about={**({"data": f"{data.name}, {data.split}"} if isinstance(data, ImageData | FolderData) else {}), **about},
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """A model, data and attacks that passed all checks."""

    model: nn.Module
    images: Tensor
    labels: Tensor
    index: Tensor
    threat: ThreatModel
    jobs: tuple[Job, ...]
    routes: tuple[str | None, ...]
    device: torch.device
    batch_size: int
    seed: int
    statistics: Mode
    record: Path | str | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    def run(self, *, progress: bool = False) -> BenchmarkResult:
        """Work through the jobs; with a record continue where an earlier run was killed."""
        jobs = [(job.name, job.key) for job in self.jobs]
        fingerprint = digest(self.fingerprint, self.threat, self.routes, jobs)
        done = finished(self.record, fingerprint, self.known_by)
        if done is not None:
            return BenchmarkResult.of_record(done)
        with exclusive(self.record):
            return self._work(fingerprint, progress)

    def _work(self, fingerprint: str, progress: bool) -> BenchmarkResult:
        path = None if self.record is None else partial_path(self.record)
        partial = Partial(path, self.fingerprint, self.known_by)
        with show_progress(progress) as display:
            runner = Runner(self, partial, display)
            clean = {route: runner.clean(route) for route in self.routes}
            for route in self.routes:
                runner.look(route)
            if mixing := {module.plan.name for module in mixing_norms(self.model).values()}:
                partial.warn(
                    "choice",
                    f"input-dependent: {', '.join(sorted(mixing))} weighs its statistics by the input, and the attacks "
                    "went through this choice; judge one Gaussian alone inside "
                    "`with advnorm.mixture_component(model, 'adv'):`",
                )
            robust: dict[str, dict[str, Tensor]] = {route or AS_CALLED: {} for route in self.routes}
            for job in self.jobs:
                robust[job.route or AS_CALLED][job.name] = runner.robust(job, among=clean[job.route])
        stages: dict[str, dict[str, dict[str, float]]] = {}  # of cascades: accuracy after each attack
        for job in self.jobs:
            if (found := partial.stages(job.key)) is not None:
                stages.setdefault(job.route or AS_CALLED, {})[job.name] = found
        result = BenchmarkResult(
            threat=self.threat,
            attacks={job.name: repr(dataclasses.replace(job.attack, route=None)) for job in self.jobs},
            clean={route or AS_CALLED: verdicts for route, verdicts in clean.items()},
            robust=robust,
            seconds={
                route or AS_CALLED: {job.name: partial.seconds(job.key) for job in self.jobs if job.route == route}
                for route in self.routes
            },
            conditions={
                **self.conditions(),
                "fingerprint": fingerprint,
                "logits": {name: first.written() for name, first in self.known_by.items()},
                "stages": stages,
            },
            warnings=partial.warnings(),
        )
        if self.record is not None:
            with writing(self.record, result):
                write_json(self.record, result.record())
                partial.remove()
        return result

    @cached_property
    def fingerprint(self) -> str:
        """What a partial result belongs to: the images, the labels, the model's parameters, statistics and scopes."""
        by_batch = self.batch_size if self.statistics != "running" else None
        conditions = (self.statistics, by_batch, self.seed, self.scopes)
        return digest(self.images, self.labels, self.index, *conditions, model_fingerprint(self.model))

    @cached_property
    def first(self) -> dict[str | None, First]:
        """What the model says of the first images, by route."""
        return {route: First.of(self, route) for route in self.routes}

    @property
    def known_by(self) -> dict[str, First]:
        """What tells a model from another one of the same structure and tensors, for a record."""
        return {route or AS_CALLED: first for route, first in self.first.items()}

    @property
    def least(self) -> int:
        """Images of the smallest batch: a norm may see one value per channel of an image, which has no statistics."""
        return 1 if self.statistics == "running" else 2

    @property
    def scopes(self) -> dict[str, str]:
        """What the caller's scopes say of a model that is judged as it is called."""
        found: dict[str, str] = {}
        for module in routed_modules(self.model).values():
            state = module.state
            route = ", ".join(domain if count is None else f"{domain}: {count}" for domain, count in state.route or ())
            told = {"route": route, "pair": " with affine of ".join(state.pair or ()), "component": state.component}
            found |= {name: text for name, text in told.items() if text}
        return found

    def conditions(self) -> dict[str, Any]:
        """What the numbers hold under."""
        model = self.model
        plans = {module.plan.name for module in routed_modules(model).values()}
        kinds = {type(module).__name__ for module in model.modules()}
        built_in = {kind for kind in kinds if re.search(r"(Batch|Layer|Group|Instance|RMS)Norm", kind)}
        return {
            "seed": self.seed,
            "batch_size": self.batch_size,
            "statistics": self.statistics,
            "scopes": self.scopes,
            "model": {
                "class": type(model).__name__,
                "parameters": sum(p.numel() for p in model.parameters()),
                "norms": sorted(plans | built_in),
                "domains": list(domains(model)),
                "dtypes": sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()}),
            },
            "precision": "float32, TF32 and autocast off",
            "image_shape": list(self.images.shape[1:]),
            **environment(self.device),
            "about": dict(self.about),
        }


def statistics_problems(statistics: object) -> list[str]:
    """What is wrong with the name of a statistics mode."""
    known = statistics in MODES
    return [] if known else [f"unknown statistics mode {statistics!r}{did_you_mean(statistics, MODES)}"]


def _jobs(
    attacks: Attacks, threat: ThreatModel, routes: Sequence[str | None], seed: int, any_threat: bool, statistics: Mode
) -> tuple[list[Job], list[str]]:
    named: dict[str, str | Attack] = {}
    if isinstance(attacks, Mapping):
        named = dict(attacks)
    else:
        attacks = [attacks] if isinstance(attacks, str | Attack) or not isinstance(attacks, Iterable) else [*attacks]
        spoken = {attack for attack in attacks if isinstance(attack, str)}
        for attack in attacks:
            named[attack if isinstance(attack, str) else _label(attack, spoken | set(named))] = attack
    jobs, problems = [], []
    if not named:
        problems.append("no attack given; name some, for example attacks=('pgd10', 'autoattack')")
    for name, attack in named.items():
        if name in ("clean", "union"):
            problems.append(f"an attack cannot be called {name!r}, which is a column of the result")
        try:
            if isinstance(attack, str):
                if not isinstance(threat, ThreatModel):
                    parse_name(attack)
                    continue
                attack = attack_names.get(attack, threat=threat, seed=seed, statistics=frozen_mode(statistics))
            elif not isinstance(attack, Attack):
                problems.append(f"an attack is a name or an Attack, got {attack!r}")
                continue
            elif not any_threat and attack.threat != threat:
                problems.append(f"attack {name!r} has the threat model {attack.threat}, the evaluation {threat}")
        except AdvnormError as error:
            problems.append(str(error))
            continue
        attack = dataclasses.replace(attack, statistics=frozen_mode(attack.statistics))
        for route in routes:
            chosen = attack if attack.route is not None else dataclasses.replace(attack, route=route)
            jobs.append(Job(name=name, attack=chosen, route=route))
    return jobs, problems


def _label(attack: Attack, taken: Collection[str]) -> str:
    label = type(attack).__name__.lower() + str(getattr(attack, "steps", ""))
    return next(name for name in (label, *(f"{label} ({n})" for n in range(2, len(taken) + 3))) if name not in taken)


def _place(model: nn.Module, device: str | torch.device | None) -> tuple[torch.device, list[str]]:
    found = next((tensor.device for tensor in [*model.parameters(), *model.buffers()]), None)
    try:
        wanted = None if device is None else torch.device(device)
    except RuntimeError:
        return torch.device("cpu"), [f"unknown device {device!r}; use 'cpu' or 'cuda'"]
    if wanted is not None and wanted.type == "cuda" and not torch.cuda.is_available():
        return wanted, ["no CUDA device here; leave device out or use device='cpu'"]
    if found is None or wanted is None:
        return wanted or found or torch.device("cpu"), []
    if wanted.type != found.type or (wanted.index is not None and wanted.index != found.index):
        return found, [f"the model is on {found} and device is {wanted}; move it with model.to('{wanted}')"]
    return found, []


def _probe(
    model: nn.Module,
    route: str | None,
    x: Tensor,
    classes: int,
    statistics: Mode,
    jobs: Sequence[Job] = (),
    gradients: bool = False,
) -> str | None:
    """What is wrong with a model, by one forward of a few images; the labels need so many classes.

    And which of the attacks do not go with it; with ``gradients``, those that need some where there are none, or
    that there are none where no attack is given.
    """
    if route in domains(model) and mixture_norms(model) and not branches(model):
        return (
            "the norms weigh their statistics by the input, and a route changes nothing at test time; leave route out, "
            f"or judge one Gaussian inside `with advnorm.mixture_component(model, {domains(model)[-1]!r}):`"
        )
    through = f"through route {route!r} " if route else ""
    climbing = [job.name for job in jobs if job.attack.by_gradients]
    gradients = gradients and (bool(climbing) or not jobs)
    points, stopped = x.clone().requires_grad_(gradients), ""
    try:
        with attacked(model, route=route, statistics=frozen_mode(statistics)) as predict:
            with torch.set_grad_enabled(gradients):
                logits = predict(points)
            try:
                if gradients:
                    input_gradient(logits.sum(1), points)
            except ConfigError as error:
                stopped = str(error)
    except AdvnormError as error:
        return str(error)
    except Exception as error:
        return (
            f"the model fails {through}on images of shape {tuple(x.shape)}: {type(error).__name__}: {error}; "
            "images are (N, channels, height, width) in [0, 1]"
        )
    if bool(logits.isnan().any()):
        return f"the model returns NaN logits {through}".rstrip() + "; check its weights and statistics"
    if classes > logits.shape[1]:
        return f"labels go up to {classes - 1} and the model has {logits.shape[1]} classes; labels count from 0"
    shape = tuple(x.shape[1:])
    problems = [f"{job.name}: {text}" for job in jobs for text in job.attack.misfits(shape, logits.shape[1])]
    problems += [f"{', '.join(climbing) or 'attacks'}: {stopped}"] if stopped else []
    return "; ".join(problems) or None


def _once(found: Mapping[str | None, str | None]) -> list[str]:
    """What is wrong by route; what several routes have in common once, and without their names."""
    common: dict[str, list[str]] = {}
    for route, text in found.items():
        if text:
            common.setdefault(text.replace(f" through route {route!r}", ""), []).append(text)
    return [texts[0] if len(texts) == 1 else shared for shared, texts in common.items()]


def _surrogate_problems(
    surrogate: nn.Module | None, routes: Sequence[str | None], x: Tensor, classes: int
) -> list[str]:
    """What keeps attacks from being computed on a surrogate."""
    if surrogate is None:
        return []
    _, problems = _place(surrogate, x.device)
    known = branches(surrogate)
    if known and not set(routes) <= set(known):
        problems.append(
            f"it has the branches {', '.join(known)}; give one of them: advnorm.strip(surrogate, route={known[-1]!r})"
        )
    found: dict[str | None, str | None] = {}
    for route in () if problems else dict.fromkeys(same_branch(surrogate, route) for route in routes):
        found[route] = _probe(surrogate, route, x, classes, "running", gradients=True)
    return [f"the surrogate: {problem}" for problem in [*problems, *_once(found)]]


def same_branch(model: nn.Module, route: str | None) -> str | None:
    """The branch of another model that goes by the same name; None where it has none."""
    return route if route in branches(model) else None


def branches(model: nn.Module) -> tuple[str, ...]:
    """The domains that a model's norms treat differently at test time, so that a forward needs a route."""
    plans: Iterable[Any] = (module.plan for module in routed_modules(model).values())
    return tuple(dict.fromkeys(d for plan in plans if plan.routed and not plan.mixture for d in plan.domains))


def mixing_norms(model: nn.Module) -> dict[str, RoutedModule]:
    """The norms that weigh their statistics by the input, unless an enclosing scope fixes a component."""
    return {name: module for name, module in mixture_norms(model).items() if module.state.component is None}
