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
from torch import Tensor, nn

import advnorm.data as data_sets
from advnorm._core.errors import AdvnormError, ConfigError, did_you_mean, raise_all
from advnorm._core.wrappers import device_of
from advnorm.attacks.base import ATTACKS, parse_name
from advnorm.data import FolderData, ImageData
from advnorm.evaluation.audit import Budget, budget_problems
from advnorm.evaluation.audit import audit as run_audit
from advnorm.evaluation.benchmark import benchmark
from advnorm.evaluation.partial_record import Unwritten, unwritable, writing
from advnorm.evaluation.plan import branches, statistics_problems
from advnorm.evaluation.verdict import Verdict, plot_problems
from advnorm.norms import Mode
from advnorm.threat import NORMS, Norm, ThreatModel
from advnorm.training.checkpoint import load_weights
from advnorm.training.run import Run, Which

_NAMES = ("x", "images"), ("y", "labels")


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

    def problems(self) -> list[str]:
        """What is wrong with the statistics or keeps the record from being written."""
        return [*statistics_problems(self.statistics), *(unwritable(self.json) if self.json else [])]

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
    case = subject(asked, problems)
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
        tell(benchmark(case.model, case.data, case.threat, names, routes, about=case.about, **asked.settings()))
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
    case = subject(asked, problems)
    own = {"route": route, "budget": budget, "surrogate": source, "about": case.about}
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
    except Unwritten as error:
        if error.result is not None:
            show(error.result)
        raise
    if record is not None:
        console.print(f"{label} {record}", highlight=False)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is judged: a model, images and labels, the threat model, and where they come from."""

    model: nn.Module
    data: ImageData | FolderData | tuple[Tensor, Tensor]
    threat: ThreatModel
    about: dict[str, Any]


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


def subject(asked: Asked, problems: Problems) -> Subject:
    """A run's model with its own test images and threat model, or ``module:function`` with those that are given.

    What is given goes before what the run says. What is wrong comes in one error, with the ``problems`` so far.
    """
    run = config = model = images = threat = None
    about: dict[str, Any] = {}
    with problems.collected():
        run = Run.open(asked.target) if Path(asked.target).is_dir() else None
        config = None if run is None else run.config
        if run is None or config is None:
            if asked.checkpoint is not None:
                raise ConfigError("a checkpoint is chosen for the folder of a run; for a module use --weights")
            model = load_model(asked.target, asked.weights, asked.device)
            about = {"model": asked.target, "weights": asked.weights.name if asked.weights else None}
        elif asked.weights is not None:
            raise ConfigError(
                f"{asked.target} is a run with weights of its own; leave --weights out, or use --checkpoint"
            )
        else:
            model = run.model(asked.checkpoint, place(asked.device))
            about = {"run": run.folder.resolve().name, "checkpoint": run.judged(asked.checkpoint)}
            about["training"] = config.to_dict()
            if not run.finished:
                about["unfinished"] = f"{len(run.metrics())} of {config.epochs} epochs"
    with problems.collected():
        norm = asked.norm
        for known in NORMS:
            norm = known if known.lower() == str(norm).lower() else norm
        threat = ThreatModel(
            norm=norm or (config.threat if config else "Linf"), eps=asked.eps or (config.eps if config else "8/255")
        )
    with problems.collected():
        if asked.data is not None:
            images = load_data(asked.data, asked.data_dir)
        elif config is not None:
            images = data_sets.load(config.data.name, "test", asked.data_dir, **config.data.options)
        elif run is None:  # else its images are not known for the reason that was told
            raise ConfigError("on which images? --data, for example --data cifar10:FOLDER or --data digits")
        name = asked.data.partition(":")[0] if asked.data else config.data.name if config else ""
        about["data"] = f"{name}, test" if name in data_sets.DATASETS else Path(str(asked.data)).name
    problems.tell()
    assert model is not None and images is not None and threat is not None
    return Subject(model=model, data=images, threat=threat, about=about)


def place(device: str | None) -> torch.device:
    """The device that is asked for; else CUDA where there is one."""
    try:
        where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise ConfigError(f"unknown device {device!r}; use --device cpu or cuda") from None
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("no CUDA device here; leave --device out or use --device cpu")
    return where


def load_model(target: str, weights: Path | None = None, device: str | None = None) -> nn.Module:
    """The module that ``package.module:function`` returns, looked up from the working directory, with its weights.

    Weights are safetensors: a pickle can run anything when it is opened.
    """
    where = place(device)
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


def load_data(name: str, data_dir: Path | None = None) -> ImageData | FolderData | tuple[Tensor, Tensor]:
    """The test images of a data set, as ``digits`` or ``cifar10:FOLDER``, or a .npz or .safetensors file with both.

    A file names them ``x`` or ``images`` and ``y`` or ``labels``. Images of whole numbers (uint8) are divided by 255.
    """
    path = Path(name)
    data_set, _, folder = name.partition(":")
    if data_set in data_sets.DATASETS:
        return data_sets.load(data_set, "test", folder or data_dir)
    if path.suffix not in (".npz", ".safetensors"):
        known = ", ".join(data_sets.list_datasets())
        raise ConfigError(
            f"unknown data {name!r}; use NAME:FOLDER of a data set ({known}), or a .npz or .safetensors file of x and y"
        )
    if not path.is_file():
        raise ConfigError(f"there is no file {path}")
    try:
        if path.suffix == ".npz":
            import numpy as np

            with np.load(path, allow_pickle=False) as file:
                names = file.files
                found = [torch.from_numpy(file[key]) for key in _wanted(names)]
        else:
            from safetensors import safe_open

            with safe_open(path, framework="pt") as file:
                names = list(file.keys())
                found = [file.get_tensor(key) for key in _wanted(names)]
    except Exception as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    if len(found) < 2:
        raise ConfigError(f"{path} holds {', '.join(names) or 'nothing'}; name the images 'x' and the labels 'y'")
    images, labels = found
    if images.dtype == torch.uint8:
        images = images.float() / 255
    return images, labels if labels.is_floating_point() else labels.long()


def _wanted(names: Sequence[str]) -> list[str]:
    """The names of the images and of the labels in a file; whatever else it holds is left unread."""
    return [next(key for key in keys if key in names) for keys in _NAMES if not set(keys).isdisjoint(names)]
