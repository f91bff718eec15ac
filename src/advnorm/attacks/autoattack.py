"""AutoAttack: a cascade of attacks without parameters to tune, and a record that a killed evaluation continues from.

Source: Croce & Hein 2020, "Reliable evaluation of adversarial robustness with an ensemble of diverse parameter-free
attacks"; settings and checks as in the authors' code (github.com/fra31/auto-attack).
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from advnorm._core.errors import ConfigError, did_you_mean
from advnorm._core.precision import float32_as
from advnorm._core.records import digest, write_json, write_whole
from advnorm._core.seeding import ImageNoise
from advnorm.attacks.apgd import APGD
from advnorm.attacks.base import Attack, Option, Predict, attacked, check_images, checked, register
from advnorm.attacks.fab import FAB
from advnorm.attacks.losses import cross_entropy
from advnorm.attacks.search import Found, Halving, Search, Victim, bucket, filled, margin_of
from advnorm.attacks.square import Square
from advnorm.attacks.stand_in import StandIn, fast_stand_in

Version = Literal["standard", "plus", "rand"]
Precision = Literal["float32", "tf32", "bf16"]

VERSIONS: Mapping[str, tuple[str, ...]] = {
    "standard": ("apgd-ce", "apgd-t", "fab-t", "square"),
    "plus": ("apgd-ce", "apgd-dlr", "fab", "square", "apgd-t", "fab-t"),
    "rand": ("apgd-ce", "apgd-dlr"),
}
#: What decides the close calls of a fast search, and how many times the tolerance a margin is for that.
FINISH, CLOSE = "float32", 8
#: Images for the checks before the attack.
PROBE = 64
#: Rows of a forward: on a CPU, and at most on a GPU, where more gain nothing.
CPU_ROWS, GPU_ROWS = 512, 4096
#: On a GPU a strict forward has a multiple of so many rows.
JUDGED = 32


@dataclass(frozen=True, kw_only=True)
class AutoAttack(Attack):
    """A cascade: each attack gets the images that the ones before it did not fool.

    ``version``: ``standard``, ``plus`` (restarts, and untargeted attacks too) or ``rand`` (for randomized models: every
    gradient is the mean of ``samples`` forwards); or the names of ``attacks`` in order.
    ``precision``: of the search. A success counts only after a strict float32 forward of the projected image. After a
    search in ``tf32`` or ``bf16`` strict float32 decides the close calls too: where a survivor came as near to the
    boundary as 8 times the difference of margins in the two precisions, FAB-T goes on from its best point.
    ``batch_size``: rows of one forward (an image takes one for each target or restart); None: as many as pay. Halved
    when memory runs out.
    """

    version: Version = "standard"
    attacks: tuple[str, ...] | None = None
    precision: Precision = "float32"
    steps: int = 100
    targets: int = 9
    queries: int = 5000
    samples: int = 20
    batch_size: int | None = None

    def problems(self) -> list[str]:
        problems = super().problems()
        for label, value, allowed in (
            ("version", self.version, tuple(VERSIONS)),
            ("precision", self.precision, get_args(Precision)),
        ):
            if value not in allowed:
                problems.append(f"unknown {label} {value!r}{did_you_mean(value, allowed)}")
        counts = {label: getattr(self, label) for label in ("steps", "targets", "queries", "samples")}
        if self.batch_size is not None:
            counts["batch_size"] = self.batch_size
        problems += [
            f"{label} must be an integer of at least 1, got {value!r}"
            for label, value in counts.items()
            if isinstance(value, bool) or not isinstance(value, int) or value < 1
        ]
        names = dict.fromkeys(name for version in VERSIONS.values() for name in version)
        if self.attacks is not None:
            if isinstance(self.attacks, str) or not self.attacks:
                problems.append(f"attacks must be a tuple of names such as ('apgd-ce', 'square'), got {self.attacks!r}")
            else:
                strangers = [name for name in self.attacks if name not in names]
                problems += [f"unknown attack {name!r}{did_you_mean(name, names)}" for name in strangers]
                if len(set(self.attacks)) < len(self.attacks):
                    problems.append(f"an attack can take part once, got {self.attacks!r}")
        return problems

    def stages(self) -> dict[str, Search]:
        """The attacks by name, in order, with the authors' settings."""
        sparse, plus = self.threat.norm == "L1", self.version == "plus"
        base = {name: getattr(self, name) for name in ("threat", "seed", "route", "statistics")}
        restarts = 5 if plus or (sparse and self.version == "standard") else 1
        samples = self.samples if self.version == "rand" else 1
        apgd: dict[str, Any] = {**base, "steps": self.steps, "samples": samples}
        targets = min(self.targets, 5) if sparse and not plus else self.targets
        table: dict[str, Search] = {
            "apgd-ce": APGD(**apgd, restarts=restarts),
            "apgd-dlr": APGD(**apgd, restarts=restarts, loss="dlr"),
            "apgd-t": APGD(**apgd, loss="dlr", targets=targets),
            "fab": FAB(**base, steps=self.steps, targets=0, restarts=5),
            "fab-t": FAB(**base, steps=self.steps, targets=self.targets),
            "square": Square(**base, queries=self.queries),
        }
        return {name: table[name] for name in self.attacks or VERSIONS[self.version]}

    def perturb(self, predict: Predict, x: Tensor, y: Tensor, noise: ImageNoise) -> Tensor:
        return _Cascade(self, predict, x, y, noise, device=x.device).run().x_adv

    def evaluate(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        *,
        index: Tensor | None = None,
        record: Path | str | None = None,
        bar: bool | None = None,
        search: Predict | None = None,
    ) -> AutoAttackResult:
        """Attack the images and say how many resist; ``x`` may be on another device than the model.

        ``record``: a folder that is written after each batch and continued from after a kill, and that holds the answer
        at the end. ``bar``: a progress bar; None: on a terminal. ``search``: a fast stand-in for the model that the
        search uses in place of ``precision`` (compiled, folded, half precision); the model itself decides.
        """
        largest_label = check_images(x, y)
        x, y = x.detach(), y.detach()
        index = torch.arange(len(x)) if index is None else index
        if len(index) != len(x):
            raise ConfigError(f"index names {len(index)} images and there are {len(x)}")
        tensors = (*model.parameters(), *model.buffers()) if isinstance(model, nn.Module) else ()
        device = next((tensor.device for tensor in tensors), x.device)
        with ExitStack() as stack:
            predict = stack.enter_context(attacked(model, route=self.route, statistics=self.statistics))
            torch.manual_seed(self.seed)  # of randomized models; `attacked` gives the callers theirs back
            predict = checked(predict, largest_label)
            noise = ImageNoise(self.seed, index.to(device)).fold(type(self).__name__)
            fast = search
            if fast is None and self.precision == "bf16":
                fast = fast_stand_in(model, route=self.route, statistics=self.statistics)
            cascade = _Cascade(self, predict, x, y, noise, device=device, search=fast)
            if record is not None:
                cascade.record = Record(Path(record), self._asked(x, y, index, cascade, search))
            if bar or (bar is None and sys.stderr.isatty()):
                cascade.reports.append(stack.enter_context(_progress_bar()))
            return cascade.run()

    def _asked(self, x: Tensor, y: Tensor, index: Tensor, cascade: _Cascade, search: Predict | None) -> dict[str, Any]:
        """What a record belongs to. The batch size is none of it: an image's fate does not depend on the others."""
        return {
            "attack": repr(dataclasses.replace(self, batch_size=None)),
            "search": "given" if search else self.precision,
            **{name: digest(value) for name, value in (("images", x), ("labels", y), ("index", index))},
            "logits": cascade.victim.strict(x[:8].to(cascade.device)).double().cpu().tolist(),
        }


@dataclass(frozen=True)
class Flag:
    """A reason to doubt the number."""

    name: str
    message: str


@dataclass(frozen=True, kw_only=True)
class AutoAttackResult:
    """The answer of an evaluation, with its conditions."""

    attack: AutoAttack
    #: Adversarial images; for robust ones the point nearest to one that was seen.
    x_adv: Tensor
    #: Which attack fooled an image: the position in ``stages``; 0 for ``clean``: wrong without attack; -1: robust.
    fooled_by: Tensor
    stages: tuple[str, ...]
    seconds: dict[str, float]
    #: Forwards in images, backwards not counted.
    forwards: dict[str, int]
    warnings: tuple[Flag, ...]
    batch_size: int
    #: Batch sizes for which memory did not suffice.
    halved: tuple[int, ...] = ()

    @property
    def robust(self) -> Tensor:
        """The verdict on each image."""
        return self.fooled_by < 0

    @property
    def accuracy(self) -> dict[str, float]:
        """Clean accuracy, then robust accuracy after each attack of the cascade."""
        return {
            name: ((self.fooled_by < 0) | (self.fooled_by > place)).double().mean().item()
            for place, name in enumerate(self.stages)
        }

    @property
    def clean_accuracy(self) -> float:
        return self.accuracy["clean"]

    @property
    def robust_accuracy(self) -> float:
        return self.robust.double().mean().item()

    def summary(self) -> dict[str, Any]:
        """What a record keeps as JSON, but for the time it took."""
        return {
            "attack": repr(self.attack),
            "images": len(self.x_adv),
            "accuracy": self.accuracy,
            "forwards": self.forwards,
            "warnings": [dataclasses.asdict(flag) for flag in self.warnings],
            "batch_size": self.batch_size,
            "halved": list(self.halved),
        }

    def __str__(self) -> str:
        lines = [f"AutoAttack {self.attack.version}, {self.attack.threat}, {len(self.x_adv)} images"]
        width = max(map(len, self.stages))
        for name, accuracy in self.accuracy.items():
            lines.append(f"  {name:{width}} {100 * accuracy:6.2f} %  {self.seconds.get(name, 0):8.1f} s")
        return "\n".join([*lines, *(f"  warning ({flag.name}): {flag.message}" for flag in self.warnings)])


# -- the cascade -------------------------------------------------------------------------------------------------------

ROBUST = -1


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What an attack of the cascade found for some of the images; ``images`` are their places."""

    stage: str
    images: Tensor
    found: Found
    seconds: float
    forwards: int


class _Cascade:
    """One evaluation under way. What belongs to all images is kept where they are, a batch where the model is."""

    def __init__(
        self,
        attack: AutoAttack,
        predict: Predict,
        x: Tensor,
        y: Tensor,
        noise: ImageNoise,
        *,
        device: torch.device,
        search: Predict | None = None,
    ) -> None:
        self.attack, self.x, self.y, self.noise, self.device = attack, x, y, noise, device
        stand_in = {"float32": None, "tf32": _with_float32(predict, "tf32"), "bf16": _with_bfloat16(predict)}
        fast = search or stand_in[attack.precision]
        strict = _with_float32(predict, "ieee")
        self.memory = Halving(attack.batch_size or (CPU_ROWS if device.type == "cpu" else GPU_ROWS))
        if device.type == "cuda" and attack.statistics == "running":
            strict = _in_buckets(strict, self.memory)
        self.strict = Victim(strict, memory=self.memory)
        self.victim = Victim(strict, search=fast, memory=self.memory) if fast else self.strict
        self.record: Record | None = None
        self.reports: list[Callable[[str, float], None]] = []
        if attack.progress is not None:
            whole, progress = 1000, attack.progress
            self.reports.append(lambda _name, share: progress(round(whole * share), whole))
        self.flags: list[Flag] = []
        self.fooled_by = torch.full_like(y, ROBUST)
        self.best, self.margin = x.clone(), torch.full(y.shape, torch.inf, device=x.device)
        self.no_gradient: dict[str, int] = {}
        self.seconds: dict[str, float] = {}
        self.forwards: dict[str, int] = {}

    def run(self) -> AutoAttackResult:
        answer = self.record.answer(self.x.device) if self.record else None
        if answer is not None:
            return AutoAttackResult(attack=self.attack, **answer)
        classes, stages = self._prepare()
        names = ("clean", *stages)
        done = {name: torch.zeros_like(self.y, dtype=torch.bool) for name in stages}
        for batch in self.record.batches(names, self.x.device) if self.record else ():
            self._take_in(names.index(batch.stage), batch)
            done[batch.stage][batch.images] = True
        for place, name in enumerate(stages, 1):
            left = (self.fooled_by == ROBUST) & ~done[name]
            if name == FINISH:
                left &= self.margin <= CLOSE * self.victim.tolerance
            self._stage(place, names, stages[name], left.nonzero()[:, 0], classes)
        result = AutoAttackResult(
            attack=self.attack,
            x_adv=self.best,
            fooled_by=self.fooled_by,
            stages=names,
            seconds=self.seconds,
            forwards=self.forwards,
            warnings=(*self.flags, *_flags_after(names, self.fooled_by, self.no_gradient)),
            batch_size=self.memory.size or 1,
            halved=tuple(self.memory.halved),
        )
        if self.record:
            self.record.finish(result)
        return result

    def _prepare(self) -> tuple[int, dict[str, Search]]:
        """Checks, batch size and clean predictions; the number of classes and the stages."""
        started = time.perf_counter()
        probe, labels = (v[:PROBE].to(self.device) for v in (self.x, self.y))
        stages = self.attack.stages()
        logits = self.strict.strict(probe)
        self.flags += _flags_before(self.strict, self.attack, stages, probe, logits)
        try:
            self.victim.gradient(probe, lambda z, part: cross_entropy(z, labels[part]))
        except ConfigError as error:
            stages = {name: stages[name] for name in stages if name == "square"}
            if not stages:
                raise
            self.flags.append(Flag("no-gradients", f"{error}; nothing but Square was run"))
        if self.victim is not self.strict:
            gap = margin_of(self.victim.logits(probe), labels) - margin_of(logits, labels)
            self.victim.tolerance = 2 * gap.abs().max().item()
            if set(stages) - {"square"} and self.attack.version != "rand":
                stages[FINISH] = FAB(threat=self.attack.threat, targets=3, steps=20)
        if self.attack.batch_size is None and self.device.type == "cuda":
            self.memory.size = _fitting_rows(self.victim, probe, labels)
        for part in torch.arange(len(self.x), device=self.x.device).split(self.memory.size or len(self.x)):
            wrong = self.strict.fooled(self.x[part].to(self.device), self.y[part].to(self.device))
            self.fooled_by[part[wrong.to(part.device)]] = 0
        self.seconds["clean"] = time.perf_counter() - started
        self.forwards["clean"] = len(self.x)
        return logits.shape[1], stages

    def _stage(self, place: int, names: tuple[str, ...], search: Search, left: Tensor, classes: int) -> None:
        """Run one attack on the images that are left to it, batch by batch."""
        name, variants = names[place], search.variants(classes)
        self.seconds.setdefault(name, 0.0)
        self.forwards.setdefault(name, 0)
        batches = Halving((self.memory.size or 1) // variants or 1)

        def show(images: float) -> None:
            for report in self.reports:
                report(name, (place - 1 + images / max(len(left), 1)) / (len(names) - 1))

        def work(part: slice) -> None:
            images, before, started = left[part], self._counted(), time.perf_counter()
            most = search.forwards(classes) * len(images)

            def tick() -> None:
                show(part.start + len(images) * min((self._counted() - before) / most, 1))

            self.strict.tick = self.victim.tick = tick if self.reports else None
            found = self._attack(name, search, images).to(self.x.device)
            seconds, forwards = time.perf_counter() - started, self._counted() - before
            batch = Batch(stage=name, images=images, found=found, seconds=seconds, forwards=forwards)
            if self.record:
                self.record.add(batch)
            self._take_in(place, batch)
            batches.size = min(batches.size or 1, (self.memory.size or 1) // variants or 1)

        show(0)
        batches.over(len(left), work)
        self.memory.halved += [images * variants for images in batches.halved]
        show(len(left))

    def _attack(self, name: str, search: Search, images: Tensor) -> Found:
        x, y = self.x[images].to(self.device), self.y[images].to(self.device)
        noise = self.noise.select(images.to(self.device)).fold(name)
        if name == FINISH:
            assert isinstance(search, FAB)
            return search.search(self.strict, x, y, noise, start=self.best[images].to(self.device))
        return search.search(self.victim, x, y, noise)

    def _take_in(self, place: int, batch: Batch) -> None:
        images, found = batch.images, batch.found
        closer = found.fooled | (found.margin < self.margin[images])
        self.best[images[closer]] = found.x_adv[closer]
        self.margin[images[closer]] = found.margin[closer]
        self.fooled_by[images[found.fooled]] = place
        self.no_gradient[batch.stage] = self.no_gradient.get(batch.stage, 0) + int(found.zero_gradient.sum())
        self.seconds[batch.stage] = self.seconds.get(batch.stage, 0.0) + batch.seconds
        self.forwards[batch.stage] = self.forwards.get(batch.stage, 0) + batch.forwards

    def _counted(self) -> int:
        return sum(victim.forwards for victim in {self.strict, self.victim})


def _with_float32(predict: Predict, precision: Literal["ieee", "tf32"]) -> Predict:
    def forward(x: Tensor) -> Tensor:
        with float32_as(precision, x.device):
            return predict(x)

    return forward


def _in_buckets(predict: Predict, memory: Halving) -> Predict:
    """Few sizes, and none that is beyond the memory's: the candidates to judge are another number every time."""

    def forward(x: Tensor) -> Tensor:
        rows = min(bucket(len(x), JUDGED), max(len(x), memory.size or 1))
        return predict(filled(x, rows))[: len(x)]

    return forward


def _with_bfloat16(predict: Predict) -> Predict:
    def forward(x: Tensor) -> Tensor:
        if x.dim() == 4 and x.is_cuda:
            x = x.contiguous(memory_format=torch.channels_last)
        with torch.autocast(x.device.type, torch.bfloat16):
            return predict(x).float()

    return forward


def _fitting_rows(victim: Victim, x: Tensor, y: Tensor) -> int:
    """How many rows of forward and backward fit into the GPU's free memory, with what a search keeps for each row."""
    if isinstance(victim.search, StandIn):  # a replay would show nothing of what it needs
        victim = Victim(victim.predict, search=victim.search.eager)

    def peak(rows: int) -> int:
        torch.cuda.reset_peak_memory_stats(x.device)
        before = torch.cuda.memory_allocated(x.device)
        points, labels = (v.repeat(-(-rows // len(v)), *(1,) * (v.dim() - 1))[:rows] for v in (x, y))
        victim.gradient(points, lambda z, part: cross_entropy(z, labels[part]))
        return torch.cuda.max_memory_allocated(x.device) - before

    peak(64)  # libraries' own workspace
    each = max(peak(128) - peak(64), 1) / 64 + 160 * x[0].numel()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(x.device)
    return max(1, min(GPU_ROWS, int(0.7 * free / each)))


@contextmanager
def _progress_bar() -> Iterator[Callable[[str, float], None]]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task("AutoAttack", total=1.0)
        yield lambda name, share: bar.update(task, description=f"AutoAttack: {name}", completed=share)


# -- reasons to doubt --------------------------------------------------------------------------------------------------


def _flags_before(
    victim: Victim, attack: AutoAttack, stages: Mapping[str, Search], x: Tensor, logits: Tensor
) -> list[Flag]:
    """The authors' checks of the model before the attack, and whether images influence each other."""
    flags = []
    again = [victim.strict(x) for _ in range(4)]
    scale = logits.norm(dim=1).clamp_min(1e-10)
    randomized = max(((other - logits).norm(dim=1) / scale).max().item() for other in again) > 1e-4
    if randomized and attack.version != "rand":
        flags.append(Flag("randomized", "two forwards of the same images differ; use version='rand'"))
    if not randomized and attack.version == "rand" and attack.samples > 1:
        message = f"{attack.samples} samples per gradient on a model that is not randomized; use version='standard'"
        flags.append(Flag("deterministic", message))
    if not randomized and len(x) > 1:
        alone = torch.cat([victim.strict(image) for image in x[:4].split(1)])
        if (((alone - logits[:4]).norm(dim=1)) / scale[:4]).max().item() > 1e-3:
            message = (
                "the output for an image depends on the other images of its batch (batch statistics at test time?), "
                "so that the verdict does too; use statistics='running', or fix a branch"
            )
            flags.append(Flag("batch-dependent", message))
    if logits.min() > -1e-5 and logits.max() < 1 + 1e-5 and ((logits.sum(1) - 1).abs() < 1e-5).all():
        message = "the outputs look like probabilities, whose gradients vanish; return the logits, without softmax"
        flags.append(Flag("probabilities", message))
    if _differentiates(victim, x):
        message = "the forward computes gradients itself (a dynamic defence), against which AutoAttack may not suffice"
        flags.append(Flag("dynamic", message))
    flags += _flags_of_classes(stages, logits.shape[1])
    return flags


def _flags_of_classes(stages: Mapping[str, Search], classes: int) -> list[Flag]:
    problems = []
    for name, search in stages.items():
        targets = getattr(search, "targets", 0)
        if targets > classes - 1:
            problems.append(f"{name} had {classes - 1} target classes in place of {targets}")
        if getattr(search, "loss", "") == "dlr" and classes < (4 if targets else 3):
            problems.append(f"{name} used the margin in place of the DLR loss")
    message = f"with {classes} classes, " + "; ".join(problems)
    return [Flag("few-classes", message)] if problems else []


def _differentiates(victim: Victim, x: Tensor) -> bool:
    """Whether the forward calls autograd: seen by a profiler for the length of one forward."""
    entries = {function.__code__ for function in (torch.autograd.grad, torch.autograd.backward)}
    called = False

    def watch(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal called
        called = called or (event == "call" and frame.f_code in entries)

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        victim.strict(x)
    finally:
        sys.setprofile(before)
    return called


def _flags_after(names: tuple[str, ...], fooled_by: Tensor, no_gradient: Mapping[str, int]) -> list[Flag]:
    flags = []
    without = ", ".join(f"{name} on {count} images" for name, count in no_gradient.items() if count)
    if without:
        message = (
            f"zero gradients met {without}, where attacks by gradients cannot be trusted; "
            "look for saturation, rounding or a huge scale of the logits"
        )
        flags.append(Flag("zero-gradients", message))
    if "square" in names and len(names) > 2:
        accuracy = [((fooled_by < 0) | (fooled_by > place)).double().mean().item() for place in range(len(names))]
        square = accuracy.pop(names.index("square"))
        if square < min(accuracy) - 0.002:
            message = (
                f"Square lowered the robust accuracy by another {100 * (min(accuracy) - square):.2f} points, "
                "which points to masked gradients; try more queries and restarts, or an adaptive attack"
            )
            flags.append(Flag("square-better", message))
    return flags


# -- the record on disk ------------------------------------------------------------------------------------------------


class Record:
    """A folder: ``record.json`` (what was asked, at the end the answer), and the images in ``answer.safetensors``.

    While the evaluation runs it holds a file for each finished batch. Every file is written whole or not at all.
    """

    FORMAT = 1

    def __init__(self, folder: Path, asked: dict[str, Any]) -> None:
        self.folder, self.asked = folder, asked
        self._json = folder / "record.json"
        self._count = 0
        if not self._json.exists():
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise ConfigError(f"{folder} is there and is no record of AutoAttack; give record= a folder of its own")
            write_json(self._json, {"format": self.FORMAT, "asked": asked})
        self._data = self._read()

    def __str__(self) -> str:
        return str(self.folder)

    def _read(self) -> dict[str, Any]:
        try:
            data = json.loads(self._json.read_text(encoding="utf-8"))
            found, known = data["asked"], data["format"] == self.FORMAT
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{self._json} is corrupt ({error!r}); remove the folder to start anew") from None
        differing = [name for name in self.asked if name != "logits" and found.get(name) != self.asked[name]]
        if not differing and known:
            ours, theirs = (
                torch.tensor(value, dtype=torch.float64) for value in (self.asked["logits"], found["logits"])
            )
            # A tolerance, since another device or batch size rounds differently.
            if ours.shape != theirs.shape or not torch.allclose(ours, theirs, rtol=1e-2, atol=1e-3):
                differing.append("model")
        if differing or not known:
            raise ConfigError(
                f"{self._json} belongs to another evaluation (different: {', '.join(differing) or 'format'}); "
                "give record= another folder, or remove this one"
            )
        return data

    def add(self, batch: Batch) -> None:
        """Keep a finished batch."""
        found = batch.found
        tensors = {
            "images": batch.images,
            "x_adv": found.x_adv,
            "fooled": found.fooled,
            "margin": found.margin,
            "zero_gradient": found.zero_gradient,
        }
        facts = {"stage": batch.stage, "seconds": batch.seconds, "forwards": batch.forwards}
        self._count += 1
        _write_tensors(self.folder / f"batch-{self._count:06}.safetensors", tensors, facts)

    def batches(self, stages: tuple[str, ...], device: torch.device) -> Iterator[Batch]:
        """The batches that an earlier process finished, in order."""
        for path in sorted(self.folder.glob("batch-*.safetensors")):
            tensors, facts = _read_tensors(path, device)
            stage = facts.pop("stage", None)
            if stage not in stages:
                raise ConfigError(f"{path} holds a batch of {stage!r}; this evaluation has {', '.join(stages)}")
            images = tensors.pop("images")
            self._count = int(path.stem.removeprefix("batch-"))
            yield Batch(stage=stage, images=images, found=Found(**tensors), **facts)

    def finish(self, result: AutoAttackResult) -> None:
        """Write the answer and remove the batches."""
        tensors = {"x_adv": result.x_adv, "fooled_by": result.fooled_by}
        _write_tensors(self.folder / "answer.safetensors", tensors, {})
        answer = {"result": result.summary(), "stages": list(result.stages), "seconds": result.seconds}
        write_json(self._json, {**self._data, "answer": answer})
        for path in self.folder.glob("batch-*.safetensors"):
            path.unlink()

    def answer(self, device: torch.device) -> dict[str, Any] | None:
        """What :class:`AutoAttackResult` needs, of an evaluation that is finished."""
        answer = self._data.get("answer")
        if answer is None:
            return None
        tensors, _ = _read_tensors(self.folder / "answer.safetensors", device)
        summary = answer["result"]
        return {
            **tensors,
            "stages": tuple(answer["stages"]),
            "seconds": answer["seconds"],
            "forwards": summary["forwards"],
            "warnings": tuple(Flag(**flag) for flag in summary["warnings"]),
            "batch_size": summary["batch_size"],
            "halved": tuple(summary["halved"]),
        }


def _write_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """A safetensors file with facts and hashes in its header, whole or not at all."""
    tensors = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    header = {"facts": json.dumps(facts), "digests": json.dumps({name: digest(v) for name, v in tensors.items()})}
    write_whole(path, save(tensors, metadata=header))


def _read_tensors(path: Path, device: torch.device) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            header = file.metadata()
        if json.loads(header["digests"]) != {name: digest(value) for name, value in tensors.items()}:
            raise ValueError("its content does not match its hash")
        facts = json.loads(header["facts"])
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is corrupt ({error}); remove the folder {path.parent} to start anew") from None
    return {name: value.to(device) for name, value in tensors.items()}, facts


register(
    "autoattack",
    AutoAttack,
    options={
        **{name: Option(setting=name, parse=int) for name in ("steps", "queries")},
        **{version: Option(setting="version", value=version) for version in VERSIONS},
        **{word: Option(setting="precision", parse=word.__add__) for word in ("float", "tf", "bf")},
    },
    summary="APGD-CE, APGD-T, FAB-T and Square in a cascade",
    paper="A, C",
)
