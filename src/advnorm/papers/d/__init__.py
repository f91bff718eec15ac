"""D: Batch Normalization Increases Adversarial Vulnerability: Disentangling Usefulness and Robustness of Features.

Figures that the paper draws along training are measured at four moments: early, after a warm-up, half-way, at the end.
"""

from advnorm.papers.d import figures, tables, trainings

__all__ = ["figures", "tables", "trainings"]
