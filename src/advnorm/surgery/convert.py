"""Replace the norms of a model by routed norms, in place."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.lazy import LazyModuleMixin

from advnorm._core.errors import Problem, SurgeryError, raise_problems, unknown_name
from advnorm._core.settings import convert_options
from advnorm.norms.factory import MODULE_OPTIONS, NORMS, channel_groups, make_plan
from advnorm.norms.plan import Plan
from advnorm.norms.routed_linear import RoutedLinear
from advnorm.norms.routed_norm import RoutedNorm
from advnorm.surgery.adapter import (
    ADAPTERS,
    Kept,
    NormAdapter,
    NormSettings,
    Rejected,
    adapter_of,
    branch_settings,
)
from advnorm.surgery.replace import (
    BankCopies,
    Replacement,
    find_additions,
    move_hooks,
    replace_modules,
    validate_convertible,
)
from advnorm.surgery.report import SurgeryReport

#: Options that can be set in a norm that stays.
CHANGEABLE_OPTIONS = ("eps", "momentum", "process_group")

Decision = Replacement | Kept | Rejected


def convert_norm(
    model: nn.Module, name: str, *, keep: Iterable[str] = (), sync: bool | None = None, **options: Any
) -> SurgeryReport:
    """Replace the norms of ``model`` by the routed norm ``name``, in place; every bank starts as the replaced norm.

    Batch norms become any norm. Group, instance and layer norms become the routed form of their own kind (``gn``,
    ``dual_affine_gn``, ...) and are kept for other names. A subclass of a built-in norm may do more than normalize and
    raises an error. ``keep`` names modules to leave unchanged. ``sync`` synchronizes statistics over ranks (default: as
    in the replaced norm). Further options are those of :func:`advnorm.make_norm`. An error leaves the model unchanged.
    Create the optimizer afterwards, because additional banks are new parameters.
    """
    validate_convertible(model)
    plan = make_plan(name, **{key: value for key, value in options.items() if key not in MODULE_OPTIONS})
    conversion = _Conversion(plan, sync, options)
    kept_modules = _modules_below(model, (keep,) if isinstance(keep, str) else tuple(keep))
    decisions: dict[str, Decision] = {}
    for module_name, module in model.named_modules():
        decision = conversion.decide(module)
        if decision is not None:
            decisions[module_name] = Kept("named in keep") if module in kept_modules else decision
    modules = dict(model.named_modules())
    replacements = {modules[name]: d for name, d in decisions.items() if isinstance(d, Replacement)}
    kept = {name: decision for name, decision in decisions.items() if isinstance(decision, Kept)}
    transformers = _routed_transformer_layers(model, plan, replacements)
    raise_problems(
        [_rejection(name, decision) for name, decision in decisions.items() if isinstance(decision, Rejected)]
        + _head_problems(model, plan)
        + [
            _rejection(name, Rejected("has the batch in its second dimension", "build it with batch_first=True"))
            for name, layer in transformers.items()
            if not layer.self_attn.batch_first
        ],
        f"cannot convert to {name} (pass keep=['module.name', ...] to leave modules unchanged)",
        SurgeryError,
    )
    encoders = [layer for layer in transformers.values() if isinstance(layer, nn.TransformerEncoderLayer)]
    notes = []
    if any(replacement.changes_outputs for replacement in replacements.values()):
        notes.append("outputs change, because the new norm normalizes differently; train the model before evaluation")
    if not replacements and not any(decision.is_routed for decision in kept.values()):
        notes.append(f"nothing was converted: the model has no norm that {name} replaces")
    if encoders:
        notes.append("encoder layers evaluate as in training: the fast path of PyTorch does not support routed norms")
    reasons = {module_name: decision.reason for module_name, decision in kept.items()}
    report = SurgeryReport(norm=name, domains=plan.domains, kept=reasons, notes=tuple(notes))
    report = replace_modules(model, replacements, report)
    for decision in kept.values():
        if decision.update is not None:
            decision.update()
    for layer in encoders:
        layer.activation_relu_or_gelu = 0  # the only condition of the fast path that nothing else reads
    return report


def _modules_below(model: nn.Module, names: Sequence[str]) -> set[nn.Module]:
    """The named modules and all modules inside of them. A shared module can have several names."""
    modules = dict(model.named_modules(remove_duplicate=False))
    unknown = [name for name in names if name not in modules]
    raise_problems([unknown_name("module", name, modules, field="keep") for name in unknown], "bad conversion")
    return {inner for name in names for inner in modules[name].modules()}


def _rejection(name: str, rejected: Rejected) -> Problem:
    message = f"{{field}}: {rejected.reason}"
    return Problem(code="not_supported", message=message, field=name or "model", hint=rejected.hint)


def _routed_transformer_layers(
    model: nn.Module, plan: Plan, replacements: Mapping[nn.Module, Replacement]
) -> dict[str, Any]:
    """Transformer layers whose norms become routed. Routes split the first dimension, which must be the batch."""
    layers = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    return {
        name: layer
        for name, layer in model.named_modules()
        if plan.routed and isinstance(layer, layers) and any(child in replacements for child in layer.children())
    }


def _head_problems(model: nn.Module, plan: Plan) -> list[Problem]:
    return [
        Problem(
            code="conflict",
            message=f"{{field}} has the domains {', '.join(head.plan.domains)}, and no route fits it and the norms",
            field=name,
            got=list(plan.domains),
            hint=f"convert the norms first, or use domains={[*head.plan.domains]}",
        )
        for name, head in model.named_modules()
        if isinstance(head, RoutedLinear) and plan.routed and not {*head.plan.domains} & {*plan.domains}
    ]


class _Conversion:
    """What a conversion does with each module."""

    def __init__(self, plan: Plan, sync: bool | None, options: Mapping[str, Any]) -> None:
        fixed = [key for key in options if key in MODULE_OPTIONS and key not in CHANGEABLE_OPTIONS]
        message = "{field} is taken from the replaced norm"
        problems = [Problem(code="conflict", message=message, field=key, hint="leave it out") for key in fixed]
        raise_problems(problems, "bad conversion")
        self.plan, self.sync = plan, sync
        self.family = NORMS.get(plan.name).family
        self.options = {key: value for key, value in options.items() if key in CHANGEABLE_OPTIONS}
        self.num_groups = options.get("num_groups")

    def decide(self, module: nn.Module) -> Decision | None:
        """What becomes of a module; None if it is not a norm."""
        if isinstance(module, RoutedNorm):
            return self._decide_routed(module)
        kind = type(module)
        adapter = ADAPTERS.get(kind)
        if adapter is not None:
            settings = adapter.read(module)
            decision = self._replace(module, settings, adapter) if isinstance(settings, NormSettings) else settings
            additions = find_additions(module, adapter.parts) if isinstance(decision, Replacement) else None
            return decision if additions is None else Rejected(f"{kind.__name__} {additions}")
        if isinstance(module, _NormBase | nn.GroupNorm | nn.LayerNorm):
            return self._decide_subclass(module)
        if "norm" in kind.__name__.lower() and not list(module.children()):
            return Kept(f"{kind.__name__} is not a built-in norm")
        return None

    def _decide_routed(self, norm: RoutedNorm) -> Decision:
        old, new = norm.plan, self.plan
        if old == new or dataclasses.replace(old, statistics="group") == new:  # a layer norm of the last dimensions
            return self._change_settings(norm)
        if old.routed or old.mixture:
            reason = f"is already routed as {old.name} over {', '.join(old.domains)}"
            if old.other_gradient != new.other_gradient:
                reason += f" with other_gradient={old.other_gradient}"
            return Rejected(reason, hint="take a branch out with advnorm.strip first")
        if old.statistics == "none":
            return Kept("none has nothing to convert")
        return self._replace(norm, branch_settings(norm), adapter_of(norm))

    def _decide_subclass(self, module: nn.Module) -> Kept | Rejected:
        kind = type(module).__name__
        if isinstance(module, LazyModuleMixin):
            return Rejected(f"{kind} has no size yet", hint="run one forward first")
        base = next(base for base in type(module).__mro__ if base.__module__.startswith("torch.nn.modules"))
        adapter = ADAPTERS.get(base)
        if adapter is not None:
            settings = adapter.read(module)
            becomes = isinstance(settings, NormSettings) and adapter.becomes(settings, self.family)
            if not becomes and not isinstance(settings, Rejected):
                return Kept(f"{kind}, a subclass of {base.__name__}, is not replaced by {self.plan.name}")
        return Rejected(f"{kind} is a subclass of {base.__name__} and may do more than normalize")

    def _change_settings(self, norm: RoutedNorm) -> Kept | Rejected:
        """Keep a norm that has the requested plan, with the requested settings."""
        if self.num_groups not in (None, norm.num_groups):
            return Rejected(f"already has {norm.num_groups} groups", hint="leave num_groups out")
        wanted = self.options | ({} if self.sync is None else {"sync": self.sync})
        changed = {key: value for key, value in wanted.items() if getattr(norm, key) != value}
        if not changed:
            return Kept("already routed", is_routed=True)
        numbers = {key: value for key, value in changed.items() if key in ("eps", "momentum")}
        raise_problems(convert_options("", RoutedNorm, numbers)[1], f"bad norm {norm.plan.name!r}")
        text = ", ".join(f"{key}={value}" for key, value in changed.items())
        update = lambda: [setattr(norm, *item) for item in changed.items()]  # noqa: E731
        return Kept(f"already routed, now with {text}", is_routed=True, update=update)

    def _replace(self, old: nn.Module, settings: NormSettings, adapter: NormAdapter) -> Decision:
        kind = old.plan.name if isinstance(old, RoutedNorm) else type(old).__name__
        if not adapter.becomes(settings, self.family):
            return Kept(f"{kind} is not replaced by {self.plan.name}")
        batch, channels, groups = settings.statistics == "batch", settings.num_features, self.num_groups
        if not batch and groups not in (None, settings.num_groups):
            return Rejected(f"has {settings.num_groups} groups, which stay", hint="leave num_groups out")
        if isinstance(groups, int) and groups > 0 and channels % groups:
            return Rejected(f"{channels} channels cannot be split into {groups} groups")
        if groups is None:
            groups = channel_groups(self.plan.name, channels) if batch else settings.num_groups
        plan = dataclasses.replace(self.plan, statistics="last") if settings.statistics == "last" else self.plan

        def build(copies: BankCopies) -> nn.Module:
            new = adapter.routed_class(
                settings.num_features,
                plan,
                dim=settings.dim,
                affine=settings.weight is not None,
                bias=settings.bias is not None,
                track_running_stats=settings.running is not None,
                sync=batch and (settings.sync if self.sync is None else self.sync),
                num_groups=groups,
                **{key: getattr(settings, key) for key in CHANGEABLE_OPTIONS} | self.options,
            )
            new.source_class = adapter.norm_class
            for index, bank in enumerate(plan.affine_banks if new.affine else ()):
                new.set_affine_bank(bank, copies.get(settings.weight, index), copies.get(settings.bias, index))
            for index, bank in enumerate(plan.statistics_banks if new.track_running_stats else ()):
                new.set_statistics_bank(bank, *(copies.get(value, index) for value in settings.running or ()))
            adapter.finish(old, new)
            return move_hooks(old, new)

        changes = batch and plan.statistics != "batch"
        return Replacement(build, f"{kind} -> {plan.name}" + (" (outputs change)" if changes else ""), changes)
