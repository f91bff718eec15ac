"""Turn any model into a routed one in place, and take one branch back out as a plain module."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.lazy import LazyModuleMixin

from advnorm._core.errors import ConfigError, SurgeryError, did_you_mean, raise_all
from advnorm._core.wrappers import parallel_wrappers, unwrapped
from advnorm.norms.factory import MODULE_OPTIONS, channel_groups, make_plan
from advnorm.norms.head import RoutedLinear
from advnorm.norms.mixture import MixtureNorm
from advnorm.norms.plan import Plan, listed
from advnorm.norms.routed import RoutedNorm, setting_problems
from advnorm.norms.routing import Routed
from advnorm.norms.routing import domains as known_domains

BATCH_NORMS: dict[type, int | None] = {
    nn.BatchNorm1d: 1,
    nn.BatchNorm2d: 2,
    nn.BatchNorm3d: 3,
    nn.SyncBatchNorm: None,
}
INSTANCE_NORMS: dict[type, int] = {nn.InstanceNorm1d: 1, nn.InstanceNorm2d: 2, nn.InstanceNorm3d: 3}
BUILT_IN = (_BatchNorm, _InstanceNorm, nn.GroupNorm, nn.LayerNorm)

#: Layers that hold layer norms beside an attention, which knows where the batch is.
TRANSFORMER_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)

#: The names whose norms replace a built-in one, without their prefix; those of batches replace batch norms alone.
_FAMILIES: dict[type, tuple[str, ...]] = {
    _InstanceNorm: ("in",),
    nn.GroupNorm: ("gn", "ln", "in"),
    nn.LayerNorm: ("ln",),
}

#: Options that a norm which stays can still take on.
SETTABLE = ("eps", "momentum", "process_group")

#: Everything that users hang on a module. The dictionaries move as they are, so that a handle still removes its hook.
_HOOKS = tuple(name for name in vars(nn.Module()) if "_hook" in name)


@dataclass(frozen=True, kw_only=True)
class SurgeryReport:
    """What a conversion did: the modules it replaced, and those it left with the reason."""

    norm: str
    domains: tuple[str, ...]
    replaced: Mapping[str, str] = field(default_factory=dict)
    kept: Mapping[str, str] = field(default_factory=dict)
    parameters_before: int = 0
    parameters_after: int = 0
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        added = self.parameters_after - self.parameters_before
        width = max((len(name) for name in [*self.replaced, *self.kept]), default=0)
        return "\n".join(
            [
                f"{self.norm}: {len(self.replaced)} replaced, {len(self.kept)} kept; "
                f"domains: {', '.join(self.domains)}; {added:+,} parameters",
                *(f"  {name:<{width}}  {change}" for name, change in self.replaced.items()),
                *(f"  {name:<{width}}  kept: {reason}" for name, reason in self.kept.items()),
                *(f"  note: {note}" for note in self.notes),
            ]
        )


class _Replace(NamedTuple):
    build: Callable[[_Ties], nn.Module]
    change: str = ""


class _Keep(NamedTuple):
    reason: str
    change: Callable[[], object] | None = None


class _Refuse(NamedTuple):
    reason: str


def convert_norm(
    model: nn.Module, name: str, *, keep: Iterable[str] = (), sync: bool | None = None, **options: Any
) -> SurgeryReport:
    """Replace the norms of ``model`` by the routed norm ``name``, in place; weights and statistics go into every bank.

    Batch norms of the exact built-in types become any norm. Group, instance and layer norms become the routed form of
    their own kind (``gn`` and ``dual_affine_gn`` …) and stay as they are for other names. A subclass of a built-in norm
    may do more than normalize and is refused by name; ``keep`` lists modules to leave alone. ``sync`` synchronizes
    statistics over ranks (default: as the replaced norm did). Further options are those of :func:`advnorm.make_norm`.
    When anything is refused, nothing is changed. Create the optimizer afterwards: more banks are new parameters.
    """
    _check_convertible(model)
    plan = make_plan(name, **{key: value for key, value in options.items() if key not in MODULE_OPTIONS})
    fixed = [key for key in options if key in MODULE_OPTIONS and key not in SETTABLE]
    raise_all([f"{key} is taken from the norm that is replaced; leave it out" for key in fixed], "bad conversion")
    left = _modules_below(model, (keep,) if isinstance(keep, str) else tuple(keep))
    replacements: dict[nn.Module, _Replace] = {}
    kept: dict[str, _Keep] = {}
    refused: list[str] = []
    for module_name, module in model.named_modules():
        verdict = _judge(module, plan, sync, options)
        if module in left and verdict is not None:
            verdict = _Keep("as asked")
        if isinstance(verdict, _Replace):
            replacements[module] = verdict
        elif isinstance(verdict, _Keep):
            kept[module_name] = verdict
        elif isinstance(verdict, _Refuse):
            refused.append(f"{module_name or 'the model itself'} ({verdict.reason})")
    layers = {
        layer_name: layer
        for layer_name, layer in model.named_modules()
        if plan.routed and isinstance(layer, TRANSFORMER_LAYERS) and any(m in replacements for m in layer.children())
    }
    refused += [
        f"{layer_name or 'the model itself'} ({type(layer).__name__} has its batch in the second dimension, and routes "
        "are cut along the first; build it with batch_first=True)"
        for layer_name, layer in layers.items()
        if not layer.self_attn.batch_first
    ]
    for head_name, head in model.named_modules():
        if isinstance(head, RoutedLinear) and plan.routed and not {*head.plan.domains} & {*plan.domains}:
            heads, norms = (", ".join(one.domains) for one in (head.plan, plan))
            raise SurgeryError(
                f"{head_name} is routed over {heads} and the norms would be over {norms}, so that no route fits both; "
                f"convert the norms first, or use domains={[*head.plan.domains]}"
            )
    if refused:
        raise SurgeryError(
            f"cannot convert to {name}: {'; '.join(refused)}. To leave modules alone, pass keep=['their.name', ...]"
        )
    notes = []
    if any("outputs change" in verdict.change for verdict in replacements.values()):
        notes.append("another kind of normalization: outputs change, train the model before you judge it")
    if not replacements and not any(verdict.change or "already" in verdict.reason for verdict in kept.values()):
        notes.append("nothing was converted: the model has no norm that this name replaces")
    encoders = [layer for layer in layers.values() if isinstance(layer, nn.TransformerEncoderLayer)]
    if encoders:
        notes.append("encoder layers evaluate as they train from now on: their fast path takes no norm but its own")
    reasons = {module_name: verdict.reason for module_name, verdict in kept.items()}
    report = SurgeryReport(norm=name, domains=plan.domains, kept=reasons, notes=tuple(notes))
    report = _perform(model, replacements, report)
    for verdict in kept.values():
        if verdict.change is not None:
            verdict.change()
    for layer in encoders:
        layer.activation_relu_or_gelu = 0  # the one condition of the fast path that nothing else reads
    return report


def convert_head(model: nn.Module, *, domains: Sequence[str] | None = None, name: str | None = None) -> SurgeryReport:
    """Give the classifier one linear layer per domain (paper A, table 7: Dual Linear), in place.

    ``domains``: by default those of the model's routed norms, else clean and adv. ``name`` is the classifier's module
    name; without it the model's last linear layer is taken.
    """
    _check_convertible(model)
    domains = listed(domains or known_domains(model) or ("clean", "adv"))
    plan = Plan(name="dual_linear", domains=domains, statistics="none", affine=domains)
    linears = {n: m for n, m in model.named_modules() if type(m) is nn.Linear}
    routed = {n: m for n, m in model.named_modules() if isinstance(m, RoutedLinear)}
    if name is None and routed:
        name = list(routed)[-1]
    elif name is None and linears:
        name = list(linears)[-1]
    elif name is None:
        raise SurgeryError(
            "the model has no nn.Linear to make a routed head of; a classifier of another kind stays single"
        )
    modules = dict(model.named_modules())
    if name not in modules:
        raise ConfigError(f"the model has no module {name!r}{did_you_mean(name, linears)}")
    report = SurgeryReport(norm=plan.name, domains=domains)
    if name in routed and routed[name].plan == plan:
        return _perform(model, {}, replace(report, kept={name: "routed already"}))
    if name in routed:
        raise SurgeryError(
            f"{name} is routed already, over {', '.join(routed[name].plan.domains)}; strip a branch first"
        )
    if name not in linears:
        raise SurgeryError(
            f"{name} is a {type(modules[name]).__name__}, not a plain nn.Linear; there are: {', '.join(linears)}"
        )
    linear = linears[name]
    more = _does_more(linear)
    if more is not None:
        raise SurgeryError(f"{name} {more}; make it a plain nn.Linear first")

    def build(ties: _Ties) -> nn.Module:
        head = RoutedLinear(linear.in_features, linear.out_features, plan, bias=linear.bias is not None, device="meta")
        for index, domain in enumerate(domains):
            for kind in ("weight", "bias"):
                setattr(head, f"{kind}_{domain}", ties.copy(getattr(linear, kind), index))
        return _carry(linear, head)

    return _perform(model, {linear: _Replace(build, "Linear -> dual_linear")}, report)


def strip(
    model: nn.Module, route: str | None = None, *, component: str | None = None, linked: bool = False
) -> nn.Module:
    """A copy of ``model`` with every routed module as the plain one that ``route`` uses, and the same outputs.

    The copy has no trace of routing: it exports, and where the model came from :func:`convert_norm` its state dict
    loads into the original architecture. The statistics are those that normalize ``route`` at test time.
    ``component``: of a mixture norm this domain's Gaussian alone; by default the one that an enclosing
    :func:`advnorm.component` fixes, and outside of one the whole mixture. ``linked``: parameters and statistics are
    those of ``model`` itself, so that the copy follows its training; a mixture has none of its own and is refused.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"strip takes an nn.Module, got {type(model).__name__}")
    model = unwrapped(model)
    routed = [module for module in model.modules() if isinstance(module, Routed)]
    plans = {module.plan for module in routed}
    problems = []
    mixtures = [module for module in routed if module.plan.mixture]
    if component is not None and not mixtures:
        problems.append("the model has no mixture norm to take a component of; leave component out")
    for module in mixtures:
        if component is not None and component not in module.plan.domains:
            problems.append(f"unknown component {component!r}{did_you_mean(component, module.plan.domains)}")
    if route is not None and not routed:
        problems.append(f"the model has no routed modules, so no route {route!r}; convert it first, or leave route out")
    if component is None and mixtures:
        component = mixtures[0].state.component
    if linked and mixtures and component is None:
        problems.append("a mixture's copy cannot be linked; say which component, or leave linked out")
    for plan in plans:
        if route is None and plan.routed and not plan.mixture:
            problems.append(f"{plan.name} has several branches; say which: strip(model, route={plan.domains[-1]!r})")
        elif route is not None and route not in plan.domains:
            problems.append(f"unknown domain {route!r}{did_you_mean(route, plan.domains)}")
    raise_all(sorted(set(problems)), "cannot strip")
    own = (*model.parameters(), *model.buffers()) if linked else ()
    model = copy.deepcopy(model, {id(tensor): tensor for tensor in own})
    if isinstance(model, Routed):
        return _bound(_plain(model, route, component))
    replacements: dict[nn.Module, _Replace] = {
        module: _Replace(lambda _ties, module=module: _plain(module, route, component))
        for module in model.modules()
        if isinstance(module, Routed)
    }
    _perform(model, replacements, SurgeryReport(norm="", domains=()))
    return model


def _check_convertible(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"surgery takes an nn.Module, got {type(model).__name__}")
    wrappers = parallel_wrappers(model)
    if wrappers:
        raise SurgeryError(
            f"the model is wrapped in {', '.join(wrappers)}, which would not learn of new parameters; "
            "convert first, then wrap"
        )


def _modules_below(model: nn.Module, names: Sequence[str]) -> set[nn.Module]:
    """The modules of these names, which may be second names, and all inside of them."""
    modules = dict(model.named_modules(remove_duplicate=False))
    problems = [f"keep names no module: {name!r}{did_you_mean(name, modules)}" for name in names if name not in modules]
    raise_all(problems, "bad conversion")
    return {inner for name in names for inner in modules[name].modules()}


# -- what becomes of a module --------------------------------------------------------------------------------------


def _judge(
    module: nn.Module, plan: Plan, sync: bool | None, options: Mapping[str, Any]
) -> _Replace | _Keep | _Refuse | None:
    kind = type(module)
    if isinstance(module, RoutedNorm):
        if _same_plan(module.plan, plan):
            return _settings(module, sync, options)
        if module.plan.routed or module.plan.mixture:
            how = f"{module.plan.name} over {', '.join(module.plan.domains)}"
            if plan.other_gradient != module.plan.other_gradient:
                how += f" with other_gradient={module.plan.other_gradient}"
            return _Refuse(f"routed already as {how}; take a branch out with advnorm.strip first")
        if module.plan.statistics == "none":
            return _Keep("none has nothing to convert")
        return _replacement(module, _plain(module, None), plan, sync if sync is not None else module.sync, options)
    if isinstance(module, LazyModuleMixin) and isinstance(module, BUILT_IN):
        return _Refuse(f"{kind.__name__} has no size yet; run one forward first")
    if kind in BATCH_NORMS or kind in INSTANCE_NORMS or kind in (nn.GroupNorm, nn.LayerNorm):
        verdict = _replacement(module, module, plan, sync, options)
        more = _does_more(module) if isinstance(verdict, _Replace) else None
        return verdict if more is None else _Refuse(f"{kind.__name__} {more}")
    if isinstance(module, BUILT_IN):
        base = next(base.__name__ for base in kind.__mro__ if base.__module__.startswith("torch.nn.modules"))
        if not isinstance(module, _BatchNorm) and _family(plan) not in _FAMILIES[_built_in(module)]:
            return _Keep(f"{kind.__name__}, a subclass of {base}, is not the norm that {plan.name} replaces")
        return _Refuse(f"{kind.__name__} is a subclass of {base} and may do more than normalize")
    if "norm" in kind.__name__.lower() and not list(module.children()):
        return _Keep(f"{kind.__name__} is not a built-in norm")
    return None


def _does_more(module: nn.Module) -> str | None:
    """What a module of a built-in class has that its class does not, and that would be lost with it."""
    if "forward" in vars(module):
        return "has a forward of its own and may do more than its class"
    known = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    tensors = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    more = [name for name in (*tensors, *dict(module.named_children())) if name not in known]
    return f"holds {', '.join(more)}, which its class has not, and may do more" if more else None


def _family(plan: Plan) -> str:
    return plan.name.removeprefix("dual_affine_")


def _built_in(module: nn.Module) -> type:
    return next(kind for kind in BUILT_IN if isinstance(module, kind))


def _settings(norm: RoutedNorm, sync: bool | None, options: Mapping[str, Any]) -> _Keep | _Refuse:
    """A norm of the wanted plan stays; settings that were asked for are changed in it."""
    if options.get("num_groups") not in (None, norm.num_groups):
        return _Refuse(f"it has {norm.num_groups} groups already; leave num_groups out")
    wanted = {key: value for key, value in options.items() if key in SETTABLE}
    wanted |= {} if sync is None else {"sync": sync}
    changed = {key: value for key, value in wanted.items() if getattr(norm, key) != value}
    if not changed:
        return _Keep("routed already")
    asked = {"eps": norm.eps, "momentum": norm.momentum, **wanted}
    problems = setting_problems(norm.shape, norm.plan, norm.dim, asked["eps"], asked["momentum"], norm.num_groups)
    raise_all(problems, f"bad norm {norm.plan.name!r}")
    text = ", ".join(f"{key}={value}" for key, value in changed.items())
    return _Keep(f"routed already, now with {text}", lambda: [setattr(norm, *item) for item in changed.items()])


def _same_plan(old: Plan, new: Plan) -> bool:
    return old == new or replace(old, statistics="group") == new


def _replacement(
    old: nn.Module, source: Any, plan: Plan, sync: bool | None, options: Mapping[str, Any]
) -> _Replace | _Keep | _Refuse:
    """How a plain norm (``old`` itself, or what an unrouted ``old`` stands for) becomes the norm of ``plan``."""
    kind, family = type(source).__name__, _family(plan)
    settings: dict[str, Any] = {"eps": source.eps, **{k: v for k, v in options.items() if k in MODULE_OPTIONS}}
    given = options.get("num_groups")
    if isinstance(source, _BatchNorm):
        features: Any = source.num_features
        dim = BATCH_NORMS[type(source)]
        kept = [source.running_mean is not None, source.running_var is not None]
        if any(kept) and not (all(kept) and source.track_running_stats):
            return _Refuse(
                f"{kind} has statistics that it evaluates with and does not feed; set track_running_stats=True (and "
                "momentum=0 where they shall stay), or running_mean and running_var to None"
            )
        settings = {"momentum": source.momentum, "track_running_stats": all(kept), **settings}
        settings["sync"] = isinstance(source, nn.SyncBatchNorm) if sync is None else sync
        settings.setdefault("process_group", getattr(old, "process_group", None))
        settings["num_groups"] = channel_groups(plan.name, features) if given is None else given
        if isinstance(given, int) and given > 0 and features % given:
            return _Refuse(f"{features} channels cannot be cut into {given} groups")
    elif isinstance(source, nn.GroupNorm):
        features, groups = source.num_channels, source.num_groups
        if family != "gn" and not (family == "ln" and groups == 1) and not (family == "in" and groups == features):
            return _Keep(f"{kind} with {groups} groups is not the norm that {plan.name} replaces")
        if given not in (None, groups):
            return _Refuse(f"it has {groups} groups, which are taken over; leave num_groups out")
        dim = getattr(old, "dim", None)
        settings["num_groups"] = groups
    elif isinstance(source, nn.LayerNorm):
        if family != "ln":
            return _Keep(f"{kind} is not the norm that {plan.name} replaces")
        features, dim, plan = source.normalized_shape, None, replace(plan, statistics="last")
    else:
        assert isinstance(source, _InstanceNorm)
        if family != "in":
            return _Keep(f"{kind} is not the norm that {plan.name} replaces")
        if source.track_running_stats or not source.affine:
            return _Keep(f"{kind} without affine parameters, or with running statistics, has nothing to route")
        features, dim = source.num_features, INSTANCE_NORMS[type(source)]
        settings["num_groups"] = features

    def build(ties: _Ties) -> nn.Module:
        weight, bias = source.weight, source.bias
        new = RoutedNorm(features, plan, dim=dim, affine=weight is not None, bias=bias is not None, **settings)
        for index, bank in enumerate(plan.affine_banks if new.affine else ()):
            new.set_affine_bank(bank, ties.copy(weight, index), ties.copy(bias, index))
        for index, bank in enumerate(plan.statistics_banks if new.track_running_stats else ()):
            values = (source.running_mean, source.running_var, source.num_batches_tracked)
            new.set_statistics_bank(bank, *(ties.copy(value, index) for value in values))
        return _carry(old, new)

    changes = isinstance(source, _BatchNorm) and plan.statistics != "batch"
    kind = old.plan.name if isinstance(old, RoutedNorm) else kind
    return _Replace(build, f"{kind} -> {plan.name}" + (" (outputs change)" if changes else ""))


def _plain(module: Routed, route: str | None, component: str | None = None) -> nn.Module:
    """The built-in module that computes what ``module`` computes for ``route`` with stored statistics."""
    plan = module.plan
    mixes = plan.mixture and component is None
    domain = component if plan.mixture and component is not None else route
    index = 0 if domain is None else plan.index(domain)
    if isinstance(module, RoutedLinear):
        weight, bias = module.bank(plan.affine[index])
        plain: Any = nn.Linear(module.in_features, module.out_features, bias=bias is not None, device="meta")
        plain.weight, plain.bias = weight, bias
        return _carry(module, plain)
    assert isinstance(module, RoutedNorm)
    if plan.statistics == "none":
        return _carry(module, nn.Identity())
    weight, bias = module.affine_bank(plan.affine[index])
    if mixes and not module.track_running_stats:
        raise SurgeryError(
            f"{plan.name} without running statistics computes nothing without its batch; it stays routed"
        )
    if mixes:
        means, variances, _ = zip(*(module.statistics_bank(bank) for bank in plan.statistics_banks))
        return _carry(module, MixtureNorm(torch.stack(means), torch.stack(variances), weight, bias, module.eps))
    settings: dict[str, Any] = {"eps": module.eps, "device": "meta"}
    if plan.statistics == "batch":
        kind = next(kind for kind, dim in BATCH_NORMS.items() if dim == module.dim)
        settings |= {"momentum": module.momentum, "track_running_stats": module.track_running_stats}
        settings |= {"process_group": module.process_group} if kind is nn.SyncBatchNorm else {}
        plain = kind(module.shape[0], affine=module.affine, **settings)
        if module.track_running_stats:
            bank = module.statistics_bank(plan.normalized_by[index])
            plain.running_mean, plain.running_var, plain.num_batches_tracked = bank
    elif plan.statistics == "group":
        plain = nn.GroupNorm(module.num_groups, module.shape[0], affine=module.affine, **settings)
    else:
        plain = nn.LayerNorm(list(module.shape), elementwise_affine=module.affine, bias=bias is not None, **settings)
    if module.affine:
        plain.weight, plain.bias = weight, bias
    return _carry(module, plain)


# -- how it is done ------------------------------------------------------------------------------------------------


class _Ties:
    """Copies of a tensor, one per bank: the first bank keeps the original, and tensors shared before stay shared."""

    def __init__(self) -> None:
        self._copies: dict[tuple[int, int], torch.Tensor] = {}

    def copy(self, tensor: Any, index: int) -> Any:
        if tensor is None or index == 0:
            return tensor
        key = (id(tensor), index)
        if key not in self._copies:
            fresh = tensor.detach().clone()
            is_parameter = isinstance(tensor, nn.Parameter)
            self._copies[key] = nn.Parameter(fresh, requires_grad=tensor.requires_grad) if is_parameter else fresh
        return self._copies[key]


def _carry(old: nn.Module, new: nn.Module) -> nn.Module:
    """Mode and hooks of ``old`` go over to ``new``."""
    new.training = old.training
    for name in _HOOKS:
        setattr(new, name, getattr(old, name))
    return new


def _bound(module: nn.Module) -> nn.Module:
    """Hooks that were given their module get this one."""
    hooks: Any = module._load_state_dict_pre_hooks.values()
    for hook in hooks:
        if getattr(hook, "with_module", False):
            hook.module = weakref.ref(module)
    return module


def _perform(model: nn.Module, replacements: Mapping[nn.Module, _Replace], report: SurgeryReport) -> SurgeryReport:
    """Build every new module, then put them all in place of the old ones, wherever these are held."""
    if model in replacements:
        raise SurgeryError(
            f"the model itself is a {type(model).__name__} and cannot be replaced in place; wrap it in nn.Sequential"
        )
    before = _parameter_count(model)
    ties = _Ties()
    built = {old: replacement.build(ties) for old, replacement in replacements.items()}
    names = {name: replacements[module].change for name, module in model.named_modules() if module in built}
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child in built:
                parent._modules[name] = _bound(built[child])
    return replace(report, replaced=names, parameters_before=before, parameters_after=_parameter_count(model))


def _parameter_count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
