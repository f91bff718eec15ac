"""The typed configuration of a training run: its fields, YAML, Python and command-line forms, and its validation."""

from advnorm.config.config import AttackConfig, Config, load_config
from advnorm.config.values import Named

__all__ = ["AttackConfig", "Config", "Named", "load_config"]
