"""Replace the norms of a model by routed norms, in place."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.lazy import LazyModuleMixin

from advnorm._core.errors import ConfigError, Problem, SurgeryError, collect_problems, raise_problems, unknown_name
from advnorm._core.settings import convert_options
from advnorm.norms.factory import MODULE_OPTIONS, NORMS, NormNames, channel_groups, make_plan, make_plans
from advnorm.norms.plan import Plan
from advnorm.norms.routed_linear import RoutedLinear
from advnorm.norms.routed_norm import IN_FRONT, RoutedNorm
from advnorm.surgery.adapters import (
    BUILT_IN,
    KINDS,
    Kind,
    NormAdapter,
    find_adapter,
    kind_of,
    make_adapter,
    read_settings,
    validate_forward,
)
from advnorm.surgery.replace import (
    AFFINE,
    STATISTICS,
    SurgeryReport,
    map_modules,
    other_parts,
    replace_modules,
    validate_class,
    validate_model,
)

#: Options that can be set in a norm that stays.
CHANGEABLE_OPTIONS = ("eps", "momentum", "process_group")

_BASES = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
_TRANSFORMERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def convert_norm(
    model: nn.Module,
    name: NormNames,
    *,
    keep: Iterable[str] = (),
    sync: bool | None = None,
    treat_as: Mapping[type[nn.Module], str] | None = None,
    **options: Any,
) -> SurgeryReport:
    """Replace the norms of ``model`` by the routed norm ``name``, in place; every bank starts as the replaced norm.

    Batch norms become any norm. Group, instance, layer and root-mean-square norms become the routed form of their own
    kind (``gn``, ``dual_affine_gn``, ...); with another ``name`` they are kept. The norm classes of timm, torchvision
    and transformers convert too, including their activations. Other subclasses of a built-in norm raise an error,
    because they may do more than normalize.

    name: a norm for all layers, or a norm by pattern of the module's name: ``{"layer4.*": "dual_bn", "*": "bn"}``. The
        first pattern that matches decides; a norm that no pattern matches is kept.
    keep: names of modules to leave unchanged.
    sync: synchronize statistics over ranks (default: as in the replaced norm).
    treat_as: the kind of norm of your own classes: ``{MyNorm: "batch_norm_2d"}``; see :func:`register_adapter`.

    Further options are those of :func:`advnorm.make_norm`. An error leaves the model unchanged. Create the optimizer
    afterwards, because additional banks are new parameters.
    """
    validate_model(model)
    if treat_as is not None and not isinstance(treat_as, Mapping):
        message = "{field} must be a mapping such as {MyNorm: 'batch_norm_2d'}"
        raise ConfigError("wrong_type", message, field="treat_as", got=treat_as)
    adapters = {norm: make_adapter(norm, kind, field="treat_as") for norm, kind in (treat_as or {}).items()}
    plans = make_plans(name, options)
    conversions = {pattern: _Conversion(plan, sync, options, adapters) for pattern, plan in plans.items()}
    kept_modules = _modules_below(model, (keep,) if isinstance(keep, str) else tuple(keep))
    replaced, kept, problems = _decide_changes(model, conversions, kept_modules, adapters)
    replacements = {old: new for conversion in conversions.values() for old, new in conversion.replacements.items()}
    transformers = _routed_transformers(model, replacements)
    problems += _batch_order_problems(transformers)
    shown = name if isinstance(name, str) else ", ".join(f"{p}: {plan.name}" for p, plan in plans.items())
    heading = f"cannot convert to {shown} (pass keep=['module.name', ...] to leave modules unchanged)"
    raise_problems(problems, heading, SurgeryError)
    for pattern, conversion in conversions.items():
        conversion.validate_effect(None if isinstance(name, str) else pattern, kept_modules, kept)
    encoders = [layer for layer in transformers.values() if isinstance(layer, nn.TransformerEncoderLayer)]
    notes = []
    if any(conversion.changes_outputs for conversion in conversions.values()):
        notes.append("outputs change, because the new norm normalizes differently; train the model before evaluation")
    if encoders:
        notes.append("encoder layers evaluate as in training: the fast path of PyTorch does not support routed norms")
    added = replace_modules(model, replacements)
    for conversion in conversions.values():
        for norm, settings in conversion.updates.items():
            for key, value in settings.items():
                setattr(norm, key, value)
    for layer in encoders:
        layer.activation_relu_or_gelu = 0  # the only condition of the fast path that nothing else reads
    domains = max((plan.domains for plan in plans.values()), key=len)
    return SurgeryReport(norm=shown, domains=domains, replaced=replaced, kept=kept, new_parameters=added, notes=notes)


def _decide_changes(
    model: nn.Module,
    conversions: Mapping[str, _Conversion],
    kept_modules: set[nn.Module],
    adapters: Mapping[type[nn.Module], NormAdapter],
) -> tuple[dict[str, str], dict[str, str], list[Problem]]:
    """Decide for every norm whether it is replaced. Return descriptions of replaced and of kept norms, and problems."""
    problems: list[Problem] = []
    replaced: dict[str, str] = {}
    kept: dict[str, str] = {}
    for name, module in model.named_modules():
        with collect_problems(problems, name or "model"):
            if isinstance(module, RoutedLinear):
                for conversion in conversions.values():
                    conversion.validate_head(module)
            elif type(module) in adapters or _is_norm(module):
                pattern = next((pattern for pattern in conversions if fnmatchcase(name, pattern)), None)
                if pattern is None:
                    kept[name] = "no pattern matches"
                    continue
                conversion = conversions[pattern]
                conversion.matches[name] = module
                change = "named in keep" if module in kept_modules else conversion.decide(module)
                (replaced if module in conversion.replacements else kept)[name] = change
    registered = {*model.modules()}

    def keep_unregistered(name: str, module: nn.Module) -> nn.Module:
        if module not in registered and (type(module) in adapters or _is_norm(module)):
            kept[name] = f"{type(module).__name__} is hidden from PyTorch; hold it in an nn.ModuleList or nn.ModuleDict"
        return module

    map_modules(model, keep_unregistered)
    return replaced, kept, problems


def _modules_below(model: nn.Module, names: Sequence[str]) -> set[nn.Module]:
    """The named modules and all modules inside of them. A shared module can have several names."""
    modules = dict(model.named_modules(remove_duplicate=False))
    unknown = [name for name in names if name not in modules]
    raise_problems([unknown_name("module", name, modules, field="keep") for name in unknown], "bad conversion")
    return {inner for name in names for inner in modules[name].modules()}


def _routed_transformers(model: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> dict[str, Any]:
    """The transformer layers of PyTorch in which a norm becomes a routed one, by name."""
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, _TRANSFORMERS) and any(_is_routed(replacements.get(child)) for child in layer.children())
    }


def _batch_order_problems(transformers: Mapping[str, Any]) -> list[Problem]:
    """Return a problem for each transformer layer with the batch in its second dimension: routes split the first."""
    message, hint = "{field} has the batch in its second dimension", "build it with batch_first=True"
    return [
        Problem(code="not_supported", message=message, field=name or "model", hint=hint)
        for name, layer in transformers.items()
        if not layer.self_attn.batch_first
    ]


def _is_norm(module: nn.Module) -> bool:
    if isinstance(module, (RoutedNorm, *_BASES)) or find_adapter(type(module)) is not None:
        return True
    named = "norm" in type(module).__name__.lower() and not list(module.children())
    return _is_frozen(module) or (named and any(value is not None for value in module._parameters.values()))


def _is_frozen(module: nn.Module) -> bool:
    return "FrozenBatchNorm" in type(module).__name__  # its weights and statistics are buffers that nothing updates


def _norm_name(norm: nn.Module) -> str:
    return norm.plan.name if isinstance(norm, RoutedNorm) else type(norm).__name__


def _is_routed(module: nn.Module | None) -> bool:
    return isinstance(module, RoutedNorm) and module.plan.routed


class _Conversion:
    """Collects the replacement of each norm, or its new settings. The model changes only after all were accepted."""

    def __init__(
        self, plan: Plan, sync: bool | None, options: Mapping[str, Any], adapters: Mapping[type[nn.Module], NormAdapter]
    ) -> None:
        fixed = [key for key in options if key in MODULE_OPTIONS and key not in CHANGEABLE_OPTIONS]
        message, hint = "{field} is taken from the replaced norm", "leave it out"
        problems = [Problem(code="conflict", message=message, field=key, hint=hint) for key in fixed]
        numbers = {key: options[key] for key in ("eps", "momentum", "num_groups") if options.get(key) is not None}
        raise_problems(problems + convert_options("", RoutedNorm, numbers)[1], "bad conversion")
        self.plan, self.sync, self.adapters = plan, sync, adapters
        self.family = NORMS.get(plan.name).family
        self.options = {key: value for key, value in options.items() if key in CHANGEABLE_OPTIONS}
        self.num_groups = options.get("num_groups") if "num_groups" in NORMS.get(plan.name).options else None
        self.matches: dict[str, nn.Module] = {}  # the norms that this conversion decides on, by name
        self.replacements: dict[nn.Module, nn.Module] = {}
        self.updates: dict[RoutedNorm, dict[str, Any]] = {}  # settings that change in norms of the requested plan
        self.changes_outputs = False
        self._copies: defaultdict[int, dict[int, Any]] = defaultdict(dict)

    def validate_head(self, head: RoutedLinear) -> None:
        domains = head.plan.domains
        if self.plan.routed and not {*domains} & {*self.plan.domains}:
            message = f"has the domains {', '.join(domains)}, and no route fits it and the norms"
            raise SurgeryError("conflict", message, hint=f"convert the norms first, or use domains={[*domains]}")

    def validate_effect(self, pattern: str | None, named: set[nn.Module], kept: Mapping[str, str]) -> None:
        """Raise if there is no norm that the requested one replaces, unless ``keep`` names them all."""
        if not self.matches and pattern is not None:
            raise SurgeryError("no_norm", f"{pattern!r} matches no norm layer", field="norm")
        if not self.matches:
            hint = "a norm-free network trains as it is, with one branch: create_model(..., norm='none')"
            hint = next((f"{name}: {reason}" for name, reason in kept.items()), hint)
            raise SurgeryError("no_norm", "the model has no norm layers", field="model", hint=hint)
        decided = [norm for norm in self.matches.values() if norm not in named]
        if self.replacements or self.updates or not decided:
            return
        found = Counter(map(_norm_name, decided))
        classes = ", ".join(f"{count} {kind}" for kind, count in found.items())
        where = "the model" if pattern is None else repr(pattern)
        message = f"no norm can become {self.plan.name}: {where} has {classes}"
        raise SurgeryError("no_norm_of_kind", message, field="norm", hint=self._fix(decided))

    def _fix(self, norms: Sequence[nn.Module]) -> str:
        """How to convert norms of which none can become the requested one."""
        known = [(norm, adapter.kind) for norm in norms if (adapter := self._adapter(norm)) is not None]
        settings = [(kind, read_settings(norm, kind)) for norm, kind in known]
        routable = [(kind, own) for kind, own in settings if own["affine"] or not self.plan.routed]
        alike = [name for name in NORMS if make_plan(name).routed == self.plan.routed]
        fitting = [n for n in alike if any(kind.becomes(own, NORMS.get(n).family) for kind, own in routable)]
        if fitting:
            return f"use {' or '.join(fitting)}"
        if any(_is_frozen(norm) for norm in norms):
            return "replace frozen norms by batch norms first, as timm.layers.unfreeze_batch_norm_2d does"
        if known:
            return "norms with no parameters have nothing that could differ by domain; build them with parameters"
        name = type(norms[0]).__name__
        return f"if it treats every sample alone: advnorm.surgery.register_adapter({name}, 'layer_norm')"

    def _adapter(self, norm: nn.Module) -> NormAdapter | None:
        if isinstance(norm, RoutedNorm):
            return NormAdapter(kind_of(norm), norm.after)
        return self.adapters.get(type(norm)) or find_adapter(type(norm))

    def decide(self, norm: nn.Module) -> str:
        """Decide whether a norm is replaced or kept, and return that in words; raise if neither is possible."""
        if isinstance(norm, RoutedNorm):
            return self._decide_routed(norm)
        if self._adapter(norm) is not None:
            return self._replace(norm)
        name = type(norm).__name__
        if _is_frozen(norm):
            return f"{name} has fixed statistics and parameters, equal in all domains"
        if not isinstance(norm, _BASES):
            return f"{name} is not a known norm; if it treats every sample alone: treat_as={{{name}: 'layer_norm'}}"
        if isinstance(norm, LazyModuleMixin):
            raise SurgeryError("not_supported", f"{name} has no size yet", hint="run one forward first")
        base = next(base for base in type(norm).__mro__ if base.__module__.startswith("torch.nn.modules"))
        builtin = find_adapter(base)
        if builtin is not None and not builtin.kind.becomes(read_settings(norm, builtin.kind), self.family):
            return f"{name}, a subclass of {base.__name__}, is not replaced by {self.plan.name}"
        message = f"{name} is a subclass of {base.__name__} and may do more than normalize"
        kind = _kind_name(builtin.kind) if builtin is not None else None
        hint = f"if it does not, pass treat_as={{{name}: '{kind}'}}" if kind else ""
        if kind and kind.startswith("batch_norm") and norm._modules:
            hint = f"if it {_applying(norm, kind)}"
        raise SurgeryError("not_supported", message, hint=hint)

    def _decide_routed(self, norm: RoutedNorm) -> str:
        old, new = norm.plan, self.plan
        same_kind = "batch" not in (old.statistics, new.statistics)  # a replaced norm keeps what it normalizes over
        if old == new or (same_kind and dataclasses.replace(old, statistics=new.statistics) == new):
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
        return self._replace(norm)

    def _replace(self, old: nn.Module) -> str:
        adapter: Any = self._adapter(old)
        kind, settings = adapter.kind, read_settings(old, adapter.kind)
        template = old.template if isinstance(old, RoutedNorm) else old
        name = _norm_name(old)
        if not kind.becomes(settings, self.family):
            return f"{name} is not replaced by {self.plan.name}"
        if kind.statistics != "batch" and self.plan.routed and not settings["affine"]:
            return f"{name} has no parameters that could differ by domain"
        plan = dataclasses.replace(self.plan, statistics="last") if kind.statistics == "last" else self.plan
        settings["bias"] &= plan.statistics != "rms"
        self._set_groups(settings, kind)
        parts = old.parts if isinstance(old, RoutedNorm) else self._validated_parts(old, adapter)
        changes_outputs = plan.statistics != kind.statistics
        if changes_outputs and template is not None and type(template) not in BUILT_IN:
            # ``strip`` would have no class to give back.
            raise SurgeryError("not_supported", f"{name} may do more than normalize and must stay a norm of its kind")
        eps: Any = settings.pop("eps")
        new = RoutedNorm(plan=plan, **settings | ({} if eps is None else {"eps": eps}) | self.options)
        if "eps" not in self.options:
            new.eps = eps  # None in nn.RMSNorm stands for the smallest number of the input's type
        if template is not None and not changes_outputs:
            new.adopt_class(old, template, parts, [part for part in adapter.after if part in parts])
        for index, bank in enumerate(new.affine_names if new.affine else ()):
            weight, bias = self._bank_tensors(old, AFFINE, index)
            new.set_affine_bank(bank, weight, bias if settings["bias"] else None)
            if plan.sandwich and bank != IN_FRONT:  # the mapping in front has the parameters of the norm
                nn.init.ones_(weight)
                if bias is not None:
                    nn.init.zeros_(bias)
        for index, bank in enumerate(plan.statistics_banks if new.track_running_stats else ()):
            new.set_statistics_bank(bank, *self._bank_tensors(old, STATISTICS, index))
        self.replacements[old] = new
        self.changes_outputs |= changes_outputs
        return f"{name} -> {plan.name}" + (" (outputs change)" if changes_outputs else "")

    def _set_groups(self, settings: dict[str, Any], kind: Kind) -> None:
        groups, channels = self.num_groups, settings["num_features"]
        if kind.statistics == "batch":
            settings["sync"] = settings["sync"] if self.sync is None else self.sync
            settings["num_groups"] = channel_groups(self.plan.name, channels) if groups is None else groups
            if channels % settings["num_groups"]:
                raise SurgeryError("not_supported", f"{channels} channels cannot be split into {groups} groups")
        elif groups not in (None, settings.get("num_groups")):
            raise _fixed_groups(settings["num_groups"])

    def _validated_parts(self, norm: nn.Module, adapter: NormAdapter) -> list[str]:
        """The parts of a norm that move with it; raise if there are more than its class is known for."""
        parts = [] if type(norm) in BUILT_IN else other_parts(norm)
        fix = "make it a plain module of its class first"
        if norm._modules and type(norm) not in BUILT_IN and (kind := _kind_name(adapter.kind)):
            fix = f"if it {_applying(norm, kind)}; else {fix}"
        validate_class(norm, adapter.after if adapter.kind.statistics == "batch" else parts, hint=fix)
        if adapter.kind.statistics != "batch":
            validate_forward(norm)
        return parts

    def _bank_tensors(self, norm: nn.Module, names: Sequence[str], bank: int) -> list[Any]:
        """The first bank keeps the tensors of the norm, the others get copies. Tensors that were shared stay shared."""
        tensors = [getattr(norm, name, None) for name in names]
        return tensors if bank == 0 else [copy.deepcopy(tensor, self._copies[bank]) for tensor in tensors]


def _kind_name(kind: Kind) -> str | None:
    return next((name for name, known in KINDS.items() if known == kind), None)


def _applying(norm: nn.Module, kind: str) -> str:
    """The rest of a hint: how to declare the children that a batch norm applies to its output."""
    name, after = type(norm).__name__, tuple(norm._modules)
    order = " in this order" if len(after) > 1 else ""
    call = f"advnorm.surgery.register_adapter({name}, '{kind}', after={after})"
    return f"normalizes and then applies {', '.join(after)}{order}: {call}"


def _fixed_groups(groups: int) -> SurgeryError:
    return SurgeryError("not_supported", f"has {groups} groups, which stay", hint="leave num_groups out")
