"""The typed configuration of a training run: its fields, YAML, Python and command-line forms, and its validation."""

from advnorm._core.settings import Named
from advnorm.config.config import AttackConfig, Config, load_config

__all__ = ["AttackConfig", "Config", "Named", "load_config"]
