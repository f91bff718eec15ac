"""Training objectives: modules that take images and labels, attack, and return the loss with its terms by name."""

from advnorm.objectives.base import OBJECTIVES, Layout, Objective, list_objectives, register_objective
from advnorm.objectives.dual import ALP, KL, TRADES, AdvProp, Cross, DualDomain, Hybrid
from advnorm.objectives.execution import CraftedBatch, Execution, ObjectiveOutput
from advnorm.objectives.ligs import LIGS, REGULARIZERS, register_regularizer
from advnorm.objectives.second_pass import APART, APARTSAM, AWP, SAM, SECOND_PASSES, register_second_pass
from advnorm.objectives.single import Classical, Standard

__all__ = [
    "ALP",
    "APART",
    "APARTSAM",
    "AWP",
    "KL",
    "LIGS",
    "OBJECTIVES",
    "REGULARIZERS",
    "SAM",
    "SECOND_PASSES",
    "TRADES",
    "AdvProp",
    "Classical",
    "CraftedBatch",
    "Cross",
    "DualDomain",
    "Execution",
    "Hybrid",
    "Layout",
    "Objective",
    "ObjectiveOutput",
    "Standard",
    "list_objectives",
    "register_objective",
    "register_regularizer",
    "register_second_pass",
]
