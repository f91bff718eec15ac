"""Analyses: what the papers measure about trained networks, as functions that return data and draw figures."""

from advnorm.analysis.banks import AffineBank, Gaussian, affine_parameters, stored_statistics
from advnorm.analysis.base import ANALYSES, Finding, list_analyses, register_analysis
from advnorm.analysis.channel_statistics import ChannelStatistics, batch_channels, channel_statistics, stored_channels
from advnorm.analysis.corruption_accuracy import CorruptionAccuracy, CorruptionScore, corruption_accuracy
from advnorm.analysis.domain_gap import BranchGap, DomainGap, DomainGapTable, branch_gap, domain_gap
from advnorm.analysis.feature_extraction import (
    RECIPES,
    Recipe,
    extract_features,
    match_features,
    penultimate,
    towards_class,
)
from advnorm.analysis.feature_pictures import FeaturePictures
from advnorm.analysis.landscape import LandscapePoint, LandscapeRecorder, LandscapeTrend, landscape
from advnorm.analysis.ligs import GradientSimilarities, LIGSTrend, ligs, ligs_along
from advnorm.analysis.moments import LayerMoments, NormStatistics, collect_moments, norm_statistics
from advnorm.analysis.perturbed_statistics import AccuracyCurves, perturbed_accuracy
from advnorm.analysis.projection import Projection, principal_components, projection
from advnorm.analysis.statistics_perturbation import StatisticsPerturbation, StatisticsPerturbationResult
from advnorm.analysis.statistics_shift import ShiftAlongTraining, StatisticsShift, statistics_shift
from advnorm.analysis.swap_table import SwapTable, swap_table
from advnorm.analysis.transfer import Alignment, Transfer, alignment, transfer
from advnorm.analysis.wasserstein import wasserstein

__all__ = [
    "ANALYSES",
    "RECIPES",
    "AccuracyCurves",
    "AffineBank",
    "Alignment",
    "BranchGap",
    "ChannelStatistics",
    "CorruptionAccuracy",
    "CorruptionScore",
    "DomainGap",
    "DomainGapTable",
    "FeaturePictures",
    "Finding",
    "Gaussian",
    "GradientSimilarities",
    "LIGSTrend",
    "LandscapePoint",
    "LandscapeRecorder",
    "LandscapeTrend",
    "LayerMoments",
    "NormStatistics",
    "Projection",
    "Recipe",
    "ShiftAlongTraining",
    "StatisticsPerturbation",
    "StatisticsPerturbationResult",
    "StatisticsShift",
    "SwapTable",
    "Transfer",
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
    "match_features",
    "norm_statistics",
    "penultimate",
    "perturbed_accuracy",
    "principal_components",
    "projection",
    "register_analysis",
    "statistics_shift",
    "stored_channels",
    "stored_statistics",
    "swap_table",
    "towards_class",
    "transfer",
    "wasserstein",
]
