"""The configuration of a training run: fields, validation, files and text."""

from advnorm._core.settings import Named, Setting
from advnorm.config.config import Config
from advnorm.config.fields import AttackConfig
from advnorm.config.files import load_config
from advnorm.config.rows import explain

__all__ = ["AttackConfig", "Config", "Named", "Setting", "explain", "load_config"]
