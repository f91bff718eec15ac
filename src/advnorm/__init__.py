"""Adversarial training in which normalization is the subject."""

from advnorm import attacks
from advnorm._core.errors import AdvnormError, ConfigError, RouteError, SurgeryError
from advnorm.models import create_model, list_models
from advnorm.norms import (
    Perturbation,
    checkpoint_context,
    domains,
    likelihood,
    list_norms,
    make_norm,
    pair,
    recalibrate,
    route,
    statistics,
    zero_perturbation,
)
from advnorm.surgery import SurgeryReport, convert_head, convert_norm, strip
from advnorm.threat import ThreatModel

__version__ = "0.1.0"

__all__ = [
    "AdvnormError",
    "ConfigError",
    "Perturbation",
    "RouteError",
    "SurgeryError",
    "SurgeryReport",
    "ThreatModel",
    "attacks",
    "checkpoint_context",
    "convert_head",
    "convert_norm",
    "create_model",
    "domains",
    "likelihood",
    "list_models",
    "list_norms",
    "make_norm",
    "pair",
    "recalibrate",
    "route",
    "statistics",
    "strip",
    "zero_perturbation",
]
