"""What runs for long: evaluation and audit, each with a record that a killed run continues from."""

from advnorm.engine.audit import Verdict, audit
from advnorm.engine.evaluate import accuracy_against_eps, accuracy_against_steps, benchmark
from advnorm.engine.result import BenchmarkResult, Curve

__all__ = [
    "BenchmarkResult",
    "Curve",
    "Verdict",
    "accuracy_against_eps",
    "accuracy_against_steps",
    "audit",
    "benchmark",
]
