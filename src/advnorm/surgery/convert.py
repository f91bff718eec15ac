"""Replace the norms of a model by routed norms, in place."""

from __future__ import annotations

import copy
import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.lazy import LazyModuleMixin

from advnorm._core.errors import Problem, SurgeryError, collect_problems, raise_problems, unknown_name
from advnorm._core.settings import convert_options
from advnorm.norms.factory import MODULE_OPTIONS, NORMS, channel_groups, make_plan
from advnorm.norms.plan import Plan
from advnorm.norms.routed_linear import RoutedLinear
from advnorm.norms.routed_norm import RoutedNorm
from advnorm.surgery.adapters import ADAPTERS, NormAdapter, adapter_of, settings_of
from advnorm.surgery.replace import AFFINE, STATISTICS, SurgeryReport, replace_modules, validate_class, validate_model

#: Options that can be set in a norm that stays.
CHANGEABLE_OPTIONS = ("eps", "momentum", "process_group")

_BUILT_IN = (_NormBase, nn.GroupNorm, nn.LayerNorm)
_TRANSFORMERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


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
    validate_model(model)
    plan = make_plan(name, **{key: value for key, value in options.items() if key not in MODULE_OPTIONS})
    conversion = _Conversion(plan, sync, options)
    kept_modules = _modules_below(model, (keep,) if isinstance(keep, str) else tuple(keep))
    problems: list[Problem] = []
    replaced: dict[str, str] = {}
    kept: dict[str, str] = {}
    for module_name, module in model.named_modules():
        with collect_problems(problems, module_name or "model"):
            if isinstance(module, RoutedLinear):
                conversion.validate_head(module)
            elif _is_norm(module):
                change = "named in keep" if module in kept_modules else conversion.decide(module)
                (replaced if module in conversion.replacements else kept)[module_name] = change
    replacements = conversion.replacements
    transformers: dict[str, Any] = {
        layer_name: layer
        for layer_name, layer in model.named_modules()
        if plan.routed and isinstance(layer, _TRANSFORMERS) and any(child in replacements for child in layer.children())
    }
    message, hint = "{field} has the batch in its second dimension", "build it with batch_first=True"
    problems += [
        Problem(code="not_supported", message=message, field=layer_name or "model", hint=hint)
        for layer_name, layer in transformers.items()
        if not layer.self_attn.batch_first  # routes split the first dimension
    ]
    heading = f"cannot convert to {name} (pass keep=['module.name', ...] to leave modules unchanged)"
    raise_problems(problems, heading, SurgeryError)
    encoders = [layer for layer in transformers.values() if isinstance(layer, nn.TransformerEncoderLayer)]
    notes = []
    if conversion.changes_outputs:
        notes.append("outputs change, because the new norm normalizes differently; train the model before evaluation")
    if not replacements and not conversion.updates:
        notes.append(f"nothing was converted: the model has no norm that {name} replaces")
    if encoders:
        notes.append("encoder layers evaluate as in training: the fast path of PyTorch does not support routed norms")
    added = replace_modules(model, replacements)
    for norm, settings in conversion.updates.items():
        for key, value in settings.items():
            setattr(norm, key, value)
    for layer in encoders:
        layer.activation_relu_or_gelu = 0  # the only condition of the fast path that nothing else reads
    return SurgeryReport(
        norm=name, domains=plan.domains, replaced=replaced, kept=kept, new_parameters=added, notes=notes
    )


def _modules_below(model: nn.Module, names: Sequence[str]) -> set[nn.Module]:
    """The named modules and all modules inside of them. A shared module can have several names."""
    modules = dict(model.named_modules(remove_duplicate=False))
    unknown = [name for name in names if name not in modules]
    raise_problems([unknown_name("module", name, modules, field="keep") for name in unknown], "bad conversion")
    return {inner for name in names for inner in modules[name].modules()}


def _is_norm(module: nn.Module) -> bool:
    if isinstance(module, (RoutedNorm, *_BUILT_IN)) or type(module) in ADAPTERS:
        return True
    return "norm" in type(module).__name__.lower() and not list(module.children())


class _Conversion:
    """Collects what becomes of each norm. The model changes only after all norms were accepted."""

    def __init__(self, plan: Plan, sync: bool | None, options: Mapping[str, Any]) -> None:
        fixed = [key for key in options if key in MODULE_OPTIONS and key not in CHANGEABLE_OPTIONS]
        message, hint = "{field} is taken from the replaced norm", "leave it out"
        problems = [Problem(code="conflict", message=message, field=key, hint=hint) for key in fixed]
        numbers = {key: options[key] for key in ("eps", "momentum", "num_groups") if options.get(key) is not None}
        raise_problems(problems + convert_options("", RoutedNorm, numbers)[1], "bad conversion")
        self.plan, self.sync = plan, sync
        self.family = NORMS.get(plan.name).family
        self.options = {key: value for key, value in options.items() if key in CHANGEABLE_OPTIONS}
        self.num_groups = options.get("num_groups")
        self.replacements: dict[nn.Module, nn.Module] = {}
        self.updates: dict[RoutedNorm, dict[str, Any]] = {}  # settings that change in norms of the requested plan
        self.changes_outputs = False
        self._copies: defaultdict[int, dict[int, Any]] = defaultdict(dict)

    def validate_head(self, head: RoutedLinear) -> None:
        domains = head.plan.domains
        if self.plan.routed and not {*domains} & {*self.plan.domains}:
            message = f"has the domains {', '.join(domains)}, and no route fits it and the norms"
            raise SurgeryError("conflict", message, hint=f"convert the norms first, or use domains={[*domains]}")

    def decide(self, norm: nn.Module) -> str:
        """Decide whether a norm is replaced or kept, and return that in words; raise if neither is possible."""
        if isinstance(norm, RoutedNorm):
            return self._decide_routed(norm)
        kind, adapter = type(norm).__name__, ADAPTERS.get(type(norm))
        if adapter is not None:
            return self._replace(norm, adapter.read_settings(norm), adapter)
        if not isinstance(norm, _BUILT_IN):
            return f"{kind} is not a built-in norm"
        if isinstance(norm, LazyModuleMixin):
            raise SurgeryError("not_supported", f"{kind} has no size yet", hint="run one forward first")
        base = next(base for base in type(norm).__mro__ if base.__module__.startswith("torch.nn.modules"))
        adapter = ADAPTERS.get(base)
        if adapter is not None and not adapter.becomes(adapter.read_settings(norm), self.family):
            return f"{kind}, a subclass of {base.__name__}, is not replaced by {self.plan.name}"
        raise SurgeryError("not_supported", f"{kind} is a subclass of {base.__name__} and may do more than normalize")

    def _decide_routed(self, norm: RoutedNorm) -> str:
        old, new = norm.plan, self.plan
        if old == new or dataclasses.replace(old, statistics="group") == new:  # a layer norm of the last dimensions
            if self.num_groups not in (None, norm.num_groups):
                raise _fixed_groups(norm.num_groups)
            wanted = self.options | ({} if self.sync is None else {"sync": self.sync})
            self.updates[norm] = {key: value for key, value in wanted.items() if getattr(norm, key) != value}
            text = ", ".join(f"{key}={value}" for key, value in self.updates[norm].items())
            return f"already routed, now with {text}" if text else "already routed"
        if old.routed:
            message = f"is already routed as {old.name} over {', '.join(old.domains)}"
            if old.other_gradient != new.other_gradient:
                message += f" with other_gradient={old.other_gradient}"
            raise SurgeryError("not_supported", message, hint="take a branch out with advnorm.strip first")
        if old.statistics == "none":
            return "none has nothing to convert"
        own = ("num_features", "dim", "momentum", "num_groups", "sync", "process_group")
        return self._replace(norm, settings_of(norm, *own), adapter_of(norm))

    def _replace(self, old: nn.Module, settings: dict[str, Any], adapter: NormAdapter) -> str:
        kind = old.plan.name if isinstance(old, RoutedNorm) else type(old).__name__
        if not adapter.becomes(settings, self.family):
            return f"{kind} is not replaced by {self.plan.name}"
        if not isinstance(old, RoutedNorm):
            validate_class(old, adapter.parts)
        last, channels, groups = adapter.statistics == "last", settings["num_features"], self.num_groups
        plan = dataclasses.replace(self.plan, statistics="last") if last else self.plan
        if adapter.statistics == "batch":
            settings["sync"] = settings["sync"] if self.sync is None else self.sync
            settings["num_groups"] = channel_groups(plan.name, channels) if groups is None else groups
            if channels % settings["num_groups"]:
                raise SurgeryError("not_supported", f"{channels} channels cannot be split into {groups} groups")
        elif groups not in (None, settings.get("num_groups")):
            raise _fixed_groups(settings["num_groups"])
        changes_outputs = plan.statistics != adapter.statistics
        if changes_outputs and adapter.routed_class is not RoutedNorm:  # ``strip`` would have no class to give back
            raise SurgeryError("not_supported", f"{kind} does more than normalize and must stay a norm of its kind")
        new = adapter.routed_class(plan=plan, **settings | self.options)
        new.source_class = adapter.norm_class
        for index, bank in enumerate(plan.affine_banks if new.affine else ()):
            new.set_affine_bank(bank, *self._bank_tensors(old, AFFINE, index))
        for index, bank in enumerate(plan.statistics_banks if new.track_running_stats else ()):
            new.set_statistics_bank(bank, *self._bank_tensors(old, STATISTICS, index))
        for name in adapter.parts:
            setattr(new, name, getattr(old, name))
        self.replacements[old] = new
        self.changes_outputs |= changes_outputs
        return f"{kind} -> {plan.name}" + (" (outputs change)" if changes_outputs else "")

    def _bank_tensors(self, norm: nn.Module, names: Sequence[str], bank: int) -> list[Any]:
        """The first bank keeps the tensors of the norm, the others get copies. Tensors that were shared stay shared."""
        tensors = [getattr(norm, name) for name in names]
        return tensors if bank == 0 else [copy.deepcopy(tensor, self._copies[bank]) for tensor in tensors]


def _fixed_groups(groups: int) -> SurgeryError:
    return SurgeryError("not_supported", f"has {groups} groups, which stay", hint="leave num_groups out")
