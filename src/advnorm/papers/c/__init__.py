"""C: Improving the Accuracy-Robustness Trade-Off for Dual-Domain Adversarial Training."""

from advnorm.papers.c import figures, tables, trainings

__all__ = ["figures", "tables", "trainings"]
