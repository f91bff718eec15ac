"""Clean and robust accuracy with all conditions, by attack and in the worst case, resumable after a kill."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import advnorm.attacks as attack_names
from advnorm._core.errors import ConfigError
from advnorm.attacks import PGD, Attack
from advnorm.evaluation.plan import Attacks, prepare
from advnorm.evaluation.results import BenchmarkResult, Curve
from advnorm.norms import Mode, frozen_mode
from advnorm.threat import ThreatModel


def benchmark(
    model: nn.Module,
    data: Any,
    threat: ThreatModel,
    attacks: Attacks = ("pgd10", "autoattack"),
    route: str | Sequence[str | None] | None = None,
    *,
    batch_size: int | None = None,
    device: str | torch.device | None = None,
    record: Path | str | None = None,
    progress: bool = False,
    seed: int = 0,
    limit: int | None = None,
    statistics: Mode = "running",
    about: Mapping[str, Any] | None = None,
) -> BenchmarkResult:
    """Clean accuracy, robust accuracy by attack, and the union over the attacks: the worst case per image.

    ``data``: images in [0, 1] and labels as two tensors, a data set, or a loader of batches; ``limit`` takes the first
    so many. ``attacks``: names such as ``"pgd20-restarts5"``, attacks, or attacks under names of your own; an attack
    with a route of its own is computed through that branch and judged through ``route``. ``route``: one branch of a
    routed model or several; None: the model as it is called.
    The mode of the model plays no part, and every flag stays as it was. Verdicts are those of a float32 forward without
    TF32 and autocast. Noise belongs to an image's place in the data, so results do not depend on the batch size.
    ``record``: JSON file for the result; a run that was killed continues from ``<record>.partial``, and one that is
    finished is read back. ``about``: where the model comes from, as plain data, for the record.
    """
    case = prepare(
        model,
        data,
        threat,
        attacks,
        route,
        batch_size=batch_size,
        device=device,
        seed=seed,
        limit=limit,
        statistics=statistics,
        record=record,
        about=about,
    )
    return case.run(progress=progress)


def accuracy_against_steps(
    model: nn.Module,
    data: Any,
    threat: ThreatModel,
    steps: int | Sequence[int] = (10, 20, 50, 100, 500, 2000),
    route: str | Sequence[str | None] | None = None,
    *,
    step_size: float | str | None = None,
    seed: int = 0,
    statistics: Mode = "running",
    **options: Any,
) -> Curve:
    """Robust accuracy under PGD of 10 to 2000 steps (paper E, fig. 2 and 3); it must level off.

    ``step_size``: by default 2.5·eps/steps; paper E keeps 1/255 for all. Other options as in :func:`benchmark`.
    """
    steps = tuple(dict.fromkeys(steps if isinstance(steps, Iterable) else [steps]))
    settings = {"threat": threat, "step_size": step_size, "seed": seed, "statistics": frozen_mode(statistics)}
    built = {f"pgd{n}": PGD(steps=n, **settings) for n in steps}
    result = benchmark(model, data, threat, built, route, seed=seed, statistics=statistics, **options)
    return Curve(parameter="steps", values=steps, labels=tuple(map(str, steps)), result=result)


def accuracy_against_eps(
    model: nn.Module,
    data: Any,
    threat: ThreatModel,
    eps: float | str | Sequence[float | str] = ("2/255", "4/255", "8/255", "16/255", "32/255", "64/255", "128/255"),
    attack: str | Attack = "pgd20",
    route: str | Sequence[str | None] | None = None,
    *,
    record: Path | str | None = None,
    progress: bool = False,
    seed: int = 0,
    statistics: Mode = "running",
    **options: Any,
) -> Curve:
    """Robust accuracy under one attack of growing eps, in the norm of ``threat``; it must fall to chance or below."""
    if not isinstance(threat, ThreatModel):
        raise ConfigError(f"threat must be a ThreatModel such as ThreatModel(eps='8/255'), got {threat!r}")
    values = [eps] if isinstance(eps, str) or not isinstance(eps, Iterable) else eps
    threats = {str(value): ThreatModel(norm=threat.norm, eps=value) for value in values}
    built = {}
    for label, value in threats.items():
        if isinstance(attack, str):
            made = attack_names.get(attack, threat=value, seed=seed, statistics=frozen_mode(statistics))
        else:  # what is no attack is refused with all the rest
            made = dataclasses.replace(attack, threat=value) if isinstance(attack, Attack) else attack
        built[f"eps={label}"] = made
    settings = {"seed": seed, "any_threat": True, "record": record, "statistics": statistics}
    result = prepare(model, data, threat, built, route, **settings, **options).run(progress=progress)
    radii = tuple(value.eps for value in threats.values())
    return Curve(parameter="eps", values=radii, labels=tuple(threats), result=result)
