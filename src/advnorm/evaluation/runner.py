"""Verdicts on images, batch by batch: attacks, the strict forward that decides, and what a killed run has done."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from advnorm._core.errors import ConfigError
from advnorm._core.memory import AdaptiveBatchSize
from advnorm._core.precision import float32_as
from advnorm._core.progress import ProgressDisplay, ProgressTask
from advnorm._core.records import digest, writing
from advnorm._core.wrappers import dtype_of
from advnorm.attacks import Attack, attacked
from advnorm.attacks.autoattack import AutoAttack
from advnorm.attacks.autoattack_checks import square_flags
from advnorm.attacks.autoattack_record import AutoAttackResult
from advnorm.attacks.base import Predict
from advnorm.attacks.search import Search
from advnorm.evaluation.partial_record import Partial
from advnorm.norms import frozen_mode

if TYPE_CHECKING:
    from advnorm.evaluation.plan import Case

#: Images by which it is seen whether outputs are random, depend on the batch, or are probabilities.
LOOKED_AT = 16
#: Relative difference of logits that is beyond the rounding of float32.
SAME = 1e-3
#: Verdicts are saved about so often; a slow attack gets smaller batches for that, but not below so many images.
UNIT_SECONDS, UNIT_IMAGES = 60.0, 8


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
class First:
    """Strict logits of the first images, by which a model is known and looked at."""

    logits: Tensor
    #: Largest relative difference between two forwards of the same images.
    varies: float
    #: Difference that the model's precision explains.
    same: float
    #: What memory sufficed for.
    batch_size: int | None

    @property
    def random(self) -> bool:
        return self.varies > self.same

    def written(self) -> list[str] | None:
        """For a record: a line per image, since JSON has no infinity. None: no logits tell a randomized model."""
        return None if self.random else [" ".join(f"{v:.5g}" for v in row) for row in self.logits.tolist()]

    def fits(self, written: Any) -> bool:
        """Whether a record's logits can be these, but for what another device rounds otherwise."""
        if written is None or self.random:
            return True
        try:
            theirs = torch.tensor([[float(v) for v in line.split()] for line in written])
        except (AttributeError, TypeError, ValueError):
            return False
        ours, near = self.logits.cpu(), self.same * _largest(self.logits).item()
        return ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=1e-2, atol=near, equal_nan=True)

    @classmethod
    def of(cls, case: Case, route: str | None) -> First:
        """Two forwards of them."""
        x, memory = case.images[:LOOKED_AT].to(case.device), AdaptiveBatchSize(minimum=case.least)
        with judging(case, route, "look") as predict:
            logits, again = (torch.cat(memory.map(len(x), lambda part: predict(x[part]))) for _ in range(2))
        return cls(
            logits=logits,
            varies=_difference(again, logits),
            same=max(SAME, 4 * torch.finfo(dtype_of(case.model)).eps),
            batch_size=memory.size,
        )


def _largest(logits: Tensor) -> Tensor:
    return logits.abs().masked_fill(~logits.isfinite(), 0).amax().clamp_min(1e-12)


def _difference(logits: Tensor, reference: Tensor) -> float:
    """The largest one, relative to the largest logit; a class that both leave out with -inf does not differ."""
    gap = (logits - reference).abs().masked_fill(logits == reference, 0)
    return gap.amax().div(_largest(reference)).item()


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """What a few forwards show of a model's outputs."""

    #: Largest relative difference of logits between two forwards of the same images.
    varies: float
    #: ... between an image alone and the same one in a batch; 0 where the outputs are random.
    by_batch: float
    probabilities: bool
    #: Difference that the model's precision explains.
    same: float

    @property
    def random(self) -> bool:
        return self.varies > self.same

    @property
    def steady(self) -> bool:
        """Whether an image's output depends on the image alone."""
        return max(self.varies, self.by_batch) <= self.same

    def warnings(self) -> list[str]:
        """Reasons to doubt what an attack says of this model."""
        found = {
            "the outputs are random: every verdict is one draw, a union of attacks is one of draws too, and the stages "
            "of a cascade are draws of their own; attack the expectation: 'autoattack-rand', 'apgd-ce-samples20'": (
                self.random
            ),
            "batch-dependent: an image's output depends on the others of its batch, so the numbers hold for this batch "
            "size and order alone; evaluate with running statistics": self.by_batch > self.same,
            "the outputs are probabilities, whose gradients vanish; return the logits, without softmax": (
                self.probabilities
            ),
        }
        return [text for text, said in found.items() if said]


#: What AutoAttack flags by itself and :class:`Outputs` says for all attacks at once.
_SAID = ("randomized", "batch-dependent", "probabilities")


class Runner:
    """Verdicts of a case, batch by batch; what is done is kept in ``partial``.

    A randomized model draws numbers that follow from the case's seed, the attack and the batch, and others to be
    attacked than to be judged.
    """

    def __init__(self, case: Case, partial: Partial, display: ProgressDisplay) -> None:
        self.case, self.partial = case, partial
        self.display = display
        self._steady = True
        self._classes = 2
        self._pace = math.inf  # seconds that an image's forward takes

    def clean(self, route: str | None) -> Tensor:
        """Which images are classified right without an attack."""
        case, memory = self.case, AdaptiveBatchSize(self.case.batch_size, minimum=self.case.least)

        def work(part: slice) -> Tensor:
            x, y = case.images[part].to(case.device), case.labels[part].to(case.device)
            begun = time.perf_counter()
            right, nan = (v.cpu() for v in self._right(x, y, route, "clean", part.start))
            self._pace = min(self._pace, (time.perf_counter() - begun) / len(x))
            if bool(nan.any()):
                image = int(case.index[part][nan][0])
                raise ConfigError(f"the model returns NaN logits for image {image} of the data; check image and model")
            return right

        right = torch.cat(memory.map(len(case.images), work))
        self._warn_memory(f"{route} | clean", "clean", memory)
        return right

    def look(self, route: str | None) -> Outputs:
        """Whether outputs are random, depend on the batch or are probabilities: told once for all attacks."""
        case, first = self.case, self.case.first[route]
        together, by_batch = first.logits, 0.0
        if not first.random and 1 not in (first.batch_size, case.batch_size):  # chance would show as well
            with judging(case, route, "alone") as predict:
                # With a copy of itself, which changes no statistics: of one value per channel a norm has none.
                images = case.images[: len(together)].to(case.device).split(1)
                alone = torch.cat([predict(torch.cat([image, image]))[:1] for image in images])
            by_batch = _difference(alone, together)
        found = Outputs(
            varies=first.varies,
            by_batch=by_batch,
            probabilities=bool((together >= 0).all() and (together.sum(1) - 1).abs().max() < 1e-3),
            same=first.same,
        )
        self._steady &= found.steady
        for text in found.warnings():
            self.partial.warn("outputs", text)
        return found

    def robust(self, job: Job, among: Tensor, *, source: nn.Module | None = None) -> Tensor:
        """Which images of ``among`` withstand an attack; the others count as fooled and are not attacked.

        ``source``: compute the attack on this model; the case's model judges.
        """
        case, memory = self.case, AdaptiveBatchSize(self._unit(job.attack), minimum=self.case.least)
        verdicts = self.partial.verdicts(job.key, len(case.images))
        todo = (among & (verdicts < 0)).nonzero()[:, 0]
        total = int(among.sum())
        shown = self.display.task(f"{job.route or ''} {job.name}".strip(), total, unit="images")

        def work(part: slice) -> None:
            rows, done, begun = todo[part], total - len(todo) + part.start, time.perf_counter()
            attack = job.attack
            if attack.progress is None:
                attack = dataclasses.replace(attack, progress=_within(shown, done, len(rows)))
            with_others = rows if isinstance(attack, AutoAttack) else self._accompanied(rows)
            x, y, index = case.images[with_others], case.labels[with_others], case.index[with_others]
            if isinstance(attack, AutoAttack):
                found = self._cascade(job, attack, x, y, index)
                x_adv, begun = found.x_adv, time.perf_counter() - sum(found.seconds.values())  # of all processes
            else:
                x, y, index = (tensor.to(case.device) for tensor in (x, y, index))
                with float32_as("ieee", case.device), seeded(case, job.key, "attack", int(rows[0])):
                    x_adv = attack(source or case.model, x, y, index=index)
            verdicts[rows] = self._judge(job, x_adv[: len(rows)], rows).to(verdicts.dtype)
            self.partial.save(job.key, verdicts, time.perf_counter() - begun)

        memory.map(len(todo), work)
        self._warn_memory(job.key, job.name, memory)
        shown.finish()
        return among & (verdicts == 1)

    def _unit(self, attack: Attack) -> int | None:
        """Images that are attacked and saved at once: a batch, or about a minute's work if that is less.

        None: all of them; a cascade keeps a record of its own. Where the others of its batch matter to an image, or
        chance does, only whole batches give the same result every time.
        """
        if isinstance(attack, AutoAttack):
            return None
        if isinstance(attack, Search):
            forwards = attack.forwards(self._classes)
        else:
            forwards = getattr(attack, "steps", 1) * getattr(attack, "restarts", 1)
        size = self.case.batch_size
        seconds = 3 * forwards * (self._pace if math.isfinite(self._pace) else 0.0)  # with the backward
        while self._steady and size >= 2 * UNIT_IMAGES and size * seconds > UNIT_SECONDS:
            size //= 2
        return size

    def _accompanied(self, rows: Tensor) -> Tensor:
        """The rows, and the next image of the data where one that is left alone would have no statistics."""
        return rows if len(rows) >= self.case.least else torch.cat([rows, (rows + 1) % len(self.case.images)])

    def _judge(self, job: Job, x: Tensor, rows: Tensor) -> Tensor:
        """Whether adversarial images are classified right, by the strict forward that decides; on the CPU."""
        case, with_others = self.case, self._accompanied(rows)
        x, y = torch.cat([x, case.images[with_others[len(rows) :]].to(x)]), case.labels[with_others]

        def work(part: slice) -> Tensor:
            x_part, y_part = x[part].to(case.device), y[part].to(case.device)
            return self._right(x_part, y_part, job.route, f"{job.key} | judge", int(with_others[part.start]))[0].cpu()

        return torch.cat(AdaptiveBatchSize(case.batch_size, minimum=case.least).map(len(x), work))[: len(rows)]

    def _cascade(self, job: Job, attack: AutoAttack, x: Tensor, y: Tensor, index: Tensor) -> AutoAttackResult:
        case = self.case
        self.partial.begin(job.key)
        folder = self.partial.folder(job.key)
        if attack.batch_size is None and case.statistics != "running":  # which are then those of the batches judged
            attack = dataclasses.replace(attack, batch_size=case.batch_size)
        with writing(folder):
            found = attack.evaluate(case.model, x, y, index=index, record=folder, bar=False)
        # Of all images, of which those that are wrong without an attack are not here.
        flags = [flag for flag in found.warnings if flag.name not in (*_SAID, "square-better")]
        for flag in flags + square_flags(found.stages, found.fooled_by, len(case.images)):
            self.partial.warn(job.key, f"{job.name}: {flag.message}")
        self._warn_memory(job.key, job.name, found, "rows")
        if attack.route == job.route:  # else they are those of the branch that is attacked, not of the one that judges
            counts = {name: round(value * len(x)) for name, value in found.accuracy.items()}
            self.partial.detail(job.key, {name: count / len(case.images) for name, count in counts.items()})
        return found

    def _right(self, x: Tensor, y: Tensor, route: str | None, *tags: Any) -> tuple[Tensor, Tensor]:
        with judging(self.case, route, *tags) as predict:
            logits = predict(x)
        self._classes = logits.shape[1]
        nan = logits.isnan().any(1)
        return (logits.argmax(1) == y) & ~nan, nan

    def _warn_memory(
        self, key: str, name: str, memory: AdaptiveBatchSize | AutoAttackResult, unit: str = "images"
    ) -> None:
        if memory.halved:
            sizes = ", ".join(map(str, memory.halved))
            self.partial.warn(
                key,
                f"{name}: memory did not suffice for {sizes} {unit} at a time, went on with {memory.halved[-1] // 2}",
            )


@contextmanager
def judging(case: Case, route: str | None, *tags: Any) -> Iterator[Predict]:
    """Scope: the strict forward that decides."""
    with (
        seeded(case, route, *tags),
        attacked(case.model, route=route, statistics=frozen_mode(case.statistics)) as predict,
        float32_as("ieee", case.device),
        torch.no_grad(),
    ):
        yield predict


@contextmanager
def seeded(case: Case, *tags: Any) -> Iterator[None]:
    """Scope: what a randomized model draws follows from the seed and the tags; the caller's generators rest."""
    device, seed = case.device, int(digest(case.seed, *tags)[:15], 16)
    here = torch.cuda.current_device() if device.index is None and device.type == "cuda" else device.index
    cuda = [here] if device.type == "cuda" else []
    with torch.random.fork_rng(cuda):
        torch.default_generator.manual_seed(seed)
        for number in cuda:
            torch.cuda.default_generators[number].manual_seed(seed)
        yield


def _within(task: ProgressTask, done: int, images: int) -> Callable[[int, int], None]:
    """Progress within a batch as progress over all images."""
    return lambda n, of: task.update(done + images * n / of)
