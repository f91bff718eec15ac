"""Every public name, imported from the module that defines it."""

from advnorm import analysis, attacks, data, objectives, studies
from advnorm._core.errors import AdvnormError, ConfigError, RouteError, SurgeryError
from advnorm.config import Config, load_config
from advnorm.evaluation import accuracy_against_eps, accuracy_against_steps, audit, benchmark, compare
from advnorm.models import create_model, list_models
from advnorm.norms import (
    Perturbation,
    checkpoint_context,
    domains,
    list_norms,
    make_norm,
    mixture_component,
    mixture_likelihood,
    pair_banks,
    recalibrate,
    route,
    statistics,
    zero_perturbation,
)
from advnorm.report.rows import runs
from advnorm.sharing import from_pretrained, save_pretrained
from advnorm.surgery import SurgeryReport, convert_head, convert_norm, strip
from advnorm.threat import ThreatModel
from advnorm.training import Run, train

__all__ = [
    "AdvnormError",
    "Config",
    "ConfigError",
    "Perturbation",
    "RouteError",
    "Run",
    "SurgeryError",
    "SurgeryReport",
    "ThreatModel",
    "accuracy_against_eps",
    "accuracy_against_steps",
    "analysis",
    "attacks",
    "audit",
    "benchmark",
    "checkpoint_context",
    "compare",
    "convert_head",
    "convert_norm",
    "create_model",
    "data",
    "domains",
    "from_pretrained",
    "list_models",
    "list_norms",
    "load_config",
    "make_norm",
    "mixture_component",
    "mixture_likelihood",
    "objectives",
    "pair_banks",
    "recalibrate",
    "route",
    "runs",
    "save_pretrained",
    "statistics",
    "strip",
    "studies",
    "train",
    "zero_perturbation",
]
