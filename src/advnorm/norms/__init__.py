"""Norms that know which domain a sample comes from."""

from advnorm.norms.calibration import recalibrate
from advnorm.norms.factory import NORMS, list_norms, make_norm, make_plan
from advnorm.norms.perturbation import Perturbation, zero_perturbation
from advnorm.norms.plan import Plan
from advnorm.norms.routed import RoutedNorm
from advnorm.norms.routing import (
    MODES,
    Mode,
    Route,
    Routed,
    checkpoint_context,
    component,
    domains,
    likelihood,
    mixture_norms,
    pair,
    route,
    routed_modules,
    statistics,
)

__all__ = [
    "MODES",
    "NORMS",
    "Mode",
    "Perturbation",
    "Plan",
    "Route",
    "Routed",
    "RoutedNorm",
    "checkpoint_context",
    "component",
    "domains",
    "likelihood",
    "list_norms",
    "make_norm",
    "make_plan",
    "mixture_norms",
    "pair",
    "recalibrate",
    "route",
    "routed_modules",
    "statistics",
    "zero_perturbation",
]
