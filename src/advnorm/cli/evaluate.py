"""The verbs ``evaluate`` and ``audit``: a training run, or a model from the user's own code with weights and data."""

from __future__ import annotations

import importlib
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from advnorm._core.devices import resolve_device
from advnorm._core.errors import AdvnormError, ConfigError, Problem, did_you_mean, raise_all
from advnorm._core.records import NotWritable, writable_problems, writing
from advnorm._core.wrappers import device_of
from advnorm.attacks import PGD
from advnorm.attacks.base import ATTACKS, parse_name
from advnorm.evaluation.audit import Budget, budget_problems
from advnorm.evaluation.audit import audit as run_audit
from advnorm.evaluation.benchmark import benchmark
from advnorm.evaluation.plan import branches, statistics_problems
from advnorm.evaluation.target import (
    EvaluationTarget,
    describe_data,
    load_test_data,
    open_run,
)
from advnorm.evaluation.verdict import Verdict, plot_problems
from advnorm.norms import Mode
from advnorm.threat import NORMS, Norm, ThreatModel
from advnorm.training.checkpoint import load_weights
from advnorm.training.run import Which


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What both verbs are asked: a folder of a run or ``module:function``, and what goes before what the run says."""

    target: str
    weights: Path | None = None
    checkpoint: Which | None = None
    data: str | None = None
    data_dir: Path | None = None
    eps: str | None = None
    norm: Norm | None = None
    statistics: Mode = "running"
    limit: int | None = None
    batch_size: int | None = None
    device: str | None = None
    seed: int = 0
    json: Path | None = None

    def problems(self) -> list[str | Problem]:
        """What is wrong with the statistics or keeps the record from being written."""
        return [*statistics_problems(self.statistics), *(writable_problems(self.json) if self.json else [])]

    def settings(self) -> dict[str, Any]:
        """What both verbs hand on as it is."""
        return {
            "batch_size": self.batch_size,
            "record": self.json,
            "progress": True,
            "seed": self.seed,
            "limit": self.limit,
            "statistics": self.statistics,
        }


def evaluate(
    console: Console, asked: Asked, *, attacks: Sequence[str] = ("pgd10", "autoattack"), route: Sequence[str] = ()
) -> int:
    """Print the table of a benchmark and write its record; the exit status is 0."""
    problems = Problems()
    for name in attacks:
        with problems.collected():
            parse_name(name)
    with problems.collected():
        raise_all(asked.problems(), "bad command")
    case = target_of(asked, problems)
    known = branches(case.model)
    if known and not route:
        if not Path(asked.target).is_dir():
            raise ConfigError(f"the model has several branches; say which to judge: --route {' '.join(known)}")
        route = known
        console.print(f"branches: {', '.join(known)}; --route chooses", highlight=False)
    names, routes = list(attacks), list(route) or None
    if (faster := in_less_time(names, device_of(case.model))) is not None:
        console.print(faster, style="dim", highlight=False)
    with told(console, asked.json, lambda result: console.print(result.table(console.width))) as tell:
        tell(benchmark(case.model, case.data, case.threat, names, routes, about=case.origin, **asked.settings()))
    return 0


def in_less_time(attacks: Sequence[str], device: torch.device) -> str | None:
    """A word on the fast search of AutoAttack, where one is asked for that would gain by it."""
    parsed = {name: parse_name(name) for name in attacks}
    slow = [
        name
        for name, (family, settings) in parsed.items()
        if family is ATTACKS.get("autoattack") and "precision" not in settings
    ]
    if device.type != "cuda" or not slow:
        return None
    return f"{slow[0]} searches in float32; {slow[0]}-bf16 is many times as fast, and float32 forwards decide there too"


def audit(
    console: Console,
    asked: Asked,
    *,
    route: str | None = None,
    budget: Budget = "standard",
    surrogate: str | None = None,
    surrogate_weights: Path | None = None,
    plot: Path | None = None,
) -> int:
    """Print the verdict with its evidence; the exit status is 0 real, 1 false, 3 inconclusive, 4 none."""
    problems, source = Problems(), None
    with problems.collected():
        wrong = [*budget_problems(budget), *asked.problems(), *(plot_problems(plot) if plot else [])]
        if surrogate_weights is not None and surrogate is None:
            wrong.append("--surrogate-weights go with a --surrogate; name it, or leave them out")
        raise_all(wrong, "bad command")
    if surrogate is not None:
        with problems.collected("the surrogate: "):
            source = load_model(surrogate, surrogate_weights or asked.weights, asked.device)
    case = target_of(asked, problems)
    own = {"route": route, "budget": budget, "surrogate": source, "about": case.origin}
    with told(console, asked.json, lambda verdict: _print_verdict(console, verdict)) as tell:
        verdict = run_audit(case.model, case.data, case.threat, **own, **asked.settings())
        tell(verdict)
    if plot is not None:
        with writing(plot):
            verdict.plot(plot)
        console.print(f"plot: {plot}", highlight=False)
    return verdict.exit_code


def _print_verdict(console: Console, verdict: Verdict) -> None:
    console.print(verdict.table())
    console.print(verdict.evidence_table())
    colour = {"real": "green", "false": "red", "inconclusive": "yellow", "none": "blue"}[verdict.verdict]
    headline, *rest = verdict.summary().splitlines()
    console.print(f"[bold {colour}]{headline}[/]", highlight=False)
    console.print("\n".join(rest), highlight=False, markup=False)


@contextmanager
def told(console: Console, record: Path | None, show: Callable[[Any], object]) -> Iterator[Callable[[Any], object]]:
    """Scope: shows a result, and says where its record is.

    One that is there before is read back or refused. A result whose record cannot be written is shown before the
    error; it may have taken days.
    """
    label = "read back from" if record is not None and record.exists() else "record:"
    try:
        yield show
    except NotWritable as error:
        if error.result is not None:
            show(error.result)
        raise
    if record is not None:
        console.print(f"{label} {record}", highlight=False)


class Problems:
    """Errors meant for the user that wait for others, so that all are told at once."""

    def __init__(self) -> None:
        self.errors: list[tuple[str, AdvnormError]] = []

    @contextmanager
    def collected(self, label: str = "") -> Iterator[None]:
        """Scope whose error waits."""
        try:
            yield
        except AdvnormError as error:
            self.errors.append((label, error))

    def tell(self) -> None:
        """Raise what there is."""
        if len(self.errors) == 1 and not self.errors[0][0]:
            raise self.errors[0][1]
        if self.errors:
            text = "; ".join(dict.fromkeys(f"{label}{error}" for label, error in self.errors))
            raise ConfigError(text) from self.errors[0][1]


def target_of(asked: Asked, problems: Problems) -> EvaluationTarget:
    """A run's model with its own test images and threat model, or ``module:function`` with those that are given.

    What is given goes before what the run says. What is wrong comes in one error, with the ``problems`` so far.
    """
    target = model = attack = images = None
    norm = asked.norm
    for known in NORMS:
        norm = known if known.lower() == str(norm).lower() else norm
    if Path(asked.target).is_dir():
        with problems.collected():
            if asked.weights is not None:
                raise ConfigError(
                    f"{asked.target} is a run with weights of its own; leave --weights out, or use --checkpoint"
                )
            target = open_run(
                asked.target,
                checkpoint=asked.checkpoint,
                data=asked.data,
                data_dir=asked.data_dir,
                threat_norm=norm,
                eps=asked.eps,
                device=asked.device,
            )
        problems.tell()
        assert target is not None
        return target
    with problems.collected():
        if asked.checkpoint is not None:
            raise ConfigError("a checkpoint is chosen for the folder of a run; for a module use --weights")
        model = load_model(asked.target, asked.weights, asked.device)
    with problems.collected():
        attack = PGD(threat=ThreatModel(norm=norm or "Linf", eps=asked.eps or "8/255"))
    with problems.collected():
        if asked.data is None:
            raise ConfigError("on which images? --data, for example --data cifar10:FOLDER or --data digits")
        images = load_test_data(asked.data, asked.data_dir)
    problems.tell()
    assert model is not None and images is not None and attack is not None and asked.data is not None
    origin = {
        "model": asked.target,
        "weights": asked.weights.name if asked.weights else None,
        "data": describe_data(asked.data),
    }
    return EvaluationTarget(name=asked.target, model=model, data=images, attack=attack, origin=origin)


def load_model(target: str, weights: Path | None = None, device: str | None = None) -> nn.Module:
    """The module that ``package.module:function`` returns, looked up from the working directory, with its weights.

    Weights are safetensors: a pickle can run anything when it is opened.
    """
    where = resolve_device(device)
    name, _, function = target.partition(":")
    if not name or not function:
        raise ConfigError(
            f"cannot read {target!r}: no folder of a run, and no module:function such as my_models:build_model"
        )
    with _from_here(target):
        module = importlib.import_module(name)
    build = getattr(module, function, None)
    if build is None:
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ConfigError(f"{name} has no {function!r}{did_you_mean(function, names)}")
    try:
        model = build() if callable(build) and not isinstance(build, nn.Module) else build
    except (Exception, SystemExit) as error:
        raise _raised(target, error) from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{target} must return an nn.Module, got {type(model).__name__}")
    if weights is not None:
        load_weights(model, weights)
    return model.to(where)


@contextmanager
def _from_here(target: str) -> Iterator[None]:
    """Scope: modules are looked up from the working directory; what the user's code raises is told with its place."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        yield
    except ConfigError:
        raise
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"no module {error.name!r} for {target!r}; run from the folder that holds it, or install it"
        ) from error
    except (Exception, SystemExit) as error:
        raise _raised(f"importing {target.partition(':')[0]}", error) from error
    finally:
        sys.path.pop(0)


def run_code(source: str) -> None:
    """Run a ``.py`` file or import a module of the user's own, for the models and data sets that it registers."""
    if not source.endswith(".py"):
        with _from_here(source):
            importlib.import_module(source)
        return
    if not Path(source).is_file():
        raise ConfigError(f"--import {source}: there is no such file")
    with _from_here(source):
        runpy.run_path(source)


def _raised(what: str, error: BaseException) -> ConfigError:
    """An error of the user's own code, with its place."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = "" if last.filename == __file__ else f" ({Path(last.filename).name}, line {last.lineno})"
    return ConfigError(f"{what} raised {type(error).__name__}: {error}{place}")
