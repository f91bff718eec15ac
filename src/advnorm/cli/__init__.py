"""The command ``advnorm``."""

from advnorm.cli.app import main

__all__ = ["main"]
