"""The model as a search sees it: counted forwards, batches that fit into memory, strict float32 decisions."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from advnorm._core.memory import AdaptiveBatchSize
from advnorm._core.precision import ContextFactory
from advnorm.attacks.losses import label_margin, misclassified
from advnorm.attacks.model_access import Predict, input_gradient


class VictimModel:
    """The attacked model. ``search_predict`` guides the search; the strict ``predict`` decides alone.

    ``search_predict`` is ``predict`` itself or a faster surrogate. A surrogate's margins differ by up to
    ``tolerance``, or are not finite where it overflows. ``precision`` creates the scope in which it runs, including
    its gradients.
    """

    def __init__(
        self,
        predict: Predict,
        *,
        search_predict: Predict | None = None,
        precision: ContextFactory = nullcontext,
        tolerance: float = 0.0,
        memory: AdaptiveBatchSize | None = None,
    ) -> None:
        self.predict, self.search_predict, self.tolerance = predict, search_predict or predict, tolerance
        self.precision = precision
        self.memory = memory or AdaptiveBatchSize()
        self.forwards = self.backwards = 0  # in images
        self.on_call: Callable[[], object] | None = None  # called before every forward of the model

    def strict_logits(self, x: Tensor) -> Tensor:
        """Logits that decide whether an image is misclassified."""
        return self._logits(self.predict, x)

    def search_logits(self, x: Tensor) -> Tensor:
        """Logits that guide the search."""
        with self.precision():
            return self._logits(self.search_predict, x)

    def search_margin(self, logits: Tensor, y: Tensor) -> Tensor:
        """Margins for the search. If a surrogate has no finite margin, the image becomes a candidate to verify.

        NaN logits of the model itself count as misclassified.
        """
        margin = label_margin(logits, y)
        if self.search_predict is self.predict:
            return margin.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        return margin.nan_to_num(nan=self.tolerance, posinf=self.tolerance, neginf=self.tolerance)

    def misclassifies(self, x: Tensor, y: Tensor) -> Tensor:
        """Whether the strict prediction differs from the label, or a logit is NaN."""
        return misclassified(self.strict_logits(x), y)

    def gradient(
        self, x: Tensor, value: Callable[[Tensor, slice], Tensor], samples: int = 1
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, values and gradients of the values; for a randomized model their means over ``samples`` forwards.

        A gradient entry that is not finite becomes 0, so that the pixel stays where it is. A value that is NaN becomes
        -inf, so that every other value is larger.
        """

        def compute(part: slice) -> tuple[Tensor, ...]:
            points = x[part].detach().requires_grad_()
            total: list[Tensor] = []
            for _ in range(samples):
                with torch.enable_grad():
                    logits = self.search_predict(points)
                    value_N = value(logits, part)
                sample = [logits.detach(), value_N.detach(), input_gradient(value_N, points)]
                total = [a + b for a, b in zip(total, sample)] if total else sample
            return tuple(t / samples for t in total) if samples > 1 else tuple(total)

        self._count(len(x) * samples, backwards=True)
        with self.precision():
            logits, values, grad = _concatenate(self.memory.map(len(x), compute))
        values = values.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        return logits, values, grad.contiguous().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)

    def jacobian(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits ``(N, K)`` and the gradient of each logit, ``(N, K, ...)``, by K backward passes."""

        def compute(part: slice) -> tuple[Tensor, ...]:
            points = x[part].detach().requires_grad_()
            with torch.enable_grad():
                logits = self.search_predict(points)
                columns = logits.sum(0)
            grads = [torch.autograd.grad(c, points, retain_graph=True)[0] for c in columns]
            return logits.detach(), torch.stack(grads, 1)

        with self.precision():
            logits, grads = _concatenate(self.memory.map(len(x), compute))
        self._count(len(x), backwards=False)
        self.backwards += len(x) * logits.shape[1]
        return logits, grads.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)

    def _logits(self, predict: Predict, x: Tensor) -> Tensor:
        self._count(len(x), backwards=False)
        with torch.no_grad():
            parts = self.memory.map(len(x), lambda part: predict(x[part]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _count(self, images: int, *, backwards: bool) -> None:
        self.forwards += images
        self.backwards += images * backwards
        if self.on_call is not None:
            self.on_call()


def _concatenate(parts: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    return parts[0] if len(parts) == 1 else tuple(torch.cat(column) for column in zip(*parts))
