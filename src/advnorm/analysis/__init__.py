"""Analyses: what the papers measure about trained networks, as functions that return data and draw figures."""

from advnorm.analysis.banks import Gaussian, affine_parameters, stored_statistics, wasserstein
from advnorm.analysis.base import ANALYSES, Finding, list_analyses, register_analysis
from advnorm.analysis.channel_statistics import batch_channels, channel_statistics, stored_channels
from advnorm.analysis.corruption_accuracy import corruption_accuracy
from advnorm.analysis.domain_gap import branch_gap, domain_gap
from advnorm.analysis.feature_extraction import RECIPES, Recipe, extract_features
from advnorm.analysis.images import reporting_progress
from advnorm.analysis.landscape import LandscapeRecorder, LandscapeTrend, landscape
from advnorm.analysis.ligs import ligs, ligs_along
from advnorm.analysis.moments import collect_moments, norm_statistics
from advnorm.analysis.perturbed_statistics import StatisticsPerturbation, perturbed_accuracy
from advnorm.analysis.projection import projection
from advnorm.analysis.statistics_shift import ShiftAlongTraining, statistics_shift
from advnorm.analysis.swap_table import swap_table
from advnorm.analysis.tradeoff import TradeOff, tradeoff
from advnorm.analysis.transfer import alignment, transfer

__all__ = [
    "ANALYSES",
    "RECIPES",
    "Finding",
    "Gaussian",
    "LandscapeRecorder",
    "LandscapeTrend",
    "Recipe",
    "ShiftAlongTraining",
    "StatisticsPerturbation",
    "TradeOff",
    "affine_parameters",
    "alignment",
    "batch_channels",
    "branch_gap",
    "channel_statistics",
    "collect_moments",
    "corruption_accuracy",
    "domain_gap",
    "extract_features",
    "landscape",
    "ligs",
    "ligs_along",
    "list_analyses",
    "norm_statistics",
    "perturbed_accuracy",
    "projection",
    "register_analysis",
    "reporting_progress",
    "statistics_shift",
    "stored_channels",
    "stored_statistics",
    "swap_table",
    "tradeoff",
    "transfer",
    "wasserstein",
]
