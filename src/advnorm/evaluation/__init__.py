"""Evaluation of any classifier: attacks by name, resumable records, and the audit with its verdict."""

from advnorm.evaluation.audit import audit
from advnorm.evaluation.benchmark import accuracy_against_eps, accuracy_against_steps, benchmark
from advnorm.evaluation.results import BenchmarkResult, Curve
from advnorm.evaluation.target import EvaluationTarget, open_run
from advnorm.evaluation.verdict import Verdict

__all__ = [
    "BenchmarkResult",
    "Curve",
    "EvaluationTarget",
    "Verdict",
    "accuracy_against_eps",
    "accuracy_against_steps",
    "audit",
    "benchmark",
    "open_run",
]
