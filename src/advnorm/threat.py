"""The threat model: norm, radius and the box of valid images; projection and random start inside both."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from numbers import Real
from typing import Literal, get_args

import torch
from torch import Tensor

from advnorm._core.errors import ConfigError, Problem, raise_problems, unknown_name
from advnorm._core.seeding import ImageNoise

Norm = Literal["Linf", "L2", "L1"]
THREAT_NORMS: tuple[Norm, ...] = get_args(Norm)
#: Orders of the vector norms.
ORDERS: Mapping[Norm, float] = {"Linf": math.inf, "L2": 2.0, "L1": 1.0}


def parse_length(value: float | str) -> float:
    """Return a length in pixel scale from a number or a string such as ``"8/255"`` or ``"0.5"``."""
    try:
        if isinstance(value, bool) or not isinstance(value, str | Real):
            raise ValueError
        if isinstance(value, str) and "/" in value:
            numerator, denominator = value.split("/")
            length = float(numerator) / float(denominator)
        else:
            length = float(value)
    except (ValueError, ZeroDivisionError, OverflowError):
        words, hint = "{field} must be a number or a fraction", "write for example 0.03 or '8/255'"
        raise ConfigError("wrong_type", words, field="length", got=value, hint=hint) from None
    if not math.isfinite(length) or length < 0:
        raise ConfigError("out_of_range", "{field} must be finite and at least 0", field="length", got=value)
    return length


def length_problem(field: str, value: float | str, norm: str) -> Problem | None:
    """Return the problem of a length under a threat norm, if any."""
    try:
        length = parse_length(value)
    except ConfigError as error:
        return replace(error.problems[0], field=field)
    if norm == "Linf" and length > 1:
        hint = f"did you mean '{length:g}/255'?"
        return Problem("out_of_range", "{field} must lie in pixel scale [0, 1]", field, got=value, hint=hint)
    return None


@dataclass(frozen=True, init=False)
class ThreatModel:
    """``{x' in [0, 1]^d : ||x' - x|| <= eps}`` for Linf, L2 or L1; eps in pixel scale, a number or ``"8/255"``."""

    norm: Norm
    eps: float

    def __init__(self, *, norm: Norm = "Linf", eps: float | str) -> None:
        problems = [] if norm in THREAT_NORMS else [unknown_name("threat norm", norm, THREAT_NORMS, field="norm")]
        problem = length_problem("eps", eps, norm)
        raise_problems(problems + ([problem] if problem else []), "bad threat model")
        object.__setattr__(self, "norm", norm)
        object.__setattr__(self, "eps", parse_length(eps))

    def __str__(self) -> str:
        short = f"{self.eps:g}"
        pixels = Fraction(self.eps * 255).limit_denominator(4)
        counted = self.norm == "Linf" and math.isclose(pixels / 255, self.eps, rel_tol=1e-12)
        whole = float(short) == self.eps and len(short) < 6  # as one types it
        return f"{self.norm} eps={f'{float(pixels):g}/255' if counted and not whole else short}"

    # Images are (N, ...), float32 in [0, 1]. "Exactly" below: as real numbers, and as computed in float32.

    def bounds(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Linf: the smallest and largest float32 values v with ``0 <= v <= 1`` and ``|v - x| <= eps`` exactly.

        Rounding is monotone: if ``|v - x|`` is at most the largest float32 below eps as a real number, so is its
        float32 value. The float64 sums are exact wherever they could round across a float32 number.
        """
        if self.norm != "Linf":
            words = "only Linf has bounds for each pixel"
            raise ConfigError("not_supported", words, field="norm", got=self.norm, hint="use project")
        radius = _float32_below(self.eps)
        low, high = x.double() - radius, x.double() + radius
        low32, high32 = low.float(), high.float()
        low32 = torch.where(low32 < low, low32.nextafter(torch.ones_like(low32)), low32)
        high32 = torch.where(high32 > high, high32.nextafter(torch.zeros_like(high32)), high32)
        return low32.clamp_min(0), high32.clamp_max(1)

    def inner_radius(self, dimensions: int) -> float:
        """Radius of L2 and L1 projections, below eps so that the float32 norm of the result is at most eps too.

        ``torch.linalg.vector_norm`` adds float32 in 8 lanes, so its relative error can reach d/8 · 2⁻²⁴, and does on
        constant images: 1e-3 for 150,528 pixels. For a CIFAR image the ball shrinks by 2.5e-5.
        """
        return self.eps * (1 - 2e-6 - dimensions * 2.0**-27)

    def projection(self, x: Tensor) -> Callable[[Tensor], Tensor]:
        """Return :meth:`project` for a fixed ``x``; bounds that depend only on ``x`` are computed once."""
        if self.norm == "Linf":
            low, high = self.bounds(x)
            return lambda x_adv: x_adv.clamp(low, high)
        return lambda x_adv: self._project_sum(x_adv, x)

    def project(self, x_adv: Tensor, x: Tensor) -> Tensor:
        """Project onto the ball, then onto the box; the result lies exactly in both."""
        return self.projection(x)(x_adv)

    def _project_sum(self, x_adv: Tensor, x: Tensor) -> Tensor:
        """Project under L2 or L1. Rounding and the box only move towards x, so the norm can only shrink."""
        delta = x_adv.double() - x.double()
        rows = delta.flatten(1)
        radius = self.inner_radius(rows.shape[1])
        if self.norm == "L2":
            norm = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
            inside = _shrunk(rows, norm, radius)
        else:
            norm = rows.abs().sum(1, keepdim=True)
            inside = _onto_l1_ball(rows, radius)
            inside = _shrunk(inside, inside.abs().sum(1, keepdim=True), radius)  # rounding of the threshold
        inside = inside.view(delta.shape)
        exact = x.double() + inside
        rounded = exact.float()
        beyond = (rounded.double() - exact) * inside > 0
        projected = torch.where(beyond, rounded.nextafter(x), rounded)
        outside = per_image(norm, x) > radius * (1 + 1e-12)  # a second projection changes nothing
        return torch.where(outside, projected, x_adv).clamp(0, 1)

    def distance(self, x_adv: Tensor, x: Tensor) -> Tensor:
        """Return ``||x_adv - x||`` of each image, in float64."""
        return torch.linalg.vector_norm((x_adv.double() - x.double()).flatten(1), ORDERS[self.norm], dim=1)

    def random_start(self, x: Tensor, noise: ImageNoise, project: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Draw uniformly from the ball and project: Linf cube; L2 and L1 by direction and radius (Barthe et al. 2005).

        ``project``: the :meth:`projection` for ``x``, if the caller has it.
        """
        shape = tuple(x.shape[1:])
        if self.norm == "Linf":
            delta = self.eps * (2 * noise.uniform(shape, "start") - 1)
        elif self.norm == "L2":
            direction = noise.normal(shape, "start").double()
            norm = torch.linalg.vector_norm(direction.flatten(1), dim=1)
            radius = noise.uniform((), "radius").double() ** (1 / math.prod(shape))
            delta = self.eps * direction * per_image(radius / norm, x)
        else:
            exponential = -torch.log1p(-noise.uniform((math.prod(shape) + 1,), "start").double())
            share = (exponential / exponential.sum(1, keepdim=True))[:, :-1]
            delta = self.eps * share.view(-1, *shape) * noise.signs(shape, "sign")
        return (project or self.projection(x))((x + delta).float())

    def ascended(self, x_adv: Tensor, grad: Tensor, step: float) -> Tensor:
        """Return ``x_adv`` after a step of steepest ascent with length ``step``."""
        if self.norm == "Linf":
            return x_adv.add(grad.sign(), alpha=step)  # the product is exact: rounded once on every device
        return x_adv + step * self.steepest(grad)

    def steepest(self, grad: Tensor, *, sparsity: float = 0.05) -> Tensor:
        """Return the unit step of steepest ascent: sign (Linf), ``g / ||g||_2``, top coordinates (L1); 0 for g = 0.

        L1: the sign on the share ``sparsity`` of coordinates with the largest gradients, scaled to L1 norm 1: the
        sparse step of Tramèr & Boneh 2019.
        """
        if self.norm == "Linf":
            return grad.sign()
        rows = grad.flatten(1)
        size = rows.abs()
        if self.norm == "L2":
            scaled = rows / size.amax(1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny)
            norm = torch.linalg.vector_norm(scaled, dim=1, keepdim=True)
            return (scaled / norm.clamp_min(torch.finfo(rows.dtype).tiny)).view(grad.shape)
        count = max(1, round(sparsity * rows.shape[1]))
        threshold = size.topk(count, dim=1).values[:, -1:]
        step = rows.sign() * (size >= threshold)
        return (step / step.abs().sum(1, keepdim=True).clamp_min(1)).view(grad.shape)


def _float32_below(value: float) -> float:
    """The largest float32 that is at most ``value``, for values of at least 0."""
    (bits,) = struct.unpack("I", struct.pack("f", value))
    (nearest,) = struct.unpack("f", struct.pack("I", bits))
    return nearest if nearest <= value else struct.unpack("f", struct.pack("I", bits - 1))[0]


def per_image(value: Tensor, like: Tensor) -> Tensor:
    """Reshape one value per image to broadcast over images like ``like``."""
    return value.reshape(-1, *(1,) * (like.dim() - 1))


def _shrunk(rows: Tensor, norm: Tensor, radius: float) -> Tensor:
    return rows * (radius / norm.clamp_min(torch.finfo(norm.dtype).tiny)).clamp_max(1)


def _onto_l1_ball(rows: Tensor, radius: float) -> Tensor:
    """Euclidean projection onto ``||row||_1 <= radius`` for rows outside of it (Duchi et al. 2008, fig. 1)."""
    size = rows.abs()
    descending = size.sort(1, descending=True).values
    excess = descending.cumsum(1) - radius
    rank = torch.arange(1, rows.shape[1] + 1, device=rows.device)
    support = (descending * rank > excess).sum(1, keepdim=True).clamp_min(1)
    threshold = excess.gather(1, support - 1) / support
    return rows.sign() * (size - threshold).clamp_min(0)
