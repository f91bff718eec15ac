"""The plan of an evaluation: validated by one forward of a few images, before any long computation."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TypedDict

import torch
from torch import Tensor, nn

from advnorm._core.devices import resolve_device
from advnorm._core.errors import ConfigError, Description, Problem, collect_problems, raise_problems, unknown_name
from advnorm._core.provenance import environment
from advnorm._core.records import digest, model_fingerprint, writable_problems
from advnorm._core.settings import Seed, Setting, convert
from advnorm._core.tensors import meta_problems
from advnorm.attacks import input_gradient
from advnorm.attacks.inputs import model_failure, validate_batch, validating_first_logits
from advnorm.data import FolderData, ImageData
from advnorm.data.gather import gather_spread
from advnorm.evaluation.jobs import AttackJob, Attacks, build_jobs
from advnorm.evaluation.model_branches import branches, same_branch
from advnorm.evaluation.reference_logits import ReferenceLogits
from advnorm.evaluation.results import DEFAULT_ROUTE
from advnorm.evaluation.strict_forward import StrictForward
from advnorm.norms import MODES, Mode, domains, mixture_norms, routed_modules
from advnorm.threat import ThreatModel

#: Default batch size by device; it is halved when memory runs out.
BATCH_SIZES = {"cpu": 128, "cuda": 512}
Routes = str | Sequence[str | None] | None
Count = Annotated[int | None, Setting("Number of images.", "[1, inf)")]
#: Number of images of the forward that validates a model.
PROBE_IMAGES = 4


class EvaluationOptions(TypedDict, total=False):
    """Options of every evaluation."""

    batch_size: int | None  #: By default that of the device; halved when memory runs out.
    device: str | torch.device | None  #: By default that of the model.
    seed: int
    limit: int | None  #: Number of images, spread evenly over the data.
    statistics: Mode  #: ``"batch_frozen"`` uses batch statistics at test time.
    record: Path | str | None  #: JSON file: a finished record is read back, ``<record>.partial`` is resumed.
    about: Mapping[str, Any] | None  #: Origin of the model as plain data, for the record.


@dataclass(frozen=True, kw_only=True, eq=False)
class EvaluationPlan:
    """A model, data and attack jobs that passed all checks."""

    model: nn.Module
    images: Tensor
    labels: Tensor
    index: Tensor  # rows of the images in their data set
    threat: ThreatModel
    jobs: tuple[AttackJob, ...]
    routes: tuple[str | None, ...]
    device: torch.device
    batch_size: int
    seed: int
    statistics: Mode
    record: Path | str | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def forward(self) -> StrictForward:
        return StrictForward(model=self.model, device=self.device, statistics=self.statistics, seed=self.seed)

    @cached_property
    def fingerprint(self) -> str:
        """Identifies images, labels, parameters, statistics and scopes in a partial record."""
        batch_size = self.batch_size if self.statistics != "running" else None
        conditions = (self.statistics, batch_size, self.seed, self.scopes)
        return digest(self.images, self.labels, self.index, *conditions, model_fingerprint(self.model))

    @cached_property
    def references(self) -> dict[str, ReferenceLogits]:
        """Logits of the first images, by the names of the routes in records."""
        forward, images = self.forward, self.images
        return {route or DEFAULT_ROUTE: ReferenceLogits.compute(forward, route, images) for route in self.routes}

    def with_surrogate(self, surrogate: nn.Module) -> EvaluationPlan:
        """Return the plan of computing attacks on a surrogate."""
        routes = tuple(dict.fromkeys(same_branch(surrogate, route) for route in self.routes))
        return replace(self, model=surrogate, routes=routes, statistics="running", jobs=())

    @property
    def scopes(self) -> dict[str, str]:
        """Route, pair and component of the caller's scopes around the evaluation."""
        found: dict[str, str] = {}
        for module in routed_modules(self.model).values():
            state = module.state
            route = ", ".join(domain if count is None else f"{domain}: {count}" for domain, count in state.route or ())
            texts = {"route": route, "pair": " with affine of ".join(state.pair or ()), "component": state.component}
            found |= {name: text for name, text in texts.items() if text}
        return found

    def conditions(self) -> dict[str, Any]:
        """Return the conditions of the numbers, for a record."""
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
                "fingerprint": model_fingerprint(model),
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


def plan_evaluation(
    model: nn.Module,
    data: Any,
    threat: ThreatModel,
    attacks: Attacks,
    route: Routes = None,
    *,
    batch_size: int | None = None,
    device: str | torch.device | None = None,
    seed: int = 0,
    limit: int | None = None,
    any_threat: bool = False,
    statistics: Mode = "running",
    record: Path | str | None = None,
    surrogate: nn.Module | None = None,
    gradients: bool = True,
    about: Mapping[str, Any] | None = None,
) -> EvaluationPlan:
    """Validate everything with one small forward per route; all problems come in one error.

    ``any_threat``: attacks may have threat models of their own. ``surrogate``: another model on which attacks will be
    computed. ``gradients``: reject attacks that need gradients on a model without gradients.
    """
    problems = type_problems(model=(model, nn.Module), threat=(threat, ThreatModel))
    problems += statistics_problems(statistics) + _about_problems(about)
    for name, (kind, value) in {"route": (Routes, route), "seed": (Seed, seed)}.items():
        with collect_problems(problems):
            convert(name, kind, value)
    raise_problems(problems, "bad evaluation")
    for name, count in {"batch_size": batch_size, "limit": limit}.items():
        with collect_problems(problems):
            convert(name, Count, count)
    problems += [] if record is None else writable_problems(record)
    most = PROBE_IMAGES if any(problem.field == "limit" for problem in problems) else limit
    routes = tuple(dict.fromkeys([route] if route is None or isinstance(route, str) else route)) or (None,)
    jobs, found = build_jobs(attacks, threat, routes, seed=seed, statistics=statistics, any_threat=any_threat)
    problems += found
    plan = None
    with collect_problems(problems):
        found_device = model_device(model, device)
        images, labels, index = gather_spread(data, most)
        validate_batch(images, labels)
        if statistics != "running" and 1 in (batch_size, len(images)):
            message = "batch statistics need batches of at least two images"
            raise ConfigError("conflict", message, field="statistics", hint="use statistics='running'")
        origin = {"data": f"{data.name}, {data.split}"} if isinstance(data, ImageData | FolderData) else {}
        plan = EvaluationPlan(
            model=model,
            images=images,
            labels=labels,
            index=index,
            threat=threat,
            jobs=tuple(jobs),
            routes=routes,
            device=found_device,
            batch_size=batch_size or BATCH_SIZES.get(found_device.type, 128),
            seed=seed,
            statistics=statistics,
            record=record,
            about={**origin, **(about or {})},
        )
        problems += _probe(plan, gradients=gradients)
        if surrogate is not None:
            problems += _surrogate_problems(plan, surrogate)
    raise_problems(problems, "bad evaluation")
    assert plan is not None
    return plan


def type_problems(**arguments: tuple[object, Any]) -> list[Problem]:
    """Return a problem for each argument that is not of its type."""
    return [
        Problem(
            code="wrong_type",
            message=f"{{field}} must be of type {getattr(kind, '__name__', kind)}",
            field=name,
            got=Description(type(value).__name__),
        )
        for name, (value, kind) in arguments.items()
        if not isinstance(value, kind)
    ]


def statistics_problems(statistics: object) -> list[Problem]:
    """Return the problem of an unknown statistics mode."""
    return [] if statistics in MODES else [unknown_name("statistics mode", statistics, MODES, "statistics")]


def _about_problems(about: Mapping[str, Any] | None) -> list[Problem]:
    """Return the problem of an ``about`` that JSON cannot hold: writing the record would fail after hours."""
    try:
        json.dumps({**(about or {})}, allow_nan=False)
    except (TypeError, ValueError) as error:
        return [Problem("wrong_type", f"{{field}} must be a mapping of plain data for JSON ({error})", "about")]
    return []


def model_device(model: nn.Module, device: str | torch.device | None) -> torch.device:
    """Return the device of a model's tensors; raise if ``device`` is another one."""
    raise_problems(meta_problems(model))
    found = next((tensor.device for tensor in [*model.parameters(), *model.buffers()]), None)
    if device is None:
        return found or torch.device("cpu")
    wanted = resolve_device(device)
    if found is None:
        return wanted
    if wanted.type != found.type or torch.device(device).index not in (None, found.index):
        message = f"the model is on {found} and device is {wanted}"
        raise ConfigError("conflict", message, field="device", hint=f"move it: model.to('{wanted}')")
    return found


# -- one forward of a few images ---------------------------------------------------------------------------------------


def _probe(plan: EvaluationPlan, *, gradients: bool = True) -> list[Problem]:
    """Run a forward through each route and return the problems.

    ``gradients``: report attacks that need gradients if the model has none; without jobs, report missing gradients.
    """
    found = [(route, problem) for route in plan.routes for problem in _route_problems(plan, route, gradients)]
    every = [problem for _, problem in found]
    problems: list[Problem] = []
    for route, problem in found:
        if len(plan.routes) > 1 and every.count(problem) == 1 and problem.field != "route":
            problem = replace(problem, message=f"{problem.message} through route {route!r}")
        if problem not in problems:
            problems.append(problem)
    return problems


def _route_problems(plan: EvaluationPlan, route: str | None, gradients: bool) -> list[Problem]:
    known = domains(plan.model)
    if route in known and mixture_norms(plan.model) and not branches(plan.model):
        message = "the norms weight their statistics by the input, and a route changes nothing at test time"
        hint = f"omit route, or evaluate one Gaussian inside `with advnorm.mixture_component(model, {known[-1]!r}):`"
        return [Problem(code="not_supported", message=message, field="route", hint=hint)]
    jobs = [job for job in plan.jobs if job.route == route]
    by_gradients = [job.name for job in jobs if job.attack.needs_gradients]
    gradients = gradients and (bool(by_gradients) or not jobs)
    x = plan.images[:PROBE_IMAGES].to(plan.device).clone().requires_grad_(gradients)
    problems: list[Problem] = []
    missing: list[Problem] = []
    try:
        with collect_problems(problems), plan.forward.differentiable(route) as predict:
            with torch.set_grad_enabled(gradients):
                logits = validating_first_logits(predict, int(plan.labels.max()))(x)
            for job in jobs:
                unfit = job.attack.input_problems(tuple(x.shape[1:]), logits.shape[1])
                problems += _attack_problems(job.name, unfit)
            with collect_problems(missing):
                if gradients:
                    input_gradient(logits.sum(1), x)
    except Exception as error:
        return [model_failure(x, error)]
    return problems + _attack_problems(", ".join(by_gradients) or "attacks", missing)


def _attack_problems(names: str, problems: Sequence[Problem]) -> list[Problem]:
    """Return problems that concern the attacks with these names."""
    texts = [f"{names}: {problem.message.replace('{field}', problem.field)}" for problem in problems]
    return [replace(problem, message=text, field="attacks") for problem, text in zip(problems, texts)]


def _surrogate_problems(plan: EvaluationPlan, surrogate: nn.Module) -> list[Problem]:
    problems: list[Problem] = []
    known = branches(surrogate)
    with collect_problems(problems, "surrogate"):
        model_device(surrogate, plan.device)
        if known and not set(plan.routes) <= set(known):
            hint = f"give one of them: advnorm.strip(surrogate, route={known[-1]!r})"
            raise ConfigError("missing_route", f"it has the branches {', '.join(known)}", hint=hint)
        raise_problems(_probe(plan.with_surrogate(surrogate)))
    return problems
