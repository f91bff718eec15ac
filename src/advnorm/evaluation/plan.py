"""The plan of an evaluation: validated before any long computation."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from advnorm._core.errors import Description, Problem, collect_problems, raise_problems, unknown_name
from advnorm._core.provenance import environment
from advnorm._core.records import digest, model_fingerprint, writable_problems
from advnorm.attacks.inputs import validate_batch
from advnorm.data import FolderData, ImageData
from advnorm.evaluation.data_source import gather, gather_spread
from advnorm.evaluation.jobs import AttackJob, Attacks, build_jobs
from advnorm.evaluation.probe import PROBE_IMAGES, model_device, probe_model, probe_surrogate
from advnorm.evaluation.reference_logits import ReferenceLogits
from advnorm.evaluation.results import DEFAULT_ROUTE
from advnorm.evaluation.strict_forward import StrictForward
from advnorm.norms import MODES, Mode, domains, routed_modules
from advnorm.threat import ThreatModel

#: Default batch size by device; it is halved when memory runs out.
BATCH_SIZES = {"cpu": 128, "cuda": 512}


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
    def reference_logits(self) -> dict[str | None, ReferenceLogits]:
        """Logits of the first images by route."""
        return {route: ReferenceLogits.compute(self.forward, route, self.images) for route in self.routes}

    @property
    def references(self) -> dict[str, ReferenceLogits]:
        """The reference logits by the names of the routes in records."""
        return {route or DEFAULT_ROUTE: logits for route, logits in self.reference_logits.items()}

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
) -> EvaluationPlan:
    """Validate everything with one small forward per route; all problems come in one error.

    ``any_threat``: attacks may have threat models of their own. ``spread``: take ``limit`` images evenly from all data.
    ``surrogate``: another model on which attacks will be computed. ``gradients``: reject attacks that need gradients on
    a model without gradients.
    """
    validate_model_and_threat(model, threat)
    problems = [*statistics_problems(statistics), *_count_problems(batch_size=batch_size, limit=limit)]
    problems += [] if record is None else writable_problems(record)
    problems += _about_problems(about)
    most = PROBE_IMAGES if any(problem.field == "limit" for problem in problems) else limit
    mode: Mode = statistics if statistics in MODES else "running"
    routes = list(dict.fromkeys([route] if route is None or isinstance(route, str) else route))
    if not routes:
        hint = "name branches, or leave route out"
        problems.append(Problem(code="empty", message="no route given", field="route", hint=hint))
    jobs, found = build_jobs(attacks, threat, routes, seed=seed, statistics=mode, any_threat=any_threat)
    problems += found
    images = labels = index = place = None
    with collect_problems(problems):
        if spread:
            x, y, index = gather_spread(data, most)
        else:
            x, y = gather(data, most)
            index = torch.arange(len(x))
        validate_batch(x, y)
        images, labels = x, y
    alone = mode != "running" and (batch_size == 1 or (images is not None and len(images) == 1))
    if alone:
        message = "batch statistics need batches of at least two images"
        hint = "give more images and a larger batch_size, or use statistics='running'"
        problems.append(Problem(code="conflict", message=message, field="statistics", hint=hint))
    with collect_problems(problems):
        place = model_device(model, device)
        if images is not None and labels is not None and not alone:
            few, classes = images[:PROBE_IMAGES].to(place), int(labels.max()) + 1
            problems += probe_model(model, routes, few, classes, mode, jobs, gradients=gradients)
            problems += probe_surrogate(surrogate, routes, few, classes)
    raise_problems(problems, "bad evaluation")
    assert images is not None and labels is not None and index is not None and place is not None
    name = {"data": f"{data.name}, {data.split}"} if isinstance(data, ImageData | FolderData) else {}
    return EvaluationPlan(
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
        statistics=mode,
        record=record,
        about={**name, **(about or {})},
    )


def validate_model_and_threat(model: object, threat: object) -> None:
    """Raise unless the types are right."""
    problems = []
    if not isinstance(model, nn.Module):
        got, hint = Description(type(model).__name__), "wrap a function in a module"
        message = "{field} must be an nn.Module"
        problems.append(Problem(code="wrong_type", message=message, field="model", got=got, hint=hint))
    if not isinstance(threat, ThreatModel):
        message = "{field} must be a ThreatModel such as ThreatModel(eps='8/255')"
        problems.append(Problem(code="wrong_type", message=message, field="threat", got=threat))
    raise_problems(problems, "bad evaluation")


def statistics_problems(statistics: object) -> list[Problem]:
    """Return the problem of an unknown statistics mode."""
    return [] if statistics in MODES else [unknown_name("statistics mode", statistics, MODES, "statistics")]


def _count_problems(**counts: int | None) -> list[Problem]:
    message = "{field} must be an integer of at least 1 or None"
    return [
        Problem(code="out_of_range", message=message, field=name, got=count)
        for name, count in counts.items()
        if count is not None and (not isinstance(count, int) or count < 1)
    ]


def _about_problems(about: Mapping[str, Any] | None) -> list[Problem]:
    """A record that cannot be written would otherwise fail after hours."""
    try:
        json.dumps({**(about or {})}, allow_nan=False)
    except (TypeError, ValueError) as error:
        message = f"{{field}} must be a mapping of plain data for JSON ({error})"
        return [Problem(code="wrong_type", message=message, field="about")]
    return []
