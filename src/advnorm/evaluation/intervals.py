"""Intervals and tests of accuracies."""

from __future__ import annotations

from math import sqrt
from statistics import NormalDist

from advnorm._core.errors import Problem, raise_problems

#: Confidence of every interval in records, tables and pages.
CONFIDENCE = 0.95


def wilson_interval(successes: int, n: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
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


def accuracy_interval(accuracy: float, n: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a fraction of ``n`` images. A mean over seeds is rounded to whole images."""
    return wilson_interval(round(accuracy * n), n)


def format_accuracy(accuracy: float, n: int, decimals: int = 1) -> str:
    """``45.5 (44.6–46.5)``: a fraction of ``n`` images in percent, with Wilson's 95 % interval."""
    percent, low, high = (100 * value for value in (accuracy, *accuracy_interval(accuracy, n)))
    return f"{percent:.{decimals}f} ({low:.{decimals}f}–{high:.{decimals}f})"


def mcnemar_p_value(only_first: int, only_second: int) -> float:
    """Return the exact two-sided p-value of equal accuracies, from the images that only one model classifies correctly.

    If the accuracies are equal, each model has half of these images in expectation (McNemar 1947, binomial form).
    """
    from scipy.stats import binomtest

    n = only_first + only_second
    return float(binomtest(only_first, n).pvalue) if n else 1.0


def paired_interval(total: float, squares: float, n: int) -> tuple[float, float]:
    """Return the 95 % interval of a mean difference per image, from the sum of the differences and of their squares.

    This is the Wald interval with half an observation added to each of the four outcomes of a pair (Agresti and Min
    2005): two images are added, one with difference 0, and one split into the differences 1 and -1.
    """
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    count, spread = n + 2, squares + 1
    centre = total / count
    half = z * sqrt(max(spread - total * total / count, 0.0)) / count
    return max(centre - half, -1.0), min(centre + half, 1.0)
