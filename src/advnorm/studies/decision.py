"""The verdict on a claim: its clauses evaluated on the measured values and on resampled ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

from advnorm._core.errors import Problem, first_line
from advnorm.studies.claims import Clause, Values
from advnorm.studies.uncertainty import PROBES, RESAMPLES, Key, MeasuredValues, ResampledValues

ClaimVerdict = Literal["supported", "contradicted", "undecided", "not run"]
#: Yields the clauses of a claim in order; raises KeyError or IndexError if a number was not measured.
Check = Callable[[Values], Iterable[Clause]]
#: A clause is decided if it holds, or fails, in this share of the resampled sets of values.
DECIDED = 0.975
#: Number of resampled sets that are evaluated first, and distance from a share of 0 or 1 within which all are needed.
FIRST_SETS, CLOSE = 200, 0.06
#: The largest number of seeds that is tried when asking how many would decide.
MOST_SEEDS = 10


class ClauseResult(NamedTuple):
    """A clause with the measured numbers, whether it holds for them, and the verdict on it.

    ``margin`` is the meaning and the source of its margin, empty without one. ``one_network``: it reads a number of one
    network that has no interval, so it stays undecided.
    """

    text: str
    held: bool
    verdict: ClaimVerdict
    margin: str = ""
    one_network: bool = False


class Conclusion(NamedTuple):
    """The verdict on a claim, the clauses that could be evaluated, and the problem with the values, if any.

    ``needs`` names what would decide an undecided claim. ``missing`` is the first number that was not measured.
    """

    verdict: ClaimVerdict
    clauses: Sequence[ClauseResult] = ()
    problem: Problem | None = None
    needs: str = ""
    missing: Key | None = None


class _Evaluation(NamedTuple):
    clauses: list[Clause]
    complete: bool
    problem: Problem | None
    missing: Key | None


def decide_claim(name: str, check: Check, values: Values, cells: Iterable[str] = ()) -> Conclusion:
    """Evaluate the clauses in order, up to the first that needs a missing number; ``cells`` are those of the study.

    Plain values count as exact. For :class:`MeasuredValues`, a clause must hold or fail in 97.5 % of the resampled
    sets too.
    """
    found = _evaluate(name, check, values)
    clauses = _decide_clauses(name, check, values, found.clauses)
    verdicts = [clause.verdict for clause in clauses]
    if "contradicted" in verdicts:
        return Conclusion("contradicted", clauses, found.problem, missing=found.missing)
    if not clauses:
        return Conclusion("not run", (), found.problem, missing=found.missing)
    if found.complete and set(verdicts) == {"supported"}:
        return Conclusion("supported", clauses, found.problem)
    needs: list[str] = []
    if not found.complete:
        recorded = {cell for cell, _ in values}
        lacking = [cell for cell in cells if cell not in recorded]
        several = f"{len(lacking)} more cells" if len(lacking) > 1 else "1 more cell"
        needs.append(several if lacking else "numbers that the records lack")
    if any(clause.one_network for clause in clauses):
        needs.append("1 more seed")
    elif "undecided" in verdicts and isinstance(values, MeasuredValues):
        needs.append(_seeds_that_decide(name, check, values, found.clauses))
    return Conclusion("undecided", clauses, found.problem, " and ".join(needs), found.missing)


def _evaluate(name: str, check: Check, values: Values) -> _Evaluation:
    clauses: list[Clause] = []
    complete, problem, missing = False, None, None
    try:
        for clause in check(values):
            clauses.append(Clause(*clause))  # clauses before an error are kept
        complete = bool(clauses)
    except (KeyError, IndexError) as error:
        key = error.args[0] if error.args else None
        missing = key if isinstance(key, tuple) and len(key) == 2 else None
    except ArithmeticError as error:  # a spread or a smoothness of 0
        clauses.append(Clause(f"the networks have not collapsed ({first_line(error)})", False))
    except (ValueError, TypeError, AttributeError) as error:
        text = f"the check of {{field}} cannot read the recorded values: {first_line(error)}"
        problem = Problem(code="damaged_file", message=text, field=name)
    return _Evaluation(clauses, complete, problem, missing)


def _decide_clauses(
    name: str, check: Check, values: Values, clauses: Sequence[Clause], seeds: int | None = None
) -> list[ClauseResult]:
    if not isinstance(values, MeasuredValues):
        return [ClauseResult(*c[:2], "supported" if c.held else "contradicted", _margin_text(c)) for c in clauses]
    labels = _labels(clauses)
    times, held, unchanged = Counter[tuple[str, int]](), Counter[tuple[str, int]](), Counter[tuple[str, int]]()
    resampled = ResampledValues(values, seeds)
    plain = dict(zip(labels, _evaluate(name, check, dict(values)).clauses))

    def count(places: Iterable[int]) -> None:
        for resampled.place in places:
            found = _evaluate(name, check, resampled).clauses
            for label, clause in zip(_labels(found), found):
                if resampled.place < RESAMPLES:
                    times[label] += 1
                    held[label] += clause.held
                else:
                    unchanged[label] += clause == plain.get(label)

    count([*range(FIRST_SETS), *range(RESAMPLES, RESAMPLES + PROBES)])
    if any(0 < min(held[label], times[label] - held[label]) < CLOSE * times[label] for label in labels):
        count(range(FIRST_SETS, RESAMPLES))
    results: list[ClauseResult] = []
    for label, clause in zip(labels, clauses):
        share = held[label] / times[label] if times[label] else 0.5
        one_network = unchanged[label] < PROBES
        verdict: ClaimVerdict = "undecided"
        if not one_network:
            if clause.held and share >= DECIDED:
                verdict = "supported"
            elif not clause.held and share <= 1 - DECIDED:
                verdict = "contradicted"
        results.append(ClauseResult(clause.text, clause.held, verdict, _margin_text(clause), one_network))
    return results


def _margin_text(clause: Clause) -> str:
    return "" if clause.margin is None else str(clause.margin)


def _labels(clauses: Sequence[Clause]) -> list[tuple[str, int]]:
    """Return the words of each clause before its numbers, and how often they occurred before."""
    seen: Counter[str] = Counter()
    labels: list[tuple[str, int]] = []
    for clause in clauses:
        words = clause.text.partition(":")[0]
        labels.append((words, seen[words]))
        seen[words] += 1
    return labels


def _seeds_that_decide(name: str, check: Check, values: MeasuredValues, clauses: Sequence[Clause]) -> str:
    """Return how many more seeds would decide, if the means stay as they are."""

    def decides(seeds: int) -> bool:
        return all(one.verdict != "undecided" for one in _decide_clauses(name, check, values, clauses, seeds))

    fewest = min((len(sample.values) for sample in values.samples.values()), default=1)
    low, high = fewest, MOST_SEEDS
    if fewest >= MOST_SEEDS or not decides(high):
        return f"more than {MOST_SEEDS} seeds or more images"
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if decides(middle) else (middle, high)
    return f"{high - fewest} more seed{'s' if high - fewest > 1 else ''}"
