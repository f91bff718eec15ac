"""What runs for long: training, evaluation and audit, each with a record that a killed run continues from."""

from advnorm.engine.audit import audit
from advnorm.engine.config import AttackConfig, Config, Named, load_config
from advnorm.engine.evaluate import accuracy_against_eps, accuracy_against_steps, benchmark
from advnorm.engine.result import BenchmarkResult, Curve
from advnorm.engine.run import Run
from advnorm.engine.train import PREEMPTED, TrainingError, train
from advnorm.engine.verdict import Verdict

__all__ = [
    "PREEMPTED",
    "AttackConfig",
    "BenchmarkResult",
    "Config",
    "Curve",
    "Named",
    "Run",
    "TrainingError",
    "Verdict",
    "accuracy_against_eps",
    "accuracy_against_steps",
    "audit",
    "benchmark",
    "load_config",
    "train",
]
