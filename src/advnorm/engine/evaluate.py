"""Clean and robust accuracy with all conditions, by attack and in the worst case, resumable after a kill."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import advnorm.attacks as attack_names
from advnorm._core.errors import AdvnormError, ConfigError, did_you_mean, raise_all
from advnorm._core.precision import float32_as
from advnorm._core.records import write_json
from advnorm.attacks import PGD, Attack, attacked
from advnorm.attacks.apgd import Halving
from advnorm.attacks.autoattack import AutoAttack
from advnorm.attacks.base import check_images, parse_name
from advnorm.norms import Mode, domains, routed_modules
from advnorm.threat import ThreatModel

if TYPE_CHECKING:
    from rich.table import Table

#: Attacks by name, as instances, or instances under a name of the caller's.
Attacks = str | Attack | Sequence[str | Attack] | Mapping[str, Attack]
#: How a model without a given route is called in tables and records.
AS_CALLED = "as called"
#: Images at a time where the caller does not say; halved when memory runs out.
BATCH_SIZES = {"cpu": 128, "cuda": 512}
#: Images of the first forward, which finds what is wrong with a model before any long work.
PROBE = 4


# -- results -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class BenchmarkResult:
    """Verdicts per image and their conditions. An image is robust where it is right clean and under the attack.

    ``clean[route]`` and ``robust[route][attack]`` are boolean tensors in the order of the data.
    """

    threat: ThreatModel
    attacks: Mapping[str, str]
    clean: Mapping[str, Tensor]
    robust: Mapping[str, Mapping[str, Tensor]]
    seconds: Mapping[str, Mapping[str, float]]
    conditions: Mapping[str, Any]
    warnings: tuple[str, ...] = ()

    @property
    def routes(self) -> tuple[str, ...]:
        """The judged branches, ``"as called"`` for a model without one."""
        return tuple(self.clean)

    @property
    def images(self) -> int:
        """Number of images."""
        return len(self.clean[self.routes[0]])

    def union(self, route: str | None = None) -> Tensor:
        """Whether each image withstands all of the attacks."""
        route = self._one(route)
        return torch.stack([self.clean[route], *self.robust[route].values()]).all(0)

    def clean_accuracy(self, route: str | None = None) -> float:
        """Share of the images that are classified right without an attack."""
        return _share(self.clean[self._one(route)])

    def robust_accuracy(self, attack: str | None = None, route: str | None = None) -> float:
        """Share of the images that withstand an attack, or all of them (the union)."""
        if attack is None:
            return _share(self.union(route))
        verdicts = self.robust[self._one(route)]
        if attack not in verdicts:
            raise ConfigError(f"attack {attack!r} was not run{did_you_mean(attack, verdicts)}")
        return _share(verdicts[attack])

    @property
    def accuracy(self) -> dict[str, dict[str, float]]:
        """By route: ``clean``, each attack, and ``union``."""
        return {
            route: {
                "clean": _share(self.clean[route]),
                **{name: _share(verdicts) for name, verdicts in self.robust[route].items()},
                "union": _share(self.union(route)),
            }
            for route in self.routes
        }

    def _one(self, route: str | None) -> str:
        if route is None and len(self.routes) == 1:
            return self.routes[0]
        if route is None or route not in self.clean:
            raise ConfigError(f"say which route: {route!r} was not judged{did_you_mean(route, self.clean)}")
        return route

    def table(self) -> Table:
        """Accuracies for the terminal, a row per route."""
        from rich.table import Table

        title = f"accuracy, {self.images} images, {self.threat}"
        table = Table("route", title=title, title_justify="left", min_width=len(title) + 2)
        for column in ("clean", *self.attacks, "union"):
            table.add_column(column, justify="right")
        for route, row in self.accuracy.items():
            table.add_row(route, *(f"{100 * value:.2f}" for value in row.values()))
        seconds = sum(sum(row.values()) for row in self.seconds.values())
        c = self.conditions
        caption = [f"{c['model']['class']}, seed {c['seed']}, {c['device']}, strict float32, {seconds:.1f} s"]
        table.caption = "\n".join([*caption, *(f"note: {warning}" for warning in self.warnings)])
        table.caption_justify = "left"
        return table

    def __str__(self) -> str:
        return rendered(self.table())

    def record(self) -> dict[str, Any]:
        """All of it as plain data, for JSON; verdicts as strings of 0 and 1, an image each."""
        return {
            "format": "advnorm.benchmark/1",
            "accuracy": self.accuracy,
            "threat": dataclasses.asdict(self.threat),
            "attacks": dict(self.attacks),
            "routes": list(self.routes),
            "images": self.images,
            **self.conditions,
            "warnings": list(self.warnings),
            "seconds": {route: dict(row) for route, row in self.seconds.items()},
            "verdicts": {
                route: {
                    "clean": _letters(self.clean[route]),
                    **{name: _letters(verdicts) for name, verdicts in self.robust[route].items()},
                }
                for route in self.routes
            },
        }

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> BenchmarkResult:
        """The result that :meth:`record` came from."""
        if record.get("format") != "advnorm.benchmark/1":
            raise ConfigError(f"not the record of a benchmark: its format is {record.get('format')!r}")
        known = ("format", "accuracy", "threat", "attacks", "routes", "images", "warnings", "seconds", "verdicts")
        verdicts = {r: {n: _booleans(v) for n, v in row.items()} for r, row in record["verdicts"].items()}
        return cls(
            threat=ThreatModel(**record["threat"]),
            attacks=dict(record["attacks"]),
            clean={route: row["clean"] for route, row in verdicts.items()},
            robust={route: {n: v for n, v in row.items() if n != "clean"} for route, row in verdicts.items()},
            seconds=record["seconds"],
            conditions={key: value for key, value in record.items() if key not in known},
            warnings=tuple(record["warnings"]),
        )

    @classmethod
    def load(cls, path: Path | str) -> BenchmarkResult:
        """Read a record from disk."""
        return cls.of_record(_read(Path(path)))


@dataclass(frozen=True, kw_only=True, eq=False)
class Curve:
    """Robust accuracy against a setting of the attack: number of steps, or eps."""

    parameter: str
    values: tuple[float, ...]
    result: BenchmarkResult

    def accuracy(self, route: str | None = None) -> list[float]:
        """Robust accuracy at each value."""
        return [self.result.robust_accuracy(name, route) for name in self.result.attacks]

    def table(self) -> Table:
        """A row per value, a column per route."""
        from rich.table import Table

        title = f"robust accuracy against {self.parameter}, {self.result.images} images, {self.result.threat.norm}"
        table = Table(self.parameter, title=title, title_justify="left", min_width=len(title) + 2)
        for route in self.result.routes:
            table.add_column(route, justify="right")
        table.add_row("clean", *(f"{100 * self.result.clean_accuracy(route):.2f}" for route in self.result.routes))
        for name, value in zip(self.result.attacks, self.values):
            cells = [f"{100 * self.result.robust_accuracy(name, route):.2f}" for route in self.result.routes]
            table.add_row(f"{value:g}", *cells)
        return table

    def __str__(self) -> str:
        return rendered(self.table())

    def record(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        record = self.result.record()
        return {**record, "parameter": self.parameter, "values": list(self.values)}


def _share(verdicts: Tensor) -> float:
    return verdicts.sum().item() / len(verdicts)


def _letters(verdicts: Tensor) -> str:
    return "".join("01"[value] for value in verdicts.int().tolist())


def _booleans(letters: str) -> Tensor:
    return torch.tensor([letter == "1" for letter in letters], dtype=torch.bool)


def rendered(table: Table) -> str:
    from rich.console import Console

    console = Console(width=160, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


# -- what users call ---------------------------------------------------------------------------------------------------


def benchmark(
    model: nn.Module,
    data: Any,
    threat: ThreatModel,
    attacks: Attacks = ("pgd10", "autoattack"),
    route: str | Sequence[str | None] | None = None,
    *,
    batch_size: int | None = None,
    device: str | torch.device | None = None,
    record: Path | str | None = None,
    progress: bool = False,
    seed: int = 0,
    limit: int | None = None,
    statistics: Mode = "running",
) -> BenchmarkResult:
    """Clean accuracy, robust accuracy by attack, and the union over the attacks: the worst case per image.

    ``data``: images in [0, 1] and labels as two tensors, a data set, or a loader of batches; ``limit`` takes the first
    so many. ``attacks``: names such as ``"pgd20-restarts5"``, attacks, or attacks under names of your own; an attack
    with a route of its own is computed through that branch and judged through ``route``. ``route``: one branch of a
    routed model or several; None: the model as it is called.
    The mode of the model plays no part, and every flag stays as it was. Verdicts are those of a float32 forward without
    TF32 and autocast. Noise belongs to an image's place in the data, so results do not depend on the batch size.
    ``record``: JSON file for the result; a run that was killed continues from ``<record>.partial``, and one that is
    finished is read back.
    """
    case = prepare(
        model,
        data,
        threat,
        attacks,
        route,
        batch_size=batch_size,
        device=device,
        seed=seed,
        limit=limit,
        statistics=statistics,
    )
    return case.run(record=record, progress=progress)


def accuracy_against_steps(
    model: nn.Module,
    data: Any,
    threat: ThreatModel,
    steps: Sequence[int] = (10, 20, 50, 100, 500, 2000),
    route: str | Sequence[str | None] | None = None,
    *,
    step_size: float | str | None = None,
    seed: int = 0,
    **options: Any,
) -> Curve:
    """Robust accuracy under PGD of 10 to 2000 steps (paper E, fig. 2 and 3); it must level off.

    ``step_size``: by default 2.5·eps/steps; paper E keeps 1/255 for all. Other options as in :func:`benchmark`.
    """
    built = {f"pgd{n}": PGD(threat=threat, steps=n, step_size=step_size, seed=seed) for n in steps}
    result = benchmark(model, data, threat, built, route, seed=seed, **options)
    return Curve(parameter="steps", values=tuple(steps), result=result)


def accuracy_against_eps(
    model: nn.Module,
    data: Any,
    threat: ThreatModel,
    eps: Sequence[float | str] = ("2/255", "4/255", "8/255", "16/255", "32/255", "64/255", "128/255"),
    attack: str | Attack = "pgd20",
    route: str | Sequence[str | None] | None = None,
    *,
    record: Path | str | None = None,
    progress: bool = False,
    seed: int = 0,
    **options: Any,
) -> Curve:
    """Robust accuracy under one attack of growing eps, in the norm of ``threat``; it must fall to chance or below."""
    threats = [ThreatModel(norm=threat.norm, eps=value) for value in eps]
    built = {}
    for value in threats:
        made = attack_names.get(attack, threat=value, seed=seed) if isinstance(attack, str) else attack
        built[str(value)] = dataclasses.replace(made, threat=value)
    case = prepare(model, data, threat, built, route, seed=seed, any_threat=True, **options)
    result = case.run(record=record, progress=progress)
    return Curve(parameter="eps", values=tuple(value.eps for value in threats), result=result)


# -- a checked case ----------------------------------------------------------------------------------------------------


def prepare(
    model: nn.Module,
    data: Any,
    threat: ThreatModel,
    attacks: Attacks,
    route: str | Sequence[str | None] | None = None,
    *,
    batch_size: int | None = None,
    device: str | torch.device | None = None,
    seed: int = 0,
    limit: int | None = None,
    any_threat: bool = False,
    spread: bool = False,
    statistics: Mode = "running",
) -> Case:
    """Check everything with one small forward per route; all that is wrong in one error.

    ``any_threat``: attacks may have threat models of their own. ``spread``: take ``limit`` images evenly from all data.
    """
    problems: list[str] = []
    if not isinstance(model, nn.Module):
        problems.append(f"the model must be an nn.Module, got {type(model).__name__}; wrap a function in a module")
    if not isinstance(threat, ThreatModel):
        problems.append(f"threat must be a ThreatModel such as ThreatModel(eps='8/255'), got {threat!r}")
    for label, value in (("batch_size", batch_size), ("limit", limit)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            problems.append(f"{label} must be an integer of at least 1 or None, got {value!r}")
    routes = [route] if route is None or isinstance(route, str) else list(dict.fromkeys(route))
    if not routes:
        problems.append("no route given; name branches, or leave route out for a model without")
    jobs, bad = _jobs(attacks, threat, routes, seed, any_threat)
    problems += bad
    images = labels = index = None
    try:
        images, labels = gather(data, None if spread else limit)
        check_images(images, labels)
        index = torch.arange(len(images))
        if spread and limit is not None and isinstance(limit, int) and 0 < limit < len(images):
            index = index[:limit] * len(images) // limit
            images, labels = images[index], labels[index]
    except AdvnormError as error:
        problems.append(str(error))
        images = None
    if isinstance(model, nn.Module):
        place, bad = _place(model, device)
        problems += bad
        if images is not None and labels is not None and not bad:
            for name in routes:
                problem = _probe(model, name, images[:PROBE].to(place), int(labels.max()), statistics)
                problems += [problem] if problem else []
    raise_all(list(dict.fromkeys(problems)), "bad evaluation")
    assert images is not None and labels is not None and index is not None
    return Case(
        model=model,
        images=images,
        labels=labels,
        index=index,
        threat=threat,
        jobs=tuple(jobs),
        routes=tuple(routes),
        device=place,
        batch_size=batch_size or BATCH_SIZES.get(place.type, 128),
        seed=seed,
        statistics=statistics,
    )


@dataclass(frozen=True, kw_only=True)
class Job:
    """One attack, judged through one branch."""

    name: str
    attack: Attack
    route: str | None
    origin: str = ""  # of the model that the attack is computed on, where it is another one

    @property
    def key(self) -> str:
        return " | ".join([str(self.route), repr(self.attack), *([self.origin] if self.origin else [])])


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """A model, data and attacks that passed all checks."""

    model: nn.Module
    images: Tensor
    labels: Tensor
    index: Tensor
    threat: ThreatModel
    jobs: tuple[Job, ...]
    routes: tuple[str | None, ...]
    device: torch.device
    batch_size: int
    seed: int
    statistics: Mode

    def run(self, *, record: Path | str | None = None, progress: bool = False) -> BenchmarkResult:
        """Work through the jobs; with ``record`` continue where an earlier run was killed."""
        fingerprint = _digest(self.fingerprint, self.threat, self.routes, [job.key for job in self.jobs])
        if record is not None and Path(record).exists():
            return _finished(Path(record), fingerprint)
        partial = Partial(None if record is None else partial_path(record), self.fingerprint)
        with progress_bar(progress) as bar:
            runner = Runner(self, partial, bar)
            clean = {route: runner.clean(route) for route in self.routes}
            robust: dict[str, dict[str, Tensor]] = {route or AS_CALLED: {} for route in self.routes}
            for job in self.jobs:
                robust[job.route or AS_CALLED][job.name] = runner.robust(job, among=clean[job.route])
        stages: dict[str, dict[str, dict[str, float]]] = {}  # of cascades: accuracy after each attack
        for job in self.jobs:
            if (found := partial.stages(job.key)) is not None:
                stages.setdefault(job.route or AS_CALLED, {})[job.name] = found
        result = BenchmarkResult(
            threat=self.threat,
            attacks={job.name: repr(dataclasses.replace(job.attack, route=None)) for job in self.jobs},
            clean={route or AS_CALLED: verdicts for route, verdicts in clean.items()},
            robust=robust,
            seconds={
                route or AS_CALLED: {job.name: partial.seconds(job.key) for job in self.jobs if job.route == route}
                for route in self.routes
            },
            conditions={**self.conditions(), "fingerprint": fingerprint, "stages": stages},
            warnings=partial.warnings(),
        )
        if record is not None:
            write_json(record, result.record())
            partial.remove()
        return result

    @property
    def fingerprint(self) -> str:
        """What a partial result belongs to: the images, the labels, the model's parameters and statistics."""
        return _digest(self.images, self.labels, self.index, self.statistics, model_fingerprint(self.model))

    def conditions(self) -> dict[str, Any]:
        """What the numbers hold under."""
        model = self.model
        plans = {module.plan.name for module in routed_modules(model).values()}
        kinds = {type(module).__name__ for module in model.modules()}
        built_in = {kind for kind in kinds if re.search(r"(Batch|Layer|Group|Instance|RMS)Norm", kind)}
        return {
            "seed": self.seed,
            "batch_size": self.batch_size,
            "statistics": self.statistics,
            "model": {
                "class": type(model).__name__,
                "parameters": sum(p.numel() for p in model.parameters()),
                "norms": sorted(plans | built_in),
                "domains": list(domains(model)),
                "dtypes": sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()}),
            },
            "precision": "float32, TF32 and autocast off",
            "image_shape": list(self.images.shape[1:]),
            **environment(self.device),
        }


def _jobs(
    attacks: Attacks, threat: ThreatModel, routes: Sequence[str | None], seed: int, any_threat: bool
) -> tuple[list[Job], list[str]]:
    named: dict[str, str | Attack] = {}
    if isinstance(attacks, Mapping):
        named = dict(attacks)
    else:
        for attack in [attacks] if isinstance(attacks, str | Attack) else attacks:
            named[attack if isinstance(attack, str) else _label(attack, named)] = attack
    jobs, problems = [], []
    if not named:
        problems.append("no attack given; name some, for example attacks=('pgd10', 'autoattack')")
    for name, attack in named.items():
        if name in ("clean", "union"):
            problems.append(f"an attack cannot be called {name!r}, which is a column of the result")
        try:
            if isinstance(attack, str):
                if not isinstance(threat, ThreatModel):
                    parse_name(attack)
                    continue
                attack = attack_names.get(attack, threat=threat, seed=seed)
            elif not isinstance(attack, Attack):
                problems.append(f"an attack is a name or an Attack, got {attack!r}")
                continue
            elif not any_threat and attack.threat != threat:
                problems.append(f"attack {name!r} has the threat model {attack.threat}, the evaluation {threat}")
        except AdvnormError as error:
            problems.append(str(error))
            continue
        for route in routes:
            chosen = attack if attack.route is not None else dataclasses.replace(attack, route=route)
            jobs.append(Job(name=name, attack=chosen, route=route))
    return jobs, problems


def _label(attack: Attack, taken: Mapping[str, Any]) -> str:
    label = type(attack).__name__.lower() + str(getattr(attack, "steps", ""))
    return next(name for name in (label, *(f"{label} ({n})" for n in range(2, len(taken) + 3))) if name not in taken)


def _place(model: nn.Module, device: str | torch.device | None) -> tuple[torch.device, list[str]]:
    found = next((tensor.device for tensor in [*model.parameters(), *model.buffers()]), None)
    try:
        wanted = None if device is None else torch.device(device)
    except RuntimeError:
        return torch.device("cpu"), [f"unknown device {device!r}; use 'cpu' or 'cuda'"]
    if wanted is not None and wanted.type == "cuda" and not torch.cuda.is_available():
        return wanted, ["no CUDA device here; leave device out or use device='cpu'"]
    if found is None or wanted is None:
        return wanted or found or torch.device("cpu"), []
    if wanted.type != found.type or (wanted.index is not None and wanted.index != found.index):
        return found, [f"the model is on {found} and device is {wanted}; move it with model.to('{wanted}')"]
    return found, []


def _probe(model: nn.Module, route: str | None, x: Tensor, largest_label: int, statistics: Mode) -> str | None:
    """What is wrong with a model, by one forward of a few images."""
    if route is not None and not routed_modules(model):
        return f"{type(model).__name__} has no routed norms, and so no route {route!r}; leave route out"
    through = f"through route {route!r} " if route else ""
    try:
        with attacked(model, route=route, statistics=unmoving(statistics)) as predict, torch.no_grad():
            logits = predict(x)
    except AdvnormError as error:
        return str(error)
    except Exception as error:
        return (
            f"the model fails {through}on images of shape {tuple(x.shape)}: {type(error).__name__}: {error}; "
            "images are (N, channels, height, width) in [0, 1]"
        )
    if bool(logits.isnan().any()):
        return f"the model returns NaN logits {through}".rstrip() + "; check its weights and statistics"
    if largest_label >= logits.shape[1]:
        return f"labels go up to {largest_label} and the model has {logits.shape[1]} classes; labels count from 0"
    return None


def unmoving(statistics: Mode) -> Mode:
    """A verdict uses the batch's statistics where that is asked for, and never moves the running ones."""
    return "batch_frozen" if statistics == "batch" else statistics


def gather(data: Any, limit: int | None = None) -> tuple[Tensor, Tensor]:
    """Images and labels as two tensors on the CPU, from two tensors, a data set, or an iterable of samples or batches.

    ``limit`` takes the first so many and reads no further.
    """
    if isinstance(data, Sequence) and len(data) == 2 and all(hasattr(part, "shape") for part in data):
        images, labels = (torch.as_tensor(part) for part in data)
        return images[:limit].cpu(), labels[:limit].cpu()
    images_parts: list[Tensor] = []
    labels_parts: list[Tensor] = []
    count = 0
    for item in _items(data):
        if not isinstance(item, Sequence) or len(item) != 2 or isinstance(item, str):
            raise ConfigError(f"data must give (images, labels), got {type(item).__name__}; wrap the data set")
        x, y = (torch.as_tensor(part) for part in item)
        if y.dim() == 0:  # a sample, not a batch
            x, y = x[None], y[None]
        images_parts.append(x.cpu())
        labels_parts.append(y.cpu())
        count += len(x)
        if limit is not None and count >= limit:
            break
    if not count:
        raise ConfigError("the data set is empty; check its path and its split")
    shapes = {tuple(part.shape[1:]) for part in images_parts}
    if len(shapes) > 1:
        raise ConfigError(f"images must share one shape, got {sorted(shapes)}; resize or crop them in the data set")
    return torch.cat(images_parts)[:limit], torch.cat(labels_parts)[:limit]


def _items(data: Any) -> Iterator[Any]:
    if isinstance(data, Tensor) or not (hasattr(data, "__iter__") or hasattr(data, "__getitem__")):
        raise ConfigError(
            f"data must be (images, labels), a data set or a loader of (images, labels), got {type(data).__name__}"
        )
    if not hasattr(data, "__iter__") and hasattr(data, "__len__"):
        return (data[position] for position in range(len(data)))  # a map-style data set ends at its length
    return iter(data)


# -- verdicts ----------------------------------------------------------------------------------------------------------


class Runner:
    """Verdicts of a case, batch by batch; what is done is kept in ``partial``."""

    def __init__(self, case: Case, partial: Partial, bar: Any) -> None:
        self.case, self.partial = case, partial
        self.bar: Any = bar  # of rich, or None

    def clean(self, route: str | None) -> Tensor:
        """Which images are classified right without an attack."""
        case, memory = self.case, Halving(self.case.batch_size)

        def work(part: slice) -> Tensor:
            right, nan = self._right(case.images[part].to(case.device), case.labels[part].to(case.device), route)
            if bool(nan.any()):
                image = int(case.index[part][nan.cpu()][0])
                raise ConfigError(f"the model returns NaN logits for image {image} of the data; check image and model")
            return right.cpu()

        right = torch.cat(memory.over(len(case.images), work))
        self._warn_memory(f"{route} | clean", "clean", memory)
        return right

    def robust(self, job: Job, among: Tensor, *, source: nn.Module | None = None) -> Tensor:
        """Which images of ``among`` withstand an attack; the others count as fooled and are not attacked.

        ``source``: compute the attack on this model; the case's model judges.
        """
        case, memory = self.case, Halving(self.case.batch_size)
        verdicts = self.partial.verdicts(job.key, len(case.images))
        todo = (among & (verdicts < 0)).nonzero()[:, 0]
        total = int(among.sum())
        show = self._shown(job, total)
        if isinstance(job.attack, AutoAttack):
            # A cascade over all images at once, with a record of its own for the time in between.
            memory.size = None

        def work(part: slice) -> None:
            rows, done, begun = todo[part], total - len(todo) + part.start, time.perf_counter()
            x, y, index, attack = case.images[rows], case.labels[rows], case.index[rows], job.attack
            if show is not None:
                attack = dataclasses.replace(attack, progress=_within(show, done, len(rows)))
            if isinstance(attack, AutoAttack):
                x_adv = self._cascade(job, attack, x, y, index)
            else:
                x, y, index = (tensor.to(case.device) for tensor in (x, y, index))
                with float32_as("ieee", case.device):
                    x_adv = attack(source or case.model, x, y, index=index)
            verdicts[rows] = self.right(x_adv, y, job.route).to(verdicts.dtype)
            self.partial.save(job.key, verdicts, time.perf_counter() - begun)

        memory.over(len(todo), work)
        self._warn_memory(job.key, job.name, memory)
        if show is not None:
            show(total)
        return among & (verdicts == 1)

    def right(self, x: Tensor, y: Tensor, route: str | None) -> Tensor:
        """Whether images are classified right, by the strict forward that decides; in batches, on the CPU."""
        device = self.case.device

        def work(part: slice) -> Tensor:
            return self._right(x[part].to(device), y[part].to(device), route)[0].cpu()

        return torch.cat(Halving(self.case.batch_size).over(len(x), work))

    def _shown(self, job: Job, total: int) -> Callable[[float], None] | None:
        """Shows how many images are done with, where there is a bar; it goes when all are."""
        if self.bar is None:
            return None
        bar, task = self.bar, self.bar.add_task(f"{job.route or ''} {job.name}".strip(), total=total)
        return lambda done: bar.update(task, completed=done, visible=done < total)

    def _cascade(self, job: Job, attack: AutoAttack, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        found = attack.evaluate(self.case.model, x, y, index=index, record=self.partial.folder(job.key), bar=False)
        for flag in found.warnings:
            self.partial.warn(job.key, f"{job.name}: {flag.message}")
        for size in found.halved:
            self.partial.warn(job.key, f"{job.name}: memory did not suffice for {size} rows at a time")
        counts = {name: round(value * len(x)) for name, value in found.accuracy.items()}
        self.partial.detail(job.key, {name: count / len(self.case.images) for name, count in counts.items()})
        return found.x_adv

    def _right(self, x: Tensor, y: Tensor, route: str | None) -> tuple[Tensor, Tensor]:
        statistics = unmoving(self.case.statistics)
        with (
            attacked(self.case.model, route=route, statistics=statistics) as predict,
            float32_as("ieee", x.device),
            torch.no_grad(),
        ):
            logits = predict(x)
        nan = logits.isnan().any(1)
        return (logits.argmax(1) == y) & ~nan, nan

    def _warn_memory(self, key: str, name: str, memory: Halving) -> None:
        for size in memory.halved:
            self.partial.warn(
                key, f"{name}: memory did not suffice for {size} images at a time, went on with {size // 2}"
            )


def _within(show: Callable[[float], None], done: int, images: int) -> Callable[[int, int], None]:
    """Progress within a batch as progress over all images."""
    return lambda n, of: show(done + images * n / of)


@contextmanager
def progress_bar(show: bool) -> Iterator[Any]:
    """A bar per attack on a terminal's standard error, or None."""
    if not show:
        with nullcontext():
            yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield bar


# -- records -----------------------------------------------------------------------------------------------------------


def partial_path(record: Path | str) -> Path:
    """Where a run that is not finished keeps its verdicts."""
    return Path(record).with_name(Path(record).name + ".partial")


class Partial:
    """Verdicts so far, by job, in a file that is written whole after each batch; without a path in memory only."""

    FORMAT = "advnorm.partial/1"

    def __init__(self, path: Path | None, fingerprint: str) -> None:
        self.path, self.fingerprint, self._commit = path, fingerprint, _commit()
        self._jobs: dict[str, dict[str, Any]] = {}
        if path is None or not path.exists():
            return
        data = _read(path)
        jobs = data.get("jobs")
        if data.get("format") != self.FORMAT or not isinstance(jobs, dict):
            raise ConfigError(f"{path} is not a partial evaluation; delete it, or choose another record")
        if data.get("fingerprint") != fingerprint:
            raise ConfigError(
                f"{path} belongs to another evaluation (other images, labels, model parameters or statistics mode); "
                "delete it to start afresh, or choose another record"
            )
        self._jobs = jobs
        before, now = (str(commit).rstrip("+") for commit in (data.get("commit"), self._commit))
        if before != now:
            self.warn("commit", f"continued from a run of another version of advnorm, commit {before}")

    def verdicts(self, key: str, count: int) -> Tensor:
        """1 robust, 0 fooled, -1 not known yet."""
        letters = self._jobs.get(key, {}).get("verdicts")
        if letters is None:
            return torch.full((count,), -1, dtype=torch.int8)
        if not isinstance(letters, str) or len(letters) != count or set(letters) - set("01?"):
            raise ConfigError(f"{self.path} is damaged at {key!r}; delete it to start afresh")
        return torch.tensor([{"?": -1, "0": 0, "1": 1}[letter] for letter in letters], dtype=torch.int8)

    def save(self, key: str, verdicts: Tensor, seconds: float) -> None:
        job = self._jobs.setdefault(key, {"warnings": []})
        job["verdicts"] = "".join("01?"[value] for value in verdicts.tolist())
        job["seconds"] = job.get("seconds", 0.0) + seconds
        self._write()

    def warn(self, key: str, warning: str) -> None:
        warnings = self._jobs.setdefault(key, {}).setdefault("warnings", [])
        if warning not in warnings:
            warnings.append(warning)
            self._write()

    def detail(self, key: str, accuracy: Mapping[str, float]) -> None:
        self._jobs.setdefault(key, {"warnings": []})["stages"] = dict(accuracy)

    def stages(self, key: str) -> dict[str, float] | None:
        return self._jobs.get(key, {}).get("stages")

    def folder(self, key: str) -> Path | None:
        """Where an attack that keeps a record of its own may do so until it is done."""
        return None if self.path is None else self.path.with_name(f"{self.path.name}.{_digest(key)[:8]}")

    def seconds(self, key: str) -> float:
        return float(self._jobs.get(key, {}).get("seconds", 0.0))

    def warnings(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(warning for job in self._jobs.values() for warning in job.get("warnings", [])))

    def remove(self) -> None:
        for key in self._jobs:
            folder = self.folder(key)
            if folder is not None and folder.is_dir():
                shutil.rmtree(folder)
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _write(self) -> None:
        if self.path is not None:
            data = {"format": self.FORMAT, "fingerprint": self.fingerprint, "commit": self._commit, "jobs": self._jobs}
            write_json(self.path, data)


def _finished(path: Path, fingerprint: str) -> BenchmarkResult:
    data = _read(path)
    if data.get("fingerprint") != fingerprint:
        raise ConfigError(
            f"{path} holds the record of another evaluation (other data, model, threat, attacks or routes); "
            "delete it, or choose another record"
        )
    return BenchmarkResult.of_record(data)


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError:
        data = None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} is damaged or no record of ours; delete it, or choose another record")
    return data


def _digest(*parts: Any) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        if isinstance(part, Tensor):
            array = part.detach().cpu().contiguous()
            digest.update(f"{array.dtype}{tuple(array.shape)}".encode())
            digest.update(array.reshape(-1).view(torch.uint8).numpy().tobytes() if array.numel() else b"")
        else:
            digest.update(repr(part).encode() + b"\0")
    return digest.hexdigest()


def model_fingerprint(model: nn.Module) -> str:
    """A hash of a model's structure, parameters and statistics."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    structure = re.sub(r"0x[0-9a-f]+", "", repr(model))  # addresses differ from process to process
    return _digest(structure, *(value for item in tensors.items() for value in item))


def environment(device: torch.device) -> dict[str, Any]:
    """Versions and device, as a record carries them."""
    package = sys.modules["advnorm"]  # its version, without importing upwards
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "advnorm": getattr(package, "__version__", None),
        "commit": _commit(),
    }


def _commit() -> str | None:
    """The commit of this package's own repository, ``+`` where files differ; None where it is installed elsewhere."""
    here = Path(__file__)

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], cwd=here.parent, capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if git("ls-files", "--error-unmatch", str(here.parent.parent / "__init__.py")) is None:
        return None
    commit = git("rev-parse", "HEAD")
    return commit if commit is None else commit + ("+" if git("status", "--porcelain", "-uno") else "")


def branches(model: nn.Module) -> tuple[str, ...]:
    """The domains that a model's norms treat differently at test time, so that a forward needs a route."""
    plans: Iterable[Any] = (module.plan for module in routed_modules(model).values())
    return tuple(dict.fromkeys(d for plan in plans if plan.routed and not plan.mixture for d in plan.domains))
