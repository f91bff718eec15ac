"""Projected gradient ascent with restarts, and the fast gradient sign method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from advnorm._core.errors import ConfigError, did_you_mean
from advnorm._core.seeding import ImageNoise
from advnorm.attacks.base import Attack, Option, Predict, checked, input_gradient, register
from advnorm.attacks.losses import LOSSES, least_classes, too_few_classes
from advnorm.threat import length_problem, parse_length, per_image

Start = Literal["uniform", "clean", "gaussian"]
Keep = Literal["last", "worst"]
Target = Literal["random", "least_likely"]
#: Logits to the value that is ascended, one per image.
Objective = Callable[[Tensor], Tensor]


class Worst:
    """The worst case per image of what was seen so far: a wrong prediction before a right one, then the higher loss.

    A targeted attack ranks the target's class above another wrong one. Selection is by ``torch.where``: nothing waits
    for the device.
    """

    def __init__(self, y: Tensor, target: Tensor | None = None) -> None:
        self.y, self.target = y, target
        self.x: Tensor | None = None
        self._rank = self._loss = torch.empty(0)

    def see(self, x: Tensor, logits: Tensor, loss: Tensor) -> None:
        """Take in candidates with their logits and losses; an earlier one stays where both are equally bad."""
        x, loss, predicted = x.detach(), loss.detach(), logits.detach().argmax(1)
        rank = ((predicted != self.y) | logits.detach().isnan().any(1)).long()
        if self.target is not None:
            rank = rank + (predicted == self.target)
        if self.x is None:
            self.x, self._rank, self._loss = x, rank, loss
            return
        worse = (rank > self._rank) | ((rank == self._rank) & (loss > self._loss))
        self.x = torch.where(worse.view(-1, *(1,) * (x.dim() - 1)), x, self.x)
        self._rank = torch.where(worse, rank, self._rank)
        self._loss = torch.where(worse, loss, self._loss)


@dataclass(frozen=True, kw_only=True)
class PGD(Attack):
    """``x ← P(x + α · steepest(∇ loss))`` (Madry et al. 2018).

    ``step_size``: a number or ``"2/255"``; by default ``2.5 · eps / steps`` (paper D, B.2).
    ``start``: ``"uniform"`` in the ball, ``"clean"``, ``"gaussian"`` (0.001 · N(0, 1), TRADES), or the probability of a
    clean start, else uniform (0.2 in paper E).
    ``loss``: ``ce``, ``cw`` margin, ``dlr``, or ``kl`` to the clean output (TRADES; the labels play no part).
    ``target``: None, ``"random"`` (never the label; the same for all restarts), ``"least_likely"``; or give a tensor of
    classes to the call: ``attack(model, x, y, target=t)``.
    ``restarts``: the worst case per image of all restarts: a wrong prediction first, else the highest loss.
    ``keep``: each restart offers its ``"last"`` iterate, as usual in training and in the papers' PGD-n, or its
    ``"worst"`` (which costs one more forward, as restarts do).
    ``momentum``: decay of the accumulated gradient (Dong et al. 2018, eq. 6).
    """

    steps: int = 10
    step_size: float | str | None = None
    restarts: int = 1
    start: Start | float = "uniform"
    loss: str = "ce"
    target: Target | None = None
    momentum: float = 0.0
    keep: Keep = "last"

    def problems(self) -> list[str]:
        problems = super().problems()
        for label in ("steps", "restarts"):
            count = getattr(self, label)
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                problems.append(f"{label} must be an integer of at least 1, got {count!r}")
        if self.step_size is not None:
            problem = length_problem("step_size", self.step_size, getattr(self.threat, "norm", ""))
            problems += [str(problem)] if problem else []
            if problem is None and parse_length(self.step_size) == 0:
                problems.append("step_size must be above 0: without a step there is no attack; leave it out")
        if isinstance(self.start, str):
            if self.start not in get_args(Start):
                hint = did_you_mean(self.start, get_args(Start))
                problems.append(f"unknown start {self.start!r}{hint}, or the probability of a clean start")
        elif isinstance(self.start, bool) or not isinstance(self.start, int | float) or not 0 <= self.start <= 1:
            problems.append(f"the probability of a clean start must lie in [0, 1], got {self.start!r}")
        if self.loss not in LOSSES:
            problems.append(f"unknown loss {self.loss!r}{did_you_mean(self.loss, LOSSES)}")
        if self.target is not None and self.target not in get_args(Target):
            hint = did_you_mean(self.target, get_args(Target))
            problems.append(f"unknown target {self.target!r}{hint}; give classes to the call: attack(..., target=t)")
        if self.loss == "kl" and self.target is not None:
            problems.append("the kl loss has no target; leave target out or use loss='ce'")
        if self.loss == "kl" and (self.start == "clean" or (isinstance(self.start, int | float) and self.start > 0)):
            problems.append(
                f"the kl loss has no gradient at the clean image, where start={self.start!r} begins; use "
                "start='gaussian' or 'uniform'"
            )
        if not isinstance(self.momentum, int | float) or self.momentum < 0:
            problems.append(f"momentum must be at least 0, got {self.momentum!r}")
        if self.keep not in get_args(Keep):
            problems.append(f"unknown keep {self.keep!r}{did_you_mean(self.keep, get_args(Keep))}")
        return problems

    def misfits(self, shape: Sequence[int], classes: int) -> list[str]:
        least = least_classes(self.loss, targeted=self.target is not None)
        return [] if classes >= least else [too_few_classes(self.loss, least, classes)]

    @property
    def step(self) -> float:
        """The step size as a number."""
        return 2.5 * self.threat.eps / self.steps if self.step_size is None else parse_length(self.step_size)

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, *, index: Tensor | None = None, target: Tensor | None = None
    ) -> Tensor:
        """Adversarial images for ``x``; with ``target``, towards these classes, one per image."""
        if target is None:
            return super().__call__(model, x, y, index=index)
        if target.shape != y.shape or target.dtype != torch.int64:
            raise ConfigError(
                f"target gives one class (int64) per image, shape {tuple(y.shape)}; "
                f"got {target.dtype} of shape {tuple(target.shape)}"
            )
        if self.loss == "kl":
            raise ConfigError("the kl loss has no target; leave target out or use loss='ce'")
        least, most, same = torch.stack([*target.aminmax(), (target == y).sum()]).tolist()
        if same:
            raise ConfigError("a target must differ from the image's label; use for example (y + 1) % classes")
        if least < 0:
            raise ConfigError(f"targets must be at least 0, got {least}")

        def towards(predict: Predict, x: Tensor, y: Tensor, noise: ImageNoise) -> Tensor:
            return self.perturb(checked(predict, most, x), x, y, noise, target=target)

        return self._run(model, x, y, index, towards)

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
        """See :meth:`Attack.perturb`. ``clean``: logits of ``x`` that the kl loss starts from, else ``predict(x)``."""
        objective, target = self._objective(predict, x, y, noise, target, clean)
        project = self.threat.projection(x)
        worst = Worst(y, target)
        for restart in range(self.restarts):
            x_adv = self._started(x, noise.fold("restart").fold(restart), project)
            velocity = torch.zeros_like(x)
            for step in range(self.steps):
                x_adv = x_adv.detach().requires_grad_()
                logits = predict(x_adv)
                loss = objective(logits)
                grad = input_gradient(loss, x_adv)
                if self.keep == "worst":
                    worst.see(x_adv, logits, loss)
                grad = grad.nan_to_num(nan=0.0)  # where the model gives no number it is fooled: stay there
                if self.momentum:
                    grad = velocity = self.momentum * velocity + _per_image_scale(grad)
                x_adv = project(self.threat.ascended(x_adv.detach(), grad, self.step))
                if self.progress is not None:
                    self.progress(restart * self.steps + step + 1, self.restarts * self.steps)
            if self.keep == "last" and self.restarts == 1:
                return x_adv
            with torch.no_grad():
                logits = predict(x_adv)
                worst.see(x_adv, logits, objective(logits))
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
        self,
        predict: Predict,
        x: Tensor,
        y: Tensor,
        noise: ImageNoise,
        target: Tensor | None,
        clean: Tensor | None = None,
    ) -> tuple[Objective, Tensor | None]:
        """The value to ascend as a function of the logits, and the target where there is one.

        What depends on the clean output (classes, its log probabilities) is computed once.
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


def _per_image_scale(grad: Tensor) -> Tensor:
    """Divide by each image's mean absolute gradient, so that steps of very different gradients add up."""
    mean = grad.abs().flatten(1).mean(1).clamp_min(torch.finfo(grad.dtype).tiny)
    return grad / per_image(mean, grad)


@dataclass(frozen=True, kw_only=True)
class FGSM(PGD):
    """One step of size eps from the clean image: ``x + ε · sign(∇ loss)`` (Goodfellow et al. 2015)."""

    steps: int = 1
    start: Start | float = "clean"

    @property
    def step(self) -> float:
        return self.threat.eps if self.step_size is None else parse_length(self.step_size)


def in_255ths(number: str) -> str:
    """The step size that a name gives: ``pgd10-step2`` has 2/255, as papers A and C have it."""
    float(number)  # a ValueError is explained by who reads the name
    return f"{number}/255"


OPTIONS = {
    "step": Option(setting="step_size", parse=in_255ths, norm="Linf"),
    "restarts": Option(setting="restarts", parse=int),
    "targeted": Option(setting="target", value="random"),
    "leastlikely": Option(setting="target", value="least_likely"),
    "clean": Option(setting="start", value="clean"),
    "worst": Option(setting="keep", value="worst"),
    "momentum": Option(setting="momentum", parse=float),
    **{loss: Option(setting="loss", value=loss) for loss in ("cw", "dlr", "kl")},
}
register("fgsm", FGSM, options=OPTIONS, summary="one signed step from the clean image", paper="D")
register("pgd", PGD, steps=10, options=OPTIONS, summary="projected gradient ascent", paper="A, C, D, E")
register(
    "cw",
    partial(PGD, loss="cw"),
    steps=20,
    options={name: option for name, option in OPTIONS.items() if option.setting != "loss"},
    summary="projected gradient ascent on the CW margin",
    paper="D",
)
