"""Take one branch of a routed model out as a plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from advnorm._core.errors import Problem, SurgeryError, raise_problems, unknown_name
from advnorm._core.settings import ACCEPTS
from advnorm._core.wrappers import unwrap_model
from advnorm.norms.mixture import MixtureNorm
from advnorm.norms.replaced_class import empty_copy, eps_name
from advnorm.norms.rms import SampleRMSNorm
from advnorm.norms.routed_linear import RoutedLinear
from advnorm.norms.routed_module import RoutedModule, list_routed, validate_module
from advnorm.norms.routed_norm import RoutedNorm
from advnorm.surgery.replace import move_hooks, replace_modules


@torch.enable_grad()  # in a sandwich a parameter is a product, which is trained if its factors are
def strip(
    model: nn.Module,
    route: str | Mapping[str, float] | None = None,
    *,
    component: str | None = None,
    linked: bool = False,
) -> nn.Module:
    """Copy ``model`` with every routed module replaced by the plain one that ``route`` uses, and the same outputs.

    The copy has no trace of routing. It can be exported, and after :func:`convert_norm` its state dict loads into the
    original architecture. The statistics are those that normalize ``route`` at test time.
    A mapping of shares, ``{"clean": 0.3, "adv": 0.7}``, interpolates between branches: every statistic and parameter is
    the weighted mean over their banks. A share of 1 gives that branch to the bit.
    ``component``: use only the Gaussian of this domain in mixture norms. The default is the component that an enclosing
    :func:`advnorm.mixture_component` fixes, else the whole mixture.
    ``linked``: share parameters and statistics with ``model``, so that the copy follows its training. A mixture and a
    sandwich have no tensors to share.
    """
    validate_module(model)
    model = unwrap_model(model)
    routed = list_routed(model)
    mixtures = [module for module in routed if module.plan.mixture]
    if component is None and mixtures:
        component = mixtures[0].state.component
    raise_problems(_problems(routed, route, component, linked), "cannot strip")
    shared = (*model.parameters(), *model.buffers()) if linked else ()
    model = copy.deepcopy(model, {id(tensor): tensor for tensor in shared})
    plain = {module: _plain_module(module, route, component) for module in list_routed(model)}
    if isinstance(model, RoutedModule):
        return move_hooks(model, plain[model])
    replace_modules(model, {**plain})
    return model


def _problems(
    routed: list[RoutedModule], route: str | Mapping[str, float] | None, component: str | None, linked: bool
) -> list[Problem]:
    if not isinstance(route, Mapping):
        return _branch_problems(routed, route, component, linked)
    problems, shares = [], list(route.values())
    if not all(ACCEPTS[float](share) and 0 <= share <= 1 for share in shares) or abs(sum(shares) - 1) > 1e-6:
        message, hint = "shares of {field} must be in [0, 1] and add up to 1", "for example {'clean': 0.3, 'adv': 0.7}"
        problems.append(Problem(code="out_of_range", message=message, field="route", got=dict(route), hint=hint))
    if linked or any(module.plan.mixture for module in routed):
        message = "an interpolation of branches cannot be linked, and mixture norms have no branches"
        hint = "leave linked out, and choose a component of a mixture norm"
        problems.append(Problem(code="not_supported", message=message, field="route", hint=hint))
    for domain in route:
        problems += [p for p in _branch_problems(routed, domain, component, linked=False) if p not in problems]
    return problems


def _branch_problems(
    routed: list[RoutedModule], route: str | None, component: str | None, linked: bool
) -> list[Problem]:
    problems = []
    plans = dict.fromkeys(module.plan for module in routed)
    mixtures = [plan for plan in plans if plan.mixture]
    components = {domain for plan in mixtures for domain in plan.domains}
    if component is not None and component not in components:
        problems.append(unknown_name("component", component, sorted(components)))
    if component is None and linked and mixtures:
        message, hint = "the copy of a mixture cannot be linked", "choose a component, or leave linked out"
        problems.append(Problem(code="not_supported", message=message, field="linked", hint=hint))
    if linked and any(plan.sandwich for plan in plans):
        message, hint = "the copy of a sandwich has products as parameters and cannot be linked", "leave linked out"
        problems.append(Problem(code="not_supported", message=message, field="linked", hint=hint))
    if route is not None and not routed:
        message, hint = f"the model has no routed modules and no {{field}} {route!r}", "convert it, or leave route out"
        problems.append(Problem(code="no_routed_norm", message=message, field="route", hint=hint))
    for plan in plans:
        if route is None and plan.routed and not plan.mixture:
            message, hint = f"{plan.name} has several branches", f"choose one: strip(model, route={plan.domains[-1]!r})"
            problems.append(Problem(code="missing_route", message=message, field="route", hint=hint))
        elif route is not None and route not in plan.domains:
            problems.append(unknown_name("domain", route, plan.domains, field="route"))
    return list(dict.fromkeys(problems))


def _blend(
    module: RoutedModule,
    banks: Sequence[str],
    shares: Mapping[str, float],
    get: Callable[[str], Sequence[Tensor | None]],
) -> Sequence[Any]:
    """The weighted mean of the tensors that the domains use; the tensors themselves if they use one bank."""
    totals: dict[str, float] = {}
    for domain, share in shares.items():
        if share:
            bank = banks[module.plan.index(domain)]
            totals[bank] = totals.get(bank, 0.0) + share
    if len(totals) == 1:
        return get(next(iter(totals)))
    blended: list[Tensor | None] = []
    for tensors in zip(*(get(bank) for bank in totals)):
        first = tensors[0]
        if first is None or not first.is_floating_point():  # no parameter, or the number of batches
            blended.append(first)
            continue
        with torch.no_grad():
            weighted = [share * tensor.double() for share, tensor in zip(totals.values(), tensors)]
            mean = torch.stack(weighted).sum(0).to(first.dtype)
        blended.append(mean.requires_grad_(first.requires_grad))
    return blended


def _parameter(value: Tensor | None) -> nn.Parameter | None:
    """The parameter itself; a mean over branches and the product in a sandwich become parameters."""
    if value is None or isinstance(value, nn.Parameter):
        return value
    return nn.Parameter(value.detach(), value.requires_grad)


def _plain_module(module: RoutedModule, route: str | Mapping[str, float] | None, component: str | None) -> nn.Module:
    """The plain module that computes the same as ``module`` for ``route`` with stored statistics."""
    plan, domain = module.plan, component if module.plan.mixture else route
    shares = domain if isinstance(domain, Mapping) else {plan.domains[0] if domain is None else domain: 1.0}
    plain: Any
    if isinstance(module, RoutedLinear):
        plain = nn.Linear(module.in_features, module.out_features, device="meta")
        plain.weight, plain.bias = map(_parameter, _blend(module, plan.affine, shares, module.bank))
        return plain
    assert isinstance(module, RoutedNorm)
    if plan.statistics == "none":
        return nn.Identity()
    weight, bias = map(_parameter, _blend(module, plan.affine, shares, module.affine_bank))
    if plan.mixture and component is None:
        if not module.track_running_stats:
            raise SurgeryError("not_supported", f"{plan.name} has no running statistics", field="model")
        means, variances, _ = zip(*(module.statistics_bank(bank) for bank in plan.statistics_banks))
        return MixtureNorm(torch.stack(means), torch.stack(variances), weight, bias, module.eps)
    plain = _plain_norm(module)
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None or hasattr(plain, name):
            setattr(plain, name, value)
    if module.track_running_stats:
        statistics = _blend(module, plan.normalized_by, shares, module.statistics_bank)
        plain.running_mean, plain.running_var, plain.num_batches_tracked = statistics
    for name in module.parts:
        setattr(plain, name, getattr(module, name))
    return plain


def _plain_norm(norm: RoutedNorm) -> Any:
    """A norm of the replaced class, or else the built-in one of the same kind, without its tensors."""
    statistics, channels = norm.plan.statistics, norm.shape[0]
    if norm.template is not None:
        plain = empty_copy(norm.template)
        settings: dict[str | None, Any] = {eps_name(plain): norm.eps}
        if statistics == "batch":  # other classes with a momentum keep their own
            settings |= {"momentum": norm.momentum, "process_group": norm.process_group}
        for name, value in settings.items():
            if name in vars(plain):
                setattr(plain, name, value)
        return plain
    options: dict[str, Any] = {"eps": norm.eps, "affine": norm.affine, "device": "meta"}
    if statistics == "rms":
        return SampleRMSNorm(None, None, norm.eps)
    if statistics == "group":
        return nn.GroupNorm(norm.num_groups, channels, **options)
    options |= {"momentum": norm.momentum, "track_running_stats": norm.track_running_stats}
    if norm.dim is None:
        return nn.SyncBatchNorm(channels, process_group=norm.process_group, **options)
    return {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[norm.dim](channels, **options)
