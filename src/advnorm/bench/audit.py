"""The error rate of the audit: its verdicts on classifiers whose robustness is known."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from advnorm._core.devices import resolve_device
from advnorm._core.errors import collect_problems, raise_problems, unknown_name
from advnorm._core.provenance import environment
from advnorm.bench.timing import MeasuredConditions
from advnorm.data.gather import spread_rows
from advnorm.evaluation import audit
from advnorm.evaluation import audit_thresholds as limits
from advnorm.evaluation.audit_ladder import BUDGET_IMAGES, Budget, budget_problems
from advnorm.evaluation.evidence import VerdictName
from advnorm.evaluation.gallery import SCALES, SPECIMENS, Parents, Part, Truth, known_accuracy, part_of


@dataclass(frozen=True, kw_only=True)
class AuditRow:
    """The verdict on one specimen. Accuracies are shares."""

    truth: Truth
    why: str
    part: Part
    threat: str
    verdict: VerdictName
    clean: float
    one_step: float | None
    pgd10: float
    worst_case: float
    known: float  # under the attack of someone who knows the defence
    angle: float
    signs: tuple[str, ...]  # evidence that failed
    seconds: float  # of the audit


@dataclass(frozen=True, kw_only=True)
class AuditBenchmark(MeasuredConditions):
    """Conditions and verdicts of one run over the gallery."""

    data: str
    budget: Budget
    images: int
    seed: int
    rows: dict[str, AuditRow]

    def part(self, name: Part) -> dict[str, AuditRow]:
        """Return the rows of one part: all thresholds were checked on the fitted one."""
        return {specimen: row for specimen, row in self.rows.items() if row.part == name}

    def record(self) -> dict[str, Any]:
        scores = {name: score(self.part(name)) for name in get_args(Part)}
        return {**super().record(), "scores": scores, "thresholds": separations(self.part("fitted"))}


def score(rows: dict[str, AuditRow]) -> dict[str, Any]:
    """Return the confusion matrix, precision and recall of *false*, and the mean seconds of an audit."""
    matrix = {
        truth: dict.fromkeys(get_args(VerdictName), 0)
        for truth in get_args(Truth)
        if any(row.truth == truth for row in rows.values())
    }
    for row in rows.values():
        matrix[row.truth][row.verdict] += 1
    called = [row for row in rows.values() if row.verdict == "false"]
    false = [row for row in rows.values() if row.truth == "false"]
    hits = sum(row.truth == "false" for row in called)
    return {
        "matrix": matrix,
        "precision": hits / len(called) if called else None,
        "recall": hits / len(false) if false else None,
        "seconds": sum(row.seconds for row in rows.values()) / len(rows) if rows else None,
    }


def separations(rows: dict[str, AuditRow]) -> dict[str, dict[str, float | None]]:
    """Return for fitted thresholds the interval that separates the specimens of one half, and the value in use."""
    sound = [row for row in rows.values() if row.truth == "sound"]
    false = [row for row in rows.values() if row.truth == "false"]
    plain = [row for row in rows.values() if row.truth == "undefended"]

    def left(row: AuditRow) -> float:
        return row.worst_case / row.pgd10 if row.pgd10 else 1.0

    def one_step(row: AuditRow) -> float:
        return (row.one_step or 0.0) / row.clean

    ratios = [left(row) for row in false if row.pgd10 > limits.NONE_CLAIMED]
    steps = [one_step(row) for row in false if row.one_step is not None and left(row) >= limits.FALSE_RATIO]
    return {
        "FALSE_POINTS_RATIO": {
            "low": max(ratios, default=None),
            "used": limits.FALSE_POINTS_RATIO,
            "high": min(map(left, sound), default=None),
        },
        "ONE_STEP_SHARE": {
            "low": max(map(one_step, plain), default=None),
            "used": limits.ONE_STEP_SHARE,
            "high": min(steps, default=None),
        },
        "GRADIENT_ANGLE": {
            "low": max((row.angle for row in sound if "random" not in row.signs), default=None),
            "used": limits.GRADIENT_ANGLE,
            "high": None,
        },
    }


def bench_audit(
    specimens: Sequence[str] = (),
    *,
    parts: Sequence[Part] = (),
    data: str = "digits",
    data_dir: Path | str | None = None,
    budget: Budget = "quick",
    limit: int | None = None,
    device: str | None = None,
    seed: int = 0,
    parents: Parents | None = None,
    on_row: Callable[[str], object] = lambda _: None,
    on_result: Callable[[AuditBenchmark], object] = lambda _: None,
) -> AuditBenchmark:
    """Train and audit the specimens, by default all of them, or those of some ``parts``.

    ``on_result`` gets the benchmark after each. ``parents``: networks that were trained before, for the same data and
    seed.
    """
    problems = budget_problems(budget)
    problems += [] if data in SCALES else [unknown_name("data", data, SCALES)]
    problems += [unknown_name("specimen", name, SPECIMENS) for name in specimens if name not in SPECIMENS]
    problems += [unknown_name("part", name, get_args(Part)) for name in parts if name not in get_args(Part)]
    place = torch.device("cpu")
    with collect_problems(problems):
        place = resolve_device(device)
    raise_problems(problems, "bad benchmark")
    parents = parents or Parents(SCALES[data], seed, data_dir, str(place))
    images, labels = parents.test_data
    chosen = spread_rows(len(images), BUDGET_IMAGES[budget] if limit is None else limit)
    rows: dict[str, AuditRow] = {}
    result = AuditBenchmark(
        device=environment(place)["device"], data=data, budget=budget, images=len(chosen), seed=seed, rows=rows
    )
    chosen_names = specimens or [name for name in SPECIMENS if not parts or part_of(SPECIMENS.get(name)) in parts]
    for name in chosen_names:
        on_row(name)
        specimen = SPECIMENS.get(name)
        model, threat = specimen.build(parents).eval(), specimen.threat(parents.scale)
        expert = None if specimen.expert is None else specimen.expert(parents).eval()
        x, y = images[chosen].to(place), labels[chosen].to(place)
        started = time.perf_counter()
        verdict = audit(model, (x, y), threat, budget=budget, limit=len(x), seed=seed)
        seconds = time.perf_counter() - started
        rows[name] = AuditRow(
            truth=specimen.truth,
            why=specimen.why,
            part=part_of(specimen),
            threat=str(threat),
            verdict=verdict.verdict,
            clean=verdict.clean,
            one_step=next((rung.alone for rung in verdict.ladder if rung.attack == "fgsm"), None),
            pgd10=verdict.claimed,
            worst_case=verdict.worst_case,
            known=known_accuracy(model, expert, x, y, threat),
            angle=next(item.value for item in verdict.evidence if item.name == "gradient angle"),
            signs=tuple(item.name for item in verdict.evidence if not item.ok),
            seconds=seconds,
        )
        on_result(result)
    return result
