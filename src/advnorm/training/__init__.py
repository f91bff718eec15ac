"""Training by a configuration: loop, step program, checkpoints, ranks, journal."""

from advnorm.training.loop import PREEMPTED, train
from advnorm.training.ranks import TrainingError
from advnorm.training.run import Run

__all__ = ["PREEMPTED", "Run", "TrainingError", "train"]
