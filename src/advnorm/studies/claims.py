"""How much is "comparable", "significant" or "robust at all": one figure for all papers, in points of accuracy.

None of the papers says it. A check that takes another figure says in its docstring which sentence or number of the
paper asks for it. The sizes of gains that a claim names ("by over 4") are shown beside ours and not asked for.
"""

from __future__ import annotations

#: Accuracies so near are "comparable", "similar" or "nearly the same", a loss of so much is "slight", and a gap that is
#: "large" is larger. Paper A calls differences of up to 2.3 points comparable; 1,000 images, which a shortened
#: analysis sees, leave an accuracy of 30 % uncertain by 3 points (two deviations).
COMPARABLE = 3.0
#: A network has "almost zero" robustness up to here and some above it: paper A's BN_clean and single BN have up to 0.5.
ALMOST_NONE = 2.0
#: Gains from here on are "significant": the smallest that paper E calls so is 1.6.
SIGNIFICANT = 1.0
#: What the words mean, for who reads a verdict.
WORDS = {
    "comparable": f"within {COMPARABLE:g} points",
    "far": f"by more than {COMPARABLE:g} points",
    "significant": f"by {SIGNIFICANT:g} point or more",
    "almost no robustness": f"up to {ALMOST_NONE:g} %",
}


def comparable(one: float, other: float) -> bool:
    """Whether two accuracies in percent are about the same."""
    return abs(one - other) <= COMPARABLE


def robust(*accuracies: float) -> bool:
    """Whether each accuracy under attack, in percent, is one at all."""
    return min(accuracies) > ALMOST_NONE


def beside(*numbers: float, form: str = ".1f") -> str:
    """``40.1 and 39.5``: what a clause compares, by default accuracies."""
    return " and ".join(f"{number:{form}}" for number in numbers)
