"""Projected gradient descent (PGD) with restarts, and the fast gradient sign method (FGSM)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from advnorm._core.errors import ConfigError, Description, Problem, raise_problems
from advnorm._core.precision import float32_as
from advnorm._core.seeding import ImageNoise
from advnorm._core.settings import Setting
from advnorm.attacks.base import Attack, Restarts, Steps
from advnorm.attacks.losses import LOSSES, class_count_problems, minimum_classes, misclassified
from advnorm.attacks.model_access import Predict, input_gradient
from advnorm.attacks.names import NameOption, count_options, register_attack
from advnorm.attacks.surrogate import PRECISION_OPTIONS, Precision, search_surrogate
from advnorm.threat import length_problem, parse_length, per_image

#: Logits to the values that are maximized, one per image.
Objective = Callable[[Tensor], Tensor]


class WorstCase:
    """The worst candidate of each image so far: a wrong prediction before a right one, then the higher loss.

    A targeted attack ranks the target's class above other wrong classes. Selection needs no device synchronization.
    """

    def __init__(self, y: Tensor, target: Tensor | None = None) -> None:
        self.y, self.target = y, target
        self.x: Tensor | None = None
        self._rank = self._loss = torch.empty(0)

    def offer(self, x: Tensor, logits: Tensor, loss: Tensor) -> None:
        """Compare candidates with the worst so far; the earlier one wins a tie."""
        x, loss, logits = x.detach(), loss.detach(), logits.detach()
        rank = misclassified(logits, self.y).long()
        if self.target is not None:
            rank = rank + (logits.argmax(1) == self.target)
        if self.x is None:
            self.x, self._rank, self._loss = x, rank, loss
            return
        worse = (rank > self._rank) | ((rank == self._rank) & (loss > self._loss))
        self.x = torch.where(per_image(worse, x), x, self.x)
        self._rank = torch.where(worse, rank, self._rank)
        self._loss = torch.where(worse, loss, self._loss)


Start = Annotated[
    Literal["uniform", "clean", "gaussian"] | float,
    Setting(
        "Start: in the ball, at the image, or 0.001 · N(0, 1) beside it (TRADES); a number is the probability of a "
        "clean start, otherwise uniform (paper E).",
        "[0, 1]",
    ),
]


@dataclass(frozen=True, kw_only=True)
class PGDSettings:
    """Settings of PGD, which the attack of a training configuration shares."""

    steps: Steps = 10
    step_size: Annotated[
        float | str | None, Setting("Step size in pixel scale; none: 2.5 · eps / steps (paper D, B.2).")
    ] = None
    restarts: Restarts = 1
    start: Start = "uniform"
    loss: Annotated[
        Literal["ce", "cw", "dlr", "kl"], Setting("`ce`, `cw` margin, `dlr`, or `kl` to the clean output.")
    ] = "ce"
    target: Annotated[
        Literal["random", "least_likely"] | None, Setting("Class to attack towards; none: any wrong class.")
    ] = None
    momentum: Annotated[float, Setting("Decay of the accumulated gradient (Dong et al. 2018).", "[0, inf)")] = 0.0
    keep: Annotated[Literal["last", "worst"], Setting("Iterate that a restart contributes.")] = "last"


@dataclass(frozen=True, kw_only=True)
class PGD(PGDSettings, Attack):
    """``x ← P(x + α · steepest(∇ loss))`` (Madry et al. 2018).

    ``target="random"`` is never the label, and the same for all restarts. A call accepts classes instead:
    ``attack(model, x, y, target=t)``. Restarts keep the worst case per image: a wrong prediction first, then the
    highest loss. ``keep="last"`` is usual in training and in the papers' PGD-n; ``"worst"`` and restarts cost one more
    forward each, in the precision of the search. The ``kl`` loss ignores the labels. A training ignores ``precision``.
    """

    precision: Annotated[
        Precision | None, Setting("Precision of the search when the attack is called; none: the caller's.")
    ] = None

    def problems(self) -> list[Problem]:
        problems = super().problems()
        if self.step_size is not None:
            problem = length_problem("step_size", self.step_size, getattr(self.threat, "norm", ""))
            if problem is None and parse_length(self.step_size) == 0:
                problem = Problem("out_of_range", "{field} must be above 0", "step_size", got=self.step_size)
            problems += [problem] if problem else []
        if self.loss == "kl":
            problems += [_KL_TARGET] if self.target is not None else []
            if self.start == "clean" or (isinstance(self.start, int | float) and self.start > 0):
                message = "the kl loss has no gradient at the clean image, where the attack starts"
                hint = "use start='gaussian' or 'uniform'"
                problems.append(Problem(code="conflict", field="start", message=message, got=self.start, hint=hint))
        return problems

    def input_problems(self, shape: Sequence[int], classes: int) -> list[Problem]:
        least = minimum_classes(self.loss, targeted=self.target is not None)
        return class_count_problems(self.loss, least, classes)

    @property
    def step(self) -> float:
        """The step size as a number."""
        return 2.5 * self.threat.eps / self.steps if self.step_size is None else parse_length(self.step_size)

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, *, index: Tensor | None = None, target: Tensor | None = None
    ) -> Tensor:
        """Return adversarial images for ``x``; with ``target``, towards these classes, one per image."""
        if target is None:
            return super().__call__(model, x, y, index=index)
        if not isinstance(target, Tensor) or target.shape != y.shape or target.dtype != torch.int64:
            is_tensor = isinstance(target, Tensor)
            got = Description(f"{target.dtype} of shape {tuple(target.shape)}") if is_tensor else target
            message, hint = "{field} must be a tensor with one class (int64) per image", "use torch.full_like(y, 3)"
            raise ConfigError("wrong_shape", message, field="target", got=got, hint=hint)
        if self.loss == "kl":
            raise_problems([_KL_TARGET])
        least, most, same = torch.stack([*target.aminmax(), (target == y).sum()]).tolist()
        if same:
            hint = "use for example (y + 1) % classes"
            raise ConfigError("conflict", "{field} must differ from the label", field="target", hint=hint)
        if least < 0:
            raise ConfigError("out_of_range", "{field} must be at least 0", field="target", got=least)
        return self._attack(model, x, y, index, largest_target=int(most), target=target)

    @contextmanager
    def searching(self, predict: Predict, model: nn.Module, device: torch.device) -> Iterator[Predict]:
        if self.precision is None:
            yield predict
            return
        surrogate, scope = search_surrogate(self.precision, predict, device, model, self.route, self.statistics)
        with float32_as("ieee", device), scope():
            yield surrogate or predict

    def perturb(
        self,
        predict: Predict,
        x: Tensor,
        y: Tensor,
        noise: ImageNoise,
        *,
        target: Tensor | None = None,
        clean: Tensor | None = None,
    ) -> Tensor:
        """See :meth:`Attack.perturb`. ``clean``: logits of ``x`` for the kl loss, by default ``predict(x)``."""
        objective, target = self._objective(predict, x, y, noise, target, clean)
        project = self.threat.projection(x)
        worst = WorstCase(y, target)
        for restart in range(self.restarts):
            x_adv = self._started(x, noise.fold("restart").fold(restart), project)
            velocity = torch.zeros_like(x)
            for step in range(self.steps):
                x_adv = x_adv.detach().requires_grad_()
                logits = predict(x_adv)
                loss = objective(logits)
                grad = input_gradient(loss, x_adv)
                if self.keep == "worst":
                    worst.offer(x_adv, logits, loss)
                grad = grad.nan_to_num(nan=0.0)  # a NaN output is a success: stay there
                if self.momentum:
                    # Divided by each image's mean size, so that gradients of different scale add up.
                    size = grad.abs().flatten(1).mean(1).clamp_min(torch.finfo(grad.dtype).tiny)
                    grad = velocity = self.momentum * velocity + grad / per_image(size, grad)
                x_adv = project(self.threat.ascended(x_adv.detach(), grad, self.step))
                if self.progress is not None:
                    self.progress(restart * self.steps + step + 1, self.restarts * self.steps)
            if self.keep == "last" and self.restarts == 1:
                return x_adv
            with torch.no_grad():
                logits = predict(x_adv)
                worst.offer(x_adv, logits, objective(logits))
        assert worst.x is not None
        return worst.x

    def _started(self, x: Tensor, noise: ImageNoise, project: Callable[[Tensor], Tensor]) -> Tensor:
        if self.start == "clean":
            return x
        if self.start == "gaussian":
            return project(x + 0.001 * noise.normal(x.shape[1:], "start"))
        uniform = self.threat.random_start(x, noise, project)
        if self.start == "uniform":
            return uniform
        clean = noise.uniform((1,) * (x.dim() - 1), "clean") < self.start
        return torch.where(clean, x, uniform)

    def _objective(
        self, predict: Predict, x: Tensor, y: Tensor, noise: ImageNoise, target: Tensor | None, clean: Tensor | None
    ) -> tuple[Objective, Tensor | None]:
        """The values to maximize as a function of the logits, and the target classes if there are any.

        Whatever depends on the clean output (classes, log probabilities) is computed once.
        """
        loss = LOSSES[self.loss]
        if self.loss == "kl" or self.target is not None:
            if clean is None:
                with torch.no_grad():
                    clean = predict(x)
            if self.loss == "kl":
                log_probs = clean.log_softmax(1)
                return lambda logits: loss.untargeted(logits, log_probs), None
            target = random_target(y, clean.shape[1], noise) if self.target == "random" else least_likely(clean, y)
        if target is None:
            return lambda logits: loss.untargeted(logits, y), None
        towards, chosen = loss.targeted, target
        assert towards is not None
        return lambda logits: towards(logits, y, chosen), chosen


def random_target(y: Tensor, classes: int, noise: ImageNoise) -> Tensor:
    """A class other than the label, uniform (paper E, sec. 3)."""
    return (y + 1 + noise.integers(classes - 1, (), "target")) % classes


def least_likely(logits: Tensor, y: Tensor) -> Tensor:
    """The class with the lowest logit that is not the label."""
    return logits.scatter(1, y[:, None], torch.inf).argmin(1)


_KL_TARGET = Problem(code="conflict", field="target", message="the kl loss has no {field}", hint="use loss='ce'")


def _in_255ths(number: str) -> str:
    """The step size in a name: ``pgd10-step2`` means 2/255, as in papers A and C."""
    float(number)  # raises ValueError for text that is not a number
    return f"{number}/255"


OPTIONS = {
    "step": NameOption(setting="step_size", parse=_in_255ths, norm="Linf"),
    **count_options("restarts"),
    "targeted": NameOption(setting="target", value="random"),
    "leastlikely": NameOption(setting="target", value="least_likely"),
    "clean": NameOption(setting="start", value="clean"),
    "worst": NameOption(setting="keep", value="worst"),
    "momentum": NameOption(setting="momentum", parse=float),
    **PRECISION_OPTIONS,
}
PGD_OPTIONS = OPTIONS | {loss: NameOption(setting="loss", value=loss) for loss in ("cw", "dlr", "kl")}


@register_attack("fgsm", options=PGD_OPTIONS, summary="one signed step from the clean image", paper="D")
@dataclass(frozen=True, kw_only=True)
class FGSM(PGD):
    """One step of size eps from the clean image: ``x + ε · sign(∇ loss)`` (Goodfellow et al. 2015)."""

    steps: Steps = 1
    start: Start = "clean"

    @property
    def step(self) -> float:
        return self.threat.eps if self.step_size is None else parse_length(self.step_size)


register_attack("pgd", steps=10, options=PGD_OPTIONS, summary="projected gradient descent", paper="A, C, D, E")(PGD)
register_attack("cw", steps=20, settings={"loss": "cw"}, options=OPTIONS, summary="PGD on the CW loss", paper="D")(PGD)
