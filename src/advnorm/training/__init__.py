"""Training by a configuration: loop, step program, checkpoints, ranks, journal."""

from advnorm.training.loop import train
from advnorm.training.ranks import TrainingError
from advnorm.training.run import Run

__all__ = ["Run", "TrainingError", "train"]
