"""A checked evaluation and its run: everything that can be wrong is found before any long work."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import advnorm.attacks as attack_names
from advnorm._core.errors import AdvnormError, ConfigError, raise_all
from advnorm._core.precision import float32_as
from advnorm._core.records import digest, write_json
from advnorm.attacks import Attack, attacked
from advnorm.attacks.autoattack import AutoAttack
from advnorm.attacks.base import check_images, parse_name
from advnorm.attacks.search import Halving
from advnorm.engine.partial import Partial, environment, finished, model_fingerprint, partial_path
from advnorm.engine.result import BenchmarkResult
from advnorm.norms import Mode, domains, routed_modules
from advnorm.threat import ThreatModel

#: Attacks by name, as instances, or instances under a name of the caller's.
Attacks = str | Attack | Sequence[str | Attack] | Mapping[str, Attack]
#: How a model without a given route is called in tables and records.
AS_CALLED = "as called"
#: Images at a time where the caller does not say; halved when memory runs out.
BATCH_SIZES = {"cpu": 128, "cuda": 512}
#: Images of the first forward, which finds what is wrong with a model before any long work.
PROBE = 4


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
        fingerprint = digest(self.fingerprint, self.threat, self.routes, [job.key for job in self.jobs])
        if record is not None and Path(record).exists():
            return finished(Path(record), fingerprint)
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
        return digest(self.images, self.labels, self.index, self.statistics, model_fingerprint(self.model))

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


def branches(model: nn.Module) -> tuple[str, ...]:
    """The domains that a model's norms treat differently at test time, so that a forward needs a route."""
    plans: Iterable[Any] = (module.plan for module in routed_modules(model).values())
    return tuple(dict.fromkeys(d for plan in plans if plan.routed and not plan.mixture for d in plan.domains))
