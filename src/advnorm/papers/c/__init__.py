"""C: Improving the Accuracy-Robustness Trade-Off for Dual-Domain Adversarial Training."""

from advnorm.papers.c import studies, trainings

__all__ = ["studies", "trainings"]
