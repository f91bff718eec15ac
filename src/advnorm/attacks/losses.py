"""Losses that attacks maximize: one value per image from float32 logits; larger is worse for the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from advnorm._core.errors import Problem, raise_problems
from advnorm._core.precision import at_least_float32

_TINY = 1e-12


def log_odds(logits: Tensor, y: Tensor) -> Tensor:
    """``log Σ_{j≠y} exp(z_j) - z_y``: the logarithm of ``(1 - p_y) / p_y``."""
    logits = at_least_float32(logits)
    return logits.scatter(1, y[:, None], -torch.inf).logsumexp(1) - _at(logits, y)


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """``-log softmax(z)_y``, as the softplus of the log-odds.

    The gradient of the usual form contains ``p_y - 1``. In float32 a confident network rounds that to zero, or to
    something that no longer cancels the other classes, and the gradient of the images turns to another direction.
    """
    return -F.logsigmoid(-log_odds(logits, y))  # unlike torch's softplus, this is exact for large arguments too


def published_cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """``-log softmax(z)_y`` in the usual form, which the published AutoAttack uses."""
    return F.cross_entropy(at_least_float32(logits), y, reduction="none")


def cw_margin(logits: Tensor, y: Tensor) -> Tensor:
    """``max_{j≠y} z_j - z_y``, above 0 if and only if y does not win (Carlini & Wagner 2017, without their bound)."""
    logits = at_least_float32(logits)
    return logits.scatter(1, y[:, None], -torch.inf).amax(1) - _at(logits, y)


def label_margin(logits: Tensor, y: Tensor) -> Tensor:
    """``z_y - max_{j≠y} z_j``, the negated CW margin: at most 0 if the label does not win."""
    return -cw_margin(logits, y)


def misclassified(logits: Tensor, y: Tensor) -> Tensor:
    """Whether the prediction differs from the label, or a logit is NaN."""
    return (logits.argmax(1) != y) | logits.isnan().any(1)


def dlr(logits: Tensor, y: Tensor) -> Tensor:
    """``-(z_y - max_{j≠y} z_j) / (z_π1 - z_π3)`` with π the order of descending logits (Croce & Hein 2020, eq. 6)."""
    top = _top(logits, 3, "dlr")
    return cw_margin(logits, y) / (top[:, 0] - top[:, 2]).clamp_min(_TINY)


def dlr_targeted(logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
    """``-(z_y - z_t) / (z_π1 - (z_π3 + z_π4) / 2)`` (Croce & Hein 2020, eq. 7)."""
    top = _top(logits, 4, "targeted dlr")
    logits = at_least_float32(logits)
    return (_at(logits, target) - _at(logits, y)) / (top[:, 0] - 0.5 * (top[:, 2] + top[:, 3])).clamp_min(_TINY)


def kl_to_clean(logits: Tensor, clean_log_probs: Tensor) -> Tensor:
    """``KL(p(clean) || p(adv))`` (TRADES), from log probabilities, so that an underflow to 0 gives no NaN."""
    logits, top = at_least_float32(logits), clean_log_probs.argmax(1)
    log_probs = logits.log_softmax(1).scatter(1, top[:, None], -cross_entropy(logits, top)[:, None])
    return F.kl_div(log_probs, clean_log_probs, reduction="none", log_target=True).sum(1)


def _at(logits: Tensor, y: Tensor) -> Tensor:
    return logits.gather(1, y[:, None])[:, 0]


def minimum_classes(loss: str, *, targeted: bool) -> int:
    """Minimum number of classes that a loss needs: DLR divides by a difference to the third or fourth logit."""
    return (4 if targeted else 3) if loss == "dlr" else 2


def class_count_problems(loss: str, least: int, classes: int) -> list[Problem]:
    """The problem of a loss that needs at least ``least`` classes, if the model has fewer."""
    message = f"the {loss} loss needs at least {least} {{field}}"
    problem = Problem(code="out_of_range", field="classes", message=message, got=classes, hint="use loss='cw'")
    return [problem] if classes < least else []


def _top(logits: Tensor, count: int, loss: str) -> Tensor:
    raise_problems(class_count_problems(loss, count, logits.shape[1]))
    return at_least_float32(logits).topk(count, dim=1).values


@dataclass(frozen=True, kw_only=True)
class Loss:
    """The untargeted form of a loss, and the targeted form if it exists."""

    untargeted: Callable[[Tensor, Tensor], Tensor]
    targeted: Callable[[Tensor, Tensor, Tensor], Tensor] | None


def _towards_target(loss: Callable[[Tensor, Tensor], Tensor]) -> Loss:
    """A loss whose targeted form is the negated loss of the target."""
    return Loss(untargeted=loss, targeted=lambda z, y, t: -loss(z, t))


#: ``kl`` takes the clean log probabilities instead of the labels.
LOSSES: dict[str, Loss] = {
    "ce": _towards_target(cross_entropy),
    "published_ce": _towards_target(published_cross_entropy),
    "cw": _towards_target(cw_margin),
    "dlr": Loss(untargeted=dlr, targeted=dlr_targeted),
    "kl": Loss(untargeted=kl_to_clean, targeted=None),
}
