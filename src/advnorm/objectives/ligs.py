"""Local input gradient similarity as a regularizer (paper D, eq. 1 and fig. 5)."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from advnorm._core.errors import ConfigError, did_you_mean, raise_all
from advnorm._core.registry import Registry
from advnorm._core.seeding import ImageNoise
from advnorm._core.wrappers import unwrapped
from advnorm.attacks.base import logits_of
from advnorm.attacks.pgd import FGSM, PGD
from advnorm.norms import domains, route, routed_modules, statistics
from advnorm.objectives.base import Objective, needs_both_domains, weight_problem
from advnorm.objectives.execution import EAGER, CraftedBatch, Execution, ObjectiveOutput
from advnorm.objectives.second_pass import SecondPass
from advnorm.objectives.wrapper import Wrapper, leaving_no_trace
from advnorm.threat import ThreatModel, length_problem, parse_length

#: What the gradient is compared under; all of size 0.01 in the paper (app. B.4).
Shift = Literal["gaussian", "uniform", "fgsm", "pgd"]
#: Those that take hard labels, and pixels in [0, 1].
ATTACKS = ("fgsm", "pgd")


def shifted(kind: Shift, x: Tensor, y: Tensor, noise: ImageNoise, size: float, predict: Any) -> Tensor:
    """``x + ν``: Gaussian of deviation ``size``, uniform in ±size, or FGSM or 7-step PGD of that radius (app. B.4)."""
    if kind == "gaussian":
        return x + size * noise.normal(x.shape[1:], "ligs").to(x.dtype)
    if kind == "uniform":
        return x + size * (2 * noise.uniform(x.shape[1:], "ligs").to(x.dtype) - 1)
    threat = ThreatModel(eps=size)
    attack = FGSM(threat=threat) if kind == "fgsm" else PGD(threat=threat, steps=7)
    return attack.kept(attack.perturb(predict, x, y, noise), x)


class LIGS(Wrapper):
    """``L + λ (1 - LIGS)`` with ``LIGS = E cos(∇_x l(x, y), ∇_x l(x + ν, y))`` (paper D, eq. 1), λ = ``weight``.

    On the clean images, through the first branch that the objective trains, with the batch's statistics (nothing is
    fed) or the stored ones where a norm needs both domains. The gradient of a gradient is taken, which compiled
    networks do not offer: these forwards run as they are. Compile the model, not this.
    """

    summary, paper = "input gradients that stay alike near an image", "D (eq. 1, fig. 5)"

    def __init__(
        self,
        objective: Objective,
        *,
        weight: float = 1.0,
        shift: Shift = "gaussian",
        size: float | str = 0.01,
        **unknown: Any,
    ) -> None:
        own = {"weight": weight, "shift": shift, "size": size}
        problems = [f"unknown option {name!r}{did_you_mean(name, own)}" for name in unknown]
        raise_all(problems + self.setting_problems(**own), "bad LIGS")
        if isinstance(objective, SecondPass):
            name = type(objective).__name__
            raise ConfigError(f"the second pass of {name} would not see this term; write {name}(LIGS(...)) instead")
        if isinstance(objective, LIGS):
            raise ConfigError("LIGS is a term of this objective already; one LIGS with the sum of the weights will do")
        super().__init__(objective)
        self.weight, self.size = weight, parse_length(size)
        self.shift: Shift = shift

    @classmethod
    def setting_problems(cls, *, weight: Any = 1.0, shift: Any = "gaussian", size: Any = 0.01, **_: Any) -> list[str]:
        problems = weight_problem("weight", weight)
        if (problem := length_problem("size", size, "Linf")) is not None:
            problems.append(str(problem))
        if shift not in get_args(Shift):
            problems.append(f"unknown shift {shift!r}{did_you_mean(shift, get_args(Shift))}")
        return problems

    def craft_batch(
        self, x: Tensor, y: Tensor, index: Tensor | None = None, execution: Execution = EAGER
    ) -> CraftedBatch:
        if self.shift in ATTACKS:
            self.validate_images(x)
        return super().craft_batch(x, y, index, execution)

    def compute_loss(self, batch: CraftedBatch, execution: Execution = EAGER) -> ObjectiveOutput:
        output = super().compute_loss(batch, execution)
        similarity = self.similarity(batch.x, batch.y, ImageNoise(self.innermost.seed, batch.index).fold("ligs"))
        loss = output.loss + self.weight * (1 - similarity)
        return output._replace(loss=loss, terms={**output.terms, "ligs": similarity.detach()})

    def similarity(self, x: Tensor, y: Tensor, noise: ImageNoise) -> Tensor:
        """LIGS of a batch, differentiable. An image whose gradient is zero has none: it counts as 0 and moves nothing.

        What the network draws, as dropout does, is the same at both points.
        """
        model = unwrapped(self.model)
        branch = next((domain for domain in self.trained_domains() if domain in domains(model)), None)
        stored = any(needs_both_domains(module.plan) for module in routed_modules(model).values())

        def predict(images: Tensor) -> Tensor:
            logits = logits_of(model(images.to(self.innermost.dtype)), len(images))
            return logits if logits.dtype == torch.float64 else logits.float()

        def gradient(images: Tensor) -> Tensor:
            images = images.detach().requires_grad_()
            loss = F.cross_entropy(predict(images), y, reduction="sum")
            rows = torch.autograd.grad(loss, images, create_graph=True)[0].flatten(1)
            # The direction alone counts, and confident networks have gradients below what a cosine takes for zero.
            largest = rows.detach().abs().amax(1, keepdim=True)
            there = largest > torch.finfo(rows.dtype).tiny
            return torch.where(there, rows / torch.where(there, largest, 1), 0)

        with (
            torch.enable_grad(),
            leaving_no_trace(model),
            self.innermost.training_statistics(),
            route(model, branch) if branch else nullcontext(),
            statistics(model, mode="running") if stored else nullcontext(),
        ):
            near = shifted(self.shift, x, y, noise, self.size, predict)
            with torch.random.fork_rng([x.device] if x.is_cuda else []):
                at_x = gradient(x)
            return F.cosine_similarity(at_x, gradient(near.detach()), dim=1).mean()

    def extra_repr(self) -> str:
        return f"weight={self.weight}, shift={self.shift!r}, size={self.size}"


#: Regularizers by name, for configurations and listings.
REGULARIZERS: Registry[type[LIGS]] = Registry("regularizer")
REGULARIZERS.add("ligs", LIGS)
