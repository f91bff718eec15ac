"""The attack contract and the base class that enforces it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from advnorm._core.errors import ConfigError, Problem, raise_problems
from advnorm._core.precision import float32_as
from advnorm._core.seeding import ImageNoise
from advnorm._core.settings import Seed, Setting, convert_fields
from advnorm.attacks.inputs import validate_batch, validating_first_logits
from advnorm.attacks.losses import misclassified
from advnorm.attacks.model_access import Predict, never_alone, predicting
from advnorm.norms import Mode
from advnorm.threat import ThreatModel

#: Called with the amount of finished work and the total amount.
Progress = Callable[[float, int], None]
Steps = Annotated[int, Setting("Number of gradient steps.", "[1, inf)")]
Restarts = Annotated[int, Setting("Number of restarts; the worst case per image counts.", "[1, inf)")]


class AttackResult(NamedTuple):
    """Adversarial images and, for each image, whether the model misclassifies it."""

    images: Tensor
    #: Booleans ``(N,)``: the prediction differs from the label, or a logit is NaN; also for targeted attacks.
    success: Tensor


@dataclass(frozen=True, kw_only=True)
class Attack(ABC):
    """Base of all attacks. Subclasses implement :meth:`perturb`; this class enforces the contract.

    The contract: the result lies inside ball and box exactly, in float32, and is detached. The model is unchanged bit
    for bit (parameters, ``requires_grad``, ``.grad``, statistics, the training flag of each module), and so is the
    global random state. This also holds if an attack raises.

    Settings are declared as ``Annotated[type, Setting(help, range)]`` and converted on creation. ``progress`` is called
    during long runs with the finished and the total amount of work.
    """

    #: Whether the attack needs gradients of the logits with respect to the images.
    needs_gradients: ClassVar[bool] = True

    threat: ThreatModel
    seed: Seed = 0
    route: Annotated[str | None, Setting("Attacked branch; none: the branch of an enclosing `advnorm.route`.")] = None
    statistics: Annotated[Mode, Setting("Statistics of batch norms during the attack.")] = "running"
    progress: Progress | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        problems = convert_fields(self)
        invalid = {problem.field for problem in problems}
        problems += [problem for problem in self.problems() if problem.field not in invalid]
        raise_problems(problems, f"bad attack {type(self).__name__}")

    def problems(self) -> list[Problem]:
        """Problems that no declared range covers; subclasses add theirs to ``super().problems()``."""
        if isinstance(self.threat, ThreatModel):
            return []
        message, hint = "{field} must be a ThreatModel", "for example ThreatModel(eps='8/255')"
        return [Problem(code="wrong_type", field="threat", message=message, got=self.threat, hint=hint)]

    def input_problems(self, shape: Sequence[int], classes: int) -> list[Problem]:
        """Problems of this attack with images of this shape and with this number of classes."""
        return []

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, *, index: Tensor | None = None) -> Tensor:
        """Return adversarial images for ``x`` with labels ``y``.

        ``index`` identifies each image for its random numbers, for example by its position in the data set. With an
        index the result does not depend on the other images of the batch, as far as the model's arithmetic does not.
        """
        return self._attack(model, x, y, index)

    def run(self, model: nn.Module, x: Tensor, y: Tensor, *, index: Tensor | None = None, **call: Any) -> AttackResult:
        """Return the same images as a call, and whether a strict float32 forward misclassifies each of them.

        The forward does not update statistics. It evaluates a randomized model once.
        """
        images = self(model, x, y, index=index, **call)
        statistics = "batch_frozen" if self.statistics == "batch" else self.statistics
        with float32_as("ieee", x.device), predicting(model, route=self.route, statistics=statistics) as predict:
            with torch.no_grad():
                logits = (predict if statistics == "running" else never_alone(predict))(images)
            return AttackResult(images, misclassified(logits, y))

    @abstractmethod
    def perturb(self, predict: Predict, x: Tensor, y: Tensor, noise: ImageNoise) -> Tensor:
        """Return images near ``x`` that ``predict`` misclassifies. The caller validates inputs and projects the result.

        ``noise`` draws random numbers for each image, which depend on the seed and on the position of the image in the
        data set, not on its batch: ``noise.uniform(shape)``, ``noise.normal(shape)``, ``noise.signs(shape)``.

        Training loops and CUDA graphs call this inside their own :func:`predicting` scope, without a device
        synchronization: ``attack.constrain(attack.perturb(predict, x, y, attack.noise(index)), x)``.
        """

    def _attack(
        self, model: nn.Module, x: Tensor, y: Tensor, index: Tensor | None, *, largest_target: int = -1, **options: Any
    ) -> Tensor:
        """Attack with ``options`` of :meth:`perturb`; the model needs logits for the labels and the targets."""
        largest, field = max((validate_batch(x, y), "labels"), (largest_target, "target"))
        with predicting(model, route=self.route, statistics=self.statistics) as predict:
            images, labels, noise = detach(x), detach(y), self.noise(validated_index(index, x))
            with self.searching(predict, model, images.device) as search:
                search = validating_first_logits(search, largest, images, field=field)
                return self.constrain(self.perturb(search, images, labels, noise, **options), images)

    def searching(self, predict: Predict, model: nn.Module, device: torch.device) -> AbstractContextManager[Predict]:
        """Return a scope that yields the function to attack; the default yields ``predict``."""
        return nullcontext(predict)

    def noise(self, index: Tensor) -> ImageNoise:
        """The random numbers that this attack draws for each image."""
        return ImageNoise(self.seed, index).fold(type(self).__name__)

    def constrain(self, x_adv: Tensor, x: Tensor) -> Tensor:
        """Project the result of :meth:`perturb` into ball and box; detached, in the memory layout of ``x``.

        A pixel that is not finite (from a gradient that is not) keeps its clean value.
        """
        x_adv = x_adv.detach()
        x_adv = self.threat.project(torch.where(x_adv.isfinite(), x_adv, x), x)
        return torch.empty_like(x).copy_(x_adv)


def detach(value: Tensor) -> Tensor:
    """Detach a tensor; clone one that was made in inference mode, so that it can require gradients."""
    return value.detach().clone() if value.is_inference() else value.detach()


def validated_index(index: Tensor | None, x: Tensor) -> Tensor:
    """Return one number per image on its device, by default the position in the batch."""
    if index is None:
        return torch.arange(len(x), device=x.device)
    if not isinstance(index, Tensor) or index.shape != (len(x),):
        message, got = f"{{field}} must be a tensor of {len(x)} numbers, one per image", getattr(index, "shape", index)
        raise ConfigError("wrong_shape", message, field="index", got=got)
    return index.to(x.device)
