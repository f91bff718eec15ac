"""Training objectives: modules that take images and labels, attack, and return the loss with its terms by name."""

from advnorm.objectives.base import OBJECTIVES, Images, Layout, Objective, Step, list_objectives
from advnorm.objectives.dual import KL, Cross, DualDomain, Hybrid, LogitPairing, Trades
from advnorm.objectives.ligs import REGULARIZERS, Ligs
from advnorm.objectives.second_pass import SECOND_PASSES, Apart, ApartSam, Awp, Sam
from advnorm.objectives.single import Classical, Standard

__all__ = [
    "KL",
    "OBJECTIVES",
    "REGULARIZERS",
    "SECOND_PASSES",
    "Apart",
    "ApartSam",
    "Awp",
    "Classical",
    "Cross",
    "DualDomain",
    "Hybrid",
    "Images",
    "Layout",
    "Ligs",
    "LogitPairing",
    "Objective",
    "Sam",
    "Standard",
    "Step",
    "Trades",
    "list_objectives",
]
