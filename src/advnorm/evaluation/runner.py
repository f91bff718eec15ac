"""Evaluation batch by batch: attacks, the strict forward that decides, and results that survive a kill."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from advnorm._core.errors import ConfigError
from advnorm._core.locks import exclusive
from advnorm._core.memory import AdaptiveBatchSize
from advnorm._core.precision import float32_as
from advnorm._core.progress import ProgressDisplay, show_progress
from advnorm._core.records import write_json, writing
from advnorm._core.shapes import with_digest
from advnorm.attacks.autoattack import CascadeAttack
from advnorm.attacks.autoattack.checks import square_warnings
from advnorm.attacks.autoattack.record import CascadeResult
from advnorm.attacks.search import Search
from advnorm.evaluation.jobs import AttackJob
from advnorm.evaluation.partial_record import PartialRecord, load_matching
from advnorm.evaluation.plan import EvaluationPlan
from advnorm.evaluation.reference_logits import OutputCheck, ReferenceLogits, check_outputs
from advnorm.evaluation.results import DEFAULT_ROUTE, BenchmarkResult
from advnorm.evaluation.verdict import Verdict

#: Results are saved about this often; a slow attack gets smaller batches, but not below this number of images.
UNIT_SECONDS, UNIT_IMAGES = 60.0, 8
#: Warnings of AutoAttack that :class:`OutputCheck` already gives for all attacks.
_CHECKED = ("randomized", "batch-dependent", "probabilities")


R = TypeVar("R", BenchmarkResult, Verdict)


def run_or_load(
    plan: EvaluationPlan,
    kind: type[R],
    evaluate: Callable[[EvaluationRunner, dict[str, Any]], R],
    references: Mapping[str, ReferenceLogits],
    *,
    fingerprint: str,
    progress: bool,
) -> R:
    """Return the result of a plan: read its finished record, or evaluate the plan and write the record.

    An interrupted evaluation resumes from its partial record. ``evaluate`` is called with a runner and the entries that
    identify the record.
    """
    finished = load_matching(plan.record, kind, fingerprint, references)
    if finished is not None:
        return kind.from_record(finished, plan.record)
    logits = {name: reference.to_record() for name, reference in references.items()}
    with exclusive(plan.record), show_progress(progress) as display:
        partial = PartialRecord(plan.record, plan.fingerprint, references)
        runner = EvaluationRunner(plan, partial, display)
        result = evaluate(runner, {"fingerprint": fingerprint, "logits": logits})
        if plan.record is not None:
            with writing(plan.record, result):
                write_json(plan.record, with_digest(result.record()))
                partial.remove()
    return result


class EvaluationRunner:
    """Evaluates a plan batch by batch and saves finished batches in ``partial``.

    The draws of a randomized model follow from the seed, the attack and the batch. The attack and the decision use
    different draws.
    """

    def __init__(self, plan: EvaluationPlan, partial: PartialRecord, display: ProgressDisplay) -> None:
        self.plan, self.partial, self.display = plan, partial, display
        self._forward = plan.forward
        self._minimum = plan.forward.minimum_batch
        self._deterministic = True
        self._classes = 2
        self._forward_seconds = math.inf  # per image
        self._fits = plan.batch_size  # a batch for which memory is sufficient, as far as it was tried
        self.draws = 1  # forwards of a randomized model that decide on an image by their majority

    def evaluate_clean(self, route: str | None) -> Tensor:
        """Return which images are classified correctly without an attack."""
        plan, memory = self.plan, AdaptiveBatchSize(self.plan.batch_size, minimum=self._minimum)

        def evaluate(part: slice) -> Tensor:
            x, y = plan.images[part].to(plan.device), plan.labels[part].to(plan.device)
            started = time.perf_counter()
            correct, nan = (v.cpu() for v in self._classify(x, y, route, "clean", part.start))
            self._forward_seconds = min(self._forward_seconds, (time.perf_counter() - started) / len(x))
            if bool(nan.any()):
                message = f"the model returns NaN logits for image {int(plan.index[part][nan][0])} of the data"
                raise ConfigError("not_finite", message, field="model", hint="check this image and the model")
            return correct

        correct = torch.cat(memory.map(len(plan.images), evaluate))
        self._fits = memory.size or plan.batch_size
        self._warn_about_memory(f"{route} | clean", "clean", memory)
        return correct

    def check_outputs(self, route: str | None) -> OutputCheck:
        """Check whether outputs are random, depend on the batch or are probabilities; warn once for all attacks."""
        plan = self.plan
        reference = plan.references[route or DEFAULT_ROUTE]
        found = check_outputs(reference, self._forward, route, plan.images, plan.batch_size)
        self._deterministic &= not (reference.is_random or found.is_batch_dependent)
        for text in found.warnings():
            self.partial.warn("outputs", text)
        return found

    def measure_distances(self, job: AttackJob, among: Tensor) -> Tensor:
        """Return the size of the perturbation that fools each image of ``among``: inf if the attack fails, else 0."""
        distances = self.partial.distances(job.key, len(self.plan.images))
        robust = self.evaluate_attack(job, among, distances=distances)
        return distances.masked_fill(robust, torch.inf).masked_fill(~among, 0)

    def evaluate_attack(
        self,
        job: AttackJob,
        among: Tensor,
        *,
        source: nn.Module | None = None,
        distances: Tensor | None = None,
    ) -> Tensor:
        """Return which images of ``among`` are robust to an attack; other images count as fooled and are not attacked.

        ``source``: compute the attack on this model; the plan's model decides. ``distances`` receives the sizes of the
        perturbations.
        """
        plan, memory = self.plan, AdaptiveBatchSize(self._unit_size(job), minimum=self._minimum)
        results = self.partial.results(job.key, len(plan.images))
        pending = (among & (results < 0)).nonzero()[:, 0]
        total = int(among.sum())
        shown = self.display.task(f"{job.route or ''} {job.name}".strip(), total, unit="images")

        def evaluate(part: slice) -> None:
            rows, done, started = pending[part], total - len(pending) + part.start, time.perf_counter()
            attack = job.attack
            if attack.progress is None:  # the progress within a batch as progress over all images
                attack = replace(attack, progress=lambda n, of: shown.update(done + len(rows) * n / of))
            extended = rows if isinstance(attack, CascadeAttack) else self._at_least_minimum(rows)
            x, y, index = plan.images[extended], plan.labels[extended], plan.index[extended]
            if isinstance(attack, CascadeAttack):
                found = self._run_cascade(job, attack, x, y, index)
                x_adv, started = found.x_adv, time.perf_counter() - sum(found.seconds.values())  # earlier runs too
            else:
                x, y, index = (tensor.to(plan.device) for tensor in (x, y, index))
                with float32_as("ieee", plan.device), self._forward.seeded(job.key, "attack", int(rows[0])):
                    x_adv = attack(source or plan.model, x, y, index=index)
            results[rows] = self._decide(job, x_adv[: len(rows)], rows).to(results.dtype)
            if distances is not None:
                distances[rows] = plan.threat.distance(x_adv[: len(rows)].cpu(), plan.images[rows].cpu())
            self.partial.save(job.key, results, time.perf_counter() - started, distances)

        memory.map(len(pending), evaluate)
        self._warn_about_memory(job.key, job.name, memory)
        shown.finish()
        return among & (results == 1)

    def _unit_size(self, job: AttackJob) -> int | None:
        """Number of images that are attacked and saved together: a batch, or about a minute's work if that is less.

        None: all images, because a cascade keeps a record of its own. If outputs depend on the batch or on chance, only
        whole batches give reproducible results.
        """
        attack, size = job.attack, self.plan.batch_size
        if isinstance(attack, CascadeAttack):
            return None
        if not self._deterministic:
            return size
        if isinstance(attack, Search):
            forwards = attack.forwards(self._classes)
        else:
            forwards = getattr(attack, "steps", 1) * getattr(attack, "restarts", 1)
        passes = 3 * forwards  # with the backward
        if size * passes * self._forward_seconds > UNIT_SECONDS:
            self._time_forward(job.route)
        while size >= 2 * UNIT_IMAGES and size * passes * self._forward_seconds > UNIT_SECONDS:
            size //= 2
        return size

    def _time_forward(self, route: str | None) -> None:
        """Time a forward of the first batch again: the first one on a GPU also loads its kernels."""
        x = self.plan.images[: self._fits].to(self.plan.device)
        with self._forward.through(route, "time") as predict:
            started = time.perf_counter()
            predict(x).cpu()
        self._forward_seconds = min(self._forward_seconds, (time.perf_counter() - started) / len(x))

    def _at_least_minimum(self, rows: Tensor) -> Tensor:
        """Add the next image to a single row if one image has no batch statistics."""
        return rows if len(rows) >= self._minimum else torch.cat([rows, (rows + 1) % len(self.plan.images)])

    def _decide(self, job: AttackJob, x: Tensor, rows: Tensor) -> Tensor:
        """Return whether adversarial images are classified correctly by the strict forward, on the CPU."""
        plan, extended = self.plan, self._at_least_minimum(rows)
        x, y = torch.cat([x, plan.images[extended[len(rows) :]].to(x)]), plan.labels[extended]

        def evaluate(part: slice) -> Tensor:
            x_part, y_part = x[part].to(plan.device), y[part].to(plan.device)
            tags = f"{job.key} | judge", int(extended[part.start])  # a tag seeds the draws: keep its name
            return self._classify(x_part, y_part, job.route, *tags)[0].cpu()

        return torch.cat(AdaptiveBatchSize(plan.batch_size, minimum=self._minimum).map(len(x), evaluate))[: len(rows)]

    def _run_cascade(self, job: AttackJob, attack: CascadeAttack, x: Tensor, y: Tensor, index: Tensor) -> CascadeResult:
        plan = self.plan
        self.partial.begin(job.key)
        folder = self.partial.folder(job.key)
        if attack.batch_size is None and plan.statistics != "running":  # the batches whose statistics are evaluated
            attack = replace(attack, batch_size=plan.batch_size)
        with writing(folder):
            found = attack.evaluate(plan.model, x, y, index=index, record=folder, bar=False)
        # Relative to all images: x lacks those that are misclassified without an attack.
        flags = [flag for flag in found.warnings if flag.name not in (*_CHECKED, "square-better")]
        if attack.note:
            self.partial.warn(job.key, f"{job.name}: {attack.note}")
        for flag in flags + square_warnings(found.stages, found.fooled_by, len(plan.images)):
            self.partial.warn(job.key, f"{job.name}: {flag.message}")
        self._warn_about_memory(job.key, job.name, found, "rows")
        if attack.route == job.route:  # otherwise the stages belong to the attacked branch, not to the evaluated one
            counts = {name: round(value * len(x)) for name, value in found.accuracy.items()}
            self.partial.job(job.key)["stages"] = {name: count / len(plan.images) for name, count in counts.items()}
        return found

    def _classify(self, x: Tensor, y: Tensor, route: str | None, *tags: Any) -> tuple[Tensor, Tensor]:
        """Return which images are classified correctly, and which have NaN logits."""
        with self._forward.through(route, *tags) as predict:
            draws = torch.stack([predict(x) for _ in range(self.draws)])
        self._classes = draws.shape[2]
        nan = draws.isnan().any(2).any(0)
        return ((draws.argmax(2) == y).double().mean(0) > 0.5) & ~nan, nan

    def _warn_about_memory(
        self, key: str, name: str, memory: AdaptiveBatchSize | CascadeResult, unit: str = "images"
    ) -> None:
        if memory.halved:
            sizes, size = ", ".join(map(str, memory.halved)), memory.halved[-1] // 2
            self.partial.warn(key, f"{name}: out of memory for batches of {sizes} {unit}, continued with {size}")
