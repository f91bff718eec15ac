"""A: Towards Understanding Dual BN in Hybrid Adversarial Training."""

from advnorm.papers.a import authors, figures, tables, trainings

__all__ = ["authors", "figures", "tables", "trainings"]
