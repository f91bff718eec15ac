"""Scopes: which domain a sample comes from and which statistics normalize it, for the length of a ``with``.

A scope flips plain attributes of the routed modules and puts the old values back when it ends, whatever happens inside.
Nothing is copied, so a graph that is alive keeps its tensors; nothing is left over.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, get_args

import torch
from torch import Tensor, nn

from advnorm._core.errors import ConfigError, RouteError, did_you_mean, raise_all
from advnorm._core.wrappers import unwrapped
from advnorm.norms.plan import Plan

Mode = Literal["batch", "batch_frozen", "running"]


def unmoving(statistics: Mode) -> Mode:
    """The mode of an evaluation: batch statistics where they are asked for, without updates of the running ones."""
    return "batch_frozen" if statistics == "batch" else statistics


Route = str | Mapping[str, int]

MODES: tuple[Mode, ...] = get_args(Mode)


class Run(NamedTuple):
    """Consecutive samples that are treated alike: their banks and their rows of the batch."""

    normalized_by: str
    feeds: str  # empty: none
    affine: str
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


class State(NamedTuple):
    """What the enclosing scopes say; the defaults are what holds outside of any."""

    route: tuple[tuple[str, int | None], ...] | None = None  # domains and counts in order; None is the whole batch
    forwarded: tuple[tuple[str, int], ...] = ()  # samples in front of the route's, for the statistics of their banks
    pair: tuple[str, str] | None = None  # the domain whose statistics bank, the domain whose affine bank
    component: str | None = None  # the domain whose Gaussian alone normalizes in a mixture norm
    mode: Mode | None = None
    groups: int = 1
    delta: Mapping[str, tuple[Tensor, Tensor]] | None = None  # by statistics bank: of the mean, of the std
    collected: list[Tensor] | None = None  # receives the negative log-likelihoods of a mixture norm
    alone: bool = False  # moments of this rank's samples, whether the norm synchronizes or not
    recomputing: bool = False  # the forward repeats an earlier one, whose samples were counted then
    owner: int | None = None  # the thread that holds the scope


UNSCOPED = State()


class Routed(nn.Module):
    """A module that treats samples by their domain, as the enclosing scopes say."""

    plan: Plan
    state: State

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.state = UNSCOPED
        self.scopes: tuple[Scope, ...] = ()
        self._last: tuple[Any, tuple[Run, ...]] = (None, ())

    def __getstate__(self) -> dict[str, Any]:
        # A copy or a pickle made inside a scope starts outside of it, and is not compiled: that ran the original.
        state = {**self.__dict__, "state": UNSCOPED, "scopes": (), "_last": (None, ())}
        state.pop("_compiled_call_impl", None)
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> Routed:
        group = getattr(self, "process_group", None)
        if group is not None:
            memo[id(group)] = group  # a copy talks to the same ranks
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        clone.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        return clone

    def recomputing(self) -> bool:
        """Whether this forward is gradient checkpointing's repetition of an earlier one."""
        return self.state.recomputing or (not torch.compiler.is_compiling() and in_backward())

    def runs(self, batch: int, *, needs_route: bool) -> tuple[Run, ...]:
        """Cut a batch into runs by the route in force; neighbours that are treated alike become one run."""
        state = self.state
        if torch.compiler.is_compiling():
            return cut(self.plan, state, batch, needs_route)
        if state.owner is not None and state.owner != threading.get_ident() and not in_backward():
            raise RouteError(
                "this forward runs in another thread than the one that opened the scope, which would share its route; "
                "give each thread its own copy of the model (copy.deepcopy), or one process per device (torchrun)"
            )
        key = (state.route, state.forwarded, state.pair, state.component, state.groups, batch, needs_route)
        last = self._last
        if last[0] != key:
            last = self._last = (key, cut(self.plan, state, batch, needs_route))
        return last[1]


def cut(plan: Plan, state: State, batch: int, needs_route: bool) -> tuple[Run, ...]:
    """The runs of a batch under a plan and the scopes in force."""
    if batch == 0:
        raise RouteError("the batch is empty; skip empty batches before the forward (drop_last=True in the loader)")
    if state.pair is not None:
        statistics, affine = (plan.domains.index(domain) for domain in state.pair)
        bank = plan.feeds[statistics] if plan.feeds else ""
        return (Run(bank, bank, plan.affine[affine], 0, batch),)
    if plan.mixture and state.component is not None:
        index = plan.domains.index(state.component)
        return (Run(plan.normalized_by[index], plan.feeds[index], plan.affine[index], 0, batch),)
    route = state.route
    if route is None:
        if needs_route:
            raise RouteError(
                f"{plan.name} has the domains {', '.join(plan.domains)} and no route is set; wrap the forward in "
                f"`with advnorm.route(model, '{plan.domains[-1]}'):` for a batch of one domain, or in "
                f"`with advnorm.route(model, {plan.example_route}):` for a concatenated one; attacks, evaluations "
                f"and analyses take route='{plan.domains[-1]}'. With gradient checkpointing keep the backward inside "
                "the scope, or (compiled blocks always) pass context_fn=advnorm.checkpoint_context(model)"
            )
        route = ((plan.domains[0], None),)
    runs: list[Run] = []
    start = 0
    for position, (domain, count) in enumerate((*state.forwarded, *route)):
        stop = max(start, batch) if count is None else start + count
        first = position < len(state.forwarded)
        run = Run(*plan.banks(domain, forwarded=first, beside=bool(state.forwarded)), start, stop)
        if runs and runs[-1][:3] == run[:3] and state.groups == 1:  # a group is the n-th of every domain's samples
            runs[-1] = runs[-1]._replace(stop=stop)
        elif stop > start:
            runs.append(run)
        start = stop
    if start != batch:
        behind = f" behind the forwarded {dict(state.forwarded)}" if state.forwarded else ""
        raise RouteError(
            f"the route {dict(route)}{behind} covers {start} samples and the batch has {batch}; "
            "give one count per domain that sum to the batch size, in the order of the concatenation"
        )
    return tuple(runs)


class _Part(Protocol):
    @property
    def rows(self) -> int: ...


P = TypeVar("P", bound=_Part)


def per_part(x: Tensor, parts: Sequence[P], function: Callable[[Tensor, P], Tensor]) -> Tensor:
    """Apply ``function`` to each part's rows of ``x`` and put the results together again; one part needs no copy."""
    if len(parts) == 1:
        return function(x, parts[0])
    return joined([function(rows, part) for rows, part in zip(x.split([part.rows for part in parts]), parts)])


def joined(pieces: Sequence[Tensor]) -> Tensor:
    """The pieces one after the other; a single one needs no copy."""
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))


def in_backward() -> bool:
    """Whether a backward pass is under way in this thread: then a forward is a recomputation by checkpointing."""
    return torch._C._current_graph_task_id() != -1


def routed_modules(model: nn.Module) -> dict[str, Routed]:
    """The routed modules of a model by name, shared ones once."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"norms are looked for in an nn.Module, got {type(model).__name__}")
    return {name: module for name, module in unwrapped(model).named_modules() if isinstance(module, Routed)}


def _routed(model: nn.Module) -> list[Routed]:
    """The modules of :func:`routed_modules` in its order; a scope is opened at every step, and names cost time."""
    found: dict[Routed, None] = {}
    seen: set[nn.Module] = set()
    stack = [model]
    while stack:
        module = stack.pop()
        if module in seen:
            continue
        seen.add(module)
        if isinstance(module, Routed):
            found[module] = None
        stack.extend(child for child in reversed(module._modules.values()) if child is not None)
    return list(found)


def domains(model: nn.Module) -> tuple[str, ...]:
    """The domains a model's routed modules know, in order; empty for a plain model."""
    return tuple(dict.fromkeys(d for module in routed_modules(model).values() for d in module.plan.domains))


#: One scope at a time opens or closes: a thread that finds the model taken leaves all its modules as they are.
_CHANGING = threading.RLock()


class Scope:
    """Changes fields of the routed modules' state on entry and restores them on exit. Scopes nest; the inner wins."""

    def __init__(
        self,
        model: nn.Module,
        fields: Mapping[str, Any],
        *,
        wanted: Sequence[str] = (),
        delta: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ConfigError(f"a scope is opened on an nn.Module, got {type(model).__name__}")
        modules = _routed(model)
        if not modules:
            raise ConfigError(
                f"{type(model).__name__} has no routed norms; convert it with advnorm.convert_norm(model, 'dual_bn') "
                "or build one with advnorm.create_model(..., norm='dual_bn')"
            )
        problems = [
            f"unknown domain {domain!r}{did_you_mean(domain, allowed)}"
            for allowed in dict.fromkeys([module.plan.domains for module in modules])
            for domain in dict.fromkeys(wanted)
            if domain not in allowed
        ]
        raise_all(problems, "bad route")
        self._modules = modules
        self._fields = dict(fields)
        self._deltas = None if delta is None else [delta.get(name) for name in routed_modules(model)]
        self._before: list[State] | None = None

    def __enter__(self) -> Scope:
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
            raise RouteError("this scope is open already; make a new one with each `with`")
        before = [module.state for module in self._modules]
        compiling = torch.compiler.is_compiling()
        fields = self._fields
        if not compiling:
            owner = threading.get_ident()
            if any(state.owner is not None and state.owner != owner for state in before):
                raise RouteError(
                    "another thread holds a scope on this model; give each thread its own copy (copy.deepcopy)"
                )
            fields = self._fields = {**fields, "owner": owner}
        self._before = before
        old, new = None, UNSCOPED
        for index, (module, state) in enumerate(zip(self._modules, before)):
            if state is not old:  # neighbours mostly share one state
                old, new = state, state._replace(**fields)
            _set_state(module, self._applied(new, index, fresh=True))
            if not compiling:
                module.__dict__["scopes"] = (*module.scopes, self)

    def _applied(self, state: State, index: int, *, fresh: bool = False) -> State:
        """What this scope makes of a state of its module number ``index``."""
        state = state if fresh else state._replace(**self._fields)
        return state if self._deltas is None else state._replace(delta=self._deltas[index])

    def _close(self) -> None:
        before, self._before = self._before or [], None
        crossed = False
        for module, state in zip(self._modules, before):
            if not torch.compiler.is_compiling():
                crossed |= module.scopes[-1:] != (self,)
                left = tuple(scope for scope in module.scopes if scope is not self)
                module.__dict__["scopes"] = left
                if crossed or self._outlived:
                    state = UNSCOPED
                    for scope in left:
                        scope._outlived = True  # what it saw on entry is no longer true
                        state = scope._applied(state, scope._modules.index(module))
            _set_state(module, state)
        self._outlived = False
        if crossed:
            raise RouteError(
                "scopes must close in the reverse order of opening: a scope that was opened inside this one, by a "
                "generator or another task, is still open; give each of them its own copy of the model"
            )

    _outlived = False


def _set_state(module: Routed, state: State) -> None:
    if torch.compiler.is_compiling():
        module.state = state
    else:
        module.__dict__["state"] = state  # the general way of a module checks for parameters first


def route(model: nn.Module, route: Route, *, forwarded: Mapping[str, int] | None = None) -> Scope:
    """Scope: the whole batch comes from one domain, or its parts from several, in the order given.

    ``forwarded`` samples lie in front of them, and are there for the statistics of their banks alone: where a norm
    crosses domains, they are normalized by their own and scaled as what their bank normalizes (paper A, sec. 3); other
    norms treat them as any of their domain. Without any, crossed samples give each other their moments at every norm:
    the plain reading of one layer, and nothing to train a deep network by (docs/norms.md).

    >>> with route(model, "adv"): ...
    >>> with route(model, {"clean": 128, "adv": 128}): ...
    >>> with route(model, "adv", forwarded={"clean": 128}): ...
    """
    segments = ((route, None),) if isinstance(route, str) else parse_route(route)
    first = () if forwarded is None else parse_route(forwarded)
    wanted = [domain for domain, _ in (*first, *segments)]
    return Scope(model, {"route": segments, "forwarded": first, "pair": None}, wanted=wanted)


def parse_route(route: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """A mapping from domain to number of samples as a tuple; all that is wrong with it in one error."""
    if not isinstance(route, Mapping) or not route:
        raise ConfigError(
            f"a route is a domain's name or a mapping such as {{'clean': 128, 'adv': 128}}, got {route!r}"
        )
    problems = [
        f"the number of {domain!r} samples must be an integer of at least 0, got {count!r}"
        for domain, count in route.items()
        if isinstance(count, bool) or not isinstance(count, Integral | torch.SymInt) or count < 0
    ]
    raise_all(problems, "bad route")
    return tuple((domain, int(count) if isinstance(count, Integral) else count) for domain, count in route.items())


def pair(model: nn.Module, *, statistics: str, affine: str) -> Scope:
    """Scope: the statistics bank of one domain with the affine bank of another (paper A, table 5: swapped NS and AP).

    With statistics mode ``running`` the bank that ``statistics`` feeds normalizes; with ``batch`` the batch's own
    moments normalize and feed that bank.
    """
    mixtures = [name or "the norm" for name in mixture_norms(model)]
    if mixtures:
        raise ConfigError(
            f"mixture norms use all statistics banks at once and cannot be paired: {', '.join(mixtures)}; "
            "fix one of their Gaussians with advnorm.component(model, domain)"
        )
    return Scope(model, {"pair": (statistics, affine)}, wanted=[statistics, affine])


def component(model: nn.Module, domain: str) -> Scope:
    """Scope: mixture norms normalize the whole batch by the Gaussian of one domain, whatever the input looks like.

    ``w ⊙ (x - μ_d) / σ_d + b``: paper C, eq. 10, with the posterior of ``domain`` 1 everywhere. With statistics mode
    ``running`` the stored moments of its bank normalize; with ``batch`` the batch's own do and feed it. A route goes on
    to hold for other routed modules, such as heads.
    """
    scope = Scope(model, {"component": domain}, wanted=[domain])
    if not mixture_norms(model):
        raise ConfigError(
            "the model has no mixture norm, such as 'gmm_bn', to fix a component of; "
            f"choose a branch with advnorm.route(model, {domain!r})"
        )
    return scope


def mixture_norms(model: nn.Module) -> dict[str, Routed]:
    """The norms of a model that weigh their statistics by the input, by name."""
    return {name: module for name, module in routed_modules(model).items() if module.plan.mixture}


def statistics(
    model: nn.Module,
    *,
    mode: Mode | None = None,
    groups: int | None = None,
    perturbation: Mapping[str, Mapping[str, tuple[Tensor, Tensor]]] | None = None,
) -> Scope:
    """Scope: which statistics normalize. What is not given stays as the enclosing scope has it.

    ``mode``: ``batch`` uses and feeds the batch's moments, ``batch_frozen`` uses them and feeds nothing, ``running``
    uses the stored ones; without a mode each norm follows its own ``training`` flag. ``groups``: moments per n-th of
    each domain's samples (paper B, sec. 3.2). ``perturbation``: from :func:`advnorm.zero_perturbation` (B, eq. 3).
    """
    problems = []
    if mode is not None and mode not in MODES:
        problems.append(f"unknown statistics mode {mode!r}{did_you_mean(mode, MODES)}")
    if groups is not None and (isinstance(groups, bool) or not isinstance(groups, int) or groups < 1):
        problems.append(f"groups must be an integer of at least 1, got {groups!r}")
    if perturbation is not None:
        problems += _perturbation_problems(routed_modules(model), perturbation)
    raise_all(problems, "bad statistics scope")
    given = {"mode": mode, "groups": groups}
    return Scope(model, {name: value for name, value in given.items() if value is not None}, delta=perturbation)


def _perturbation_problems(norms: Mapping[str, Routed], perturbation: Mapping[str, Mapping[str, Any]]) -> list[str]:
    problems = []
    if not isinstance(perturbation, Mapping):
        return [f"a perturbation maps norms to banks to (δ of the mean, δ of the std), got {perturbation!r}"]
    for name, banks in perturbation.items():
        if name not in norms:
            problems.append(f"the perturbation names a norm that the model does not have: {name!r}")
            continue
        known = norms[name].plan.statistics_banks
        width = getattr(norms[name], "num_features", None)
        for bank, deltas in banks.items() if isinstance(banks, Mapping) else ((None, banks),):
            pair = isinstance(deltas, tuple | list) and len(deltas) == 2 and all(isinstance(d, Tensor) for d in deltas)
            if bank is None or not pair:
                problems.append(f"{name!r} needs {{bank: (tensor, tensor)}}, got {banks!r}")
            elif bank not in known:
                problems.append(f"unknown statistics bank {bank!r} of {name!r}{did_you_mean(bank, known)}")
            elif any(delta.shape != (width,) for delta in deltas):
                shapes = [tuple(delta.shape) for delta in deltas]
                problems.append(f"the deltas of bank {bank!r} of {name!r} need {width} channels, got shapes {shapes}")
    if problems:
        problems.append("make it with advnorm.zero_perturbation(model) from the same model")
    return problems


class likelihood:
    """Scope that collects the mixture norms' negative log-likelihoods (paper C, eq. 21) of the forwards inside.

    >>> with likelihood(model) as nll:
    ...     logits = model(x)
    >>> loss = cross_entropy(logits, y) + weight * nll.loss()
    """

    def __init__(self, model: nn.Module) -> None:
        if not mixture_norms(model):
            raise ConfigError("the model has no mixture norm to take a likelihood from; use norm='gmm_bn'")
        self._terms: list[Tensor] = []
        self._scope = Scope(model, {"collected": self._terms})

    def __enter__(self) -> likelihood:
        self._scope.__enter__()
        self._terms.clear()
        return self

    def __exit__(self, *exception: object) -> None:
        self._scope.__exit__(*exception)

    def loss(self) -> Tensor:
        """``L_DBN``: summed over all positions and layers, averaged over the samples."""
        if not self._terms:
            raise RouteError("no mixture norm ran inside the scope; call the model inside `with advnorm.likelihood(…)`")
        return torch.stack([term_N.mean() for term_N in self._terms]).sum()


def checkpoint_context(model: nn.Module) -> Callable[[], tuple[Scope, Scope]]:
    """``context_fn`` for ``torch.utils.checkpoint``: recomputation sees the scopes of the forward and feeds nothing.

    >>> checkpoint(model.layer1, x, use_reentrant=False, context_fn=checkpoint_context(model))
    """

    def contexts() -> tuple[Scope, Scope]:
        return Scope(model, {}), Restored(model)

    return contexts


class Restored(Scope):
    """Scope that repeats under the states of the moment at which it was made, in whichever thread enters it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, {})
        self._states = [module.state for module in self._modules]

    def _open(self) -> None:
        self._before = [module.state for module in self._modules]
        for index, module in enumerate(self._modules):
            module.__dict__["scopes"] = (*module.scopes, self)
            _set_state(module, self._applied(module.state, index))

    def _applied(self, state: State, index: int, *, fresh: bool = False) -> State:
        return self._states[index]._replace(owner=threading.get_ident(), recomputing=True)
