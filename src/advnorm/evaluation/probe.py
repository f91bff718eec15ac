"""Checks of a model by one forward of a few images, before any long computation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from advnorm._core.devices import resolve_device
from advnorm._core.errors import AdvnormError, ConfigError, Description, Problem, collect_problems
from advnorm.attacks import input_gradient, predicting
from advnorm.evaluation.branches import branches, same_branch
from advnorm.evaluation.jobs import AttackJob
from advnorm.norms import Mode, domains, frozen_mode, mixture_norms

#: Number of images of the forward.
PROBE_IMAGES = 4


def model_device(model: nn.Module, device: str | torch.device | None) -> torch.device:
    """Return the device of a model's tensors; raise if ``device`` is another one."""
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


def probe_model(
    model: nn.Module,
    routes: Sequence[str | None],
    x: Tensor,
    classes: int,
    statistics: Mode,
    jobs: Sequence[AttackJob] = (),
    *,
    gradients: bool = True,
) -> list[Problem]:
    """Run a forward through each route and return the problems.

    ``classes``: the number of classes that the labels need. ``gradients``: report attacks that need gradients if the
    model has none; without jobs, report missing gradients.
    """
    found: list[tuple[Problem, list[str | None]]] = []
    for route in routes:
        own = [job for job in jobs if job.route == route]
        for problem in _route_problems(model, route, x, classes, statistics, own, gradients):
            same = next((where for known, where in found if known == problem), None)
            if same is None:
                found.append((problem, [route]))
            else:
                same.append(route)
    return [
        replace(problem, message=f"{problem.message} through route {where[0]!r}")
        if problem.field == "model" and where[0] is not None and len(where) == 1
        else problem
        for problem, where in found
    ]


def _route_problems(
    model: nn.Module,
    route: str | None,
    x: Tensor,
    classes: int,
    statistics: Mode,
    jobs: Sequence[AttackJob],
    gradients: bool,
) -> list[Problem]:
    if route in domains(model) and mixture_norms(model) and not branches(model):
        hint = "leave route out, or evaluate one Gaussian inside "
        hint += f"`with advnorm.mixture_component(model, {domains(model)[-1]!r}):`"
        message = "the norms weight their statistics by the input, and a route changes nothing at test time"
        return [Problem(code="not_supported", message=message, field="route", hint=hint)]
    by_gradient = [job.name for job in jobs if job.attack.needs_gradients]
    gradients = gradients and (bool(by_gradient) or not jobs)
    points = x.clone().requires_grad_(gradients)
    stopped: list[Problem] = []
    try:
        with predicting(model, route=route, statistics=frozen_mode(statistics)) as predict:
            with torch.set_grad_enabled(gradients):
                logits = predict(points)
            with collect_problems(stopped):
                if gradients:
                    input_gradient(logits.sum(1), points)
    except AdvnormError as error:
        return list(error.problems)
    except Exception as error:
        message = f"the model fails on images of shape {tuple(x.shape)} ({type(error).__name__}: {error})"
        hint = "images are (N, channels, height, width) in [0, 1]"
        return [Problem(code="wrong_shape", message=message, field="model", hint=hint)]
    if bool(logits.isnan().any()):
        message, hint = "the model returns NaN logits", "check its weights and statistics"
        return [Problem(code="not_finite", message=message, field="model", hint=hint)]
    if classes > logits.shape[1]:
        message = f"labels must be less than the model's {logits.shape[1]} classes"
        hint = "labels count from 0"
        got = Description(f"a largest label of {classes - 1}")
        return [Problem(code="out_of_range", message=message, field="labels", got=got, hint=hint)]
    shape = tuple(x.shape[1:])
    problems = [
        Problem(code="not_supported", message=f"{job.name}: {text}", field="attacks")
        for job in jobs
        for text in job.attack.input_problems(shape, logits.shape[1])
    ]
    names = ", ".join(by_gradient) or "attacks"
    return problems + [replace(problem, message=f"{names}: {problem.message}", field="attacks") for problem in stopped]


def probe_surrogate(
    surrogate: nn.Module | None, routes: Sequence[str | None], x: Tensor, classes: int
) -> list[Problem]:
    """Return the problems of computing attacks on a surrogate."""
    if surrogate is None:
        return []
    problems: list[Problem] = []
    known = branches(surrogate)
    with collect_problems(problems):
        model_device(surrogate, x.device)
        if known and not set(routes) <= set(known):
            raise ConfigError(
                "missing_route",
                f"it has the branches {', '.join(known)}",
                hint=f"give one of them: advnorm.strip(surrogate, route={known[-1]!r})",
            )
        same = dict.fromkeys(same_branch(surrogate, route) for route in routes)
        problems += probe_model(surrogate, list(same), x, classes, "running")
    return [replace(problem, message=f"the surrogate: {problem.message}").inside("surrogate") for problem in problems]
