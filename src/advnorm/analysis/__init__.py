"""Seeing inside: what the papers measure about a trained network, as functions that return data and draw the figure."""

from advnorm.analysis.base import ANALYSES, Finding, Subject, list_analyses
from advnorm.analysis.channels import (
    ChannelStatistics,
    ShiftAlongTraining,
    StatisticsShift,
    batch_channels,
    channel_statistics,
    statistics_shift,
    stored_channels,
)
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

__all__ = [
    "ANALYSES",
    "BranchGap",
    "ChannelStatistics",
    "Curves",
    "DomainGap",
    "DomainGapTable",
    "Finding",
    "Gaussian",
    "LandscapePoint",
    "LandscapeRecorder",
    "LandscapeTrend",
    "LayerMoments",
    "LigsTrend",
    "NormStatistics",
    "Projection",
    "ShiftAlongTraining",
    "Similarities",
    "StatisticsShift",
    "Subject",
    "SwapTable",
    "affine_parameters",
    "batch_channels",
    "branch_gap",
    "channel_statistics",
    "collect_moments",
    "domain_gap",
    "landscape",
    "ligs",
    "ligs_along",
    "list_analyses",
    "norm_statistics",
    "perturbed_accuracy",
    "principal_components",
    "projection",
    "statistics_shift",
    "stored_channels",
    "stored_statistics",
    "swap_table",
    "wasserstein",
]
