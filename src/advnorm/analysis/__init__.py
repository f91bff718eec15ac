"""Seeing inside: what the papers measure about a trained network, as functions that return data and draw the figure."""

from advnorm.analysis.base import ANALYSES, Finding, list_analyses
from advnorm.analysis.channels import (
    ChannelStatistics,
    ShiftAlongTraining,
    StatisticsShift,
    batch_channels,
    channel_statistics,
    statistics_shift,
    stored_channels,
)
from advnorm.analysis.corruption import CorruptionAccuracy, CorruptionScore, corruption_accuracy
from advnorm.analysis.domain_gap import (
    BranchGap,
    DomainGap,
    DomainGapTable,
    SwapTable,
    branch_gap,
    domain_gap,
    swap_table,
    wasserstein,
)
from advnorm.analysis.features import (
    RECIPES,
    FeaturePictures,
    Recipe,
    extract_features,
    match_features,
    penultimate,
    towards_class,
)
from advnorm.analysis.landscape import LandscapePoint, LandscapeRecorder, LandscapeTrend, landscape
from advnorm.analysis.ligs import LigsTrend, Similarities, ligs, ligs_along
from advnorm.analysis.moments import (
    Gaussian,
    LayerMoments,
    NormStatistics,
    affine_parameters,
    collect_moments,
    norm_statistics,
    stored_statistics,
)
from advnorm.analysis.perturbed import Curves, perturbed_accuracy
from advnorm.analysis.projection import Projection, principal_components, projection
from advnorm.analysis.transfer import Alignment, Transfer, alignment, transfer

__all__ = [
    "ANALYSES",
    "RECIPES",
    "Alignment",
    "BranchGap",
    "ChannelStatistics",
    "CorruptionAccuracy",
    "CorruptionScore",
    "Curves",
    "DomainGap",
    "DomainGapTable",
    "FeaturePictures",
    "Finding",
    "Gaussian",
    "LandscapePoint",
    "LandscapeRecorder",
    "LandscapeTrend",
    "LayerMoments",
    "LigsTrend",
    "NormStatistics",
    "Projection",
    "Recipe",
    "ShiftAlongTraining",
    "Similarities",
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
    "statistics_shift",
    "stored_channels",
    "stored_statistics",
    "swap_table",
    "towards_class",
    "transfer",
    "wasserstein",
]
