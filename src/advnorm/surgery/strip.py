"""Take one branch of a routed model out as a plain model."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from advnorm._core.errors import Problem, SurgeryError, raise_problems, unknown_name
from advnorm._core.wrappers import unwrap_model
from advnorm.norms.mixture import MixtureNorm
from advnorm.norms.routed_linear import RoutedLinear
from advnorm.norms.routed_module import RoutedModule, validate_module
from advnorm.norms.routed_norm import RoutedNorm
from advnorm.surgery.adapter import adapter_of, branch_settings
from advnorm.surgery.replace import Replacement, move_hooks, rebind_hooks, replace_modules
from advnorm.surgery.report import SurgeryReport


def strip(
    model: nn.Module, route: str | None = None, *, component: str | None = None, linked: bool = False
) -> nn.Module:
    """Copy ``model`` with every routed module replaced by the plain one that ``route`` uses, and the same outputs.

    The copy has no trace of routing. It can be exported, and after :func:`convert_norm` its state dict loads into the
    original architecture. The statistics are those that normalize ``route`` at test time.
    ``component``: use only the Gaussian of this domain in mixture norms. The default is the component that an enclosing
    :func:`advnorm.mixture_component` fixes, else the whole mixture.
    ``linked``: share parameters and statistics with ``model``, so that the copy follows its training. A mixture has no
    tensors to share.
    """
    validate_module(model)
    model = unwrap_model(model)
    routed = [module for module in model.modules() if isinstance(module, RoutedModule)]
    mixtures = [module for module in routed if module.plan.mixture]
    raise_problems(_problems(routed, route, component, linked), "cannot strip")
    if component is None and mixtures:
        component = mixtures[0].state.component
    shared = (*model.parameters(), *model.buffers()) if linked else ()
    model = copy.deepcopy(model, {id(tensor): tensor for tensor in shared})
    if isinstance(model, RoutedModule):
        return rebind_hooks(_plain_module(model, route, component))
    replacements: dict[nn.Module, Replacement] = {
        module: Replacement(lambda _copies, module=module: _plain_module(module, route, component))
        for module in model.modules()
        if isinstance(module, RoutedModule)
    }
    replace_modules(model, replacements, SurgeryReport(norm="", domains=()))
    return model


def _problems(routed: list[RoutedModule], route: str | None, component: str | None, linked: bool) -> list[Problem]:
    def problem(code: str, field: str, message: str, hint: str) -> Problem:
        return Problem(code=code, field=field, message=message, hint=hint)

    problems = []
    mixtures = [module for module in routed if module.plan.mixture]
    if component is not None and not mixtures:
        problems.append(problem("no_mixture_norm", "component", "the model has no mixture norm", "leave {field} out"))
    for module in mixtures:
        if component is not None and component not in module.plan.domains:
            problems.append(unknown_name("component", component, module.plan.domains))
    if linked and any(component is None and module.state.component is None for module in mixtures[:1]):
        hint = "choose a component, or leave linked out"
        problems.append(problem("not_supported", "linked", "the copy of a mixture cannot be linked", hint))
    if route is not None and not routed:
        message = f"the model has no routed modules and no {{field}} {route!r}"
        problems.append(problem("no_routed_norm", "route", message, "convert it first, or leave route out"))
    for plan in {module.plan for module in routed}:
        if route is None and plan.routed and not plan.mixture:
            message = f"{plan.name} has several branches"
            hint = f"choose one: strip(model, route={plan.domains[-1]!r})"
            problems.append(problem("missing_route", "route", message, hint))
        elif route is not None and route not in plan.domains:
            problems.append(unknown_name("domain", route, plan.domains, field="route"))
    return list(dict.fromkeys(problems))


def _plain_module(module: RoutedModule, route: str | None, component: str | None) -> nn.Module:
    """The plain module that computes the same as ``module`` for ``route`` with stored statistics."""
    plan = module.plan
    if isinstance(module, RoutedLinear):
        weight, bias = module.bank(plan.affine[0 if route is None else plan.index(route)])
        plain: Any = nn.Linear(module.in_features, module.out_features, bias=bias is not None, device="meta")
        plain.weight, plain.bias = weight, bias
        return move_hooks(module, plain)
    assert isinstance(module, RoutedNorm)
    if plan.statistics == "none":
        return move_hooks(module, nn.Identity())
    if plan.mixture and component is None:
        if not module.track_running_stats:
            raise SurgeryError("not_supported", f"{plan.name} has no running statistics", field="model")
        weight, bias = module.affine_bank(plan.affine[0])
        means, variances, _ = zip(*(module.statistics_bank(bank) for bank in plan.statistics_banks))
        return move_hooks(module, MixtureNorm(torch.stack(means), torch.stack(variances), weight, bias, module.eps))
    settings = branch_settings(module, component if plan.mixture else route)
    return move_hooks(module, adapter_of(module).restore(settings, module))
