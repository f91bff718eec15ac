"""C: Improving the Accuracy-Robustness Trade-Off for Dual-Domain Adversarial Training."""

from advnorm.papers.c import authors, figures, tables, trainings

__all__ = ["authors", "figures", "tables", "trainings"]
