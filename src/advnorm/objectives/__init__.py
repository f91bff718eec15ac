"""Training objectives: modules that take images and labels, attack, and return the loss with its terms by name."""

from advnorm.objectives.base import OBJECTIVES, Images, Layout, Objective, Step, list_objectives
from advnorm.objectives.dual import KL, Cross, DualDomain, Hybrid, LogitPairing, Trades
from advnorm.objectives.single import Classical, Standard

__all__ = [
    "KL",
    "OBJECTIVES",
    "Classical",
    "Cross",
    "DualDomain",
    "Hybrid",
    "Images",
    "Layout",
    "LogitPairing",
    "Objective",
    "Standard",
    "Step",
    "Trades",
    "list_objectives",
]
