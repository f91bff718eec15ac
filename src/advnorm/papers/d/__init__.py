"""D: Batch Normalization Increases Adversarial Vulnerability: Disentangling Usefulness and Robustness of Features.

Figures that the paper draws along training are measured at four moments: early, after a warm-up, half-way, at the end.
Curves whose course matters are measured at 23.
"""

from advnorm.papers.d import features, figures, landscape, tables, trainings

__all__ = ["features", "figures", "landscape", "tables", "trainings"]
