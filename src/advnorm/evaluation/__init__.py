"""Evaluation of any classifier: attacks by name, resumable records, and the audit with its verdict."""

from advnorm.evaluation.audit import audit
from advnorm.evaluation.benchmark import accuracy_against_eps, accuracy_against_steps, benchmark
from advnorm.evaluation.comparison import Comparison, PairedDifference, compare
from advnorm.evaluation.results import BenchmarkResult, Curve
from advnorm.evaluation.target import EvaluationTarget, open_run
from advnorm.evaluation.verdict import Verdict

__all__ = [
    "BenchmarkResult",
    "Comparison",
    "Curve",
    "EvaluationTarget",
    "PairedDifference",
    "Verdict",
    "accuracy_against_eps",
    "accuracy_against_steps",
    "audit",
    "benchmark",
    "compare",
    "open_run",
]
