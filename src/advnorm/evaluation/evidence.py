"""Evidence of an audit, and the rules by which it decides.

The thresholds are in :mod:`advnorm.evaluation.audit_thresholds`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from advnorm._core.shapes import Fraction
from advnorm.evaluation import audit_thresholds as limits
from advnorm.threat import Norm

VerdictName = Literal["real", "false", "inconclusive", "none"]
Weight = Literal["decides", "doubt", "note"]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """One measurement with its value, its expected value, and its weight if the expectation fails.

    ``decides``: the robustness is false. ``doubt``: it cannot be called real. ``note``: information only.
    ``measured``: the value as text, with enough digits to be on the same side of the limit in ``expected``.
    """

    name: str
    value: float
    expected: str
    ok: bool
    weight: Weight
    text: str
    measured: str = ""  # records of older versions have the value alone

    def __post_init__(self) -> None:
        object.__setattr__(self, "measured", self.measured or f"{self.value:.3g}")

    @classmethod
    def at_most(cls, most: float, *, value: float, slack: str = "", **fields: Any) -> Evidence:
        """Return a measurement that should be at most ``most``; ``slack``: what the limit contains, in words."""
        ok = value <= most
        texts = [(f"{value:.{digits}g}", f"{most:.{digits}g}") for digits in range(3, 18)]
        # 5.004 exceeds 5, but both read 5 with three digits. With 17 digits a text is the number itself.
        measured, limit = next(pair for pair in texts if (float(pair[0]) <= float(pair[1])) == ok)
        expected = "" if math.isinf(most) else f"at most {limit}" + f" ({slack})" * bool(slack)
        return cls(value=value, expected=expected, ok=ok, measured=measured, **fields)


@dataclass(frozen=True, kw_only=True)
class RungResult:
    """Result of a rung: accuracy under this attack if it ran on all images, and the worst case so far."""

    attack: str
    text: str
    alone: Fraction | None
    worst: Fraction
    skipped: str = ""


class EvidenceList:
    """Collects measurements that should not exceed a limit."""

    def __init__(self, images: int) -> None:
        self.items: list[Evidence] = []
        self._images = images

    def expect(
        self, name: str, text: str, value: float, most: float, *, weight: Weight = "doubt", points: bool = False
    ) -> bool:
        """Add a measurement that should be at most ``most``. ``points``: the limit is at least that of two images."""
        slack = 100 * limits.SLACK_IMAGES / self._images
        words = ""
        if points and slack > most:
            most, words = slack, f"{limits.SLACK_IMAGES} of {self._images} images"
        item = Evidence.at_most(most, name=name, value=value, weight=weight, text=text, slack=words)
        self.items.append(item)
        return item.ok


def weigh_gap(
    claimed: float,
    worst: float,
    evidence: Sequence[Evidence] = (),
    *,
    norm: Norm = "Linf",
    images: int | None = None,
) -> Evidence:
    """Weigh the gap from PGD-10 accuracy to worst-case accuracy beside the other ``evidence``.

    A gap counts only if it would also count with two more robust images, out of ``images``.
    Under L1 a gap alone decides nothing: PGD is so weak there that it leaves 35 % of a linear model's images, where
    adaptive attacks leave 1 %.
    """
    slack = 100 * limits.SLACK_IMAGES / images if images else 0.0
    total, gap = 100 * claimed, round(100 * (claimed - worst), 9)
    zero = max((item.value for item in evidence if item.name == "zero gradients"), default=0.0)
    zero_gradients = limits.ZERO_GRADIENT_POINTS if zero >= limits.ZERO_GRADIENT_SHARE else math.inf
    # A gap of up to GAP_POINTS is no sign. Each condition limits the points that may be lost at this PGD-10 accuracy.
    false = min(
        (1 - limits.FALSE_RATIO) * total,
        max(limits.FALSE_POINTS, (1 - limits.FALSE_POINTS_RATIO) * total),
        zero_gradients,
    )
    most, decides = (  # rounded: sums of floats must not decide
        round(max(limits.GAP_POINTS, points) + slack, 9)
        for points in (min(false, (1 - limits.DOUBT_RATIO) * total), false)
    )
    return Evidence.at_most(
        most,
        name="gap",
        value=gap,
        slack=_slack_text(images) if images else "",
        weight="decides" if gap > decides and norm != "L1" else "doubt",
        text=f"points lost from PGD-10 ({total:.1f} %) to the worst case ({100 * worst:.1f} %)",
    )


def weigh_one_step(one_step: float, worst: float, clean: float, *, images: int, norm: Norm = "Linf") -> Evidence:
    """Weigh the accuracy under one step: a network that overfits to one step keeps it, and loses all else.

    Under L1 one step is weak on every network.
    """
    claims = norm != "L1" and one_step >= limits.ONE_STEP_SHARE * clean and one_step > limits.NONE_CLAIMED
    most = 100 * (1 - limits.FALSE_RATIO) * one_step + 100 * limits.SLACK_IMAGES / images
    item = Evidence.at_most(
        round(most, 9) if claims else math.inf,
        name="one step",
        value=round(100 * (one_step - worst), 9),
        slack=_slack_text(images),
        weight="decides",
        text=f"points lost from one step ({100 * one_step:.1f} %) to the worst case ({100 * worst:.1f} %)",
    )
    return item if claims else replace(item, expected="no claim")


def _slack_text(images: int) -> str:
    return f"{limits.SLACK_IMAGES} of {images} images of slack included"


def decide_verdict(
    claimed: float, worst: float, evidence: Sequence[Evidence], *, chance: float, images: int
) -> tuple[VerdictName, list[str]]:
    """Return the verdict and its reasons; the first item of ``evidence`` comes from :func:`weigh_gap`."""
    gap, *rest = evidence
    doubts = [item for item in rest if not item.ok and item.weight != "note"]
    signs = [f"{item.text}: {item.measured}, expected {item.expected}" for item in doubts]
    numbers = f"accuracy is {claimed:.1%} under PGD-10 and {worst:.1%} in the worst case, on {images} images"
    constant = f"always answering the most frequent class has an accuracy of {chance:.1%}"
    lost = worst <= max(limits.NONE_LEFT, chance)
    if images >= limits.LEAST_IMAGES and any(item.name == "one step" for item in doubts):
        return "false", [numbers, *signs]
    if lost and claimed <= limits.NONE_CLAIMED:
        return "none", [numbers]
    if lost and claimed <= chance and (gap.ok or (gap.value <= limits.FALSE_POINTS and not doubts)):
        return "none", [numbers, constant]
    if images < limits.LEAST_IMAGES:
        return "inconclusive", [numbers, f"fewer than {limits.LEAST_IMAGES} images are not enough", *signs]
    if not gap.ok and (gap.weight == "decides" or doubts):
        return "false", [f"{numbers}: a soundly trained model does not have such a gap", *signs]
    if not gap.ok:
        return "inconclusive", [f"{numbers}: a wide gap, but no other sign of masked gradients"]
    if doubts:
        return "inconclusive", [numbers, *signs]
    if lost:
        return "none", [numbers, constant]
    return "real", [numbers, "accuracy levels off with more steps and falls with eps, and the gradients are sound"]
