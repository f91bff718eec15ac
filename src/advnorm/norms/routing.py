"""Scopes: which domain a sample comes from and which statistics normalize it, for the length of a ``with``.

A scope flips plain attributes of the routed modules and puts the old values back when it ends, whatever happens inside.
Nothing is copied, so a graph that is alive keeps its tensors; nothing is left over.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, get_args

import torch
from torch import Tensor, nn

from advnorm._core.errors import ConfigError, RouteError, did_you_mean, raise_all
from advnorm.norms.plan import Plan

Mode = Literal["batch", "batch_frozen", "running"]
Route = str | Mapping[str, int]

MODES: tuple[Mode, ...] = get_args(Mode)


class Run(NamedTuple):
    """Consecutive samples that are treated alike: their banks and their rows of the batch."""

    normalized_by: str
    feeds: str
    affine: str
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


class Routed(nn.Module):
    """A module that treats samples by their domain, as the enclosing scopes say."""

    plan: Plan

    # What scopes set.
    _route: tuple[tuple[str, int | None], ...] | None  # domains and counts in order; None is the whole batch
    _pair: tuple[str, str] | None  # the domain whose statistics bank, the domain whose affine bank
    _mode: Mode | None
    _groups: int
    _delta: Mapping[str, tuple[Tensor, Tensor]] | None  # by statistics bank: of the mean, of the std
    _collected: list[Tensor] | None  # receives the negative log-likelihoods of a mixture norm
    _owner: int | None  # the thread that holds the scope

    #: Outside of any scope.
    UNSCOPED: Mapping[str, Any] = {
        "_route": None,
        "_pair": None,
        "_mode": None,
        "_groups": 1,
        "_delta": None,
        "_collected": None,
        "_owner": None,
    }

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        for name, value in self.UNSCOPED.items():
            setattr(self, name, value)

    def __getstate__(self) -> dict[str, Any]:
        # A copy or a pickle made inside a scope starts outside of it.
        return {**self.__dict__, **self.UNSCOPED}

    def runs(self, batch: int, *, needs_route: bool) -> list[Run]:
        """Cut a batch into runs by the route in force; neighbours that are treated alike become one run."""
        plan = self.plan
        if batch == 0:
            raise RouteError("the batch is empty; skip empty batches before the forward (drop_last=True in the loader)")
        if not torch.compiler.is_compiling():
            self._check_thread()
        if self._pair is not None:
            statistics, affine = (plan.domains.index(domain) for domain in self._pair)
            bank = plan.feeds[statistics] if plan.feeds else ""
            return [Run(bank, bank, plan.affine[affine] if plan.affine else "", 0, batch)]
        route = self._route
        if route is None:
            if needs_route:
                counts = ", ".join(f"'{domain}': n{index}" for index, domain in enumerate(plan.domains))
                raise RouteError(
                    f"{plan.name} has the domains {', '.join(plan.domains)} and no route is set; wrap the forward in "
                    f"`with advnorm.route(model, '{plan.domains[-1]}'):` for a batch of one domain, or in "
                    f"`with advnorm.route(model, {{{counts}}}):` for a concatenated one. With gradient checkpointing "
                    "keep the backward inside the scope, or pass context_fn=advnorm.checkpoint_context(model)"
                )
            route = ((plan.domains[0], None),)
        runs: list[Run] = []
        start = 0
        for domain, count in route:
            index = plan.domains.index(domain)
            stop = batch if count is None else start + count
            run = Run(
                plan.normalized_by[index] if plan.normalized_by else "",
                plan.feeds[index] if plan.feeds else "",
                plan.affine[index] if plan.affine else "",
                start,
                stop,
            )
            if runs and runs[-1][:3] == run[:3]:
                runs[-1] = runs[-1]._replace(stop=stop)
            elif stop > start:
                runs.append(run)
            start = stop
        if start != batch:
            raise RouteError(
                f"the route {dict(route)} covers {start} samples and the batch has {batch}; "
                "give one count per domain that sum to the batch size, in the order of the concatenation"
            )
        return runs

    def _check_thread(self) -> None:
        if self._owner is None or self._owner == threading.get_ident() or in_backward():
            return
        raise RouteError(
            "this forward runs in another thread than the one that opened the scope, which would share its route; "
            "give each thread its own copy of the model (copy.deepcopy), or one process per device (torchrun)"
        )


class _Part(Protocol):
    @property
    def rows(self) -> int: ...


P = TypeVar("P", bound=_Part)


def per_part(x: Tensor, parts: Sequence[P], function: Callable[[Tensor, P], Tensor]) -> Tensor:
    """Apply ``function`` to each part's rows of ``x`` and put the results together again; one part needs no copy."""
    if len(parts) == 1:
        return function(x, parts[0])
    return torch.cat([function(rows, part) for rows, part in zip(x.split([part.rows for part in parts]), parts)])


def in_backward() -> bool:
    """Whether a backward pass is under way in this thread: then a forward is a recomputation by checkpointing."""
    return torch._C._current_graph_task_id() != -1


def routed_modules(model: nn.Module) -> dict[str, Routed]:
    """The routed modules of a model by name, shared ones once."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Routed)}


def domains(model: nn.Module) -> tuple[str, ...]:
    """The domains a model's routed modules know, in order; empty for a plain model."""
    return tuple(dict.fromkeys(d for module in routed_modules(model).values() for d in module.plan.domains))


class Scope:
    """Sets attributes of a model's routed modules on entry and restores them on exit. Scopes nest; the inner wins."""

    def __init__(self, model: nn.Module, settings: Callable[[str, Routed], Mapping[str, Any]]) -> None:
        modules = routed_modules(model)
        if not modules:
            raise ConfigError(
                f"{type(model).__name__} has no routed norms; convert it with advnorm.convert_norm(model, 'dual_bn') "
                "or build one with advnorm.create_model(..., norm='dual_bn')"
            )
        self._targets = [(module, settings(name, module)) for name, module in modules.items()]
        self._saved: list[tuple[Routed, dict[str, Any]]] | None = None

    def __enter__(self) -> Scope:
        if self._saved is not None:
            raise RouteError("this scope is open already; make a new one with each `with`")
        owner = None if torch.compiler.is_compiling() else threading.get_ident()
        for module, _ in self._targets:
            if owner is not None and module._owner not in (None, owner):
                raise RouteError(
                    "another thread holds a scope on this model; give each thread its own copy (copy.deepcopy)"
                )
        saved = []
        for module, settings in self._targets:
            values = {**settings, "_owner": module._owner or owner}
            saved.append((module, {name: getattr(module, name) for name in values}))
            for name, value in values.items():
                setattr(module, name, value)
        self._saved = saved
        return self

    def __exit__(self, *_: object) -> None:
        saved, self._saved = self._saved or [], None
        for module, values in saved:
            for name, value in values.items():
                setattr(module, name, value)


def route(model: nn.Module, route: Route) -> Scope:
    """Scope: the whole batch comes from one domain, or its parts from several, in the order given.

    >>> with route(model, "adv"): ...
    >>> with route(model, {"clean": 128, "adv": 128}): ...
    """
    segments = ((route, None),) if isinstance(route, str) else parse_route(route)
    _check_domains(model, [domain for domain, _ in segments])
    return Scope(model, lambda _name, _module: {"_route": segments, "_pair": None})


def parse_route(route: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """A mapping from domain to number of samples as a tuple; all that is wrong with it in one error."""
    if not isinstance(route, Mapping) or not route:
        raise ConfigError(
            f"a route is a domain's name or a mapping such as {{'clean': 128, 'adv': 128}}, got {route!r}"
        )
    problems = [
        f"the number of {domain!r} samples must be an integer of at least 0, got {count!r}"
        for domain, count in route.items()
        if isinstance(count, bool) or not isinstance(count, int | torch.SymInt) or count < 0
    ]
    raise_all(problems, "bad route")
    return tuple(route.items())


def pair(model: nn.Module, *, statistics: str, affine: str) -> Scope:
    """Scope: the statistics bank of one domain with the affine bank of another (paper A, table 5: swapped NS and AP).

    With statistics mode ``running`` the bank that ``statistics`` feeds normalizes; with ``batch`` the batch's own
    moments normalize and feed that bank.
    """
    _check_domains(model, [statistics, affine])
    mixtures = [name for name, module in routed_modules(model).items() if module.plan.mixture]
    if mixtures:
        raise ConfigError(f"mixture norms use all statistics banks at once and cannot be paired: {', '.join(mixtures)}")
    return Scope(model, lambda _name, _module: {"_pair": (statistics, affine)})


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
    names = routed_modules(model)
    if perturbation is not None:
        strangers = [name for name in perturbation if name not in names]
        if strangers:
            problems.append(
                f"the perturbation names norms that the model does not have: {', '.join(strangers)}; "
                "make it with advnorm.zero_perturbation(model) from the same model"
            )
    raise_all(problems, "bad statistics scope")
    settings: dict[str, Any] = {}
    if mode is not None:
        settings["_mode"] = mode
    if groups is not None:
        settings["_groups"] = groups

    def of(name: str, _module: Routed) -> dict[str, Any]:
        return settings if perturbation is None else {**settings, "_delta": perturbation.get(name)}

    return Scope(model, of)


class likelihood:
    """Scope that collects the mixture norms' negative log-likelihoods (paper C, eq. 21) of the forwards inside.

    >>> with likelihood(model) as nll:
    ...     logits = model(x)
    >>> loss = cross_entropy(logits, y) + weight * nll.loss()
    """

    def __init__(self, model: nn.Module) -> None:
        if not any(module.plan.mixture for module in routed_modules(model).values()):
            raise ConfigError("the model has no mixture norm to take a likelihood from; use norm='gmm_bn'")
        self._terms: list[Tensor] = []
        self._scope = Scope(model, lambda _name, _module: {"_collected": self._terms})

    def __enter__(self) -> likelihood:
        self._terms.clear()
        self._scope.__enter__()
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
        state = {
            module: {name: getattr(module, name) for name in ("_route", "_pair", "_mode", "_groups", "_delta")}
            for module in routed_modules(model).values()
        }
        return Scope(model, lambda _name, _module: {}), Scope(model, lambda _name, module: state[module])

    return contexts


def _check_domains(model: nn.Module, wanted: list[str]) -> None:
    known: dict[tuple[str, ...], str] = {}
    for name, module in routed_modules(model).items():
        known.setdefault(module.plan.domains, name)
    problems = [
        f"unknown domain {domain!r}{did_you_mean(domain, allowed)}" + (f" (in {name})" if len(known) > 1 else "")
        for allowed, name in known.items()
        for domain in dict.fromkeys(wanted)
        if domain not in allowed
    ]
    raise_all(problems, "bad route")
