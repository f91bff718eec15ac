"""Gradients of an audited model: whether they exist, their size, and how they change beside an image."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from advnorm._core.errors import ConfigError
from advnorm._core.memory import AdaptiveBatchSize
from advnorm._core.seeding import ImageNoise
from advnorm.attacks import input_gradient
from advnorm.attacks.losses import cross_entropy
from advnorm.attacks.model_access import Predict
from advnorm.attacks.straight_through import StraightPredict
from advnorm.evaluation import audit_thresholds as limits
from advnorm.evaluation.plan import PROBE_IMAGES, EvaluationPlan

#: Number of correct images whose gradients are measured.
GRADIENT_IMAGES = 256


@dataclass(frozen=True, kw_only=True, eq=False)
class GradientSample:
    """Logits of some images, norms of their loss gradients, and angles (degrees) to a gradient beside each image."""

    logits: Tensor
    norms: Tensor
    angles: Tensor


def has_gradients(plan: EvaluationPlan, route: str | None) -> bool:
    """Return whether the loss has a gradient with respect to the images."""
    with plan.forward.differentiable(route) as predict:
        return _has_gradients(plan, predict)


def is_blocked(plan: EvaluationPlan, route: str | None) -> bool:
    """Return whether BPDA replaces functions of this model and gets a gradient."""
    with plan.forward.seeded("bpda"), plan.forward.differentiable(route) as predict:
        smooth = StraightPredict(predict, plan.images[:PROBE_IMAGES].to(plan.device))
        return _has_gradients(plan, smooth) and smooth.replaced > 0


def _has_gradients(plan: EvaluationPlan, predict: Predict) -> bool:
    x, y = (part[:PROBE_IMAGES].to(plan.device) for part in (plan.images, plan.labels))
    try:
        input_gradient(cross_entropy(predict(x.requires_grad_()), y), x)
    except (ConfigError, RuntimeError):
        return False
    return True


def measure_gradients(
    plan: EvaluationPlan, route: str | None, correct: Tensor, *, differentiable: bool
) -> GradientSample:
    """Measure some of the ``correct`` images. Without gradients, norms and angles are 0."""
    forward = plan.forward
    rows = correct.nonzero()[:GRADIENT_IMAGES, 0]
    if len(rows) < forward.minimum_batch:
        rows = torch.arange(min(len(plan.images), GRADIENT_IMAGES))
    beside = replace(plan.threat, eps=limits.ANGLE_STEP * plan.threat.eps)
    with forward.seeded("gradients"), forward.differentiable(route) as predict:

        def gradient(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            logits = predict(x.requires_grad_())
            return logits.detach(), input_gradient(cross_entropy(logits, y), x).double().flatten(1).cpu()

        def measure(part: slice) -> tuple[Tensor, Tensor, Tensor]:
            x, y = (v[rows[part]].to(plan.device) for v in (plan.images, plan.labels))
            if not differentiable:
                return predict(x).detach(), torch.zeros(len(x)), torch.zeros(len(x))
            noise = ImageNoise(plan.seed, plan.index[rows[part]].to(plan.device)).fold("angle")
            other = gradient(beside.random_start(x, noise), y)[1]
            logits, own = gradient(x, y)
            cosine = F.cosine_similarity(own, other, dim=1)
            return logits, own.norm(dim=1), cosine.clamp(-1, 1).arccos().rad2deg()

        memory = AdaptiveBatchSize(min(plan.batch_size, 64), minimum=forward.minimum_batch)
        logits, norms, angles = (torch.cat(parts) for parts in zip(*memory.map(len(rows), measure)))
    return GradientSample(logits=logits, norms=norms, angles=angles)
