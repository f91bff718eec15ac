"""Clean and robust accuracy with all conditions, per attack and in the worst case, resumable after a kill."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Unpack

from torch import Tensor, nn

from advnorm._core.errors import raise_problems
from advnorm._core.records import digest
from advnorm.attacks import PGD, Attack
from advnorm.attacks.names import get as get_attack
from advnorm.evaluation.jobs import Attacks
from advnorm.evaluation.model_branches import mixing_norms
from advnorm.evaluation.plan import EvaluationOptions, EvaluationPlan, plan_evaluation, type_problems
from advnorm.evaluation.results import DEFAULT_ROUTE, BenchmarkResult, Curve
from advnorm.evaluation.runner import EvaluationRunner, run_or_load
from advnorm.norms import frozen_mode
from advnorm.threat import ThreatModel


def benchmark(
    model: nn.Module,
    data: Any,
    threat: ThreatModel,
    attacks: Attacks = ("pgd10", "autoattack"),
    route: str | Sequence[str | None] | None = None,
    *,
    progress: bool = False,
    **options: Unpack[EvaluationOptions],
) -> BenchmarkResult:
    """Measure clean accuracy, robust accuracy per attack, and the union over the attacks: the worst case per image.

    ``data``: images in [0, 1] and labels as two tensors, a data set, or a loader.
    ``attacks``: names such as ``"pgd20-restarts5"``, attacks, or a mapping from your names to attacks. An attack with a
    route of its own is computed through that branch and evaluated through ``route``.
    ``route``: one or several branches of a routed model. None is the default route: the model without a route, or
    inside your own scopes.
    The train or eval mode of the model has no effect, and every flag is restored. A float32 forward without TF32 and
    autocast decides. Noise belongs to the row of an image in the data, so the batch size has no effect.
    ``options``: ``batch_size``, ``device``, ``seed``, ``limit`` (images spread evenly over the data, as in
    :func:`audit`), ``statistics``, ``record`` and ``about`` of :class:`EvaluationOptions`. An interrupted run resumes
    from ``<record>.partial``.
    """
    return run_benchmark(plan_evaluation(model, data, threat, attacks, route, **options), progress=progress)


def accuracy_against_steps(
    model: nn.Module,
    data: Any,
    threat: ThreatModel,
    steps: int | Sequence[int] = (10, 20, 50, 100, 500, 2000),
    route: str | Sequence[str | None] | None = None,
    *,
    step_size: float | str | None = None,
    progress: bool = False,
    **options: Unpack[EvaluationOptions],
) -> Curve:
    """Measure robust accuracy under PGD of 10 to 2000 steps (paper E, fig. 2 and 3); it must level off.

    ``step_size``: by default 2.5·eps/steps; paper E uses 1/255 for all. Other options as in :func:`benchmark`.
    """
    steps = tuple(dict.fromkeys(steps if isinstance(steps, Iterable) else [steps]))
    built = {f"pgd{n}": PGD(threat=threat, steps=n, step_size=step_size, **_attack_settings(options)) for n in steps}
    result = benchmark(model, data, threat, built, route, progress=progress, **options)
    return Curve(parameter="steps", values=steps, labels=tuple(map(str, steps)), result=result)


def accuracy_against_eps(
    model: nn.Module,
    data: Any,
    threat: ThreatModel,
    eps: float | str | Sequence[float | str] = ("2/255", "4/255", "8/255", "16/255", "32/255", "64/255", "128/255"),
    attack: str | Attack = "pgd20",
    route: str | Sequence[str | None] | None = None,
    *,
    progress: bool = False,
    **options: Unpack[EvaluationOptions],
) -> Curve:
    """Measure robust accuracy under one attack of growing eps, in the norm of ``threat``; it must fall to chance."""
    raise_problems(type_problems(threat=(threat, ThreatModel)))
    values = [eps] if isinstance(eps, str) or not isinstance(eps, Iterable) else eps
    threats = {str(value): ThreatModel(norm=threat.norm, eps=value) for value in values}
    if isinstance(attack, str):
        attack = get_attack(attack, threat=threat, **_attack_settings(options))
    attacks = {f"eps={label}": dataclasses.replace(attack, threat=value) for label, value in threats.items()}
    plan = plan_evaluation(model, data, threat, attacks, route, any_threat=True, **options)
    radii = tuple(value.eps for value in threats.values())
    return Curve(parameter="eps", values=radii, labels=tuple(threats), result=run_benchmark(plan, progress=progress))


def _attack_settings(options: EvaluationOptions) -> dict[str, Any]:
    return {"seed": options.get("seed", 0), "statistics": frozen_mode(options.get("statistics", "running"))}


def run_benchmark(plan: EvaluationPlan, *, progress: bool = False) -> BenchmarkResult:
    """Evaluate a plan, or read its finished record."""
    jobs = [(job.name, job.key) for job in plan.jobs]
    fingerprint = digest(plan.fingerprint, plan.threat, plan.routes, jobs)
    return run_or_load(plan, BenchmarkResult, _evaluate, plan.references, fingerprint=fingerprint, progress=progress)


def _evaluate(runner: EvaluationRunner, identity: Mapping[str, Any]) -> BenchmarkResult:
    plan, partial = runner.plan, runner.partial
    clean = {route: runner.evaluate_clean(route) for route in plan.routes}
    for route in plan.routes:
        runner.check_outputs(route)
    if mixing := {module.plan.name for module in mixing_norms(plan.model).values()}:
        partial.warn(
            "choice",
            f"input-dependent: {', '.join(sorted(mixing))} weights its statistics by the input, and the attacks "
            "differentiate through this choice; evaluate one Gaussian inside "
            "`with advnorm.mixture_component(model, 'adv'):`",
        )
    names = {route: route or DEFAULT_ROUTE for route in plan.routes}
    robust: dict[str, dict[str, Tensor]] = {name: {} for name in names.values()}
    seconds: dict[str, dict[str, float]] = {name: {} for name in names.values()}
    stages: dict[str, dict[str, dict[str, float]]] = {}  # of cascades: accuracy after each attack
    for job in plan.jobs:
        name = names[job.route]
        robust[name][job.name] = runner.evaluate_attack(job, among=clean[job.route])
        saved = partial.job(job.key)
        seconds[name][job.name] = float(saved.get("seconds", 0.0))
        if "stages" in saved:
            stages.setdefault(name, {})[job.name] = saved["stages"]
    return BenchmarkResult(
        threat=plan.threat,
        attacks={job.name: repr(dataclasses.replace(job.attack, route=None)) for job in plan.jobs},
        clean={names[route]: correct for route, correct in clean.items()},
        robust=robust,
        seconds=seconds,
        conditions={**plan.conditions(), **identity, "stages": stages},
        warnings=partial.warnings(),
        rows=plan.index,
    )
