"""False and real robustness, and margins that the tables and figures of paper C share."""

from __future__ import annotations

from collections.abc import Mapping

from advnorm.studies.claims import ALMOST_NONE, Clause, Margin, Values, are_robust, mean

NEARLY_ALL = Margin(
    0.75, "nearly all, nearly universal: at least {} of the numbers", "our margin: the paper writes this for 15 of 18"
)
LAYOUTS = {"seq": "sequential", "cat": "concatenated"}
FALSE_GAP = Margin(
    20.0,
    "false robustness: AutoAttack removes more than {} points of PGD-10's accuracy; real robustness: less, and "
    "AutoAttack leaves more than 2 %",
    "our margin: the paper marks gaps of 27 to 31 points as false, and none of up to 14",
)
METRICS = ("clean", "pgd10", "autoattack")


def robustness(values: Values, name: str) -> tuple[float, float]:
    """Return PGD-10 and AutoAttack accuracy of a cell in percent."""
    return mean(values, name, "shared/pgd10"), mean(values, name, "shared/autoattack")


def is_really_robust(pgd: float, autoattack: float) -> bool:
    """AutoAttack leaves robustness, and not much less than PGD-10: a network without robustness is not robust."""
    return are_robust(autoattack) and pgd - autoattack < FALSE_GAP


def is_falsely_robust(name: str, gap: float) -> Clause:
    text = f"{name} is falsely robust (a gap above {FALSE_GAP:g})"
    return Clause(f"{text}: AutoAttack removes {gap:.1f} points of PGD-10's accuracy", gap > FALSE_GAP, FALSE_GAP)


def has_real_robustness(name: str, gap: float, autoattack: float) -> Clause:
    text = f"{name} is really robust (a gap below {FALSE_GAP:g}, and AutoAttack leaves more than {ALMOST_NONE:g} %)"
    shown = f"AutoAttack removes {gap:.1f} points of PGD-10's accuracy and leaves {autoattack:.1f}"
    return Clause(f"{text}: {shown}", is_really_robust(gap + autoattack, autoattack), FALSE_GAP)


def false_or_real(values: Values, name: str, *, false: bool) -> Clause:
    pgd, autoattack = robustness(values, name)
    gap = pgd - autoattack
    return is_falsely_robust(name, gap) if false else has_real_robustness(name, gap, autoattack)


def improves_in_cases(text: str, gains: Mapping[str, float], share: Margin | None = None) -> Clause:
    """All gains are positive, or a share of them; shows the smallest."""
    least = min(gains, key=lambda case: gains[case])
    held = [gain > 0 for gain in gains.values()]
    return Clause.in_cases(text, held, f"least in {least} ({gains[least]:+.2f})", share=share)
