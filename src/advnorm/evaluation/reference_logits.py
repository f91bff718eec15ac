"""Logits of the first images: they identify a model in a record and show properties of its outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from advnorm._core.memory import AdaptiveBatchSize
from advnorm._core.wrappers import dtype_of
from advnorm.evaluation.strict_forward import StrictForward

#: Number of images of the reference logits.
REFERENCE_IMAGES = 16
#: Relative difference of logits that float32 rounding does not explain.
TOLERANCE = 1e-3


@dataclass(frozen=True, kw_only=True, eq=False)
class ReferenceLogits:
    """Strict logits of the first images through one branch."""

    logits: Tensor
    #: Largest relative difference between two forwards of the same images.
    difference: float
    #: Largest relative difference that the model's precision explains.
    tolerance: float
    #: Batch size for which memory was sufficient; None: all images.
    batch_size: int | None

    @classmethod
    def compute(cls, forward: StrictForward, route: str | None, images: Tensor) -> ReferenceLogits:
        """Run two forwards of the first of the images."""
        x, memory = images[:REFERENCE_IMAGES].to(forward.device), AdaptiveBatchSize(minimum=forward.minimum_batch)
        with forward.through(route, "look") as predict:  # a tag seeds the draws: keep its name
            logits, again = (torch.cat(memory.map(len(x), lambda part: predict(x[part]))) for _ in range(2))
        return cls(
            logits=logits,
            difference=_relative_difference(again, logits),
            tolerance=max(TOLERANCE, 4 * torch.finfo(dtype_of(forward.model)).eps),
            batch_size=memory.size,
        )

    @property
    def is_random(self) -> bool:
        return self.difference > self.tolerance

    def to_record(self) -> list[str] | None:
        """Return a line per image, because JSON has no infinity; None if the model is randomized."""
        return None if self.is_random else [" ".join(f"{v:.5g}" for v in row) for row in self.logits.tolist()]

    def matches(self, recorded: Any) -> bool:
        """Return whether a record's logits agree, up to the rounding of another device.

        Randomized models and records without logits always match.
        """
        if recorded is None or self.is_random:
            return True
        try:
            theirs = torch.tensor([[float(v) for v in line.split()] for line in recorded])
        except (AttributeError, TypeError, ValueError):
            return False
        ours, absolute = self.logits.cpu(), self.tolerance * _largest(self.logits).item()
        return ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=1e-2, atol=absolute, equal_nan=True)


def matches_record(record: Mapping[str, Any], fingerprint: str, references: Mapping[str, ReferenceLogits]) -> bool:
    """Return whether a record belongs to this fingerprint and to models with these logits.

    A fingerprint covers structure and tensors. A model's code and attributes only show in its logits.
    """
    recorded = record.get("logits", {})
    return (
        record.get("fingerprint") == fingerprint
        and isinstance(recorded, dict)
        and all(reference.matches(recorded.get(name)) for name, reference in references.items())
    )


@dataclass(frozen=True, kw_only=True)
class OutputCheck:
    """Properties of a model's outputs that limit what an attack can show."""

    reference: ReferenceLogits
    #: Largest relative difference of logits between an image alone and in a batch; 0 for random outputs.
    batch_difference: float
    probabilities: bool

    @property
    def is_batch_dependent(self) -> bool:
        return self.batch_difference > self.reference.tolerance

    def warnings(self) -> list[str]:
        """Reasons to distrust attacks on this model."""
        found = {
            "the outputs are random: every result is a single draw, a union over attacks is also a union over draws, "
            "and the stages of a cascade use draws of their own; attack the expectation with 'autoattack-rand' or "
            "'apgd-ce-samples20'": self.reference.is_random,
            "batch-dependent: the output of an image depends on the other images of its batch, so the numbers hold for "
            "this batch size and order only; evaluate with running statistics": self.is_batch_dependent,
            "the outputs are probabilities, whose gradients vanish; return logits, without softmax": self.probabilities,
        }
        return [text for text, applies in found.items() if applies]


def check_outputs(
    reference: ReferenceLogits, forward: StrictForward, route: str | None, images: Tensor, batch_size: int
) -> OutputCheck:
    """Check whether outputs are random, depend on the batch, or are probabilities."""
    logits, batch_difference = reference.logits, 0.0
    if not reference.is_random and 1 not in (reference.batch_size, batch_size):  # random outputs would differ anyway
        with forward.through(route, "alone") as predict:
            # Beside a copy of itself, which leaves batch statistics unchanged: a single image may not have any.
            parts = images[: len(logits)].to(forward.device).split(1)
            alone = torch.cat([predict(torch.cat([image, image]))[:1] for image in parts])
        batch_difference = _relative_difference(alone, logits)
    probabilities = are_probabilities(logits)
    return OutputCheck(reference=reference, batch_difference=batch_difference, probabilities=probabilities)


def are_probabilities(logits: Tensor) -> bool:
    """Return whether each row is not negative and sums to 1."""
    return bool((logits >= 0).all() and (logits.sum(1) - 1).abs().max() < 1e-3)


def _largest(logits: Tensor) -> Tensor:
    return logits.abs().masked_fill(~logits.isfinite(), 0).amax().clamp_min(1e-12)


def _relative_difference(logits: Tensor, reference: Tensor) -> float:
    """The largest difference relative to the largest logit; equal infinities do not differ."""
    gap = (logits - reference).abs().masked_fill(logits == reference, 0)
    return gap.amax().div(_largest(reference)).item()
