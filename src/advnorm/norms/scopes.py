"""Scopes set the domains of the samples and the statistics that normalize them, inside a ``with``.

A scope changes plain attributes of the routed modules and restores the old values when it ends, even after an error.
It copies no tensor, so an autograd graph that is still in use keeps its tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from advnorm._core.errors import ConfigError, Problem, RouteError, raise_problems, unknown_name
from advnorm.norms.routed_module import RoutedModule, list_routed, mixture_norms, routed_modules, validate_module
from advnorm.norms.state import MODES, UNSCOPED, Mode, Route, ScopeState

#: Held while a scope opens or closes, so that threads that compete for a model never see it half changed.
_CHANGING = threading.RLock()


class Scope:
    """Sets fields of the routed modules' state on entry and restores them on exit. The innermost scope wins."""

    def __init__(
        self,
        model: nn.Module,
        fields: Mapping[str, Any],
        *,
        domains: Sequence[str] = (),
        perturbation: Mapping[str, Any] | None = None,
    ) -> None:
        validate_module(model)
        modules = list_routed(model)
        if not modules:
            message = f"{type(model).__name__} has no routed norms"
            hint = "convert it with advnorm.convert_norm(model, 'dual_bn')"
            raise ConfigError("no_routed_norm", message, field="model", hint=hint)
        for known in dict.fromkeys([module.plan.domains for module in modules]):
            unknown = [domain for domain in dict.fromkeys(domains) if domain not in known]
            raise_problems([unknown_name("domain", domain, known) for domain in unknown], "bad route")
        self._modules = modules
        self._fields = dict(fields)
        self._perturbations = None if perturbation is None else [perturbation.get(n) for n in routed_modules(model)]
        self._before: list[ScopeState] | None = None
        self._outdated = False  # whether the states in _before no longer hold

    def __enter__(self) -> Self:
        if torch.compiler.is_compiling():
            self._open()
        else:
            with _CHANGING:
                self._open()
        return self

    def __exit__(self, *_: object) -> None:
        if torch.compiler.is_compiling():
            self._close()
        else:
            with _CHANGING:
                self._close()

    def _open(self) -> None:
        if self._before is not None:
            raise RouteError("already_open", "this scope is already open", hint="make a new one for each `with`")
        before = [module.state for module in self._modules]
        compiling = torch.compiler.is_compiling()
        fields = self._fields
        if not compiling:
            thread = threading.get_ident()
            if any(state.thread is not None and state.thread != thread for state in before):
                hint = "give each thread its own copy (copy.deepcopy)"
                raise RouteError("wrong_thread", "another thread holds a scope on this model", hint=hint)
            fields = self._fields = {**fields, "thread": thread}
        self._before = before
        old, new = None, UNSCOPED
        for index, (module, state) in enumerate(zip(self._modules, before)):
            if state is not old:  # neighbours mostly share one state
                old, new = state, state._replace(**fields)
            _set_state(module, self._perturbed(new, index))
            if not compiling:
                module.__dict__["scopes"] = (*module.scopes, self)

    def _perturbed(self, state: ScopeState, index: int) -> ScopeState:
        return state if self._perturbations is None else state._replace(perturbation=self._perturbations[index])

    def _applied(self, state: ScopeState, index: int) -> ScopeState:
        """The state of module number ``index`` inside this scope, given the state around it."""
        return self._perturbed(state._replace(**self._fields), index)

    def _close(self) -> None:
        before, self._before = self._before or [], None
        out_of_order = False
        for module, state in zip(self._modules, before):
            if not torch.compiler.is_compiling():
                out_of_order |= module.scopes[-1:] != (self,)
                remaining = tuple(scope for scope in module.scopes if scope is not self)
                module.__dict__["scopes"] = remaining
                if out_of_order or self._outdated:
                    state = UNSCOPED
                    for scope in remaining:
                        scope._outdated = True
                        state = scope._applied(state, scope._modules.index(module))
            _set_state(module, state)
        self._outdated = False
        if out_of_order:
            hint = "give each generator and task its own copy of the model"
            raise RouteError("wrong_order", "scopes must close in the reverse order of opening", hint=hint)


def _set_state(module: RoutedModule, state: ScopeState) -> None:
    if torch.compiler.is_compiling():
        module.state = state
    else:
        module.__dict__["state"] = state  # faster than nn.Module.__setattr__, which checks for parameters first


def route(model: nn.Module, route: Route, *, forwarded: Mapping[str, int] | None = None) -> Scope:
    """Scope: the whole batch comes from one domain, or its parts from several, in the given order.

    ``forwarded`` samples come before those of the route and only provide the statistics of their banks. A norm that
    crosses domains normalizes them by their own statistics and scales them like the samples that their bank normalizes
    (paper A, sec. 3); other norms treat them like all samples of their domain. Without forwarded samples, crossed
    samples use each other's moments at every norm, which does not train a deep network (docs/reference/norms.md).

    >>> with route(model, "adv"): ...
    >>> with route(model, {"clean": 128, "adv": 128}): ...
    >>> with route(model, "adv", forwarded={"clean": 128}): ...
    """
    segments = ((route, None),) if isinstance(route, str) else _parse_counts("route", route)
    first = () if forwarded is None else _parse_counts("forwarded", forwarded)
    named = [domain for domain, _ in (*first, *segments)]
    return Scope(model, {"route": segments, "forwarded": first, "pair": None}, domains=named)


def _parse_counts(field: str, counts: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    if not isinstance(counts, Mapping) or not counts:
        message = "{field} must be a domain or a mapping such as {'clean': 128, 'adv': 128}"
        raise ConfigError("wrong_type", message, field=field, got=counts)
    problems = [
        Problem("out_of_range", "{field} must be an integer of at least 0", f"{field}.{domain}", got=count)
        for domain, count in counts.items()
        if isinstance(count, bool) or not isinstance(count, Integral | torch.SymInt) or count < 0
    ]
    raise_problems(problems, "bad route")
    return tuple((domain, int(count) if isinstance(count, Integral) else count) for domain, count in counts.items())


def pair_banks(model: nn.Module, *, statistics: str, affine: str) -> Scope:
    """Scope: the statistics bank of one domain with the affine bank of another (paper A, table 5: swapped NS and AP).

    In mode ``running`` the bank that ``statistics`` updates normalizes. In mode ``batch`` the moments of the batch
    normalize, and they update that bank.
    """
    mixtures = [name or "the norm" for name in mixture_norms(model)]
    if mixtures:
        message = f"mixture norms use all statistics banks at once and cannot be paired: {', '.join(mixtures)}"
        raise ConfigError("not_supported", message, field="model", hint="use advnorm.mixture_component(model, domain)")
    return Scope(model, {"pair": (statistics, affine)}, domains=[statistics, affine])


def mixture_component(model: nn.Module, domain: str) -> Scope:
    """Scope: mixture norms normalize the whole batch by the Gaussian of one domain, whatever the input.

    ``w ⊙ (x - μ_d) / σ_d + b``: paper C, eq. 10, with the posterior of ``domain`` 1 everywhere. In mode ``running`` the
    stored moments of its bank normalize; in mode ``batch`` the moments of the batch normalize and update it. A route
    still applies to other routed modules, such as heads.
    """
    scope = Scope(model, {"component": domain}, domains=[domain])
    if not mixture_norms(model):
        raise _no_mixture_norm(f"choose a branch with advnorm.route(model, {domain!r})")
    return scope


def _no_mixture_norm(hint: str) -> ConfigError:
    return ConfigError("no_mixture_norm", "the model has no mixture norm", field="model", hint=hint)


def statistics(
    model: nn.Module,
    *,
    mode: Mode | None = None,
    groups: int | None = None,
    perturbation: Mapping[str, Mapping[str, tuple[Tensor, Tensor]]] | None = None,
) -> Scope:
    """Scope: which statistics normalize. Arguments that are not given keep the value of the enclosing scope.

    ``mode``: ``batch`` uses the moments of the batch and updates the banks, ``batch_frozen`` uses them without an
    update, ``running`` uses the stored moments. Without a mode each norm follows its own ``training`` flag.
    ``groups``: number of parts of each domain's samples with their own moments (paper B, sec. 3.2).
    ``perturbation``: from :func:`advnorm.zero_perturbation` (paper B, eq. 3).
    """
    problems = []
    if mode is not None and mode not in MODES:
        problems.append(unknown_name("statistics mode", mode, MODES, field="mode"))
    if groups is not None and (isinstance(groups, bool) or not isinstance(groups, int) or groups < 1):
        problems.append(Problem("out_of_range", "{field} must be an integer of at least 1", "groups", got=groups))
    if perturbation is not None:
        problems += _perturbation_problems(routed_modules(model), perturbation)
    raise_problems(problems, "bad statistics scope")
    given = {name: value for name, value in {"mode": mode, "groups": groups}.items() if value is not None}
    return Scope(model, given, perturbation=perturbation)


def _perturbation_problems(norms: Mapping[str, Any], perturbation: Mapping[str, Mapping[str, Any]]) -> list[Problem]:
    hint = "make it with advnorm.zero_perturbation(model) from the same model"
    problems = []
    for name, banks in perturbation.items():
        known = norms[name].plan.statistics_banks if name in norms else ()
        if name not in norms or not {*banks} <= {*known}:
            message, got = f"{{field}} of {name!r} must name norms and banks of the model", list(banks)
            problems.append(Problem(code="unknown_name", message=message, field="perturbation", got=got, hint=hint))
            continue
        if any([delta.shape for delta in deltas] != [norms[name].shape] * 2 for deltas in banks.values()):
            message = f"{{field}} of {name!r} must have two tensors of shape {norms[name].shape} per bank"
            problems.append(Problem(code="wrong_shape", message=message, field="perturbation", hint=hint))
    return problems


class mixture_likelihood(Scope):
    """Scope that collects the negative log-likelihoods of the mixture norms in it (paper C, eq. 21).

    >>> with mixture_likelihood(model) as likelihood:
    ...     logits = model(x)
    >>> loss = cross_entropy(logits, y) + weight * likelihood.loss()
    """

    def __init__(self, model: nn.Module) -> None:
        self._terms: list[Tensor] = []
        super().__init__(model, {"likelihoods": self._terms})
        if not mixture_norms(model):
            raise _no_mixture_norm("use norm='gmm_bn'")

    def _open(self) -> None:
        super()._open()
        self._terms.clear()

    def loss(self, positions: Literal["sum", "mean"] = "sum") -> Tensor:
        """``L_DBN``: summed over all positions and layers, or averaged over positions; averaged over the samples."""
        if not self._terms:
            raise RouteError("empty", "no mixture norm ran inside the scope", hint="call the model inside the `with`")
        terms = [term_NP.sum(1) if positions == "sum" else term_NP.mean(1) for term_NP in self._terms]
        return torch.stack([term_N.mean() for term_N in terms]).sum()


def checkpoint_context(model: nn.Module) -> Callable[[], tuple[Scope, Scope]]:
    """``context_fn`` for ``torch.utils.checkpoint``: recomputation uses the scopes of the forward, updates no bank.

    >>> checkpoint(model.layer1, x, use_reentrant=False, context_fn=checkpoint_context(model))
    """
    return lambda: (Scope(model, {}), RecomputationScope(model))


class RecomputationScope(Scope):
    """Scope that restores the states at the time of its creation, in whichever thread enters it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, {})
        self._states = [module.state for module in self._modules]

    def _open(self) -> None:
        self._before = [module.state for module in self._modules]
        for index, module in enumerate(self._modules):
            module.__dict__["scopes"] = (*module.scopes, self)
            _set_state(module, self._applied(module.state, index))

    def _applied(self, state: ScopeState, index: int) -> ScopeState:
        return self._states[index]._replace(thread=threading.get_ident(), recomputing=True)
