"""Routed norms, which treat samples by their domain: registry, plans, layers and scopes."""

from advnorm.norms.factory import NORMS, list_norms, make_norm, make_plan, register_norm
from advnorm.norms.perturbation import Perturbation, zero_perturbation
from advnorm.norms.plan import Plan
from advnorm.norms.recalibration import recalibrate
from advnorm.norms.routed_module import RoutedModule, domains, mixture_norms, routed_modules
from advnorm.norms.routed_norm import RoutedNorm
from advnorm.norms.scopes import (
    Scope,
    checkpoint_context,
    mixture_component,
    mixture_likelihood,
    pair_banks,
    route,
    statistics,
)
from advnorm.norms.state import MODES, Mode, Route, frozen_mode

__all__ = [
    "MODES",
    "NORMS",
    "Mode",
    "Perturbation",
    "Plan",
    "Route",
    "RoutedModule",
    "RoutedNorm",
    "Scope",
    "checkpoint_context",
    "domains",
    "frozen_mode",
    "list_norms",
    "make_norm",
    "make_plan",
    "mixture_component",
    "mixture_likelihood",
    "mixture_norms",
    "pair_banks",
    "recalibrate",
    "register_norm",
    "route",
    "routed_modules",
    "statistics",
    "zero_perturbation",
]
