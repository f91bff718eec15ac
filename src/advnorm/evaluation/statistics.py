"""Statistics of accuracies: a fraction of images is an estimate, and its interval says how good."""

from __future__ import annotations

from math import sqrt
from statistics import NormalDist

from advnorm._core.errors import Problem, raise_problems


def wilson_interval(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return the lower and upper bound of a fraction ``successes / n`` (Wilson 1927, score interval).

    Unlike the normal approximation, it stays inside [0, 1] and has a width above 0 at 0 % and 100 %.
    """
    problems = []
    if n < 1:
        problems.append(Problem(code="out_of_range", message="{field} must be at least 1", field="n", got=n))
    if not 0 <= successes <= max(n, 0):
        message = f"{{field}} must lie in [0, {n}]"
        problems.append(Problem(code="out_of_range", message=message, field="successes", got=successes))
    if not 0 < confidence < 1:
        message = "{field} must lie in (0, 1)"
        problems.append(Problem(code="out_of_range", message=message, field="confidence", got=confidence))
    raise_problems(problems, "bad interval")
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share, weight = successes / n, z * z / n
    centre = (share + weight / 2) / (1 + weight)
    half = sqrt(share * (1 - share) * weight + weight * weight / 4) / (1 + weight)
    low = 0.0 if successes == 0 else centre - half  # exact: rounding would leave 1e-17
    high = 1.0 if successes == n else centre + half
    return low, high
