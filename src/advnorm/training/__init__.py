"""Training by a configuration: entry point, loop, step program, checkpoints, ranks, journal."""

from advnorm.training.entry_point import train
from advnorm.training.ranks import TrainingError
from advnorm.training.run_folder import Run

__all__ = ["Run", "TrainingError", "train"]
