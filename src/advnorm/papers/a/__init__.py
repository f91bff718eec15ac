"""A: Towards Understanding Dual BN in Hybrid Adversarial Training."""

from advnorm.papers.a import figures, tables, trainings

__all__ = ["figures", "tables", "trainings"]
