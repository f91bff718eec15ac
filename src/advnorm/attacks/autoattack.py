"""AutoAttack: a cascade of attacks without parameters to tune.

Source: Croce & Hein 2020, "Reliable evaluation of adversarial robustness with an ensemble of diverse parameter-free
attacks"; settings and checks as in the authors' code (github.com/fra31/auto-attack).
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from advnorm._core.errors import ConfigError, did_you_mean
from advnorm._core.memory import AdaptiveBatchSize
from advnorm._core.precision import ContextFactory, as_set, float32_as, kernels
from advnorm._core.progress import show_progress
from advnorm._core.records import digest, model_fingerprint
from advnorm._core.seeding import ImageNoise
from advnorm.attacks.apgd import APGD
from advnorm.attacks.autoattack_checks import flags_after, flags_before
from advnorm.attacks.autoattack_record import AutoAttackResult, Batch, Flag, Record
from advnorm.attacks.base import Attack, Option, Predict, attacked, check_images, checked, register, usable
from advnorm.attacks.fab import FAB
from advnorm.attacks.losses import cross_entropy
from advnorm.attacks.search import Found, Search, Victim, bucket, filled, margin_of, never_alone
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
#: In place of the attack that fooled an image, where none did.
ROBUST = -1
#: Images for the checks before the attack.
PROBE = 64
#: Rows of a forward: on a CPU, and at most on a GPU, where more gain nothing.
CPU_ROWS, GPU_ROWS = 512, 4096
#: On a GPU a strict forward that judges has a multiple of so many rows, and one that searches of such a part of all.
JUDGED, SEARCHED = 32, 8


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

    by_gradients = False  # on a model without, Square alone runs

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

    def misfits(self, shape: Sequence[int], classes: int) -> list[str]:
        return [text for search in self.stages().values() for text in search.misfits(shape, classes)]

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
        with float32_as("ieee", x.device):
            fast, precision = self._fast(predict, x.device)
            cascade = _Cascade(self, predict, x, y, noise, device=x.device, search=fast, precision=precision)
            return cascade.run().x_adv

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
        index = torch.arange(len(x)) if index is None else index
        if len(index) != len(x):
            raise ConfigError(f"index names {len(index)} images and there are {len(x)}")
        tensors = (*model.parameters(), *model.buffers()) if isinstance(model, nn.Module) else ()
        device = next((tensor.device for tensor in tensors), x.device)
        as_called = as_set(device)
        with ExitStack() as stack:
            stack.enter_context(float32_as("ieee", device))
            predict = stack.enter_context(attacked(model, route=self.route, statistics=self.statistics))
            x, y = usable(x), usable(y)
            torch.manual_seed(self.seed)  # of randomized models; `attacked` gives the callers theirs back
            predict = checked(predict, largest_label)
            noise = ImageNoise(self.seed, index.to(device)).fold(type(self).__name__)
            fast, precision = search, as_called
            if fast is None:
                fast, precision = self._fast(predict, device, model)
            cascade = _Cascade(
                self,
                predict,
                x,
                y,
                noise,
                device=device,
                search=fast,
                precision=precision,
                given=search is not None,
            )
            if record is not None:
                cascade.record = Record(Path(record), self._asked(model, x, y, index, cascade))
            display = stack.enter_context(show_progress(sys.stderr.isatty() if bar is None else bar))
            task = display.task("AutoAttack", 100, unit="percent")
            cascade.reports.append(lambda name, share: task.update(100 * share, description=f"AutoAttack: {name}"))
            return cascade.run()

    def _fast(
        self, predict: Predict, device: torch.device, model: nn.Module | None = None
    ) -> tuple[Predict | None, ContextFactory]:
        """What to search on in place of the model, if anything, and the scope for it."""
        if self.precision == "float32":
            return None, nullcontext
        if self.precision == "tf32":
            return predict, partial(float32_as, "tf32", device)
        fast = plain = _with_bfloat16(predict)
        if model is not None:
            fast = fast_stand_in(model, route=self.route, statistics=self.statistics, otherwise=plain) or plain
        return fast, nullcontext

    def _asked(self, model: nn.Module, x: Tensor, y: Tensor, index: Tensor, cascade: _Cascade) -> dict[str, Any]:
        """What a record belongs to. The batch size is none of it: an image's fate does not depend on the others.

        A model is known by its structure and tensors, and by some logits: scopes and settings of its own show in these.
        """
        return {
            "attack": repr(dataclasses.replace(self, batch_size=None)),
            "search": "given" if cascade.given else self.precision,
            "model": model_fingerprint(model),
            **{name: digest(value) for name, value in (("images", x), ("labels", y), ("index", index))},
            # In words, since JSON has no infinity: a class that is left out has a logit of -inf.
            "logits": [[str(v) for v in row] for row in cascade.victim.strict(x[:8].to(cascade.device)).tolist()],
        }


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
        search: Predict | None,
        precision: ContextFactory,
        given: bool = False,
    ) -> None:
        self.attack, self.x, self.y, self.noise, self.device = attack, x, y, noise, device
        self.given = given
        self.memory = AdaptiveBatchSize(attack.batch_size or (CPU_ROWS if device.type == "cpu" else GPU_ROWS))
        self.buckets = device.type == "cuda" and attack.statistics == "running"
        if self.buckets:
            predict = _in_buckets(predict, self.memory, searches=search is None)
        if attack.statistics == "batch_frozen":
            predict, search = never_alone(predict), search and never_alone(search)
        self.strict = self.victim = Victim(predict, memory=self.memory)
        if search is not None:
            self.victim = Victim(predict, search=search, precision=precision, memory=self.memory)
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
            warnings=(*self.flags, *flags_after(names, self.fooled_by, self.no_gradient)),
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
        self.flags += flags_before(self.strict, self.attack, stages, probe, logits)
        try:
            self.victim.gradient(probe, lambda z, part: cross_entropy(z, labels[part]))
        except ConfigError as error:
            stages = {name: stages[name] for name in stages if name == "square"}
            if not stages:
                raise
            self.flags.append(Flag("no-gradients", f"{error}; nothing but Square was run"))
        if self.victim is not self.strict:
            self._compare(probe, labels, logits)
        if self.victim is not self.strict and set(stages) - {"square"} and self.attack.version != "rand":
            stages[FINISH] = FAB(threat=self.attack.threat, targets=3, steps=20)
        if self.attack.batch_size is None and self.device.type == "cuda":
            self.memory.size = _fitting_rows(self.victim, probe, labels)
        for part in torch.arange(len(self.x), device=self.x.device).split(self.memory.size or len(self.x)):
            wrong = self.strict.fooled(self.x[part].to(self.device), self.y[part].to(self.device))
            self.fooled_by[part[wrong.to(part.device)]] = 0
        self.seconds["clean"] = time.perf_counter() - started
        self.forwards["clean"] = len(self.x)
        return logits.shape[1], stages

    def _compare(self, probe: Tensor, labels: Tensor, logits: Tensor) -> None:
        """Set the tolerance by the images on which both have a margin; a search that has none there is no guide."""
        gap = (margin_of(self.victim.logits(probe), labels) - margin_of(logits, labels)).abs()
        gap = gap[gap.isfinite()]
        if len(gap):
            self.victim.tolerance = 2 * gap.max().item()
            return
        problem = (
            f"on none of the first {len(probe)} images the search has a finite margin that can be compared with the "
            "model's; look for overflow and NaN in its logits"
        )
        if self.given:
            raise ConfigError(f"search= cannot guide an attack: {problem}, or leave search= out")
        self.victim = self.strict
        self.flags.append(Flag("float32-search", f"the search ran in float32: {problem} in {self.attack.precision}"))

    def _stage(self, place: int, names: tuple[str, ...], search: Search, left: Tensor, classes: int) -> None:
        """Run one attack on the images that are left to it, batch by batch."""
        name, variants = names[place], search.variants(classes)
        self.seconds.setdefault(name, 0.0)
        self.forwards.setdefault(name, 0)
        batches = AdaptiveBatchSize((self.memory.size or 1) // variants or 1)

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
        with self._kernels():
            batches.map(len(left), work)
        self.memory.halved += [images * variants for images in batches.halved]
        show(len(left))

    def _kernels(self) -> AbstractContextManager[None]:
        """Scope: cuDNN tries its kernels for a strict search of few sizes; the one it thinks best can take thrice."""
        if self.buckets and self.victim is self.strict:
            return kernels(deterministic=torch.backends.cudnn.deterministic)
        return nullcontext()

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


def _in_buckets(predict: Predict, memory: AdaptiveBatchSize, *, searches: bool) -> Predict:
    """Few sizes, and none that is beyond the memory's: the candidates to judge are another number every time."""

    def forward(x: Tensor) -> Tensor:
        step = max(JUDGED, (memory.size or 1) // SEARCHED) if searches else JUDGED
        rows = min(bucket(len(x), step), max(len(x), memory.size or 1))
        return predict(filled(x, rows))[: len(x)]

    return forward


def _with_bfloat16(predict: Predict) -> Predict:
    """The model under autocast, or as it is where it does not run there: with parameters in another half precision."""
    works = True

    def forward(x: Tensor) -> Tensor:
        nonlocal works
        if x.dim() == 4 and x.is_cuda:
            x = x.contiguous(memory_format=torch.channels_last)
        if works:
            try:
                with torch.autocast(x.device.type, torch.bfloat16):
                    return predict(x).float()
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:
                works = False
        return predict(x)

    return forward


def _fitting_rows(victim: Victim, x: Tensor, y: Tensor) -> int:
    """How many rows of forward and backward fit into the GPU's free memory, with what a search keeps for each row."""
    if isinstance(victim.search, StandIn):  # a replay would show nothing of what it needs
        victim = Victim(victim.predict, search=victim.search.eager, precision=victim.precision)

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


register(
    "autoattack",
    AutoAttack,
    options={
        **{name: Option(setting=name, parse=int) for name in ("steps", "queries")},
        **{version: Option(setting="version", value=version) for version in VERSIONS},
        **{
            word: Option(setting="precision", parse=word.__add__, number=bits)
            for word, bits in (("float", "32"), ("tf", "32"), ("bf", "16"))
        },
    },
    summary="APGD-CE, APGD-T, FAB-T and Square in a cascade",
    paper="A, C",
)
