"""Give a model one linear classifier per domain (paper A, table 7: Dual Linear)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from advnorm._core.errors import SurgeryError, raise_problems, unknown_name
from advnorm.norms.plan import Plan, parse_domains
from advnorm.norms.routed_linear import RoutedLinear
from advnorm.norms.routed_module import domains as model_domains
from advnorm.surgery.replace import AFFINE, SurgeryReport, replace_modules, validate_class, validate_model


def convert_head(model: nn.Module, *, domains: Sequence[str] | None = None, name: str | None = None) -> SurgeryReport:
    """Replace the classifier by one linear layer per domain, in place.

    ``domains``: by default those of the model's routed norms, else clean and adv. ``name``: module name of the
    classifier; by default the last linear layer of the model.
    """
    validate_model(model)
    domains = parse_domains(domains or model_domains(model) or ("clean", "adv"))
    plan = Plan(name="dual_linear", domains=domains, statistics="none", affine=domains)
    modules = dict(model.named_modules())
    linears = [n for n, module in modules.items() if type(module) is nn.Linear]
    routed = [n for n, module in modules.items() if isinstance(module, RoutedLinear)]
    if name is None:
        if not (routed or linears):
            raise SurgeryError("not_supported", "the model has no nn.Linear to convert", field="model")
        name = (routed or linears)[-1]
    if name not in modules:
        raise_problems([unknown_name("module", name, linears, field="name")])
    head = modules[name]
    report = SurgeryReport(norm=plan.name, domains=domains)
    if isinstance(head, RoutedLinear):
        if head.plan != plan:
            message = f"{{field}} is already routed over {', '.join(head.plan.domains)}"
            raise SurgeryError("conflict", message, field=name, hint="strip a branch first")
        return replace(report, kept={name: "already routed"})
    if type(head) is not nn.Linear:
        hint = f"linear layers: {', '.join(linears)}"
        raise SurgeryError("wrong_type", f"{{field}} is a {type(head).__name__}, not nn.Linear", field=name, hint=hint)
    validate_class(head, field=name)
    new = RoutedLinear(head.in_features, head.out_features, plan, bias=head.bias is not None, device="meta")
    for kind in AFFINE:
        for domain in domains:
            tensor = getattr(head, kind)
            setattr(new, f"{kind}_{domain}", tensor if domain == domains[0] else copy.deepcopy(tensor))
    new_parameters = replace_modules(model, {head: new})
    return replace(report, replaced={name: "Linear -> dual_linear"}, new_parameters=new_parameters)
