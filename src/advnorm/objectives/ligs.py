"""Local input gradient similarity as a regularizer (paper D, eq. 1 and fig. 5)."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from advnorm._core.errors import ConfigError, Description, Problem
from advnorm._core.precision import at_least_float32
from advnorm._core.registry import Registry
from advnorm._core.seeding import ImageNoise
from advnorm._core.settings import Setting
from advnorm._core.wrappers import unwrap_model
from advnorm.attacks.losses import log_odds
from advnorm.attacks.model_access import extract_logits
from advnorm.attacks.pgd import FGSM, PGD
from advnorm.norms import domains, route, routed_modules, statistics
from advnorm.objectives.base import Objective, needs_both_domains
from advnorm.objectives.execution import EAGER, CraftedBatch, Execution, ObjectiveOutput
from advnorm.objectives.second_pass import SecondPass
from advnorm.objectives.wrapper import Wrapper, leaving_no_trace
from advnorm.threat import ThreatModel, length_problem, parse_length

#: Shifts under which the gradient is compared; all of size 0.01 in the paper (app. B.4).
Shift = Literal["gaussian", "uniform", "fgsm", "pgd"]
#: The shifts that need hard labels and pixels in [0, 1].
ATTACKS = ("fgsm", "pgd")


def shift_images(kind: Shift, x: Tensor, y: Tensor, noise: ImageNoise, size: float, predict: Any) -> Tensor:
    """``x + ν``: Gaussian of deviation ``size``, uniform in ±size, or FGSM or 7-step PGD of that radius (app. B.4)."""
    if kind == "gaussian":
        return x + size * noise.normal(x.shape[1:], "ligs").to(x.dtype)
    if kind == "uniform":
        return x + size * (2 * noise.uniform(x.shape[1:], "ligs").to(x.dtype) - 1)
    threat = ThreatModel(eps=size)
    attack = FGSM(threat=threat) if kind == "fgsm" else PGD(threat=threat, steps=7)
    return attack.constrain(attack.perturb(predict, x, y, noise), x)


def loss_direction(logits: Tensor, y: Tensor, x: Tensor, *, create_graph: bool = False) -> Tensor:
    """The gradient of the summed cross-entropy with respect to ``x``, up to a factor for very confident images.

    ``y``: labels ``(N,)``, or shares of the classes ``(N, K)``. The gradient of image i's loss is ``σ(m_i) ∇m_i`` with
    the log-odds ``m`` of its label. Float32 cannot hold ``σ(m)`` beyond a margin of 87. A cosine needs the direction
    alone, so that ``σ(m)`` stops at ``exp(-70)``. Only the class with the largest share can have a gradient that rounds
    away, so that the other classes add their shares of ``-∇ log p``.
    """
    logits = at_least_float32(logits)
    shares = F.one_hot(y, logits.shape[1]) if y.dim() == 1 else y
    share, label = shares.to(logits.dtype).max(1)
    others = shares.to(logits.dtype).scatter(1, label[:, None], 0)
    odds = log_odds(logits, label)
    weights = share * F.logsigmoid(odds).clamp_min(-70).exp(), -others
    return torch.autograd.grad((odds, logits.log_softmax(1)), x, weights, create_graph=create_graph)[0]


#: Regularizers by name, for configurations and listings.
REGULARIZERS: Registry[type[Wrapper]] = Registry("regularizer")
register_regularizer = REGULARIZERS.register


@register_regularizer("ligs")
class LIGS(Wrapper):
    """``L + λ (1 - LIGS)`` with ``LIGS = E cos(∇_x l(x, y), ∇_x l(x + ν, y))`` (paper D, eq. 1), λ = ``weight``.

    Clean images go through the first branch that the objective trains, with the batch's statistics (no bank is
    updated), or with the stored ones if a norm needs both domains. Compiled networks do not support the gradient of a
    gradient, so that these forwards run eagerly. Compile the model, not this objective.
    """

    summary, paper = "input gradients that stay alike near an image", "D (eq. 1, fig. 5)"

    weight: Annotated[float, Setting("Weight λ of the regularizer.", "[0, inf)")] = 1.0
    shift: Annotated[Shift, Setting("Kind of the shift ν.")] = "gaussian"
    size: Annotated[float | str, Setting("Size of the shift in pixel scale, such as 0.01 or 8/255.")] = 0.01

    def __init__(self, objective: Objective, **options: Any) -> None:
        if isinstance(objective, SecondPass):
            name = type(objective).__name__
            message = f"the second pass of {name} would not include LIGS"
            raise ConfigError("conflict", message, field="objective", hint=f"write {name}(LIGS(...)) instead")
        if isinstance(objective, LIGS):
            hint = "use one LIGS with the sum of the weights"
            raise ConfigError("conflict", "the objective has a LIGS term already", field="objective", hint=hint)
        super().__init__(objective, **options)

    @classmethod
    def setting_problems(cls, **settings: Any) -> list[Problem]:
        problem = length_problem("size", settings["size"], "Linf")
        return [] if problem is None else [problem]

    def craft_batch(
        self, x: Tensor, y: Tensor, index: Tensor | None = None, execution: Execution = EAGER
    ) -> CraftedBatch:
        if self.shift in ATTACKS:
            self.validate_images(x)
            if isinstance(y, Tensor) and y.is_floating_point():
                message, hint = f"the shift {self.shift} needs hard labels", "use shift='gaussian' or 'uniform'"
                raise ConfigError("wrong_dtype", message, field="labels", got=Description(y.dtype), hint=hint)
        return self.objective.craft_batch(x, y, index, execution)

    def compute_loss(self, batch: CraftedBatch, execution: Execution = EAGER) -> ObjectiveOutput:
        output = self.objective.compute_loss(batch, execution)
        similarity = self.similarity(batch.x, batch.y, ImageNoise(self.innermost.seed, batch.index).fold("ligs"))
        loss = output.loss + self.weight * (1 - similarity)
        return output._replace(loss=loss, terms={**output.terms, "ligs": similarity.detach()})

    def similarity(self, x: Tensor, y: Tensor, noise: ImageNoise) -> Tensor:
        """LIGS of a batch, differentiable. An image whose gradient is zero counts as 0 and has no influence.

        Random numbers of the network, such as dropout's, are the same at both points.
        """
        model = unwrap_model(self.model)
        branch = next((domain for domain in self.trained_domains() if domain in domains(model)), None)
        stored = any(needs_both_domains(module.plan) for module in routed_modules(model).values())

        def predict(images: Tensor) -> Tensor:
            return extract_logits(model(images.to(self.innermost.dtype)), len(images))

        def gradient(images: Tensor) -> Tensor:
            images = images.detach().requires_grad_()
            rows = loss_direction(predict(images), y, images, create_graph=True).flatten(1)
            # Only the direction counts, and a cosine treats small gradients as zero.
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
            near = shift_images(self.shift, x, y, noise, parse_length(self.size), predict)
            with torch.random.fork_rng([x.device] if x.is_cuda else []):
                at_x = gradient(x)
            return F.cosine_similarity(at_x, gradient(near.detach()), dim=1).mean()
