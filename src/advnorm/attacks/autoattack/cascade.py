"""One evaluation by a cascade such as AutoAttack: stages run in turn on the images that are still robust."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Literal

import torch
from torch import Tensor

from advnorm._core.errors import ConfigError
from advnorm._core.memory import AdaptiveBatchSize
from advnorm._core.precision import ContextFactory, choose_kernels
from advnorm._core.seeding import ImageNoise
from advnorm.attacks.apgd import APGD
from advnorm.attacks.autoattack.checks import warnings_after, warnings_before
from advnorm.attacks.autoattack.record import CascadeRecord, CascadeResult, ReliabilityWarning, StageBatch
from advnorm.attacks.autoattack.settings import CascadeSettings
from advnorm.attacks.fab import FAB
from advnorm.attacks.losses import cross_entropy, label_margin, misclassified
from advnorm.attacks.model_access import Predict, never_alone, pad_rows, padded_size
from advnorm.attacks.search import Search, SearchResult
from advnorm.attacks.surrogate import CapturedSurrogate
from advnorm.attacks.victim import VictimModel

#: Last stage of a fast search: FAB-T in float32 on images whose margin is small.
FINISH = "float32"
#: Value of ``fooled_by`` for an image that no attack fooled.
ROBUST = -1
#: Number of images for the checks before the attack.
PROBE = 64
#: Rows of a forward: on a CPU, and at most on a GPU, where more rows do not increase the throughput.
CPU_ROWS, GPU_ROWS = 512, 4096
#: On a GPU, strict forwards are padded to a multiple of DECISION_ROWS, and to 1 / SEARCH_PARTS of the batch size if
#: they also search (there is no surrogate).
DECISION_ROWS, SEARCH_PARTS = 32, 8


class Cascade:
    """One evaluation. Values of all images stay on the images' device; batches move to the model's device."""

    def __init__(
        self,
        attack: CascadeSettings,
        predict: Predict,
        x: Tensor,
        y: Tensor,
        noise: ImageNoise,
        *,
        surrogate: Predict | None,
        precision: ContextFactory,
        given: bool = False,
    ) -> None:
        self.attack, self.x, self.y, self.noise, self.given = attack, x, y, noise, given
        self.device = device = noise.device
        self.memory = AdaptiveBatchSize(attack.batch_size or (CPU_ROWS if device.type == "cpu" else GPU_ROWS))
        self.padded = device.type == "cuda" and attack.statistics == "running"
        if self.padded:
            predict = _padded(predict, self.memory, searches=surrogate is None)
        if attack.statistics == "batch_frozen":
            predict, surrogate = never_alone(predict), surrogate and never_alone(surrogate)
        self.strict = self.victim = VictimModel(predict, memory=self.memory)
        if surrogate is not None:
            self.victim = VictimModel(predict, search_predict=surrogate, precision=precision, memory=self.memory)
        self.record: CascadeRecord | None = None
        self.reports: list[Callable[[str, float], None]] = []
        if attack.progress is not None:
            whole, progress = 1000, attack.progress
            self.reports.append(lambda _name, share: progress(round(whole * share), whole))
        self.warnings: list[ReliabilityWarning] = []
        self.fooled_by = torch.full_like(y, ROBUST)
        self.best, self.margin = x.clone(), torch.full(y.shape, torch.inf, device=x.device)
        self.clean_margin = self.margin.clone()
        self.zero_gradient = torch.zeros_like(y, dtype=torch.bool)
        self.no_gradient: dict[str, int] = {}
        self.seconds: dict[str, float] = {}
        self.forwards: dict[str, int] = {}
        self.backwards: dict[str, int] = {}

    def run(self) -> CascadeResult:
        finished = self.record.load_result(self.attack, self.x.device) if self.record else None
        if finished is not None:
            return finished
        classes, stages = self._prepare()
        names = ("clean", *stages)
        done = {name: torch.zeros_like(self.y, dtype=torch.bool) for name in stages}
        for batch in self.record.batches(names, self.x.device) if self.record else ():
            self._merge(names.index(batch.stage), batch)
            done[batch.stage][batch.images] = True
        for place, name in enumerate(stages, 1):
            left = (self.fooled_by == ROBUST) & ~done[name]
            if name == FINISH:
                left &= self.margin <= self.attack.close * self.victim.tolerance
            else:
                left &= self.attack.selected(name, self.margin / self.clean_margin, self.zero_gradient)
            self._stage(place, names, stages[name], left.nonzero()[:, 0], classes)
        result = CascadeResult(
            attack=self.attack,
            x_adv=self.best,
            fooled_by=self.fooled_by,
            stages=names,
            seconds=self.seconds,
            forwards=self.forwards,
            backwards=self.backwards,
            warnings=(*self.warnings, *warnings_after(names, self.fooled_by, self.no_gradient)),
            batch_size=self.memory.size or 1,
            halved=tuple(self.memory.halved),
        )
        if self.record:
            self.record.finish(result)
        return result

    def _prepare(self) -> tuple[int, dict[str, Search]]:
        """Check the model, choose the batch size and predict clean images; return the class count and the stages."""
        started = time.perf_counter()
        probe, labels = (v[:PROBE].to(self.device) for v in (self.x, self.y))
        stages = self.attack.stages()
        logits = self.strict.strict_logits(probe)
        self.warnings += warnings_before(self.strict, self.attack, stages, probe, logits)
        try:
            self.victim.gradient(probe, lambda z, part: cross_entropy(z, labels[part]))
        except ConfigError as error:
            stages = {name: stages[name] for name in stages if name == "square"}
            if not stages:
                raise
            self.warnings.append(ReliabilityWarning("no-gradients", f"{error}; only Square ran"))
        if self.victim is not self.strict:
            self._compare(probe, labels, logits)
        if self.victim is not self.strict and set(stages) - {"square"} and self.attack.gradient_samples is None:
            stages[FINISH] = FAB(threat=self.attack.threat, targets=3, steps=20)
        if self.attack.batch_size is None and self.device.type == "cuda":
            self.memory.size = _fitting_rows(self.victim, probe, labels)
        for part in torch.arange(len(self.x), device=self.x.device).split(self.memory.size or len(self.x)):
            clean, y = self.strict.strict_logits(self.x[part].to(self.device)), self.y[part].to(self.device)
            self.fooled_by[part[misclassified(clean, y).to(part.device)]] = 0
            self.clean_margin[part] = label_margin(clean, y).to(part.device)
        self.seconds["clean"] = time.perf_counter() - started
        self.forwards["clean"], self.backwards["clean"] = len(self.x), 0
        return logits.shape[1], stages

    def _compare(self, probe: Tensor, labels: Tensor, logits: Tensor) -> None:
        """Set the tolerance from finite margins. Without finite margins raise if ``given``, else search in float32."""
        gap = (label_margin(self.victim.search_logits(probe), labels) - label_margin(logits, labels)).abs()
        gap = gap[gap.isfinite()]
        if len(gap):
            self.victim.tolerance = 2 * gap.max().item()
            return
        problem = f"it has no finite margin for the first {len(probe)} images; check its logits for overflow and NaN"
        if self.given:
            raise ConfigError("not_finite", f"{{field}}= cannot guide an attack: {problem}", field="search")
        self.victim = self.strict
        message = f"the search ran in float32, not in {self.attack.precision}: {problem}"
        self.warnings.append(ReliabilityWarning("float32-search", message))

    def _stage(self, place: int, names: tuple[str, ...], search: Search, left: Tensor, classes: int) -> None:
        """Run one attack on the remaining images, batch by batch."""
        name, variants = names[place], search.variants(classes)
        self.seconds.setdefault(name, 0.0)
        self.forwards.setdefault(name, 0)
        self.backwards.setdefault(name, 0)
        batches = AdaptiveBatchSize((self.memory.size or 1) // variants or 1)

        def show(images: float) -> None:
            for report in self.reports:
                report(name, (place - 1 + images / max(len(left), 1)) / (len(names) - 1))

        def attack_part(part: slice) -> None:
            images, before, started = left[part], self._counted(), time.perf_counter()
            backwards = self._counted("backwards")
            most = search.forwards(classes) * len(images)

            def on_call() -> None:
                show(part.start + len(images) * min((self._counted() - before) / most, 1))

            self.strict.on_call = self.victim.on_call = on_call if self.reports else None
            found = self._attack(name, search, images).to(self.x.device)
            seconds, forwards = time.perf_counter() - started, self._counted() - before
            backwards = self._counted("backwards") - backwards
            batch = StageBatch(
                stage=name, images=images, found=found, seconds=seconds, forwards=forwards, backwards=backwards
            )
            if self.record:
                self.record.add(batch)
            self._merge(place, batch)
            batches.size = min(batches.size or 1, (self.memory.size or 1) // variants or 1)

        show(0)
        scope = nullcontext()
        if self.padded and self.victim is self.strict:
            # cuDNN benchmarks its kernels for a strict search of few sizes; its default can be 3 times slower.
            scope = choose_kernels(deterministic=torch.backends.cudnn.deterministic)
        with scope:
            batches.map(len(left), attack_part)
        self.memory.halved += [images * variants for images in batches.halved]
        show(len(left))

    def _attack(self, name: str, search: Search, images: Tensor) -> SearchResult:
        x, y = self.x[images].to(self.device), self.y[images].to(self.device)
        noise = self.noise.select(images.to(self.device)).fold(name)
        victim = self.strict if name == FINISH else self.victim
        if name == FINISH or name in self.attack.continued:
            assert isinstance(search, APGD | FAB)
            return search.search(victim, x, y, noise, start=self.best[images].to(self.device))
        return search.search(victim, x, y, noise)

    def _merge(self, place: int, batch: StageBatch) -> None:
        images, found = batch.images, batch.found
        closer = found.fooled | (found.margin < self.margin[images])
        self.best[images[closer]] = found.x_adv[closer]
        self.margin[images[closer]] = found.margin[closer]
        self.fooled_by[images[found.fooled]] = place
        self.zero_gradient[images] |= found.zero_gradient
        self.no_gradient[batch.stage] = self.no_gradient.get(batch.stage, 0) + int(found.zero_gradient.sum())
        self.seconds[batch.stage] = self.seconds.get(batch.stage, 0.0) + batch.seconds
        self.forwards[batch.stage] = self.forwards.get(batch.stage, 0) + batch.forwards
        self.backwards[batch.stage] = self.backwards.get(batch.stage, 0) + batch.backwards

    def _counted(self, passes: Literal["forwards", "backwards"] = "forwards") -> int:
        return sum(getattr(victim, passes) for victim in {self.strict, self.victim})


def _padded(predict: Predict, memory: AdaptiveBatchSize, *, searches: bool) -> Predict:
    """Pad batches to few sizes, none above the batch size: the number of candidates varies from call to call."""

    def forward(x: Tensor) -> Tensor:
        step = max(DECISION_ROWS, (memory.size or 1) // SEARCH_PARTS) if searches else DECISION_ROWS
        rows = min(padded_size(len(x), step), max(len(x), memory.size or 1))
        return predict(pad_rows(x, rows))[: len(x)]

    return forward


def _fitting_rows(victim: VictimModel, x: Tensor, y: Tensor) -> int:
    """Number of rows whose forward, backward and search state fit into the GPU's free memory."""
    surrogate = victim.search_predict
    if isinstance(surrogate, CapturedSurrogate):  # a replay would not show its memory use
        victim = VictimModel(victim.predict, search_predict=surrogate.eager, precision=victim.precision)

    def peak(rows: int) -> int:
        torch.cuda.reset_peak_memory_stats(x.device)
        before = torch.cuda.memory_allocated(x.device)
        points, labels = (v.repeat(-(-rows // len(v)), *(1,) * (v.dim() - 1))[:rows] for v in (x, y))
        victim.gradient(points, lambda z, part: cross_entropy(z, labels[part]))
        return torch.cuda.max_memory_allocated(x.device) - before

    peak(64)  # allocates the libraries' own workspace
    each = max(peak(128) - peak(64), 1) / 64 + 160 * x[0].numel()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(x.device)
    return max(1, min(GPU_ROWS, int(0.7 * free / each)))
